"""Array operations that overwrite consumed arrays, so that tests detect a use after consumption."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from grace.core.ops.numpy_ops import NumpyOps


def _poisoned(x: Any, fresh: Any) -> Any:
    x[...] = np.nan if np.issubdtype(x.dtype, np.inexact) or x.dtype.kind == "V" else np.iinfo(x.dtype).min
    return fresh


class PoisonOps(NumpyOps):
    """NumPy operations that fill consumed arrays with NaN.

    Operations with a trailing underscore consume their first argument. Here they return a new array and overwrite the
    old one. A backend may reuse a consumed array or not; correct code works in both cases.
    """

    name: ClassVar[str] = "numpy"

    def put_(self, x: Any, indices: Any, value: float) -> Any:
        return _poisoned(x, super().put_(x.copy(), indices, value))

    def scatter_add_(self, x: Any, indices: Any, values: Any) -> Any:
        return _poisoned(x, super().scatter_add_(x.copy(), indices, values))

    def scatter_min_(self, x: Any, indices: Any, values: Any) -> Any:
        return _poisoned(x, super().scatter_min_(x.copy(), indices, values))

    def add_(self, x: Any, y: Any) -> Any:
        return _poisoned(x, super().add_(x.copy(), y))

    def sub_(self, x: Any, y: Any) -> Any:
        return _poisoned(x, super().sub_(x.copy(), y))

    def scale_(self, x: Any, factor: float) -> Any:
        return _poisoned(x, super().scale_(x.copy(), factor))
