"""`WrappedHook`: a communication hook that a model in DDP has already, whose allreduce grace takes over."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from grace.core.errors import ConfigError, StepError
from grace.torch.typed import Future

T = TypeVar("T")

# PyTorch's hooks in this folder, except the default ones, begin later to compress, to skip steps or to take steps of an
# optimizer.
_OF_TORCH = "torch.distributed.algorithms.ddp_comm_hooks."
# The methods of a process group by which a hook could exchange gradients.
_ALLREDUCES = ("allreduce", "allreduce_coalesced")
_COLLECTIVES = (
    *_ALLREDUCES,
    *("broadcast", "reduce", "allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("gather", "scatter", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall"),
    *("alltoall_base", "send", "recv", "recv_anysource", "barrier", "monitored_barrier"),
)


class DeferredFuture(Future[T]):
    """A future that is completed at the end of the backward pass; a hook that waits for it would wait forever."""

    def __init__(self, devices: list[torch.device] | None = None) -> None:
        super().__init__(devices=devices)
        self._devices = devices

    def wait(self) -> T:
        """Return the value. Raises StepError before it is there."""
        if not self.done():
            raise StepError(
                "the communication hook waits for its allreduce, which grace completes at the end of the backward "
                "pass; return a future that depends on it, as by then()."
            )
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Future[Any]:
        """Return the future of what `callback` makes of this one."""
        result: DeferredFuture[Any] = DeferredFuture(self._devices)

        def complete(done: Future[T]) -> None:
            try:
                result.set_result(callback(done))
            except Exception as error:
                result.set_exception(error)

        self.add_done_callback(complete)
        return result


class DeferredWork:
    """The handle that a hook gets for an allreduce that grace has taken over, in the place of PyTorch's `Work`."""

    def __init__(self, future: DeferredFuture[list[torch.Tensor]]) -> None:
        self._future = future

    def wait(self, timeout: Any = None) -> bool:
        """Return True. Raises StepError before the end of the backward pass."""
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether the exchange is complete."""
        return self._future.done()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return the future of the reduced tensors."""
        return self._future


@dataclass
class CapturedAllreduce:
    """An allreduce that a hook has started for a bucket: the gradients in it, in the bucket's order, and its result."""

    tensors: list[torch.Tensor]
    gradients: list[torch.Tensor]
    # True if the hook expects the sum over the ranks, not the mean.
    summed: bool
    future: DeferredFuture[list[torch.Tensor]]


