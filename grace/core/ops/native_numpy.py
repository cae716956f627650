"""Kernels for NumPy arrays, which the module grace._native takes by DLPack."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from grace.core.ops.native import corrupt, module
from grace.core.ops.native_codings import NativeCodings
from grace.core.ops.numpy_ops import DTYPES, NumpyOps
from grace.core.spec import Array

_BFLOAT16 = DTYPES["bfloat16"]


class NativeNumpyOps(NativeCodings, NumpyOps):
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
        # DLPack of NumPy has no bfloat16: it travels as the integers of the same bits.
        given = tuple(np.ascontiguousarray(x.view(np.uint16) if x.dtype == _BFLOAT16 else x) for x in inputs)
        if consumes and given[0] is not inputs[0]:
            raise ValueError(f"kernel {kernel}: the array to be changed in place is not contiguous")
        threads = int(os.environ.get("OMP_NUM_THREADS") or 1)
        try:
            results = module.run(kernel, given, integers, numbers, consumes, threads, True)
        except module.CorruptPayload as error:
            raise corrupt(error) from None
        if consumes:
            return [inputs[0]]
        return [x.view(_BFLOAT16) if dtype == "bfloat16" else x for x, dtype in zip(results, outputs, strict=True)]
