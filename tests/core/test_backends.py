"""Backends are found by name, like methods, and their flags say what the core may do with their arrays."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import ClassVar

import numpy as np
import pytest

import grace
from grace.core import ops as table
from grace.core.errors import ConfigError
from grace.core.ops import get_ops, register_backend
from grace.core.ops.numpy_ops import NumpyOps
from grace.core.wire.checksum import checksum
from grace.testing.harness import FRAMEWORKS
from tests.support.covering import rest_slow

CACHES = (table._announce_kernels, table._reference, table._kernels, table._make)


class OutsideOps(NumpyOps):
    """NumPy arrays of a backend that says it cannot change them, and that lengths may be unknown."""

    name: ClassVar[str] = "outside"
    eager: ClassVar[bool] = False
    dynamic_shapes: ClassVar[bool] = True
    kernels: ClassVar[str | None] = None

    def place(self, out, start, x, factor):
        raise AssertionError("placed although the backend is not eager")


PATH = f"{__name__}:OutsideOps"


@pytest.fixture
def backends(monkeypatch):
    """Provide a table of backends that is the test's own, and a list of announced entry points."""
    announced = []
    monkeypatch.setattr(table, "_backends", {**table._backends})
    monkeypatch.setattr(table, "entry_points", lambda group: announced if group == "grace.backends" else [])
    for cache in CACHES:
        cache.cache_clear()
    yield announced
    for cache in CACHES:
        cache.cache_clear()


def step(framework):
    """Return the merged gradients of a step with tensors that share a bucket, and with checksums."""
    config = {"compressor": "topk", "compress_ratio": 0.3, "default_rules": False, "checksum": True}
    sim = grace.Simulation(2, {"w": (20, 30), "v": (11,)}, config, framework=framework)
    rng = np.random.default_rng(0)
    given = [{name: rng.standard_normal(s, np.float32) for name, s in (("w", (20, 30)), ("v", (11,)))} for _ in "ab"]
    return [{name: x.tobytes() for name, x in rank.items()} for rank in sim.step(given)]


def test_a_registered_backend_is_found_by_its_name(backends):
    register_backend("outside", PATH)
    assert type(get_ops("outside")).name == "outside"
    assert get_ops("outside", "gpu:1").device == "gpu:1"
    assert get_ops("outside") is get_ops("outside")


def test_an_entry_point_announces_a_backend(backends):
    backends.append(EntryPoint("outside", PATH, "grace.backends"))
    assert type(get_ops("outside")).name == "outside"


def test_a_name_is_given_once(backends):
    register_backend("outside", PATH)
    register_backend("outside", PATH)
    with pytest.raises(ConfigError, match=r"backend name 'outside' is taken by .*OutsideOps; choose another"):
        register_backend("outside", "other:Ops")


def test_unknown_framework_is_told_the_known_ones():
    with pytest.raises(ConfigError, match=r"'numpyy'.*Did you mean 'numpy'.*torch"):
        get_ops("numpyy")


def test_a_backend_without_kernels_has_none(backends):
    register_backend("outside", PATH)
    with pytest.raises(ConfigError, match="there are no kernels for outside on cpu"):
        get_ops("outside", native=True)


def test_the_flags_decide_how_gradients_and_checksums_are_computed(backends):
    register_backend("outside", PATH)
    assert step("outside") == step("numpy")
    data = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)
    assert checksum(OutsideOps(), data) == checksum(NumpyOps(), data)


@pytest.mark.processes
@pytest.mark.parametrize("framework", rest_slow([name for name in FRAMEWORKS if name != "numpy"], 1))
def test_operations_of_a_framework_need_no_horovod(framework):
    code = (
        "import sys; sys.modules['horovod'] = None\n"
        f"from grace.core.ops import get_ops; ops = get_ops({framework!r}, native=False)\n"
        "assert ops.length(ops.zeros(3, 'float32')) == 3\n"
        f"assert not [name for name in sys.modules if name.startswith(('grace.torch', 'grace.tensorflow'))]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
