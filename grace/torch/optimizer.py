"""`DistributedOptimizer`: a PyTorch optimizer that exchanges its gradients by grace, over Horovod or torch.distributed.

Both libraries give the adapter an optimizer with the same entry point; see `grace.torch.library`.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from grace.core.config.config import Config
from grace.core.config.recommended import warn_of_pairs
from grace.core.errors import ConfigError, GraceError, GraceWarning, StepError
from grace.core.session.local_steps import check_local_steps
from grace.core.session.start import REFUSED, Request, open_session, refuse_arguments
from grace.torch.exchange import OPS, Exchange
from grace.torch.library import Delegated, Library
from grace.torch.local import step_locally
from grace.torch.loss_scale import LossScale, check_scaler
from grace.torch.plain import PlainMethods
from grace.torch.steps import described
from grace.torch.tensors import is_registered, is_sharded, names_of, refuse_unfrozen, spec_of
from grace.torch.views import GradientViews

_WHERE = "grace.torch.DistributedOptimizer"


def DistributedOptimizer(  # noqa: N802 - the field's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    backward_passes_per_step: int = 1,
    local_steps: int = 1,
    op: Any = None,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
    gradient_as_bucket_view: bool = False,
    backend: str | None = None,
    process_set: Any = None,
    process_group: Any = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    **options: Any,
) -> Any:
    """Wrap a PyTorch optimizer so that its gradients are compressed and exchanged over Horovod or torch.distributed.

    `config` is a mapping, a `Config` or the path of a TOML file. `options` are further keys of the configuration (see
    `grace.make_config`). If they name no compressor, the environment variable GRACE_CONFIG gives the configuration.
    `backend` is "horovod" or "torch"; without it, the launcher decides: torch.distributed is used if it is initialized
    and Horovod is not. All other arguments are those of `horovod.torch.DistributedOptimizer`, except:

    - `process_group`: the process group of torch.distributed, in place of Horovod's `process_set`. `op` is then
      `torch.distributed.ReduceOp.AVG`, the default, or `SUM`.
    - `gradient_as_bucket_view`: gradients are views into flat storage in the order of the exchange, which saves
      concatenations. Backward passes then add to the gradients. This is faster for many small tensors only.
    - `local_steps`: above 1, each rank applies its own gradients, and every local_steps-th step exchanges the change of
      the weights since the last exchange instead of gradients (local SGD; Qsparse-local-SGD with a compressor).
    - `grad_scaler`: the GradScaler that scales the loss and calls this optimizer's step. `scaler.step(optimizer)` then
      exchanges unscaled gradients first, and all ranks skip the same steps. A skipped step changes no residual.

    The library itself reduces the tensors that stay dense; with Horovod, the result is bit-identical to a run without
    grace. Small vectors are the exception: together with compressed tensors they share one allreduce.
    `gradient_predivide_factor` applies only to tensors that the library reduces, because decoded gradients are summed
    in float32.

    Returns an instance of the optimizer's class: a new one with Horovod; with torch.distributed or `local_steps` the
    given optimizer, changed. It has the attribute `grace`, an `Exchange`. `step(closure)` evaluates the closure,
    exchanges its gradients and updates the weights. A single process compresses as well. All ranks of the process set
    or group must call this function.

    Raises ConfigError for arguments that are not supported (`compression`, `groups`, Adasum, LBFGS), and
    MismatchError on every rank if the ranks differ in configuration or parameters.
    """

    # Some pass Horovod's defaults, which change nothing.
    refused = {name: value for name in REFUSED if (value := options.pop(name, None)) not in (None, 0)}
    request = Request(config, options, DistributedOptimizer, _WHERE)
    library = _library(backend, process_set, process_group, request.timeout)
    with open_session(
        request,
        library.transport,
        world=library.world,
        group=f"grace/{library.group}",
        kind="",
        # In elastic mode ranks meet when their states are synchronized: a new rank makes its optimizer while the others
        # go on.
        gather=(lambda mine: [mine]) if library.elastic else None,
    ) as session:
        refuse_arguments({name: x for name, x in refused.items() if x is not library.no_compression}, _WHERE)
        _refuse(optimizer)
        average = library.averages(op)
        if grad_scaler is not None:
            check_scaler(grad_scaler, (p for group in optimizer.param_groups for p in group["params"]), _WHERE)
        made = session.config
        # What local steps exchange is no gradient.
        used = described(optimizer) if local_steps == 1 else described(optimizer)._replace(adaptive=False)
        if library.transport.rank == 0:
            warn_of_pairs(made, used)
        if local_steps != 1:
            check_local_steps(
                made,
                local_steps,
                _WHERE,
                average=average,
                passes=backward_passes_per_step,
                factor=gradient_predivide_factor,
            )
            if grad_scaler is not None:
                raise ConfigError(
                    f"{_WHERE}: local_steps cannot be combined with grad_scaler, because ranks may skip different "
                    "steps; train in float32 or bfloat16."
                )
            if gradient_as_bucket_view:
                raise ConfigError(
                    f"{_WHERE}: with local_steps no gradients are exchanged, so gradient_as_bucket_view has no effect; "
                    "leave it out."
                )
            wrapped, names = optimizer, names_of(optimizer, named_parameters)
        else:
            wrapped, names = library.wrap(
                optimizer,
                named_parameters,
                backward_passes_per_step=backward_passes_per_step,
                op=op,
                gradient_predivide_factor=gradient_predivide_factor,
                sparse_as_dense=sparse_as_dense,
            )
        trained = [p for group in wrapped.param_groups for p in group["params"] if p.requires_grad]
        session.mine = {
            "optimizer number": session.number,
            "local_steps": local_steps,
            "backward_passes_per_step": backward_passes_per_step,
            "op": "average" if average else "sum",
            "gradient_predivide_factor": gradient_predivide_factor,
            "sparse_as_dense": sparse_as_dense,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "grad_scaler": grad_scaler is not None and grad_scaler.is_enabled(),
        }
        # With local steps, the engine exchanges all tensors.
        delegate = library.reduces if local_steps == 1 else lambda item: False
        specs = [spec_of(names[p], p) for p in trained]
        engine = session.begin(specs, OPS, average=average, delegate=delegate)
    parameters = {name: p for p, name in names.items()}
    check_frozen = functools.partial(
        refuse_unfrozen,
        {names[p]: p for group in wrapped.param_groups for p in group["params"] if not p.requires_grad},
        "the optimizer was wrapped",
        "Wrap a new optimizer after you unfreeze parameters.",
    )
    exchange = Exchange(session, specs, engine, library, parameters, delegate=delegate)
    exchange.optimizers.append(used)
    plain = PlainMethods.of(optimizer)
    if local_steps > 1:
        step_locally(wrapped, plain, {p: names[p] for p in trained}, exchange, local_steps, check_frozen)
    else:
        if wrapped is not optimizer:
            # A scheduler or a hook may have the given optimizer, and changes its groups and its state.
            vars(optimizer).update({**vars(wrapped), **vars(optimizer)})
            wrapped.__dict__ = vars(optimizer)
        wrapped.grace = exchange
        views = GradientViews(engine.plan, parameters) if gradient_as_bucket_view else None
        loss_scale = None
        if grad_scaler is not None and grad_scaler.is_enabled():
            exchange.loss_scale = loss_scale = LossScale(grad_scaler, engine)
        delegated = library.begin(wrapped, names, engine, session.prefix)
        _attach(wrapped, plain, names, delegated, sparse_as_dense, views, loss_scale, check_frozen)
    _refuse_copies(wrapped)
    exchange.announce(engine.stages)
    return wrapped


def _library(backend: str | None, process_set: Any, process_group: Any, timeout: float) -> Library:
    """Connect the ranks by the library that was named, or by the one that is initialized."""
    if backend not in (None, "horovod", "torch"):
        raise ConfigError(f"{_WHERE}: the argument 'backend' must be 'horovod' or 'torch', received {backend!r}.")
    here = torch.distributed.is_available() and torch.distributed.is_initialized()
    horovod = sys.modules.get("horovod.torch")
    if backend is None and not here and (horovod is None or not horovod.is_initialized()):
        raise ConfigError(
            f"{_WHERE}: neither Horovod nor torch.distributed is initialized; call hvd.init() or "
            "torch.distributed.init_process_group() first."
        )
    if backend == "torch" or (backend is None and not (horovod is not None and horovod.is_initialized())):
        from grace.torch.distributed.library import TorchDistributed

        if process_set is not None:
            raise ConfigError(
                f"{_WHERE}: the argument 'process_set' belongs to Horovod; pass a process group of torch.distributed "
                "as process_group."
            )
        return TorchDistributed(process_group, timeout)
    from grace.torch.horovod.library import Horovod

    if process_group is not None:
        raise ConfigError(
            f"{_WHERE}: the argument 'process_group' belongs to torch.distributed; pass a process set of Horovod as "
            "process_set."
        )
    return Horovod(process_set, timeout)


def _refuse(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError or TypeError for an optimizer that is not supported."""
    where = _WHERE
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{where}: expected a torch.optim.Optimizer, received {type(optimizer).__qualname__}.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            f"{where}: LBFGS is not supported, because it evaluates its closure several times per step and grace "
            "exchanges gradients once per step; use another optimizer."
        )
    if hasattr(optimizer, "_allreduce_grad_async") or hasattr(optimizer, "grace"):
        raise ConfigError(f"{where}: the optimizer is already wrapped; pass the plain optimizer.")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if is_registered(parameters):
        raise ConfigError(
            f"{where}: grace.torch.register() exchanges the gradients of these parameters already; use the plain "
            "optimizer, or train the plain model without DistributedDataParallel."
        )
    if any(is_sharded(p) for p in parameters):
        raise ConfigError(
            f"{where}: expected whole parameters, received sharded ones (DTensor); use the plain optimizer, and call "
            "grace.torch.register(model) for a model of FSDP2."
        )