class WrappedHook:
    """A hook of a user or a trainer, such as nanotron's, which adds gradients in float32.

    It runs as before, up to its allreduce of a bucket's gradients, which grace exchanges in its place: one flat tensor
    like the bucket's buffer, or one tensor per parameter, of any dtype. Raises ConfigError for hooks that cannot be
    wrapped, after a trial with buckets of zeros.
    """

    def __init__(self, model: DistributedDataParallel, where: str) -> None:
        self._ranks = dist.get_process_group_ranks(model.process_group)
        (self._hook, self._state), *_ = model._comm_hooks
        #: The dtypes of what the hook exchanges, by parameter.
        self.dtypes: dict[torch.Tensor, torch.dtype] = {}
        try:
            of = getattr(self._hook, "__module__", None) or ""
            if of.startswith(_OF_TORCH) and not of.endswith(".default_hooks"):
                raise StepError("it does more than to exchange the gradients of each step.")
            for bucket in model.reducer._get_zeros_like_grad_buckets():
                _, captured = self.start(bucket)
                # The hook may keep the handle and wait for it later.
                captured.future.set_result(captured.tensors)
                self.dtypes.update(zip(bucket.parameters(), (x.dtype for x in captured.gradients), strict=True))
        except Exception as error:
            name = getattr(self._hook, "__qualname__", type(self._hook).__qualname__)
            raise ConfigError(
                f"{where}: the model has the communication hook '{name}', and grace cannot wrap it: {error} "
                "Expected a hook that starts one allreduce for all gradients of a bucket, as a sum or mean over the "
                "ranks of the model, and does not wait for it. Leave the hook out."
            ) from error

    def start(self, bucket: dist.GradBucket) -> tuple[torch.futures.Future[torch.Tensor], CapturedAllreduce]:
        """Run the hook; return its future for DDP, and the allreduce that it has started.

        Raises StepError if it starts none, several or other collectives.
        """
        found: list[CapturedAllreduce] = []

        def take(tensors: Any, options: Any = dist.ReduceOp.SUM, *_: Any) -> DeferredWork:
            if found:
                raise StepError("it starts several allreduces for a bucket.")
            found.append(_capture(bucket, tensors, getattr(options, "reduceOp", options)))
            return DeferredWork(found[0].future)

        with self._intercept(take):
            future = self._hook(self._state, bucket)
        if not found:
            raise StepError("it starts no allreduce of a bucket's gradients.")
        return future, found[0]

    def pass_on(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Run the hook as DDP does, without grace; return its future."""
        future: torch.futures.Future[torch.Tensor] = self._hook(self._state, bucket)
        return future

    @contextlib.contextmanager
    def _intercept(self, take: Callable[..., DeferredWork]) -> Iterator[None]:
        """Pass the allreduces that this thread starts among the ranks of the model to `take`; refuse other collectives.

        Every way to start one in Python leads to these methods, whatever module has imported its function.
        """
        originals = {name: vars(dist.ProcessGroup)[name] for name in _COLLECTIVES if name in vars(dist.ProcessGroup)}
        thread = threading.get_ident()

        def instead(name: str, original: Any) -> Callable[..., Any]:
            def call(group: Any, *args: Any, **options: Any) -> Any:
                if threading.get_ident() != thread or dist.get_process_group_ranks(group) != self._ranks:
                    return original(group, *args, **options)
                if name not in _ALLREDUCES:
                    raise StepError(f"it starts the collective '{name}'.")
                return take(*args, **options)

            return call

        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, instead(name, original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(dist.ProcessGroup, name, original)


def _capture(bucket: dist.GradBucket, given: Any, op: Any) -> CapturedAllreduce:
    """Return the allreduce of these tensors. Raises StepError if it is not one of the bucket's gradients."""
    tensors, parameters = [given] if isinstance(given, torch.Tensor) else list(given), bucket.parameters()
    # In this order, because PyTorch's comparison of the two types is not symmetric.
    summed = op == dist.ReduceOp.SUM
    if not summed and not op == dist.ReduceOp.AVG:
        raise StepError("it reduces by another operation than SUM or AVG.")
    if [x.numel() for x in tensors] == [p.numel() for p in parameters]:
        gradients = [x if x.shape == p.shape else x.view(p.shape) for x, p in zip(tensors, parameters, strict=True)]
    elif len(tensors) == 1 and tensors[0].numel() == bucket.buffer().numel() and tensors[0].is_contiguous():
        gradients = list(split(tensors[0], parameters))
    else:
        raise StepError(
            f"it reduces {len(tensors)} tensors of {sum(x.numel() for x in tensors):,} elements for a bucket of "
            f"{len(parameters)} gradients of {bucket.buffer().numel():,} elements."
        )
    future: DeferredFuture[list[torch.Tensor]] = DeferredFuture([tensors[0].device] if tensors[0].is_cuda else None)
    return CapturedAllreduce(tensors, gradients, summed, future)


def split(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the gradients in a flat tensor like a bucket's buffer, as views with the shapes and strides of parameters.

    Views of `GradBucket` have the shape, but not the order of the elements in memory, as of channels_last.
    """
    start = flat.storage_offset()
    for p in parameters:
        dense = p.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(p)
        stride = p.stride() if dense else torch.empty(p.shape, device="meta").stride()
        yield flat.as_strided(p.shape, stride, start)
        start += p.numel()


def take_hook(model: DistributedDataParallel, where: str) -> WrappedHook | None:
    """Return the hook that a model has, None if it has none, and leave the place free.

    DDP registers one hook only, with its reducer. So the model gets a new reducer, as after it was loaded.
    """
    if not model._comm_hooks:
        return None
    hook = WrappedHook(model, where)
    model._comm_hooks.clear()
    model.reducer._remove_autograd_hooks()
    parameters, sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, sparse, names, model.static_graph)
    if model.static_graph:
        model.reducer._set_static_graph()
        model.logger._set_static_graph()
    return hook
