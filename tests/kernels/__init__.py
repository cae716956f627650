"""Tests of the kernels: against the reference implementation, on wrong arguments, with threads, under sanitizers."""

from __future__ import annotations

import pytest

from grace.core.ops import get_ops, native, serves
from grace.core.ops.composites import ArrayOps
from grace.testing.harness import FRAMEWORKS

# The frameworks that use the module grace._native.
BACKENDS = tuple(framework for framework in ("numpy", "torch") if framework in FRAMEWORKS)
needs_kernels = pytest.mark.skipif(native.module is None, reason="the kernels were not built: `grace doctor` says why")


def ops_of(framework: str) -> ArrayOps:
    """Return the operations of a framework with kernels. Skip the test if there are none.

    A function and no constant, because TensorFlow must be imported to know.
    """
    if not serves(framework, "cpu"):
        pytest.skip(f"there are no kernels for {framework}: `grace doctor` says why")
    return get_ops(framework, native=True)
