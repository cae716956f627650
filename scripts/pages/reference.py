"""The tables of the API reference: the names of the directives that follow, each with its docstring's first sentence.

The sources are read, not imported: importing all adapters takes many seconds.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import NamedTuple

from registry import ROOT, Block, kind, markdown, row

COMMENT = re.compile(r"<!-- \{eval-rst\}\n(.*?)-->", re.DOTALL)
DIRECTIVE = re.compile(r"^\.\. (auto|py:)(\w+):: ([\w.]+).*\n((?:(?:   .*)?\n)*)", re.MULTILINE)
OPTION = re.compile(r"^   :([\w-]+):((?: .*)?(?:\n      .*)*)\n", re.MULTILINE)
ROLE = re.compile(r":py:obj:`([^`<]+?)(?: <[^>]*>)?`")


@kind("names")
def names(block: Block) -> list[str]:
    """Return the table of the names that the next comment documents; the site shows all of their docstrings instead."""
    comment = COMMENT.search(block.after)
    if not comment:
        raise SystemExit(f"{block.page.relative_to(ROOT)}: no <!-- {{eval-rst}} follows the block of names.")
    lines = [row("name", "what it is"), row("---", "---")]
    waiting: list[str] = []
    for source, what, name, text in DIRECTIVE.findall(comment[1]):
        options = dict(OPTION.findall(text))
        if source == "py:":
            # A text belongs to the names before it as well.
            waiting.append(name)
            if said := OPTION.sub("", text).strip():
                lines += [row(f"`{one}`", markdown(sentence(ROLE.sub(r"`\1`", said)))) for one in waiting]
                waiting = []
            continue
        if what != "module":
            shown = f".{name.rpartition('.')[2]}" if what in ("method", "property") else name
            lines.append(row(f"`{shown}`", markdown(sentence(documented(name)))))
        for member in " ".join(options.get("members", "").split()).split(", "):
            if member:
                shown = f"{name}.{member}" if what == "module" else f".{member}"
                lines.append(row(f"`{shown}`", markdown(sentence(documented(f"{name}.{member}")))))
    return lines


def sentence(text: str) -> str:
    """Return the first sentence of a text, on one line."""
    return re.split(r"(?<=[.])\s", " ".join(text.partition("\n\n")[0].split()), maxsplit=1)[0]


class Found(NamedTuple):
    """The definition of a name: its module, and the statement in it."""

    module: str
    node: ast.stmt


def documented(name: str) -> str:
    """Return the docstring of a class or function, or the comment that begins with `#:` above an assignment."""
    found = find(name)
    if found is None:
        raise SystemExit(f"scripts/pages: nothing in grace defines {name}, which docs/reference lists.")
    if isinstance(found.node, ast.ClassDef | ast.FunctionDef):
        return ast.get_docstring(found.node) or ""
    lines: list[str] = []
    for line in reversed(source(found.module).splitlines()[: found.node.lineno - 1]):
        if not line.strip().startswith("#:"):
            break
        lines.insert(0, line.strip().removeprefix("#:"))
    return "\n".join(lines)


@cache
def find(name: str) -> Found | None:
    """Return where a dotted name is defined; None if nothing defines it."""
    owner, _, last = name.rpartition(".")
    for node in statements(owner):
        if last in defined(node):
            return find(imported(node, last)) if isinstance(node, ast.ImportFrom) else Found(owner, node)
    cls = find(owner) if owner else None
    if cls is None or not isinstance(cls.node, ast.ClassDef):
        return None
    for node in cls.node.body:
        # A method may set an attribute of its object.
        inner = node.body if isinstance(node, ast.FunctionDef) else []
        for statement, wanted in [(node, last), *((one, f"self.{last}") for one in inner)]:
            if wanted in defined(statement):
                return Found(cls.module, statement)
    bases = (ast.unparse(base.value if isinstance(base, ast.Subscript) else base) for base in cls.node.bases)
    inherited = (find(f"{in_full(cls.module, base)}.{last}") for base in bases)
    return next((found for found in inherited if found), None)


def in_full(module: str, name: str) -> str:
    """Return the full name of what a module calls by a name."""
    first, dot, rest = name.partition(".")
    for node in statements(module):
        if isinstance(node, ast.ImportFrom) and first in defined(node):
            return imported(node, first) + dot + rest
    return f"{module}.{name}"


def imported(node: ast.ImportFrom, name: str) -> str:
    """Return the full name of what an import brings under a name."""
    (original,) = (alias.name for alias in node.names if name == (alias.asname or alias.name))
    return f"{node.module}.{original}"


def defined(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines, attributes such as `self.name` included."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {node.name}
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {ast.unparse(target) for target in targets}


@cache
def statements(module: str) -> list[ast.stmt]:
    """Return the statements of a module; none if there is no such module."""
    return ast.parse(source(module)).body


@cache
def source(module: str) -> str:
    """Return the source of a module; empty if there is no such module."""
    place = ROOT.joinpath(*module.split("."))
    files = (path for path in (place / "__init__.py", place.with_suffix(".py")) if path.exists())
    return next((path.read_text(encoding="utf-8") for path in files), "")
