"""`import grace` imports no framework, and neither does the core. The tests use a new interpreter."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import grace
import grace.core

FRAMEWORKS = ("torch", "tensorflow", "keras", "horovod", "mpi4py", "jax")
# The files of the core that may import a framework.
FRAMEWORK_FILES = {
    "grace.core.mpi",
    "grace.core.ops.native_tensorflow",
    "grace.core.ops.native_torch",
    "grace.core.ops.tensorflow_ops",
    "grace.core.ops.torch_ops",
}
CORE = sorted(
    module.name
    for module in pkgutil.walk_packages(grace.core.__path__, "grace.core.")
    if module.name not in FRAMEWORK_FILES
)


def loaded_by(code):
    """Names of the frameworks that are loaded after the code ran."""
    check = f"import sys; print(*[name for name in {FRAMEWORKS!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{check}"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    "code",
    [
        "import grace",
        "import " + ", ".join(CORE),
        "import grace; list(grace.compressors); grace.make_config(compressor='topk')",
        "import grace.testing",
    ],
    ids=["grace", "core", "registry", "testing"],
)
def test_no_framework_is_loaded(code):
    assert loaded_by(code) == []


def test_a_simulation_on_numpy_loads_no_framework():
    code = """
import numpy as np, grace
sim = grace.Simulation(2, {"w": (64, 64)}, {"compressor": "topk"})
sim.step([{"w": np.ones((64, 64), np.float32)} for _ in range(2)])
"""
    assert loaded_by(code) == []


def test_the_check_sees_a_framework_that_is_loaded():
    assert loaded_by("from grace.core.ops import get_ops; get_ops('torch')") == ["torch"]


def test_the_core_was_found():
    assert len(CORE) > 20
    assert "grace.core.engine" in CORE


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
