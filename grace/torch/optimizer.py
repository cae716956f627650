"""`DistributedOptimizer`: Horovod's optimizer with grace's exchange behind Horovod's own seam.

Horovod starts the reduction of a gradient in `_allreduce_grad_async(p)`, called by a hook of the backward pass, and
its `synchronize()` accepts a callable in place of a handle. The adapter sets that one method on the instance (it must
not subclass: Horovod's methods use `super(self.__class__, self)`), and nothing of Horovod is changed.
"""

from __future__ import annotations

import collections
import logging
import os
import types
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from grace.core.agreement import agree
from grace.core.config import Config, make_config
from grace.core.engine import Engine
from grace.core.errors import ConfigError, GraceError, StepError
from grace.core.ops import get_ops
from grace.core.part import Part
from grace.core.plan import make_plans
from grace.core.spec import TensorSpec
from grace.core.timeline import Times
from grace.torch.exchange import Exchange
from grace.torch.local import check_local, local_names, step_locally
from grace.torch.transport import HorovodTransport
from grace.torch.views import GradientViews

logger = logging.getLogger("grace")

# Collectives of different optimizers of one process set must not share names; its ranks agree on the number.
_instances: collections.Counter[int] = collections.Counter()


def DistributedOptimizer(  # noqa: N802 - the field's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    backward_passes_per_step: int = 1,
    local_steps: int = 1,
    op: int = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
    gradient_as_bucket_view: bool = False,
    process_set: Any = hvd.global_process_set,
    compression: Any = hvd.Compression.none,
    num_groups: int = 0,
    groups: Any = None,
    **options: Any,
) -> Any:
    """Wrap a torch optimizer so that its gradients are exchanged compressed, over Horovod.

    `config` is a mapping, a `Config` or the path of a TOML file; `options` are further keys of it (see
    `grace.make_config`); without either, GRACE_CONFIG counts. With `gradient_as_bucket_view` gradients live in flat
    storage, laid out as units are, so that none is concatenated; backward passes then add to them, which pays for many
    small tensors only. The other arguments are those of `horovod.torch.DistributedOptimizer`. Tensors that stay dense
    are reduced by Horovod itself, bit for bit as without grace, but small vectors beside compressed tensors, which
    share one allreduce; `gradient_predivide_factor` concerns only what Horovod reduces, since decoded gradients are
    summed in float32.

    The result is the optimizer that Horovod makes (an instance of the wrapped class), with the attribute `grace` (an
    `Exchange`). `step(closure)` evaluates the closure, exchanges its gradients and updates. With one process the
    compression applies as well. All ranks of the process set must call this.

    With `local_steps` above 1 every rank steps on its own gradients, and every local_steps-th step exchanges what the
    weights have moved since the last exchange, in place of gradients (local SGD; Qsparse-local-SGD with a compressor).
    The result is then the given optimizer.

    Raises ConfigError for arguments that cannot be honoured (`compression`, `groups`, Adasum, LBFGS, elastic mode),
    MismatchError on every rank if ranks differ in configuration or parameters.
    """
    if not hvd.is_initialized():
        raise ConfigError("grace.torch.DistributedOptimizer: Horovod is not initialized; call hvd.init() first.")
    transport = HorovodTransport(process_set)
    number = _instances[process_set.process_set_id]
    _instances[process_set.process_set_id] += 1
    prefix = f"grace/{process_set.process_set_id}.{number}"
    failure: Exception | None = None
    description: dict[str, Any] = {}
    times, included = Times(), transport.rank >= 0
    try:
        _refuse(optimizer, op, compression, num_groups, groups)
        made = make_config(config, **options)
        if local_steps != 1:
            check_local(made, local_steps, op, backward_passes_per_step, gradient_predivide_factor)
            if gradient_as_bucket_view:
                raise ConfigError(
                    "grace.torch.DistributedOptimizer: with local_steps no gradients are exchanged; leave "
                    "gradient_as_bucket_view out."
                )
            wrapped, names = optimizer, local_names(optimizer, named_parameters)
        else:
            wrapped = hvd.DistributedOptimizer(
                optimizer,
                named_parameters=named_parameters,
                backward_passes_per_step=backward_passes_per_step,
                op=op,
                gradient_predivide_factor=gradient_predivide_factor,
                sparse_as_dense=sparse_as_dense,
                process_set=process_set,
            )
            names = wrapped._parameter_names
        specs = _specs(wrapped.param_groups, names)
        description = {
            "optimizer number": number,
            "configuration": made.to_dict(),
            "local_steps": local_steps,
            "backward_passes_per_step": backward_passes_per_step,
            "op": op,
            "gradient_predivide_factor": gradient_predivide_factor,
            "sparse_as_dense": sparse_as_dense,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "parameters": {spec.name: [list(spec.shape), spec.dtype] for spec in specs},
        }
        # What weights moved goes through the engine as a whole.
        delegate = _delegated if local_steps == 1 else lambda part: False
        (_, plan), *later = make_plans(specs, made, prefix=prefix, delegate=delegate)
        if included:
            times.start_as_told(hvd.rank(), hvd.size())
    except Exception as error:
        # The others must hear of it, or they would wait for this rank in the agreement below.
        failure = error
    # One name for all optimizers of the set, so that ranks with different numbers of them meet and are told.
    name = f"grace/{process_set.process_set_id}/agree"
    agree(
        description,
        failure,
        lambda mine: transport.gather_objects(mine, name) if included else [mine],
        "grace.torch.DistributedOptimizer",
    )
    engine = Engine(
        plan,
        lambda device: get_ops("torch", device),
        transport,
        seed=made.seed,
        average=op == hvd.Average,
        later=later,
        times=times,
    )
    exchange = Exchange(made, engine, specs, prefix, delegate)
    if local_steps > 1:
        step_locally(wrapped, {p: name for p, name in names.items() if p.requires_grad}, exchange, local_steps)
    else:
        wrapped.grace = exchange
        parameters = {name: p for p, name in names.items()}
        views = GradientViews(plan, parameters) if gradient_as_bucket_view else None
        _attach(wrapped, type(optimizer), sparse_as_dense, views)
    if included and hvd.size() == 1 and local_steps == 1:
        # Horovod does without hooks when it is alone; the numerics of the compression are wanted all the same.
        wrapped._register_hooks()
    if included and transport.rank == 0:
        for text in plan.warnings:
            logger.warning("%s", text)
        logger.info("grace exchanges over %d ranks with %s\n%s", transport.size, made.parts, plan.report())
    return wrapped


