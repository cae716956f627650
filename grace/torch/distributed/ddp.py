"""`DDPExchange`: the exchange of a `DistributedDataParallel` model, by its communication hook."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import unserializable_hook

from grace.core.errors import ConfigError, WaitError
from grace.core.guards.waiting import wait_until
from grace.core.transport.transport import Transport
from grace.torch.distributed.wrapped import CapturedAllreduce, WrappedHook, split
from grace.torch.model import ReplicatedExchange
from grace.torch.tensors import parameters_of, refuse_sparse, refuse_unfrozen, weak_hook

# The models that have a hook of grace.
_registered: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def check_model(model: DistributedDataParallel, where: str) -> None:
    """Raise ConfigError if the model has no place for a hook, or its gradients cannot be compressed."""
    reason = None
    if model.mixed_precision is not None:
        reason = "mixed_precision takes the place of its only communication hook; use torch.autocast instead"
    elif any(hasattr(p, "_in_backward_optimizers") for p in parameters_of(model).values()):
        reason = (
            "_apply_optimizer_in_backward() takes the place of its only communication hook; call the step() of an "
            "optimizer after backward() instead"
        )
    elif model in _registered:
        reason = "it is registered already; wrap the plain model again to register it with another configuration"
    elif len(model._comm_hooks) > 1:
        reason = "it has several communication hooks; leave them out"
    elif model._use_python_reducer:
        reason = (
            "torch._dynamo.config.optimize_ddp = 'python_reducer' calls hooks without buckets; set it to True, which "
            "is PyTorch's default"
        )
    if reason:
        raise ConfigError(f"{where}: the model cannot be used, because {reason}.")


@dataclasses.dataclass
class _Bucket:
    """A bucket of DDP that waits for merged gradients."""

    buffer: torch.Tensor
    # Completed with the buffer, or with the tensors of the allreduce that was captured.
    future: torch.futures.Future[Any]
    # The names of the tensors that are not merged yet.
    missing: set[str]
    # The reductions of what stays dense: a tensor, or the whole bucket under the name of its first one.
    reductions: dict[str, dist.Work]
    # The allreduce of another hook that is exchanged in place of the buffer.
    captured: CapturedAllreduce | None = None

    def complete(self) -> None:
        """Complete the future with what is there now."""
        self.future.set_result(self.buffer if self.captured is None else self.captured.tensors)


class DDPExchange(ReplicatedExchange):
    """The exchange of a model in DDP, by a communication hook.

    DDP calls it with each bucket of gradients during the backward pass. It compresses them and starts their exchange,
    without waiting for other ranks. Only comparisons of the ranks must end in time: in the first step at once, later
    before a tensor that stays dense is reduced. At the end of the backward pass, before DDP waits for the results, the
    run completes its own buckets. DDP makes new buckets after the first step, so everything goes by the names of
    parameters.

    The parameters are those of `parameters_of`. DDP passes no gradient of one that was frozen when DDP was made.
    `wrapped` is a hook that the model had before. It decides what is exchanged of each bucket, and what DDP gets.
    """

    # The model owns this object in C++, so that Python would never free the two if this one owned the model.
    def __init__(self, session: Any, library: Any, parameters: Any, scaler: Any, wrapped: WrappedHook | None) -> None:
        super().__init__(session, library, parameters, scaler)
        self._wrapped = wrapped
        self._names = {p: name for name, p in parameters.items()}
        # The parameters of the gradients that DDP has passed in this step.
        self._passed: set[torch.Tensor] = set()
        # The buckets of this step.
        self._buckets: list[_Bucket] = []
        self._failure: Exception | None = None
        # If parameters may be unused, the names of those with a gradient. DDP passes zeros for the others.
        self._used: set[str] | None = None

    def attach(self, model: DistributedDataParallel) -> None:
        """Register the hook with the model."""
        self._group = model.process_group
        # True until the first step of a static graph, whose buckets DDP passes at the end of the backward pass. Each of
        # them then has the index 0, and none is the last one.
        self._delayed = model.static_graph
        self._finds_unused = model.find_unused_parameters and not model.static_graph
        # How many gradients DDP passes in a step.
        self._count = int(model._get_ddp_logging_data()["num_parameter_tensors"])
        if model.find_unused_parameters or model.static_graph:
            self._used = used = set()
            for p, name in self.trained.items():
                # Called before DDP learns of the gradient, which it leaves as it is.
                p.register_hook(unserializable_hook(lambda _, name=name: used.add(name)))
        # DDP calls no hook for a parameter that was converted or moved, but PyTorch keeps the hooks of the parameter.
        # One parameter is enough to check all.
        for p in itertools.islice(self.trained, 1):
            p.register_hook(unserializable_hook(weak_hook(self._check_unchanged)))
        alive = weakref.ref(model)

        def no_sync() -> AbstractContextManager[None]:
            there = alive()
            assert there is not None
            paused: AbstractContextManager[None] = there.no_sync()
            return paused

        # False after a forward pass in no_sync(), whose gradients stay on this rank.
        self._watch(model, lambda: bool(getattr(alive(), "require_forward_param_sync", False)), no_sync)
        # DDP would refuse the annotations of a method, because they are strings.
        model.register_comm_hook(None, lambda _, bucket: self._reduce_bucket(bucket))
        # DDP's own note of it could not be saved, and a copy of the model would have the note without the hook.
        model._comm_hooks.pop()
        _registered.add(model)

    def _check_unchanged(self, _: torch.Tensor) -> None:
        self._refuse_converted(
            self.trained,
            "DistributedDataParallel passes no gradient of it any more, so the ranks would train apart. Convert or "
            "move the plain model, then wrap it again and register it.",
        )

    def _reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of a bucket; return the future of its buffer, which then has the merged gradients."""
        # DDP's join() calls the hook outside of a backward pass, with zeros, for a rank without further data.
        joined = torch._C._current_graph_task_id() == -1
        # DDP waits for the results right after its last bucket.
        at_once = joined or self._delayed
        future = None
        parameters, begins = bucket.parameters(), not self._passed
        self._passed.update(parameters)
        try:
            with self.rollback.attempt(), torch.no_grad():
                if begins:
                    self.begin_step()
                future = self._start(bucket, parameters)
        except Exception as error:
            # It is raised at the end, because DDP must come to its own end before it can begin another step.
            self._failure = self._failure or error
        if len(self._passed) == self._count:
            if at_once:
                self._end()
            else:
                # DDP queues its own end right after this, so that it comes second. Not earlier: checkpointed layers
                # have backward passes of their own within the pass, at whose ends autograd calls what was queued there.
                call_after_backward(self._end)
        return _completed(bucket.buffer()) if future is None else future

    def _start(self, bucket: dist.GradBucket, parameters: Sequence[torch.Tensor]) -> torch.futures.Future[torch.Tensor]:
        names = [self._names[p] for p in parameters]
        buffer, ours = bucket.buffer(), self.run.plan.assignment_of.keys() & names
        if self.advisor is not None and not buffer.is_sparse:
            for name, view in zip(names, split(buffer, parameters), strict=True):
                self.note_gradient(name, view)
        if ours:
            refuse_sparse(names[0], buffer)
        if self._wrapped is not None and not ours:
            # Its collectives check as little as those of `_reduce`.
            self.comparisons.finish()
            return self._wrapped.pass_on(bucket)
        if self._wrapped is not None:
            # DDP gets the future of what the hook makes of the result.
            future, captured = self._wrapped.start(bucket)
            mine = _Bucket(captured.tensors[0], captured.future, ours, {}, captured)
            views = dict(zip(names, captured.gradients, strict=True))
        else:
            future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
            mine = _Bucket(buffer, future, ours, {})
            views = dict(zip(names, split(buffer, parameters), strict=True)) if ours else {names[0]: buffer}
        self._buckets.append(mine)
        mine.reductions.update({name: self._reduce(x) for name, x in views.items() if name not in ours})
        for name, view in views.items():
            if name in ours:
                self._hand_over(name, view)
        return future

    def _reduce(self, x: torch.Tensor) -> dist.Work:
        """Start the mean of a tensor that stays dense, computed as DDP computes it."""
        # DDP's group does not check whether all ranks start the same, and cannot drop what they have started.
        self.comparisons.finish()
        size = self.transport.size
        if x.is_sparse:
            x.div_(size)
        else:
            x.mul_(1.0 / size)
        work = dist.all_reduce(x, group=self._group, async_op=True)
        assert work is not None
        return work

    def _hand_over(self, name: str, gradient: torch.Tensor) -> None:
        self.loss_scale.unscale_(gradient)
        self._gradients[name] = gradient
        reference = self._references.of(self._parameters[name])
        if reference is not None:
            # A hook that the model had before may have changed the dtype.
            reference = reference.to(gradient.dtype)
        unused = self._used is not None and name not in self._used
        self.run.current.ready(name, gradient, reference=reference, unused=unused)

    def _end(self) -> None:
        """Complete the step. An error is raised after DDP's own end, if this is a backward pass and DDP comes there."""
        self._complete()
        # To find unused parameters, DDP has started an allreduce of its own. It would wait for a rank that is missing.
        waits = self._delayed or self._finds_unused
        self._delayed = False
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward:
            call_after_backward(self._pending.note_places)
            call_after_backward(self.step_ends)
        if self._failure is not None and in_backward and not (waits and isinstance(self._failure, WaitError)):
            call_after_backward(self._raise_failure)
        else:
            self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _complete(self) -> None:
        """Complete the exchange, bucket by bucket; with an error, leave gradients as they are."""
        try:
            if self._failure is None:
                with self.rollback.attempt(), torch.no_grad():
                    self._finish()
        except Exception as error:
            self._failure = error
        for bucket in self._buckets:
            if not bucket.future.done():
                bucket.complete()
        self._clear()

    def _finish(self) -> None:
        refuse_unfrozen(
            {name: p for name, p in self._parameters.items() if p not in self._passed},
            "the model was wrapped in DistributedDataParallel",
            "Wrap the plain model again after you unfreeze parameters, and register it.",
        )
        self.comparisons.finish()
        find_unused: Callable[[], set[str]] = set
        if self._used is not None and self._gradients:
            used = {name: name in self._used for name in sorted(self._gradients)}
            find_unused = self._start_finding_unused(used, next(iter(self._gradients.values())).device)
        into = {name: x for name, x in self._gradients.items() if x.is_contiguous()}
        for merged in self.run.current.complete(into):
            self._take(merged)
        self._complete_buckets()
        # DDP drops the result of what no rank has used. It must not be missing in the residuals.
        unused = find_unused()
        # It counts the step, also if DDP reduced all tensors.
        self.run.finish(unused=unused)
        self._pending.add(self._parameters[name] for name in self._gradients if name not in unused)
        self.end_step()

    def _take(self, merged: Mapping[str, torch.Tensor]) -> None:
        """Put merged gradients in their places, and complete the buckets of DDP that are whole."""
        for name, x in merged.items():
            gradient = self._gradients[name]
            if x.data_ptr() != gradient.data_ptr():
                gradient.copy_(x)
            self.loss_scale.scale_(gradient)
        for bucket in self._buckets:
            bucket.missing -= merged.keys()
        self._complete_buckets()

    def _dense(self, name: str) -> str:
        return f"step {int(self.run.step)}, the gradient of '{name}', which stays dense"

    def _complete_buckets(self) -> None:
        for bucket in self._buckets:
            if not bucket.missing and not bucket.future.done():
                for name, work in bucket.reductions.items():
                    wait_for(work, bucket.buffer, self.transport, functools.partial(self._dense, name))
                if bucket.captured is not None and bucket.captured.summed:
                    for x in bucket.captured.tensors:
                        x.mul_(self.transport.size)
                bucket.complete()

    def _clear(self) -> None:
        self._buckets, self._gradients = [], {}
        self._passed.clear()
        if self._used is not None:
            self._used.clear()

    def _forget_pass(self) -> None:
        self._clear()
        self._failure = None


def _completed(x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(x)
    return future


def wait_for(work: dist.Work, x: torch.Tensor, transport: Transport, what: Callable[[], str]) -> None:
    """Wait for a collective on x that PyTorch runs, with the time limit of the transport.

    `what` says what this rank waits for; it is called only if the wait is long. Raises WaitError after the limit, or
    PyTorch's own error.
    """
    # On a GPU, the stream waits in place of this process.
    if not x.is_cuda:
        wait_until(work.is_completed, what, rank=transport.rank, size=transport.size, timeout=transport.timeout)
    work.wait()


def call_after_backward(call: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass under way, after those that were queued before."""
    # There is no public way to do so. DDP and FSDP do the same.
    torch.autograd.Variable._execution_engine.queue_callback(call)
