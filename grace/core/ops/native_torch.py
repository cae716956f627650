"""Kernels for PyTorch tensors, which the module grace._native takes by DLPack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from grace.core.ops.native import corrupt, module
from grace.core.ops.native_codings import NativeCodings
from grace.core.ops.torch_ops import TorchOps
from grace.core.spec import Array


class NativeTorchOps(NativeCodings, TorchOps):
    """PyTorch tensors in main memory; as many threads as PyTorch uses."""

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
        given = tuple(x.contiguous() for x in inputs)
        if consumes and given[0] is not inputs[0]:
            raise ValueError(f"kernel {kernel}: the tensor to be changed in place is not contiguous")
        try:
            results = module.run(kernel, given, integers, numbers, consumes, torch.get_num_threads(), False)
        except module.CorruptPayload as error:
            raise corrupt(error) from None
        return [inputs[0]] if consumes else list(results)
