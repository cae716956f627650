"""`register`: gradients of a model that PyTorch itself makes parallel are exchanged by grace."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from grace.core.config.config import Config
from grace.core.errors import ConfigError
from grace.core.session.start import Request, open_session
from grace.torch.exchange import OPS, Exchange
from grace.torch.loss_scale import enabled
from grace.torch.model import WHERE, ModelExchange
from grace.torch.tensors import spec_of


def register(
    model: torch.nn.Module,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    grad_scaler: torch.amp.GradScaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    process_group: Any = None,
    **options: Any,
) -> Exchange:
    """Let grace compress and exchange the gradients of a model in `DistributedDataParallel` or `fully_shard` (FSDP2).

    The model may lie in another one, such as a compiled model or a wrapper of yours; then it is the only one there.
    Call it on all ranks, after the model is wrapped and before its first forward pass. The loss, the optimizer and the
    loop stay as they are: after `backward()`, gradients are the means over all ranks. `config` and `options` are as for
    `DistributedOptimizer`. `grad_scaler` is the GradScaler that scales the loss: gradients are then exchanged unscaled,
    and a step that it skips changes no residual. Without it, residuals are in units of the scaled gradients.

    DDP itself reduces its buckets whose tensors all stay dense, bit-identical to a model without grace. So does FSDP if
    no tensor of the model is compressed. With FSDP, each rank gets the mean of its own part of each parameter, so that
    methods that need whole tensors, and communicators, cannot be chosen. On a mesh of replicas and shards (HSDP), FSDP
    reduces within each replica, and the ranks that hold the same part exchange it by any method.

    With `optimizer`, the ranks of `process_group` (all of them without it) step on their own, and exchange what the
    weights have moved, as the option `outer` says. The model may then be any module. In DDP or FSDP2 it trains within
    a site as ever, and the group has the ranks that hold the same weights, one of each site.

    Returns the exchange of the model. An error of the exchange is raised by `backward()`. Raises TypeError for another
    model, ConfigError for several such models and for a model or arguments that are not supported, and MismatchError on
    every rank if the ranks differ in configuration or parameters.
    """
    # Not every PyTorch has torch.distributed.
    from grace.torch.distributed.ddp import GradientHook, check_model, parameters_of
    from grace.torch.distributed.library import TorchDistributed
    from grace.torch.distributed.wrapped import take_hook

    request = Request(config, options, register, WHERE)
    if optimizer is not None:
        from grace.torch.outer import register_outer

        library = TorchDistributed(process_group, request.timeout)
        return register_outer(model, optimizer, request, library, process_group, grad_scaler)
    if process_group is not None:
        raise ConfigError(
            f"{WHERE}: process_group names the ranks of outer steps and needs optimizer; leave it out. DDP and FSDP2 "
            "have their own."
        )
    model = _parallel_in(model)
    if not isinstance(model, DistributedDataParallel):
        from grace.torch.distributed.fsdp import register_sharded

        return register_sharded(model, request, grad_scaler=grad_scaler)
    library = TorchDistributed(model.process_group, request.timeout)
    with open_session(
        request, library.transport, world=library.world, group=f"grace/{library.group}", kind="model"
    ) as session:
        check_model(model, WHERE)
        wrapped = take_hook(model, WHERE)
        parameters = parameters_of(model)
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        scaler = enabled(grad_scaler, trained.values(), WHERE)
        dtypes = {} if wrapped is None else wrapped.dtypes
        specs = [spec_of(name, p, dtypes.get(p)) for name, p in trained.items()]
        session.local = {"model number": session.number, "grad_scaler": scaler is not None}
        run = session.begin(specs, OPS, average=True, delegate=library.reduces)
    exchange = ModelExchange(session, library, parameters, scaler)
    GradientHook(model, parameters, exchange, wrapped).attach(model)
    exchange.announce(run.stages)
    return exchange


def _parallel_in(model: torch.nn.Module) -> torch.nn.Module:
    """Return the one model in DDP or FSDP2 that `model` is or holds, as a compiled model or a user's wrapper does."""
    # Who has applied `fully_shard` has imported it, which takes seconds.
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    found: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules() if isinstance(model, torch.nn.Module) else ():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if not inside and isinstance(module, (DistributedDataParallel, sharded)):
            found[name] = module
    if len(found) == 1:
        return next(iter(found.values()))
    received = type(model).__qualname__
    if found:
        names = list(found)
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise ConfigError(
            f"{WHERE}: expected a model that is or holds one model in DistributedDataParallel or fully_shard, "
            f"received {received}, which holds {len(names)}: {', '.join(names[:5])}{more}. Register each of them, "
            "or shard the model that holds them as well."
        )
    raise TypeError(
        f"{WHERE}: expected a model wrapped in torch.nn.parallel.DistributedDataParallel or sharded by "
        f"torch.distributed.fsdp.fully_shard, received {received}; wrap or shard it first, or use "
        "grace.torch.DistributedOptimizer for a plain model."
    )