def _refuse(optimizer: torch.optim.Optimizer, op: int, compression: Any, num_groups: int, groups: Any) -> None:
    """Raise for what cannot be honoured, naming the argument."""
    where = "grace.torch.DistributedOptimizer"
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{where}: expected a torch.optim.Optimizer, received {type(optimizer).__qualname__}.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            f"{where}: LBFGS evaluates its closure several times in a step, which one exchange cannot serve; "
            "use another optimizer."
        )
    if hasattr(optimizer, "_allreduce_grad_async"):
        raise ConfigError(f"{where}: the optimizer is already wrapped by Horovod; pass the one inside it.")
    if compression is not hvd.Compression.none:
        raise ConfigError(
            f"{where}: the argument 'compression' is Horovod's own; "
            "name a compressor in the configuration instead, for instance config={'compressor': 'fp16'}."
        )
    if num_groups != 0 or groups is not None:
        raise ConfigError(
            f"{where}: the arguments 'groups' and 'num_groups' would bypass the compression; "
            "leave them out, grace groups tensors by 'bucket_bytes'."
        )
    if op not in (hvd.Average, hvd.Sum):
        raise ConfigError(
            f"{where}: the argument 'op' must be hvd.Average or hvd.Sum; other reductions are not linear."
        )
    if os.environ.get("HOROVOD_ELASTIC") == "1":
        raise ConfigError(
            f"{where}: elastic Horovod changes the number of ranks in mid-run, which residuals do not survive yet; "
            "launch without elastic options."
        )


def _specs(groups: Sequence[Mapping[str, Any]], names: Mapping[torch.nn.Parameter, str]) -> list[TensorSpec]:
    """What is known of every parameter that gets a gradient, in the order of the parameter groups."""
    return [
        TensorSpec(names[p], tuple(p.shape), str(p.dtype).removeprefix("torch."), str(p.device))
        for group in groups
        for p in group["params"]
        if p.requires_grad
    ]


