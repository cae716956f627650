"""Tests of the kernels: against the reference bodies, on broken arguments, with several threads, under sanitizers."""

from __future__ import annotations

import pytest

from grace.core.ops import native
from grace.testing.harness import FRAMEWORKS

# What the module grace._native serves.
BACKENDS = tuple(framework for framework in ("numpy", "torch") if framework in FRAMEWORKS)
# Besides it TensorFlow, which has a library of its own.
SERVED = tuple(framework for framework in FRAMEWORKS if native.serves(framework, "cpu"))
needs_kernels = pytest.mark.skipif(native.module is None, reason="the kernels were not built: `grace doctor` says why")
