"""`GradientHook`: the communication hook of a `DistributedDataParallel` model."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import unserializable_hook

from grace.core.errors import ConfigError, StepError, WaitError
from grace.core.guards.waiting import wait_until
from grace.core.transport.transport import Handle, Transport
from grace.torch.applied import Applied
from grace.torch.distributed.wrapped import Taken, WrappedHook, split
from grace.torch.model import ModelExchange
from grace.torch.tensors import refuse_unfrozen

# The models that have a hook of grace.
_registered: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def parameters_of(model: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that DDP does not ignore, by their names in the plain model."""
    return {
        # torch.compile() adds this to names.
        name.replace("_orig_mod.", ""): p
        for name, p in model.module.named_parameters()
        if name not in model.parameters_to_ignore
    }


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
    # Completed with the buffer, or with the tensors of the allreduce that was taken.
    future: torch.futures.Future[Any]
    # The names of the tensors that are not merged yet.
    missing: set[str]
    # The reductions of what stays dense: a tensor, or the whole bucket under the name of its first one.
    reductions: dict[str, dist.Work]
    # The allreduce of another hook that is exchanged in place of the buffer.
    taken: Taken | None = None

    def complete(self) -> None:
        """Complete the future with what is there now."""
        self.future.set_result(self.buffer if self.taken is None else self.taken.tensors)


