"""Tests of the kernels: against the reference implementation, on wrong arguments, with threads, under sanitizers."""

from __future__ import annotations

import pytest

from grace.core.ops import native
from grace.testing.harness import FRAMEWORKS

# The frameworks that use the module grace._native.
BACKENDS = tuple(framework for framework in ("numpy", "torch") if framework in FRAMEWORKS)
# All frameworks with kernels. TensorFlow has its own library.
SERVED = tuple(framework for framework in FRAMEWORKS if native.serves(framework, "cpu"))
needs_kernels = pytest.mark.skipif(native.module is None, reason="the kernels were not built: `grace doctor` says why")
