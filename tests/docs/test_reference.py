"""The API reference has every name that a page tells its readers to use, once, and lists members one by one."""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
# Pages on the design and the history name internals. Pages on methods are written by scripts/pages.
WITHOUT = ("reference", "design", "methods", "results", "_ext", "changelog.md", "contributing.md")
USING = [
    ROOT / "README.md",
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.relative_to(ROOT / "docs").parts[0] not in WITHOUT),
    ROOT / "docs" / "design" / "mpi4py.md",
    *sorted((ROOT / "examples").glob("*.py")),
]
PACKAGES = (
    "",
    "torch",
    "torch/optim",
    "torch/horovod",
    "torch/distributed",
    "tensorflow",
    "tensorflow/optim",
    "mpi",
    "testing",
)
# In code and in backticks, these are no names of Python: a file, and a group of entry points.
NO_NAMES = {"grace.toml", "grace.backends"}
# The objects of the examples, and the classes that they may have.
ADAPTERS = ("grace.torch.Exchange", "grace.tensorflow.Exchange", "grace.mpi.MPIExchange")
OBJECTS = {
    "optimizer.grace": ADAPTERS[:2],
    "self.grace": (*ADAPTERS[:2], "grace.torch.distributed.ExchangeState"),
    "exchange": (*ADAPTERS, "grace.torch.model.ModelExchange", "grace.torch.distributed.module.ModuleExchange"),
    "simulation": ("grace.Simulation",),
    "run": ("grace.core.state.run.Run",),
}