def _refuse_copies(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer raise GraceError when it is copied or pickled: the copy would not exchange its gradients."""

    def refuse() -> None:
        raise GraceError(
            "a wrapped optimizer cannot be copied or pickled, because hooks and collectives belong to the one that was "
            "wrapped. Save optimizer.state_dict(), or wrap another plain optimizer."
        )

    optimizer.__getstate__ = refuse  # type: ignore[assignment, method-assign]


def _attach(
    wrapped: Any,
    plain: PlainMethods,
    names: Mapping[torch.nn.Parameter, str],
    delegated: Delegated,
    sparse_as_dense: bool,
    views: GradientViews | None,
    loss_scale: LossScale | None,
    check_frozen: Callable[[], None],
) -> None:
    """Replace methods of the library's optimizer, so that it uses the exchange and works with current PyTorch.

    `check_frozen` raises StepError if a parameter trains that has no hook, because it was frozen.
    """
    exchange: Exchange = wrapped.grace
    engine, way_back = exchange.engine, exchange.way_back
    # Keep the index of the group, because loading a checkpoint replaces the group objects.
    group_of = {p: i for i, group in enumerate(wrapped.param_groups) for p in group["params"]}
    plain_synchronize = wrapped.synchronize
    # The gradients that the exchange has taken in this step, each with its version.
    taken: dict[torch.nn.Parameter, tuple[torch.Tensor, int]] = {}
    # The gradients that frozen parameters had before zeros took their place, mostly None.
    gradients_of_frozen: dict[torch.nn.Parameter, torch.Tensor | None] = {}
    # Of the first few of them, views of some elements, with the values that they had. GradScaler and `.data` change
    # gradients without counting a version.
    samples: list[tuple[torch.Tensor, torch.Tensor]] = []

    def start(p: torch.nn.Parameter) -> Any:
        with way_back.attempt():
            if not taken:
                way_back.keep()
                exchange.start_comparing()
            handle = hand_over(p)
            assert p.grad is not None
            taken[p] = p.grad, p.grad._version
            return handle

    def hand_over(p: torch.nn.Parameter) -> Any:
        name = names[p]
        if not p.requires_grad:
            # Frozen in mid-run. It takes part with zeros, but neither its residual nor its weight may move.
            gradients_of_frozen[p] = p.grad
            p.grad = torch.zeros_like(p)
        if p.grad is not None and (p.grad.is_conj() or p.grad.is_neg()):
            # PyTorch has noted only that its signs are others than in memory, which is what is sent and overwritten.
            p.grad = p.grad.resolve_conj().resolve_neg()
        if not engine.exchanges(name):
            return delegated.start(p)
        if not p.requires_grad:
            engine.rest(name, wrapped.param_groups[group_of[p]]["lr"])
            return functools.partial(exchange._result, name), None
        if p.grad is None:
            # Another rank may have used the parameter and wait for this rank's gradient.
            p.grad = torch.zeros_like(p)
        gradient = p.grad
        if gradient.is_sparse:
            if not sparse_as_dense:
                raise StepError(
                    f"tensor '{name}' has a sparse gradient, and compressors need dense gradients. Pass "
                    "sparse_as_dense=True, or exclude the tensor from compression by a rule, for example "
                    f"rules=[{{'match': '{name}', 'compressor': 'none'}}]."
                )
            gradient = gradient.to_dense()
        else:
            exchange._gradients[name] = gradient
            if len(samples) < 4 and gradient.is_contiguous():
                some = gradient.detach().flatten()[:: max(1, gradient.numel() // 16)]
                samples.append((some, some.clone()))
        # Detached, because hooks may run with gradients enabled.
        gradient = gradient.detach()
        if loss_scale is not None:
            gradient = loss_scale.unscaled(gradient)
        engine.ready(name, gradient, wrapped.param_groups[group_of[p]]["lr"])
        return functools.partial(exchange._result, name), None

    def synchronize() -> None:
        with way_back.attempt():
            synchronize_once()

    def synchronize_once() -> None:
        # A second synchronize() would exchange the merged gradients again, and momentum and residuals would count
        # another step.
        if wrapped._handles or not wrapped._synchronized:
            check_frozen()
            refuse_changed_gradients()
            alone = not engine.plan.buckets
            if not taken:
                # This rank has no gradient. The others compare the ranks nevertheless.
                exchange.start_comparing()
            exchange.finish_comparing()
            if not engine.completed:
                # Before the library starts what this rank has no gradient for.
                delegated.agree_on_sparse()
            plain_synchronize()
            for p, gradient in gradients_of_frozen.items():
                p.grad = gradient
            gradients_of_frozen.clear()
            taken.clear()
            samples.clear()
            if alone:
                # The library reduced all tensors and asked the engine for nothing. The schedule counts the step anyway.
                engine.finish()

    def step(self: Any, closure: Any = None) -> Any:
        way_back.check()
        loss = None
        if closure is not None:
            # Before the exchange of the gradients that it computes.
            with torch.enable_grad():
                loss = closure()
        if wrapped._should_synchronize:
            if wrapped._synchronized:
                warnings.warn(
                    "step() was called after synchronize(): call it inside 'with optimizer.skip_synchronize():', or "
                    "leave synchronize() out.",
                    stacklevel=2,
                )
            synchronize()
        wrapped._synchronized = False
        result = plain.step()
        way_back.let_go()
        if loss_scale is not None:
            loss_scale.applied(wrapped)
        # A scaler looks at gradients before step() exchanges them, or after synchronize(). The samples have shown the
        # former if any is compressed, and the latter does no harm if none is.
        if not exchange.scaler_sought and wrapped._should_synchronize == exchange.all_dense:
            exchange.warn_of_scaler(_WHERE)
        return result if closure is None else loss

    def refuse_changed_gradients() -> None:
        for p, (gradient, version) in taken.items():
            if p.grad is not gradient or gradient._version != version:
                raise changed(f"the gradient of tensor '{names[p]}' was")
        # Compare bytes: NaN is not equal to itself.
        if not all(torch.equal(now.clone().view(torch.uint8), then.view(torch.uint8)) for now, then in samples):
            raise changed("gradients were")

    def changed(what: str) -> StepError:
        return StepError(
            f"{what} changed between backward() and step(), when the exchange had begun: the ranks would train apart. "
            "To clip gradients, call optimizer.synchronize() first, and then optimizer.step() inside "
            "'with optimizer.skip_synchronize():'. A GradScaler belongs into "
            "grace.DistributedOptimizer(..., grad_scaler=scaler)."
        )

    def refuse_while_under_way(call: str) -> None:
        way_back.check()
        if wrapped._handles:
            raise StepError(
                f"{call} was called after backward() but before step() or synchronize(), while gradients are being "
                "exchanged; call it after step(). To drop this step, call optimizer.grace.discard() on all ranks first."
            )

    def forget() -> None:
        for p, gradient in gradients_of_frozen.items():
            p.grad = gradient
        for collection in (wrapped._handles, taken, samples, gradients_of_frozen):
            collection.clear()
        delegated.forget()
        wrapped.set_backward_passes_per_step(wrapped.backward_passes_per_step)
        wrapped._synchronized = False
        if loss_scale is not None:
            loss_scale.forget()
        zero_grad()

    def zero_grad(set_to_none: bool = True) -> None:
        refuse_while_under_way("zero_grad()")
        if way_back.before is not None and exchange.config.rollback:
            # The gradients were exchanged by synchronize(), and no step() has applied them.
            engine.undo(way_back.before)
        way_back.let_go()
        plain.zero_grad(set_to_none=set_to_none)
        if views is not None:
            views.clear()

    def state_dict() -> dict[str, Any]:
        return {**plain.state_dict(), "grace": engine.state_dict()}

    def load_state_dict(state_dict: Mapping[str, Any] | list[Mapping[str, Any]]) -> None:
        refuse_while_under_way("load_state_dict()")
        given = exchange.gathered(state_dict)
        saved = given.pop("grace", None)
        exchange.load(saved, wrapped, lambda: plain.load_state_dict(given))
        if saved is None:
            warnings.warn(
                "the checkpoint contains no state of grace (key 'grace'): residuals start from zero",
                GraceWarning,
                stacklevel=2,
            )

    def add_param_group(group: dict[str, Any]) -> None:
        raise GraceError(
            "add_param_group() was called after the optimizer was wrapped, and the new parameters would not be "
            "exchanged; add the group before you wrap the optimizer."
        )

    way_back.forget = forget
    wrapped._allreduce_grad_async = start
    wrapped.synchronize = synchronize
    plain.replace_step(wrapped, step)
    wrapped.zero_grad = zero_grad
    wrapped.state_dict = state_dict
    wrapped.load_state_dict = load_state_dict
    wrapped.add_param_group = add_param_group
    if loss_scale is not None:
        loss_scale.attach(
            # A wrapper such as Lightning's forwards the attribute.
            lambda which: getattr(which, "grace", None) is exchange,
            synchronize=synchronize,
            exchanged=lambda _: wrapped.skip_synchronize(),
            done=way_back.let_go,
        )
    # Lightning's wrapper has a class derived from this one. It would find the library's methods there, which act on the
    # wrapper instead of this optimizer, and zero_grad() calls itself for ever. No other optimizer has this class.
    for name in ("synchronize", "skip_synchronize", "zero_grad", "state_dict", "load_state_dict", "add_param_group"):
        setattr(type(wrapped), name, _forwarded(getattr(wrapped, name)))


def _forwarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the bound method as one that can be set on a class."""
    return lambda self, *arguments, **options: method(*arguments, **options)
