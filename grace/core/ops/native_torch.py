"""Kernels for PyTorch tensors, which the module grace._native takes by DLPack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from grace.core.errors import PayloadError
from grace.core.ops.native import FLOATS, module
from grace.core.ops.native_codings import NativeCodings
from grace.core.ops.torch_ops import TorchOps
from grace.core.spec import Array

_FLOATS = {getattr(torch, name): name for name in FLOATS}


class NativeTorchOps(NativeCodings, TorchOps):
    """PyTorch tensors in main memory; as many threads as PyTorch uses."""

    def _floating(self, x: Array) -> str | None:
        return _FLOATS.get(x.dtype) if x.dim() == 1 else None

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
        # Capsules, because the module would ask tensors for theirs through slow Python code.
        capsules = [to_dlpack(x) for x in inputs]
        try:
            results = module.run(kernel, capsules, integers, numbers, consumes, torch.get_num_threads(), False)
        except module.CorruptPayload as error:
            raise PayloadError(str(error)) from None
        except TypeError:
            # A step between the elements is rare enough to be found by the failure.
            if consumes or all(x.is_contiguous() for x in inputs):
                raise
            given = [x.contiguous() for x in inputs]
            return self._run(kernel, given, integers, numbers, outputs=outputs, lengths=lengths)
        return [inputs[0]] if consumes else [from_dlpack(x) for x in results]
