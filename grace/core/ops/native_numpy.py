"""Kernels for NumPy arrays, which the module grace._native takes directly."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from grace.core.errors import PayloadError
from grace.core.ops.base import unknown
from grace.core.ops.native import FLOATS, Native, module
from grace.core.ops.numpy_ops import DTYPES, NumpyOps
from grace.core.spec import Array

MOST_THREADS = 1024

_BFLOAT16 = DTYPES["bfloat16"]
_FLOATS = {DTYPES[name].char: name for name in FLOATS}


class NativeNumpyOps(Native, NumpyOps):
    """Kernels on NumPy arrays; they use OMP_NUM_THREADS threads, or one, as NumPy itself does."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        # OpenMP allows one number per level of nesting.
        threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        self._threads = max(1, min(int(threads), MOST_THREADS)) if threads.isdecimal() else 1

    def floating(self, x: Array) -> str | None:
        # The character of a dtype is found faster than the dtype itself.
        try:
            return _FLOATS.get(x.dtype.char) if x.ndim == 1 else None
        except AttributeError:
            raise TypeError(unknown("a NumPy array", DTYPES, x)) from None

    def run(
        self,
        kernel: str,
        inputs: Sequence[Array],
        integers: Sequence[Any] = (),
        numbers: Sequence[Any] = (),
        *,
        outputs: Sequence[str],
        lengths: Sequence[Any] = (),
        consumes: bool = False,
        out: Array | tuple[Array, ...] | None = None,
    ) -> list[Array]:
        outs = () if out is None else out if isinstance(out, tuple) else (out,)
        try:
            results: list[Array] = module.run(
                kernel, inputs, integers, numbers, consumes, self._threads, None, outs, outputs[-1] == "bool"
            )
        except module.CorruptPayload as error:
            raise PayloadError(str(error)) from None
        except TypeError:
            # Strided or misaligned arrays are rare, so they are found by the failure.
            given = [np.require(x, requirements=["C", "ALIGNED"]) for x in inputs]
            same = [x is y for x, y in zip(given, inputs, strict=True)]
            if all(same) or (consumes and not same[0]):
                raise
            return self.run(kernel, given, integers, numbers, outputs=outputs, lengths=lengths, consumes=consumes)
        return [inputs[0], *results] if consumes else results

    def room(self, nbytes: int) -> Array | None:
        return module.empty(nbytes, None)

    def cast(self, x: Array, dtype: str) -> Array:
        if isinstance(x, np.ndarray):
            # The most frequent call, for which the general one takes as long as a small kernel.
            if x.dtype == DTYPES[dtype]:
                return x
            # NumPy has no bfloat16: the integers of the same bits stand for it.
            if x.ndim == 1 and dtype == "bfloat16" and x.dtype == DTYPES["float32"]:
                return self.run("half", [x], [1], outputs=[dtype])[0].view(_BFLOAT16)
            if x.ndim == 1 and dtype == "float32" and x.dtype == _BFLOAT16:
                return self.run("wide", [x.view(np.uint16)], outputs=[dtype])[0]
        return super().cast(x, dtype)

    def cast_half(self, x: Array, dtype: str, out: Array | None = None) -> Array | None:
        # Only `cast` knows the bfloat16 of NumPy.
        return None if "bfloat16" in (dtype, self.kind(x)) else super().cast_half(x, dtype, out)

    def half_sum(self, rows: Sequence[Array], factor: float = 1.0) -> Array:
        if all(isinstance(row, np.ndarray) and row.ndim == 1 and row.dtype == _BFLOAT16 for row in rows):
            bits = [row.view(np.uint16) for row in rows]
            return self.run("half_sum", bits, (), [factor], outputs=["bfloat16"])[0].view(_BFLOAT16)
        return super().half_sum(rows, factor)