_DIRECTIVE = re.compile(r"^\.\. (?:auto|py:)(\w+):: ([\w.]+).*\n((?:   .*\n)*)", re.MULTILINE)
_OPTION = re.compile(r"^   :([\w-]+):(.*(?:\n      .*)*)", re.MULTILINE)
_PYTHON = re.compile(r"^( *)```py(?:thon)?\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def directives(text: str) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield the kind, the name and the options of each directive of a page of the reference."""
    for kind, name, rest in _DIRECTIVE.findall(text):
        yield kind, name, dict(_OPTION.findall(rest))


def documented(text: str) -> list[str]:
    """Return the names that a page of the reference documents, members included."""
    found = []
    for kind, name, options in directives(text):
        found += [name] * (kind != "module")
        found += [f"{name}.{member.strip()}" for member in options.get("members", "").split(",") if member.strip()]
    return found


PUBLIC = {name for page in REFERENCE for name in documented(page.read_text(encoding="utf-8"))}


def dotted(node: ast.expr) -> str:
    """Return the name of an expression such as a.b.c; empty if it is no name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (start := dotted(node.value)):
        return f"{start}.{node.attr}"
    return ""


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield each name that is imported, with the other name that it gets, if it gets one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, name.asname or ""
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                yield f"{node.module}.{name.name}", name.asname or ""


def used(blocks: Iterable[str], prose: str) -> Iterator[list[str]]:
    """Yield what each use of a name may mean; `grace` may be the package, or a part of it that was imported so."""
    trees = [ast.parse(block) for block in blocks]
    imported = [(name, alias) for tree in trees for name, alias in imports(tree) if name.split(".")[0] == "grace"]
    yield from ([name] for name, _ in imported)
    modules = sorted({"grace", *(name for name, alias in imported if alias == "grace")})
    names = [dotted(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for name in [*names, *re.findall(r"`(grace(?:\.\w+)+)", prose)]:
        if name.startswith("grace.") and name not in NO_NAMES:
            yield [module + name.removeprefix("grace") for module in modules]


def objects_used(text: str) -> Iterator[list[str]]:
    """Yield, for each member of an object of the examples that a text names, what it may be."""
    for thing, classes in OBJECTS.items():
        for member in re.findall(rf"(?<![\w./]){re.escape(thing)}\.([a-z]\w*)(?!\.py)", text):
            yield [f"{cls}.{member}" for cls in classes]


def is_public(name: str, public: set[str]) -> bool:
    """Return whether a name is documented, is a module with documented names, or belongs to an object without members.

    Members of a class must be documented themselves.
    """
    if any(other == name or other.startswith(f"{name}.") for other in public):
        return True
    owner = name.rpartition(".")[0]
    has_members = any(other.startswith(f"{owner}.") for other in public)
    return bool(owner) and not has_members and is_public(owner, public)


def internal(text: str, public: set[str], script: bool = False) -> set[str]:
    """Return the names that a page or script uses and the reference does not document."""
    blocks = [text] if script else [textwrap.dedent(block) for _, block in _PYTHON.findall(text)]
    uses = used(blocks, "" if script else _PYTHON.sub("", text))
    found = [names for names in uses if not any(is_public(name, public) for name in names)]
    found += [names for names in objects_used("" if script else text) if not public.intersection(names)]
    return {" or ".join(names) for names in found}


@pytest.mark.parametrize("path", USING, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_page_tells_its_readers_to_use_is_in_the_reference(path):
    assert internal(path.read_text(encoding="utf-8"), PUBLIC, path.suffix == ".py") == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_exports_is_in_the_reference(package):
    tree = ast.parse((ROOT / "grace" / package / "__init__.py").read_text(encoding="utf-8"))
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and dotted(node.targets[0]) == "__all__"
    )
    prefix = ".".join(["grace", *package.split("/")]).rstrip(".")
    assert {f"{prefix}.{name}" for name in names} - {"grace.__version__"} <= PUBLIC


def test_every_array_operation_is_in_the_reference():
    operations = set()
    for path, cls in (("base.py", "Primitives"), ("composites.py", "ArrayOps")):
        tree = ast.parse((ROOT / "grace" / "core" / "ops" / path).read_text(encoding="utf-8"))
        (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls)
        operations |= {node.name for node in body if isinstance(node, ast.FunctionDef)}
    public = {f"grace.core.ops.composites.ArrayOps.{name}" for name in operations if not name.startswith("_")}
    assert len(public) > 60
    assert public <= PUBLIC


@pytest.mark.parametrize("page", REFERENCE, ids=lambda path: path.stem)
def test_members_are_listed_one_by_one(page):
    for _, name, options in directives(page.read_text(encoding="utf-8")):
        assert not options.keys() & {"inherited-members", "imported-members", "undoc-members", "private-members"}, name
        assert options.get("members", "some").strip(), name


def test_every_name_has_one_place():
    times = Counter(name for page in REFERENCE for name in documented(page.read_text(encoding="utf-8")))
    assert [name for name, count in times.items() if count > 1] == []


PAGE = """
```python
import grace.torch as grace
from grace.core.errors import Known, Unknown

grace.register(model)
grace.core.errors.Known()
exchange.report()
```

Call `grace.torch.missing()`, `optimizer.grace.discard()` and `exchange.move()`; see `grace/core/session/exchange.py`.

- In a list:
  ```py
  grace.hidden(1)
  ```
"""
TEXT = """
.. autofunction:: grace.torch.register
.. autoclass:: grace.core.errors.Known()
   :members: one,
      two
.. autoclass:: grace.torch.Exchange
   :members: report, discard
   :show-inheritance:
"""


def test_docstrings_become_restructured_text():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "_ext")
        restructured = importlib.import_module("docstrings").restructured
    session = '>>> call({"an_option": 1})\n{}'
    found = restructured(f"Return `x` of a_b.\n\nFormula: x_1\n\n    code(a_b)\n\n- one\n  more\n\n{session}")
    assert found.split("\n\n") == [
        r"Return :py:obj:`x` of a\_b.",
        ".. math:: x_1",
        "::",
        "        code(a_b)",
        "- one\n  more",
        session,
    ]


def test_a_reference_is_taken_apart():
    assert documented(TEXT) == [
        "grace.torch.register",
        "grace.core.errors.Known",
        "grace.core.errors.Known.one",
        "grace.core.errors.Known.two",
        "grace.torch.Exchange",
        "grace.torch.Exchange.report",
        "grace.torch.Exchange.discard",
    ]


def test_what_a_reference_lacks_is_noticed():
    moved = " or ".join(f"{exchange}.move" for exchange in OBJECTS["exchange"])
    lacking = {
        "grace.core.errors.Unknown",
        "grace.torch.missing or grace.torch.torch.missing",
        "grace.hidden or grace.torch.hidden",
        moved,
    }
    public = documented(TEXT)
    assert internal(PAGE, set(public)) == lacking
    for name in ("grace.torch.register", "grace.torch.Exchange.report", "grace.torch.Exchange.discard"):
        (more,) = internal(PAGE, set(public) - {name}) - lacking
        assert name in more
    assert is_public("grace.compressors.make", {"grace.compressors"})
    assert not is_public("grace.Simulation.go", {"grace.Simulation", "grace.Simulation.step"})
