"""Kernels for PyTorch tensors, which the module grace._native takes by DLPack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.dlpack

from grace.core.ops.native import Native, corrupt, module
from grace.core.ops.torch_ops import DTYPES, TorchOps
from grace.core.spec import Array


class NativeTorchOps(Native, TorchOps):
    """PyTorch tensors; in main memory by as many threads as PyTorch uses, on a GPU on its current stream.

    On a GPU memory comes from PyTorch, and only a result whose length depends on the data makes the host wait for the
    stream. Indices out of range are left out there; the next kernel that starts on the device raises PayloadError.
    """

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
            if self.device.startswith("cuda"):
                results = self._run_on_gpu(kernel, given, integers, numbers)
            else:
                results = module.run(kernel, given, integers, numbers, consumes, torch.get_num_threads(), False)
        except module.CorruptPayload as error:
            raise corrupt(error) from None
        return [inputs[0]] if consumes else list(results)

    def _run_on_gpu(
        self, kernel: str, inputs: Sequence[Array], integers: Sequence[Any], numbers: Sequence[Any]
    ) -> list[Array]:
        device = inputs[0].device if inputs else torch.device(self.device)
        index = torch.cuda.current_device() if device.index is None else device.index
        stream = torch.cuda.current_stream(index)

        def allocate(dtype: str, n: int) -> tuple[Array, int]:
            # Memory that the allocator takes back is given out again in the order of the stream it was made for.
            with torch.cuda.stream(stream):
                made = torch.empty(n, dtype=DTYPES[dtype], device=device)
            return made, made.data_ptr()

        capsules = tuple(torch.utils.dlpack.to_dlpack(x) for x in inputs)
        results: list[Array] = module.run_on_gpu(
            kernel, capsules, integers, numbers, index, stream.cuda_stream, allocate
        )
        return results
