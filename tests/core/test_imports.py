"""`import grace` imports no framework, and neither does the core. The tests use a new interpreter."""

from __future__ import annotations

import ast
import graphlib
import pickle
import pkgutil
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

import grace
import grace.core
from tests.support.covering import ALL

pytestmark = pytest.mark.processes

FRAMEWORKS = ("torch", "tensorflow", "keras", "horovod", "mpi4py", "jax")
CORE = sorted(module.name for module in pkgutil.walk_packages(grace.core.__path__, "grace.core."))
CHECK = f"import sys; print(*[name for name in {FRAMEWORKS!r} if name in sys.modules])"


def loaded_by(*steps):
    """Return the names of the frameworks that are loaded after each piece of code, all in one fresh interpreter."""
    code = "\n".join(f"{step}\n{CHECK}" for step in steps)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


# From little to much: what one loads is no fault of the next.
STEPS = {
    "grace": "import grace",
    "registry": "list(grace.compressors); grace.make_config(compressor='topk')",
    "core": "import " + ", ".join(CORE),
    "testing": "import grace.testing",
    "help": "import pydoc; pydoc.render_doc(grace); [getattr(grace, name) for name in dir(grace)]",
    "simulation": """
import numpy as np
sim = grace.Simulation(2, {"w": (64, 64)}, {"compressor": "topk"})
sim.step([{"w": np.ones((64, 64), np.float32)} for _ in range(2)])
""",
}


def test_no_framework_is_loaded():
    assert dict(zip(STEPS, loaded_by(*STEPS.values()), strict=True)) == {step: [] for step in STEPS}


# The package without which each submodule cannot be imported.
SUBMODULES = {"testing": "pytest", "torch": "torch", "mpi": "mpi4py", "tensorflow": "tensorflow"}


def test_submodules_are_imported_at_their_first_use():
    use = "assert 'grace.{0}' not in sys.modules; assert grace.{0}.__all__ and 'grace.{0}' in sys.modules"
    # TensorFlow, the last, takes seconds.
    loaded = loaded_by("import grace", *(use.format(name) for name in list(SUBMODULES)[: None if ALL else -1]))
    assert loaded[:3] == [[], [], ["torch"]]
    assert set(loaded[-1]) >= ({"torch", "tensorflow", "keras", "horovod", "mpi4py"} if ALL else {"torch", "mpi4py"})


@pytest.mark.parametrize(("name", "package"), SUBMODULES.items())
def test_a_submodule_without_its_package_says_what_to_install(name, package):
    """`None` in sys.modules is a package that cannot be found. `hasattr` and `getattr` with a default do not raise."""
    code = f"""
import pydoc, sys
sys.modules["{package}"] = None
import grace
assert not hasattr(grace, "{name}")
assert getattr(grace, "{name}", 3) == 3
pydoc.render_doc(grace)
try:
    grace.{name}
except AttributeError as error:
    assert str(error).startswith("grace.{name} cannot be imported: "), error
    assert " It needs " in str(error) and "{package}" in str(error).partition(" It needs ")[2], error
    assert isinstance(error.__cause__, ModuleNotFoundError), error.__cause__
else:
    sys.exit("no error")
"""
    loaded_by(code)


def test_an_unknown_attribute_is_named():
    with pytest.raises(AttributeError, match=r"module 'grace' has no attribute 'pytorch'"):
        _ = grace.pytorch
    with pytest.raises(ImportError, match="cannot import name 'pytorch' from 'grace'"):
        exec("from grace import pytorch")


@pytest.mark.parametrize("name", grace.errors.__all__)
def test_errors_are_named_as_users_name_them(name):
    cls = getattr(grace.errors, name)
    assert pickle.loads(pickle.dumps(cls("text"))).args == ("text",)
    assert traceback.format_exception_only(cls("text")) == [f"grace.errors.{name}: text\n"]


def test_all_errors_are_public():
    values = vars(grace.core.errors).values()
    defined = {value.__name__ for value in values if isinstance(value, type) and value.__module__.startswith("grace.")}
    assert defined == set(grace.errors.__all__)


def test_the_adapter_of_torch_needs_no_horovod():
    assert "horovod" not in loaded_by("import grace.torch, grace.torch.distributed")[0]


def test_the_check_sees_a_framework_that_is_loaded():
    assert loaded_by("import grace", "import types; sys.modules['jax'] = types.ModuleType('jax')") == [[], ["jax"]]


def test_the_core_was_found():
    assert len(CORE) > 20
    assert "grace.core.state.run" in CORE


def code_of(source):
    """Return the code of a module without comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body[0] = ast.Pass()
    return ast.unparse(tree)


def test_the_core_names_no_framework():
    named = re.compile(r"torch|tensorflow|keras|horovod|\bhvd\b|mpi4py", re.IGNORECASE)
    files = sorted(Path(grace.core.__file__).parent.rglob("*.py"))
    assert len(files) > 60
    found = [
        f"{file.name}: {line}"
        for file in files
        for line in code_of(file.read_text()).splitlines()
        if named.search(line)
    ]
    assert found == []
    assert code_of('def f():\n    """PyTorch."""\n    # Keras\n    return "torch"').count("orch") == 1


def test_importing_leaves_the_process_alone():
    """The import changes no warning filters, threads, exit handlers or random state."""
    code = """
import atexit, random, threading, warnings
import numpy as np
before = list(warnings.filters), threading.active_count(), random.getstate(), np.random.get_state()[1].tolist()
count = atexit._ncallbacks()
import grace
list(grace.compressors)
after = list(warnings.filters), threading.active_count(), random.getstate(), np.random.get_state()[1].tolist()
assert before == after
assert atexit._ncallbacks() == count
"""
    loaded_by(code)


@pytest.mark.parametrize("name", grace.__all__)
def test_public_names_exist(name):
    assert hasattr(grace, name)


def test_no_files_import_each_other_in_a_circle():
    """Imports inside functions and those for type checkers only are left out."""
    root = Path(grace.__file__).parent.parent
    names = {".".join(file.relative_to(root).with_suffix("").parts): file for file in root.glob("grace/**/*.py")}
    modules = {name.removesuffix(".__init__"): file for name, file in names.items()}
    imports = {}
    for name, file in modules.items():
        found = set()
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & modules.keys()
                found |= inner if len(inner) == len(node.names) else inner | {node.module}
        imports[name] = (found & modules.keys()) - {name}
    assert len(imports) > 80
    graphlib.TopologicalSorter(imports).prepare()
