"""Kernels for NumPy arrays, which the module grace._native takes by DLPack."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from grace.core.ops.native import Native, corrupt, module
from grace.core.ops.numpy_ops import DTYPES, NumpyOps
from grace.core.spec import Array

_BFLOAT16 = DTYPES["bfloat16"]


class NativeNumpyOps(Native, NumpyOps):
    """NumPy arrays; as many threads as OMP_NUM_THREADS says, else one, as NumPy itself."""

    def _run(
        self,
        kernel: str,
        inputs: Sequence[Array],
        integers: Sequence[Any] = (),
        numbers: Sequence[Any] = (),
        *,
        outputs: Sequence[str],
        lengths: Sequence[Any] = (),
        consumes: bool = False,
    ) -> list[Array]:
        given = tuple(map(_given, inputs))
        if consumes and given[0] is not inputs[0]:
            raise ValueError(
                f"kernel {kernel}, array 0: expected an aligned contiguous array to change in place, received one of "
                f"strides {inputs[0].strides}; pass a copy"
            )
        try:
            results = module.run(kernel, given, integers, numbers, consumes, _threads(), True)
        except module.CorruptPayload as error:
            raise corrupt(error) from None
        if consumes:
            return [inputs[0]]
        return [x.view(_BFLOAT16) if dtype == "bfloat16" else x for x, dtype in zip(results, outputs, strict=True)]


def _given(x: Array) -> Array:
    """x as kernels take it: aligned and contiguous, without a copy where it is."""
    if not isinstance(x, np.ndarray):
        if not isinstance(x, np.generic):
            raise TypeError(f"expected NumPy arrays, received {type(x)}")
        x = np.asarray(x)
    # DLPack of NumPy has no bfloat16: it travels as the integers of the same bits.
    if x.dtype == _BFLOAT16:
        x = x.view(np.uint16)
    flags = x.flags
    return x if flags.c_contiguous and flags.aligned else x.copy()


def _threads() -> int:
    """The first number of OMP_NUM_THREADS, which may list one per level of nesting; else 1."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 1