def _delegated(part: Part) -> bool:
    """Dense tensors take Horovod's own path; but Horovod cannot add bfloat16."""
    return part.dense and part.spec.dtype != "bfloat16"


def _attach(wrapped: Any, plain_class: Any, sparse_as_dense: bool, views: GradientViews | None) -> None:
    """Put the exchange behind Horovod's seam, and mend what today's PyTorch expects of an optimizer.

    `plain_class` is the class of the optimizer before Horovod wrapped it.
    """
    exchange: Exchange = wrapped.grace
    engine = exchange.engine
    names: dict[torch.nn.Parameter, str] = wrapped._parameter_names
    # By number, because loading a checkpoint replaces the groups.
    group_of = {p: i for i, group in enumerate(wrapped.param_groups) for p in group["params"]}
    horovod_start, horovod_load = wrapped._allreduce_grad_async, wrapped.load_state_dict
    horovod_synchronize, horovod_step = wrapped.synchronize, wrapped.step

    def start(p: torch.nn.Parameter) -> Any:
        exchange.meet_once()
        name = names[p]
        if not engine.exchanges(name):
            return horovod_start(p)
        if p.grad is None:
            # Another rank may have used the parameter, and it waits for this one.
            p.grad = torch.zeros_like(p)
        gradient = p.grad
        if gradient.is_sparse:
            if not sparse_as_dense:
                raise StepError(
                    f"tensor '{name}' has a sparse gradient, which its compressor cannot take. Pass "
                    "sparse_as_dense=True, or keep the tensor uncompressed by a rule, for instance "
                    f"rules=[{{'match': '{name}', 'compressor': 'none'}}]."
                )
            gradient = gradient.to_dense()
        else:
            exchange._gradients[name] = gradient
        with torch.no_grad():
            engine.ready(name, gradient, wrapped.param_groups[group_of[p]]["lr"])
        return (lambda: exchange._result(name)), None

    def synchronize() -> None:
        # Horovod would exchange the merged gradients once more, which momenta and residuals would count as a step.
        if wrapped._handles or not wrapped._synchronized:
            alone = not engine.plan.buckets
            horovod_synchronize()
            if alone:
                # Horovod did everything, and asked for no result: the step counts all the same, for the schedule.
                engine.finish()

    def step(self: Any, closure: Any = None) -> Any:
        # Horovod synchronizes before it evaluates the closure, so the gradients made there would never be exchanged.
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        result = horovod_step()
        return result if closure is None else loss

    def refuse_while_under_way(call: str) -> None:
        if wrapped._handles:
            raise StepError(
                f"{call} was called after backward() but before step() or synchronize(), while the gradients are on "
                "their way; call it after step(), or after synchronize() to drop this step."
            )

    def zero_grad(set_to_none: bool = True) -> None:
        refuse_while_under_way("zero_grad()")
        plain_class.zero_grad(wrapped, set_to_none=set_to_none)
        if views is not None:
            views.clear()

    def state_dict() -> dict[str, Any]:
        return {**plain_class.state_dict(wrapped), "grace": engine.state_dict()}

    def load_state_dict(state: Mapping[str, Any]) -> None:
        refuse_while_under_way("load_state_dict()")
        plain = dict(state)
        saved = plain.pop("grace", None)
        if saved is not None:
            exchange.load(saved)
        horovod_load(plain)
        if saved is None:
            exchange._merged.clear()
            engine.reset()
            warnings.warn(
                "the checkpoint holds no state of grace (key 'grace'): residuals start from zero", stacklevel=2
            )

    def add_param_group(group: dict[str, Any]) -> None:
        raise GraceError(
            "parameters added after wrapping would never be exchanged; add the group to the optimizer first "
            "and wrap it then."
        )

    wrapped._allreduce_grad_async = start
    wrapped.synchronize = synchronize
    # A bound method, because learning-rate schedulers take the function out of it.
    wrapped.step = types.MethodType(step, wrapped)
    wrapped.zero_grad = zero_grad
    wrapped.state_dict = state_dict
    wrapped.load_state_dict = load_state_dict
    wrapped.add_param_group = add_param_group