class GradientHook:
    """The communication hook of a DDP model, which passes gradients to the run of an exchange.

    DDP calls it with each bucket of gradients during the backward pass. It compresses them and starts their exchange,
    without waiting for other ranks. Only comparisons of the ranks must end in time: in the first step at once, later
    before a tensor that stays dense is reduced. At the end of the backward pass, before DDP waits for the results, the
    run completes its own buckets. DDP makes new buckets after the first step, so everything goes by the names of
    parameters.

    `parameters` are those of `parameters_of`. DDP passes no gradient of a parameter that was frozen when it was made.
    `wrapped` is a hook that the model had before. It decides what is exchanged of each bucket, and what DDP gets.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        parameters: Mapping[str, torch.nn.Parameter],
        exchange: ModelExchange,
        wrapped: WrappedHook | None,
    ) -> None:
        # Not the model, which owns this object in C++: Python would never free the two.
        self._group, self._exchange, self._wrapped = model.process_group, exchange, wrapped
        self._parameters = parameters
        self._names = {p: name for name, p in parameters.items()}
        self._kinds = {p: (p.dtype, p.device) for p in parameters.values() if p.requires_grad}
        self._run, self._rollback = exchange.run, exchange.rollback
        # True until the first step of a static graph, whose buckets DDP passes at the end of the backward pass. Each of
        # them then has the index 0, and none is the last one.
        self._delayed = model.static_graph
        self._finds_unused = model.find_unused_parameters and not model.static_graph
        # How many gradients DDP passes in a step, and the parameters of those that it has passed in this one.
        self._count = int(model._get_ddp_logging_data()["num_parameter_tensors"])
        self._passed: set[torch.Tensor] = set()
        # The buckets and the gradients that the run exchanges in this step.
        self._buckets: list[_Bucket] = []
        self._gradients: dict[str, torch.Tensor] = {}
        self._failure: Exception | None = None
        self._trained = {p: name for p, name in self._names.items() if p.requires_grad}
        exchange.applied = self._applied = Applied(exchange, self._trained)
        # If parameters may be unused, the names of those with a gradient. DDP passes zeros for the others.
        self._used: set[str] | None = None

    def attach(self, model: DistributedDataParallel) -> None:
        """Register the hook with the model."""
        exchange = self._exchange
        if model.find_unused_parameters or model.static_graph:
            self._used = used = set()
            for p, name in self._trained.items():
                # Called before DDP learns of the gradient, which it leaves as it is.
                p.register_hook(unserializable_hook(lambda _, name=name: used.add(name)))  # type: ignore[misc]
        self._watch_kinds()
        if exchange.loss_scale is not None:
            exchange.loss_scale.attach_to(lambda: self._trained)
        exchange.rollback.forget = self._forget
        alive = weakref.ref(model)
        exchange.take_references(lambda: alive().no_sync())
        # False after a forward pass in no_sync(), whose gradients stay on this rank.
        self._applied.attach(lambda: bool(getattr(alive(), "require_forward_param_sync", False)))
        # DDP would refuse the annotations of a method, because they are strings.
        model.register_comm_hook(None, lambda _, bucket: self.start(bucket))
        # DDP's own note of it could not be saved, and a copy of the model would have the note without the hook.
        model._comm_hooks.pop()
        _registered.add(model)

    def _watch_kinds(self) -> None:
        """Check dtypes and devices in each backward pass.

        DDP calls no hook for a parameter that was converted or moved, but PyTorch keeps the hooks of the parameter.
        """
        # It lives as long as its parameter, which must not keep this object.
        alive = weakref.ref(self)

        def check(_: torch.Tensor) -> None:
            hook = alive()
            if hook is not None:
                hook._check_unchanged()

        # One parameter is enough to check all.
        for p in itertools.islice(self._kinds, 1):
            p.register_hook(unserializable_hook(check))  # type: ignore[no-untyped-call]

    def _check_unchanged(self) -> None:
        """Raise StepError if a parameter has another dtype or device than when the model was registered."""
        for p, kind in self._kinds.items():
            if p.dtype is not kind[0] or p.device != kind[1]:
                raise StepError(
                    f"parameter '{self._names[p]}' was {kind[0]} on {kind[1]} when the model was registered, and is "
                    f"{p.dtype} on {p.device} now. DistributedDataParallel passes no gradient of it any more, so the "
                    "ranks would train apart. Convert or move the plain model, then wrap it again and register it."
                )

    def start(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of a bucket; return the future of its buffer, which then has the merged gradients."""
        # DDP's join() calls the hook outside of a backward pass, with zeros, for a rank without further data.
        joined = torch._C._current_graph_task_id() == -1
        # DDP waits for the results right after its last bucket.
        at_once = joined or self._delayed
        future = None
        parameters, begins = bucket.parameters(), not self._passed
        self._passed.update(parameters)
        try:
            with self._rollback.attempt(), torch.no_grad():
                if begins:
                    self._begin()
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

    def _begin(self) -> None:
        self._rollback.keep()
        self._exchange.start_comparing()
        if not self._run.completed:
            # Ranks at different stages of a schedule would start different collectives, and an error about these would
            # come first.
            self._exchange.comparisons.finish()

    def _start(self, bucket: dist.GradBucket, parameters: Sequence[torch.Tensor]) -> torch.futures.Future[torch.Tensor]:
        names = [self._names[p] for p in parameters]  # type: ignore[index]
        buffer, ours = bucket.buffer(), self._run.plan.assignment_of.keys() & names
        if self._exchange.advisor is not None and not buffer.is_sparse:
            for name, view in zip(names, split(buffer, parameters), strict=True):
                self._exchange.note_gradient(name, view)
        if ours and buffer.is_sparse:
            raise StepError(
                f"tensor '{names[0]}' has a sparse gradient, and compressors need dense gradients. Exclude the tensor "
                f"from compression by a rule, for example rules=[{{'match': '{names[0]}', 'compressor': 'none'}}]."
            )
        if self._wrapped is not None and not ours:
            # Its collectives check as little as those of `_reduce`.
            self._exchange.comparisons.finish()
            return self._wrapped.pass_on(bucket)
        if self._wrapped is not None:
            # DDP gets the future of what the hook makes of the result.
            future, taken = self._wrapped.start(bucket)
            mine = _Bucket(taken.tensors[0], taken.future, ours, {}, taken)
            views = dict(zip(names, taken.gradients, strict=True))
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
        self._exchange.comparisons.finish()
        size = self._run.transport.size
        if x.is_sparse:
            x.div_(size)
        else:
            x.mul_(1.0 / size)
        work = dist.all_reduce(x, group=self._group, async_op=True)
        assert work is not None
        return work

    def _hand_over(self, name: str, gradient: torch.Tensor) -> None:
        if self._exchange.loss_scale is not None:
            self._exchange.loss_scale.unscale_(gradient)
        self._gradients[name] = gradient
        unused = self._used is not None and name not in self._used
        self._run.current.ready(name, gradient, reference=self._reference(name, gradient), unused=unused)

    def _reference(self, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        found = self._exchange.reference(name)
        # A hook that the model had before may have changed the dtype.
        return None if found is None else found.to(gradient.dtype)

    def _end(self) -> None:
        """Complete the step. An error is raised after DDP's own end, if this is a backward pass and DDP comes there."""
        self._complete()
        # To find unused parameters, DDP has started an allreduce of its own. It would wait for a rank that is missing.
        waits = self._delayed or self._finds_unused
        self._delayed = False
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward:
            call_after_backward(self._applied.finished)
            call_after_backward(self._exchange.step_ends)
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
                with self._rollback.attempt(), torch.no_grad():
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
        self._exchange.comparisons.finish()
        used = self._start_comparing_used()
        into = {name: x for name, x in self._gradients.items() if x.is_contiguous()}
        for merged in self._run.current.complete(into):
            self._take(merged)
        self._complete_buckets()
        # DDP drops the result of what no rank has used. It must not be missing in the residuals.
        rows = zip(sorted(self._gradients), used.wait().tolist(), strict=True) if used else ()
        unused = {name for name, is_used in rows if not is_used}
        # It counts the step, also if DDP reduced all tensors.
        self._run.finish(unused=unused)
        self._applied.exchanged(self._parameters[name] for name in self._gradients if name not in unused)
        self._rollback.release()
        if self._exchange.loss_scale is not None:
            self._exchange.loss_scale.finish()

    def _start_comparing_used(self) -> Handle | None:
        """Start to find the gradients that no rank has, if there may be any: 0 for each of these, else 1."""
        if self._used is None or not self._gradients:
            return None
        device = next(iter(self._gradients.values())).device
        used = torch.tensor([name in self._used for name in sorted(self._gradients)], dtype=torch.int32, device=device)
        return self._run.transport.allreduce(used, op="max", name=f"{self._exchange.prefix}/used parameters")

    def _take(self, merged: Mapping[str, torch.Tensor]) -> None:
        """Put merged gradients in their places, and complete the buckets of DDP that are whole."""
        for name, x in merged.items():
            gradient = self._gradients[name]
            if x.data_ptr() != gradient.data_ptr():
                gradient.copy_(x)
            if self._exchange.loss_scale is not None:
                self._exchange.loss_scale.scale_(gradient)
        for bucket in self._buckets:
            bucket.missing -= merged.keys()
        self._complete_buckets()

    def _dense(self, name: str) -> str:
        return f"step {int(self._run.step)}, the gradient of '{name}', which stays dense"

    def _complete_buckets(self) -> None:
        for bucket in self._buckets:
            if not bucket.missing and not bucket.future.done():
                for name, work in bucket.reductions.items():
                    wait_for(work, bucket.buffer, self._run.transport, functools.partial(self._dense, name))
                if bucket.taken is not None and bucket.taken.summed:
                    for x in bucket.taken.tensors:
                        x.mul_(self._run.transport.size)
                bucket.complete()

    def _clear(self) -> None:
        self._buckets, self._gradients = [], {}
        self._passed.clear()
        if self._used is not None:
            self._used.clear()

    def _forget(self) -> None:
        """Forget the step under way, which was dropped."""
        self._clear()
        self._failure = None
        if self._exchange.loss_scale is not None:
            self._exchange.loss_scale.forget()


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
    torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]
