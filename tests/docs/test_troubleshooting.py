"""The pages of messages quote the errors that grace raises, and miss none."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "docs" / name for name in ("troubleshooting.md", "messages.md")]
# What stands for a part that is known only at run time: what the page shows of it.
SHOWN = {"self.kind": "compressor", "ENVIRONMENT_VARIABLE": "GRACE_CONFIG"}
# Too short to tell one error from another: they stand for the ranges of options.
RANGES = ("must be", "must lie in")
OPTIONS = (
    "grace/core/compressors/",
    "grace/core/memories/",
    "grace/core/codecs/buckets.py",
    "grace/core/methods/memory.py",
    "grace/core/codecs/lowrank.py",
    "grace/core/codecs/rotation.py",
)
# Errors whose text is made elsewhere.
MADE = ("...: '...' .......", "...: the argument '...' ....", "..., received ....")


def text_of(node: ast.AST) -> str:
    """Return a string expression with "..." for what is known only at run time."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return SHOWN.get(ast.unparse(node.value), "...")
    return ""


@cache
def expressions() -> list[tuple[str, ast.expr]]:
    """Return every expression of the package, but for benchmarks, the study and contract tests, with its module."""
    names = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "grace").rglob("*.py"))]
    trees = {
        name: ast.parse((ROOT / name).read_text(encoding="utf-8"))
        for name in names
        if not name.startswith(("grace/bench/", "grace/report/", "grace/testing/"))
    }
    return [(name, node) for name, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.expr)]


@cache
def errors() -> list[tuple[str, str]]:
    """Return the module and the text of every error."""
    calls = [(name, node) for name, node in expressions() if isinstance(node, ast.Call) and node.args]
    raised = [(name, n) for name, n in calls if isinstance(n.func, ast.Name) and n.func.id.endswith("Error")]
    return [(name, text) for name, n in raised if (text := text_of(n.args[0])) and text not in MADE]


@cache
def texts() -> str:
    """Return the texts of the package, and the sources of the kernels, in lines: no words go over a line's end."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "kernels").rglob("*.cpp")]
    return "\n".join({*(text_of(node) for _, node in expressions()), *sources})


def quoted(page: str) -> list[str]:
    """Return the words of errors that the page quotes."""
    cells = re.findall(r"^\| ([^|]*) \|", page.partition("\n## ")[2], re.MULTILINE)
    return [words for cell in cells for words in re.findall(r"`([^`]+)`", cell)]


def says(text: str, words: str) -> bool:
    if "..." not in words:
        return words in text
    return re.search(".*".join(map(re.escape, words.split("..."))), text) is not None


def pages() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def unsaid(page: str) -> list[str]:
    """Return the words on a page that are in no error or warning."""
    return [words for words in quoted(page) if not says(texts(), words)]


def missing(page: str) -> list[str]:
    """Return the errors of which the page quotes nothing."""
    words = quoted(page)
    telling = [w for w in words if w not in RANGES]
    return [
        f"{module}: {text}"
        for module, text in errors()
        if not any(says(text, w) for w in (words if module.startswith(OPTIONS) else telling))
    ]


def test_quoted_words_are_those_of_the_code():
    assert unsaid(pages()) == []


def test_every_error_is_on_a_page():
    assert missing(pages()) == []


def test_a_wrong_page_is_noticed():
    page = pages()
    assert unsaid(page.replace("`unknown compressor '...'`", "`no such compressor`")) == ["no such compressor"]
    assert missing(page.replace("`match is empty`", "`names no compressor`")) != []
