"""Kernels for PyTorch tensors, which the module grace._native takes and returns by DLPack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import to_dlpack

from grace.backends.torch_ops import DTYPES, TorchOps
from grace.core.errors import PayloadError
from grace.core.ops.base import unknown
from grace.core.ops.native import FLOATS, Native, module
from grace.core.spec import Array

_FLOATS = {getattr(torch, name): name for name in FLOATS}


class NativeTorchOps(Native, TorchOps):
    """Kernels on PyTorch tensors: PyTorch's number of threads in main memory, its current stream on a GPU.

    On a GPU the memory comes from PyTorch, and the host waits for the stream only if the length of a result depends on
    the data. Kernels there skip indices out of range; the next kernel that starts on the device raises PayloadError.
    """

    gpu = True

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self._on_gpu = device.startswith("cuda")

    def floating(self, x: Array) -> str | None:
        try:
            return _FLOATS.get(x.dtype) if x.dim() == 1 else None
        except AttributeError:
            raise TypeError(unknown("a PyTorch tensor", FLOATS, x)) from None

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
        judges = outputs[-1] == "bool"
        outs = () if out is None else out if isinstance(out, tuple) else (out,)
        try:
            if self._on_gpu:
                results = self._run_on_gpu(kernel, inputs, integers, numbers)
                if judges:
                    # Views: a comparison with a number takes PyTorch four times as long.
                    results[-1] = results[-1].view(torch.bool).squeeze()
            else:
                threads = torch.get_num_threads()
                results = module.run(kernel, inputs, integers, numbers, consumes, threads, torch.Tensor, outs, judges)
        except module.CorruptPayload as error:
            raise PayloadError(str(error)) from None
        except TypeError:
            # Strided or misaligned tensors are rare, so they are found by the failure.
            given = [_plain(x) for x in inputs]
            same = [x is y for x, y in zip(given, inputs, strict=True)]
            if all(same) or (consumes and not same[0]):
                raise
            return self.run(kernel, given, integers, numbers, outputs=outputs, lengths=lengths, consumes=consumes)
        return [inputs[0], *results] if consumes else results

    def room(self, nbytes: int) -> Array | None:
        return None if self._on_gpu else module.empty(nbytes, torch.Tensor)

    def _run_on_gpu(
        self, kernel: str, inputs: Sequence[Any], integers: Sequence[Any], numbers: Sequence[Any]
    ) -> list[Array]:
        device = torch.device(self.device)
        index = torch.cuda.current_device() if device.index is None else device.index
        stream = torch.cuda.current_stream(index).cuda_stream

        def allocate(dtype: str, n: int) -> tuple[Array, int]:
            # On the current stream: PyTorch reuses freed memory in its order.
            made = torch.empty(n, dtype=DTYPES[dtype], device=f"cuda:{index}")
            return made, made.data_ptr()

        # Capsules, because a tensor's own DLPack method may make streams wait for each other.
        capsules = [to_dlpack(x) for x in inputs]
        results: list[Array] = module.run_on_gpu(kernel, capsules, integers, numbers, index, stream, allocate)
        return results


def _plain(x: Array) -> Array:
    """Return a contiguous, aligned copy of x, or x itself if it is so already."""
    if not isinstance(x, torch.Tensor) or (x.is_contiguous() and x.data_ptr() % x.element_size() == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)
