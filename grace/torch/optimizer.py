"""`DistributedOptimizer`: a PyTorch optimizer that exchanges its gradients by grace, over Horovod or torch.distributed.

Both libraries give the adapter an optimizer with the same entry point; see `grace.torch.library`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from grace.core.config.config import Config
from grace.core.config.recommended import warn_of_pairs
from grace.core.errors import ConfigError
from grace.core.session.inner import InnerSteps
from grace.core.session.outer_setup import refuse_arguments_of_gradients, refuse_parts
from grace.core.session.start import REFUSED, Request, refuse_arguments
from grace.torch.adapter import GradientAdapter, OptimizerAdapter, PlainMethods
from grace.torch.describe import check_optimizer, describe
from grace.torch.exchange import OPS, Exchange
from grace.torch.library import PLAIN, Library, Settings, connect
from grace.torch.loss_scale import check_scaler
from grace.torch.model import is_registered
from grace.torch.outer import OuterAdapter, PlainOptimizer, shared_by
from grace.torch.tensors import is_sharded, names_of, own_part, refuse_unfrozen, spec_of
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
      the weights since the last exchange instead of gradients (local SGD; Qsparse-local-SGD with a compressor). It is
      the short form of `outer={"every": local_steps}`, a key of the configuration with more options (DiLoCo).
    - `grad_scaler`: the GradScaler that scales the loss and calls this optimizer's step. `scaler.step(optimizer)` then
      exchanges unscaled gradients first, and all ranks skip the same steps. A skipped step changes no residual.

    The library itself reduces the tensors that stay dense; with Horovod, the result is bit-identical to a run without
    grace. Small vectors are the exception: together with compressed tensors they share one allreduce.
    `gradient_predivide_factor` applies only to tensors that the library reduces, because decoded gradients are summed
    in float32.

    Returns an instance of the optimizer's class: a new one with Horovod; with torch.distributed or `outer` the
    given optimizer, changed. It has the attribute `grace`, an `Exchange`. `step(closure)` evaluates the closure,
    exchanges its gradients and updates the weights. With the memories `marina` and `lsvrg`, it evaluates the closure
    twice, except in full rounds, first at earlier weights. A single process compresses as well. All ranks of the
    process set or group must call this function.

    Raises ConfigError for arguments that are not supported (`compression`, `groups`, Adasum, LBFGS), and
    MismatchError on every rank if the ranks differ in configuration or parameters.
    """

    # Some pass Horovod's defaults, which change nothing.
    refused = {name: value for name in REFUSED if (value := options.pop(name, None)) not in (None, 0)}
    request = Request(config, options, DistributedOptimizer, _WHERE, local_steps)
    library = connect(backend, process_set, process_group, request.timeout, _WHERE)
    settings = Settings(op, backward_passes_per_step, gradient_predivide_factor, sparse_as_dense)
    views = gradient_as_bucket_view
    return wrap(request, library, optimizer, named_parameters, grad_scaler, settings, views=views, refused=refused)


