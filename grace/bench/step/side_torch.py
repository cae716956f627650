"""The methods and baselines of `grace bench step` in PyTorch."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import torch

from grace.bench.step import original
from grace.bench.step.methods import BASELINES, COMPUTE, LAUNCHERS, count_hop_bytes, count_memory_bytes
from grace.bench.step.models_torch import MODELS, builder
from grace.bench.step.own import load_builder
from grace.bench.step.side import SEED, Side, Training

# It makes a model and the function that computes its loss.
Build = Callable[[], tuple[Any, Callable[[], torch.Tensor]]]


def make(library: str, model: str) -> Side:
    """Return the side of the library "horovod" or "torch"."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    build = builder(model) if model in MODELS else load_builder(model)
    return HorovodSide(build) if library == "horovod" else TorchSide(build)


class _Step:
    """Training on random data, different in every step."""

    def __init__(self, model: Any, optimizer: Any, loss: Any, exchange: Any = None, size: int = 1) -> None:
        self._model, self._optimizer, self._loss, self._exchange, self._size = model, optimizer, loss, exchange, size

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._loss().backward()
        self._optimizer.step()

    def reported_bytes(self) -> int | None:
        return None if self._exchange is None else count_hop_bytes(self._exchange, self._size)

    def gradient_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._model.parameters())

    def kept_bytes(self) -> int:
        return 0 if self._exchange is None else count_memory_bytes(self._exchange)


class HorovodSide:
    """Horovod, and grace on top of it."""

    def __init__(self, build: Build) -> None:
        import horovod.torch as hvd

        # A local import before the measurement, so that grace's modules do not count as memory of a method.
        import grace.torch

        logging.getLogger("grace").setLevel(logging.WARNING)
        hvd.init()
        self._hvd, self._grace, self._build = hvd, grace.torch, build

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._hvd.barrier()

    def train(self, method: str, launcher: str, options: Mapping[str, Any]) -> Training:
        """Make a model and an optimizer for the method."""
        hvd = self._hvd
        torch.manual_seed(SEED)
        model, loss = self._build()
        torch.manual_seed(SEED + hvd.rank())
        optimizer = _sgd(model)
        if method == COMPUTE:
            return _Step(model, optimizer, loss)
        named = list(model.named_parameters())
        if method in BASELINES:
            compression = hvd.Compression.fp16 if method == "horovod-fp16" else hvd.Compression.none
            wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)
            if method in original.PARAMETERS:
                original.compress(wrapped, method, hvd.size())
            return _Step(model, wrapped, loss)
        config = {**options, "compressor": method}
        wrapped = self._grace.DistributedOptimizer(optimizer, named_parameters=named, config=config)
        return _Step(model, wrapped, loss, wrapped.grace, hvd.size())


class TorchSide:
    """PyTorch's own DistributedDataParallel and FSDP2 over Gloo, and grace on top of them."""

    def __init__(self, build: Build) -> None:
        # Local imports before the measurement, so that their modules do not count as memory of a method.
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
        from torch.distributed.fsdp import fully_shard

        import grace.torch

        logging.getLogger("grace").setLevel(logging.WARNING)
        self._hooks, self._powersgd, self._shard, self._grace = default_hooks, powerSGD_hook, fully_shard, grace.torch
        store, rank, size = _store()
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
        self._build, self._size = build, size

    def barrier(self) -> None:
        """Wait for all ranks."""
        torch.distributed.barrier()

    def train(self, method: str, launcher: str, options: Mapping[str, Any]) -> Training:
        """Make a model and an optimizer for the method."""
        torch.manual_seed(SEED)
        model, loss = self._build()
        torch.manual_seed(SEED + torch.distributed.get_rank())
        if method == COMPUTE:
            return _Step(model, _sgd(model), loss)
        config = {**options, "compressor": method}
        if method not in BASELINES and launcher == "torch-module":
            exchange = self._grace.register(model, config)
            return _Step(model, _sgd(model), loss, exchange, self._size)
        if method not in BASELINES and launcher == "torch-optimizer":
            named = list(model.named_parameters())
            wrapped = self._grace.DistributedOptimizer(
                _sgd(model), named_parameters=named, config=config, backend="torch"
            )
            return _Step(model, wrapped, loss, wrapped.grace, self._size)
        if method not in BASELINES and launcher == "torch-one-bit-adam":
            from grace.torch.optim import OneBitAdam

            # The warm-up is over before a step is timed.
            adam = OneBitAdam(model.named_parameters(), 0.001, config=config, freeze_step=1, backend="torch")
            return _Step(model, adam, loss, adam.grace, self._size)
        reference = method if method in BASELINES else LAUNCHERS[launcher].reference
        sharded = reference.startswith("fsdp")
        parallel = self._sharded(model, loss, reference) if sharded else self._replicate(model, loss, method)
        # PyTorch has no fused SGD for sharded parameters.
        optimizer = _sgd(model, fused=not sharded)
        if method in BASELINES:
            return _Step(model, optimizer, parallel)
        exchange = self._grace.register(parallel, config)
        return _Step(model, optimizer, parallel, exchange, self._size)

    def _replicate(self, model: Any, loss: Any, method: str) -> torch.nn.Module:
        # With several buckets, PowerSGD's hook starts collectives in an order that differs between the ranks. One
        # bucket avoids that.
        megabytes = 4096 if method == "ddp-powersgd" else None
        # Otherwise DDP copies each gradient into its buffer and back.
        ddp = torch.nn.parallel.DistributedDataParallel(
            _Loss(model, loss), bucket_cap_mb=megabytes, gradient_as_bucket_view=True
        )
        if method == "ddp-fp16":
            ddp.register_comm_hook(None, self._hooks.fp16_compress_hook)
        elif method == "ddp-powersgd":
            state = self._powersgd.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            ddp.register_comm_hook(state, self._powersgd.powerSGD_hook)
        return ddp

    def _sharded(self, model: Any, loss: Any, reference: str) -> torch.nn.Module:
        """Return the loss with the parameters of each layer sharded on their own."""
        whole = _Loss(model, loss)
        # None is FSDP's default.
        reshard = False if reference == "fsdp-zero2" else None
        for layer in model.children():
            if any(True for _ in layer.parameters()):
                self._shard(layer, reshard_after_forward=reshard)
        self._shard(whole, reshard_after_forward=reshard)
        return whole


def _store() -> tuple[torch.distributed.Store, int, int]:
    """Return the rendezvous store, this rank, and the number of ranks."""
    host, port, rank, size = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
    place = (host, int(port), int(size))
    if int(rank) > 0:
        return torch.distributed.TCPStore(*place, is_master=False), int(rank), int(size)
    # PyTorch's own server would listen on all interfaces of the machine.
    listener = socket.create_server((host, int(port)), backlog=int(size)).detach()
    return torch.distributed.TCPStore(*place, is_master=True, master_listen_fd=listener), 0, int(size)


def _sgd(model: Any, fused: bool = True) -> torch.optim.Optimizer:
    """Return SGD, by default in its fused form, which passes over the weights only once and takes the least time."""
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, fused=fused)


class _Loss(torch.nn.Module):
    """The model's loss as a module, because DistributedDataParallel acts on `forward`."""

    def __init__(self, model: Any, loss: Any) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = self._loss()
        return loss
