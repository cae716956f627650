"""The style of docstrings: every public part has one, and its first line is plain English of one form."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
# Folders and files whose docstrings must follow the rule.
COVERED = ["grace"]

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_QUESTION = re.compile(r"(What|Whether|How|Where|Why|Who|When)\b")
# A function's first line is a verb phrase, so none of these begins it.
_NO_VERB = re.compile(
    r"(The|A|An|All|Every|Each|Both|One|Two|Number|Bytes|Its|Their|Those|See|As|Per|For|Of|Inverse)\b"
)


def complaints(source: str, described: Mapping[str, set[str]] | None = None) -> list[str]:
    """Return a line for each docstring of the module that breaks the rule, and for each that is missing.

    `described` maps a class to the methods that are described there or in its bases; an override needs no docstring.
    The name of a test states its claim, so a test needs no docstring, and its docstring may be a statement.
    """
    tree = ast.parse(source)
    found = _of_docstring("the module", ast.get_docstring(tree), required=True, verb=False)
    for name, node, owner, public in _definitions(tree):
        is_class = isinstance(node, ast.ClassDef)
        inherited = owner is not None and node.name in (described or {}).get(owner, ())
        is_test = node.name.startswith("test_")
        is_setter = any(ast.unparse(decorator).endswith(".setter") for decorator in node.decorator_list)
        found += _of_docstring(
            name,
            ast.get_docstring(node),
            required=public and not inherited and not is_setter and not is_test,
            verb=not is_class and not _is_property(node) and not is_test,
        )
    return found


def _of_docstring(name: str, docstring: str | None, *, required: bool, verb: bool) -> list[str]:
    if docstring is None:
        return [f"{name}: has no docstring"] if required else []
    lines = docstring.splitlines()
    first = lines[0]
    found = []
    if len(first) > 120:
        found.append(f"{name}: the first line has {len(first)} characters, more than 120")
    if not first.endswith("."):
        found.append(f"{name}: the first line does not end with a period")
    if len(lines) > 1 and lines[1]:
        found.append(f"{name}: the second line is not empty")
    if not re.match(r"[A-Z0-9`]", first):
        found.append(f"{name}: the first line does not begin with a capital letter")
    if _QUESTION.match(first):
        found.append(f"{name}: the first line begins like a question")
    if verb and _NO_VERB.match(first):
        found.append(f"{name}: the first line of a function begins with a verb, not with '{first.split()[0]}'")
    return found


def _definitions(
    node: ast.AST, path: str = "", public: bool = True
) -> Iterator[tuple[str, Definition, str | None, bool]]:
    """Yield every class and function with its qualified name, the class that holds it, and whether it is public."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            name = f"{path}.{child.name}" if path else child.name
            seen = public and not child.name.startswith("_") and not isinstance(node, ast.FunctionDef)
            yield name, child, node.name if isinstance(node, ast.ClassDef) else None, seen
            yield from _definitions(child, name, seen)
        else:
            yield from _definitions(child, path, public)


def _is_property(node: Definition) -> bool:
    names = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any(name.rpartition(".")[2] in ("property", "cached_property") for name in names)