def wrap(
    request: Request,
    library: Library,
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    grad_scaler: torch.amp.GradScaler | None,
    settings: Settings = PLAIN,
    *,
    views: bool = False,
    refused: Mapping[str, Any] = MappingProxyType({}),
    sites: Sequence[int] | None = None,
) -> Any:
    """Wrap an optimizer over a library, as `DistributedOptimizer` says, and return it.

    `views` is `gradient_as_bucket_view`, and `refused` has arguments that are not supported. `sites` has the numbers of
    the ranks if they are sites of a model: it may be sharded within each of them, and they must take outer steps.
    """
    where = request.where
    with library.session(request, "") as session:
        refuse_arguments({name: x for name, x in refused.items() if x is not library.no_compression}, where)
        check_optimizer(optimizer, where)
        given = [p for group in optimizer.param_groups for p in group["params"]]
        if sites is None:
            refuse_parameters(given, where)
        average = library.averages(settings.op)
        scaler = check_scaler(grad_scaler, given, where)
        made = session.config
        outer = made.outer is not None
        if sites is not None and not outer:
            raise ConfigError(
                f"{where}: with an optimizer, the ranks step on their own and need outer, for example outer='diloco'; "
                "leave optimizer out to exchange gradients."
            )
        # What outer steps exchange is no gradient.
        used = describe(optimizer)._replace(adaptive=False) if outer else describe(optimizer)
        if library.transport.rank == 0:
            warn_of_pairs(made, used)
        if outer:
            refuse_arguments_of_gradients(
                where,
                backward_passes_per_step=settings.backward_passes_per_step != 1,
                gradient_predivide_factor=settings.gradient_predivide_factor != 1.0,
                gradient_as_bucket_view=views,
            )
            named = None if named_parameters is None else list(named_parameters)
            wrapped, names = optimizer, names_of(optimizer, named)
            refuse_parts(shared_by(optimizer, names), sites, where)
        else:
            wrapped, names = library.wrap(optimizer, named_parameters, settings)
        trained = {p: names[p] for group in wrapped.param_groups for p in group["params"] if p.requires_grad}
        session.local = {
            "optimizer number": session.number,
            "local_steps": request.local_steps,
            **settings._asdict(),
            "op": "average" if average else "sum",
            "gradient_as_bucket_view": views,
            "grad_scaler": scaler is not None,
        }
        # With outer steps, grace exchanges all tensors.
        delegate = (lambda item: False) if outer else library.reduces
        specs = [spec_of(name, own_part(p)) for p, name in trained.items()]
        steps = None
        if made.outer is not None:
            buffers = {name: x for name, x in named or () if not isinstance(x, torch.nn.Parameter) and x not in names}
            inner = PlainOptimizer(optimizer, trained, buffers)
            steps = InnerSteps(made.outer, inner, library.transport, where)
            specs += steps.specs
        # A GradScaler passes no closure to step().
        references = not outer and scaler is None
        auto = not library.elastic
        run = session.begin(
            specs, OPS, average=average, delegate=delegate, outer=True, references=references, auto=auto
        )
    parameters = {name: p for p, name in names.items()}
    check_frozen = functools.partial(
        refuse_unfrozen,
        {names[p]: p for group in wrapped.param_groups for p in group["params"] if not p.requires_grad},
        "the optimizer was wrapped",
        "Wrap a new optimizer after you unfreeze parameters.",
    )
    # Outer steps exchange no gradients, which the exchange would unscale.
    exchange = Exchange(session, library, parameters, None if outer else scaler)
    exchange.optimizers.append(used)
    plain = PlainMethods.of(optimizer)
    adapter: OptimizerAdapter
    if steps is not None:
        adapter = OuterAdapter(wrapped, plain, exchange, trained, check_frozen, scaler=scaler, steps=steps)
    else:
        if wrapped is not optimizer:
            # A scheduler or a hook may have the given optimizer, and changes its groups and its state.
            vars(optimizer).update({**vars(wrapped), **vars(optimizer)})
            wrapped.__dict__ = vars(optimizer)
        adapter = GradientAdapter(
            wrapped,
            plain,
            exchange,
            names,
            check_frozen,
            delegated=library.begin(wrapped, names, run, session.prefix),
            sparse_as_dense=settings.sparse_as_dense,
            views=GradientViews(run.plan, parameters) if views else None,
        )
    adapter.attach()
    exchange.announce(run.stages)
    return wrapped


def refuse_parameters(parameters: list[torch.Tensor], where: str) -> None:
    """Raise ConfigError for parameters whose gradients another exchange has, or of which each rank has a part."""
    if is_registered(parameters):
        raise ConfigError(
            f"{where}: grace.torch.register() exchanges the gradients of these parameters already; register a model "
            "once, and use the plain optimizer."
        )
    if any(is_sharded(p) for p in parameters):
        raise ConfigError(
            f"{where}: expected whole parameters, received sharded ones (DTensor); use the plain optimizer, and call "
            "grace.torch.register(model) for a model of fully_shard (FSDP2)."
        )
