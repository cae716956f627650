"""Docstrings, as far as ruff's rules (D, in pyproject.toml) do not check them."""

from __future__ import annotations

import ast
import inspect
import re

import pytest

from tests.support.launch import ROOT

QUESTION = re.compile(r"(What|Whether|How|Where|Why|Who|When)\b")
# A function's first line is a verb phrase, so none of these begins it.
NO_VERB = re.compile(r"(The|A|An|All|Every|Each|Both|One|Two|Number|Bytes|Its|Their|Those|See|As|Per|For|Of|Inverse)\b")
FOLDERS = ("grace", "tests", "examples", "benchmarks", "scripts", "docs")
# Not tests, whose names say what they test. Nothing is imported to list them: TensorFlow takes seconds.
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "grace").rglob("*.py"))
    if path.name != "__main__.py" and "testing" not in path.parts
]


def complaints(source: str) -> list[str]:
    """Return the first lines of docstrings that begin like a question, or a function's like a noun."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = (ast.get_docstring(node) or "").partition("\n")[0]
        is_function = not isinstance(node, ast.Module | ast.ClassDef) and not node.name.startswith("test_")
        is_property = any("property" in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ()))
        if QUESTION.match(first) or (is_function and not is_property and NO_VERB.match(first)):
            found.append(first)
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_first_lines_are_no_questions_and_those_of_functions_verb_phrases(folder):
    lines = [line for path in (ROOT / folder).rglob("*.py") for line in complaints(path.read_text(encoding="utf-8"))]
    # Outside the package, functions may be described by nouns.
    assert [line for line in lines if folder == "grace" or QUESTION.match(line)] == []


def test_questions_and_nouns_are_noticed():
    source = '''
"""{}"""
class Bytes:
    """Length of a payload."""
    @property
    def nbytes(self):
        """Number of bytes."""
    def total(self):
        """{}"""
    def test_it(self):
        """The lengths add up."""
'''
    assert complaints(source.format("Names of things.", "Return the sum.")) == []
    assert complaints(source.format("What names.", "The sum.")) == ["What names.", "The sum."]


@pytest.mark.parametrize("name", MODULES)
def test_every_public_method_is_described_in_its_class_or_a_base(name):
    # The packages of trainers need not be installed.
    module = pytest.importorskip(name, exc_type=ModuleNotFoundError)
    classes = [x for x in vars(module).values() if inspect.isclass(x) and x.__module__ == name and x.__name__[0] != "_"]
    assert [
        f"{cls.__name__}.{member}"
        for cls in classes
        for member, value in vars(cls).items()
        if member[0] != "_" and isinstance(value, _METHODS) and not inspect.getdoc(getattr(cls, member))
    ] == []


_METHODS = (type(complaints), property, classmethod, staticmethod)