def described_methods(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return, for each class of the modules, the methods with a docstring in its bases.

    Classes are known by their bare name, which is unique within the package, or else the first one counts.
    """
    classes: dict[str, ast.ClassDef] = {}
    for source in sources.values():
        for _, node, _, _ in _definitions(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, node)

    def own(name: str) -> set[str]:
        methods = (n for n in classes[name].body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
        return {method.name for method in methods if ast.get_docstring(method)}

    def inherited(name: str) -> set[str]:
        bases = [re.split(r"[\[(]", ast.unparse(base))[0].rpartition(".")[2] for base in classes[name].bases]
        known = [base for base in bases if base in classes and base != name]
        return set().union(*(own(base) | inherited(base) for base in known))

    return {name: inherited(name) for name in classes}


def _modules() -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "grace").rglob("*.py"))
    }


SOURCES = _modules()
DESCRIBED = described_methods(SOURCES)


@pytest.mark.parametrize("name", [name for name in SOURCES if any(name.startswith(part) for part in COVERED)])
def test_docstrings_follow_the_rule(name):
    assert complaints(SOURCES[name], DESCRIBED) == []


def first_lines(source: str) -> list[str]:
    """Return the first line of every docstring of the module."""
    tree = ast.parse(source)
    docstrings = [ast.get_docstring(tree), *(ast.get_docstring(node) for _, node, _, _ in _definitions(tree))]
    return [docstring.splitlines()[0] for docstring in docstrings if docstring]


def test_no_docstring_outside_the_package_begins_like_a_question():
    folders = ("tests", "examples", "benchmarks", "scripts", "docs")
    files = [*ROOT.glob("*.py"), *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]
    found = {
        f"{path.relative_to(ROOT)}: {line}"
        for path in files
        for line in first_lines(path.read_text(encoding="utf-8"))
        if _QUESTION.match(line)
    }
    assert found == set()


def test_first_lines_are_those_of_every_docstring():
    assert first_lines(GOOD) == [
        "Names of things.",
        "Length of a payload.",
        "Number of bytes.",
        "Return the sum of all lengths.",
    ]


def test_covered_parts_exist():
    assert all(any(name.startswith(part) for name in SOURCES) for part in COVERED)


GOOD = '''
"""Names of things."""

class Bytes:
    """Length of a payload."""

    @property
    def nbytes(self):
        """Number of bytes."""

    def total(self):
        """Return the sum of all lengths."""

    def _hidden(self):
        pass
'''


def test_good_docstrings_pass():
    assert complaints(GOOD) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"""Names of things."""', "", "the module: has no docstring"),
        ('    """Length of a payload."""\n', "", "Bytes: has no docstring"),
        ('"""Return the sum of all lengths."""', "pass", "Bytes.total: has no docstring"),
        ("Names of things.", "What names.", "begins like a question"),
        ("Return the sum of all lengths.", "Whether it adds up.", "begins like a question"),
        ("Length of a payload.", "How long a payload is.", "begins like a question"),
        ("Number of bytes.", "Where bytes are.", "begins like a question"),
        ("Return the sum of all lengths.", "The sum of all lengths.", "begins with a verb, not with 'The'"),
        ("Return the sum of all lengths.", "return the sum.", "does not begin with a capital letter"),
        ("Length of a payload.", "Length of a payload", "does not end with a period"),
        ("Length of a payload.", f"Length {'very ' * 30}long.", "more than 120"),
        ("Length of a payload.", "Length of a payload.\n    More.", "the second line is not empty"),
    ],
)
def test_bad_docstrings_are_rejected(old, new, expected):
    assert old in GOOD
    assert [line for line in complaints(GOOD.replace(old, new)) if expected in line]


def test_private_docstrings_follow_the_style_too():
    source = GOOD.replace("        pass", '        """Whether it hides."""')
    assert complaints(source) == ["Bytes._hidden: the first line begins like a question"]


def test_a_test_needs_no_docstring_and_may_state_its_claim():
    source = GOOD.replace("def total", "def test_total")
    assert complaints(source.replace('"""Return the sum of all lengths."""', "pass")) == []
    assert complaints(source.replace("Return the sum of all lengths.", "The lengths add up.")) == []
    wrong = complaints(source.replace("Return the sum of all lengths.", "How lengths add up."))
    assert wrong == ["Bytes.test_total: the first line begins like a question"]


def test_an_override_needs_no_docstring_of_its_own():
    base = 'class Base:\n    """Base of all."""\n    def run(self):\n        """Run it."""\n'
    derived = '"""Module."""\nclass Middle(Base[int]):\n    """Middle."""\n\nclass Last(Middle):\n    """Last."""\n'
    override = "    def run(self):\n        pass\n"
    described = described_methods({"a.py": base, "b.py": derived + override})
    assert complaints(derived + override, described) == []
    assert complaints(derived + override.replace("run", "walk"), described) == ["Last.walk: has no docstring"]
