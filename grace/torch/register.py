"""`register`: gradients of a model that PyTorch itself makes parallel are exchanged by grace."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from grace.core.config.config import Config
from grace.core.errors import ConfigError
from grace.core.session.start import Request
from grace.torch.exchange import OPS, Exchange
from grace.torch.loss_scale import check_scaler
from grace.torch.model import WHERE
from grace.torch.optimizer import refuse_parameters, wrap
from grace.torch.tensors import parameters_of, spec_of


def register(
    model: torch.nn.Module,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    grad_scaler: torch.amp.GradScaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    process_group: Any = None,
    **options: Any,
) -> Exchange:
    """Let grace compress and exchange the gradients of a model: plain, in `DistributedDataParallel`, or in FSDP2.

    Call it on all ranks, after the model is wrapped, if it is, and before its first forward pass. The loss, the
    optimizer and the loop stay as they are: after `backward()`, gradients are the means over all ranks. A model in DDP
    or `fully_shard` (FSDP2) may lie in another one, such as a compiled model or a wrapper of yours; then it is the only
    one there. `config` and `options` are as for `DistributedOptimizer`. `grad_scaler` is the GradScaler that scales the
    loss: gradients are then exchanged unscaled, and a step that it skips changes no residual. Without it, residuals are
    in units of the scaled gradients.

    A plain model needs no DDP: its ranks are those of `process_group`, or all of them, and get the parameters and
    buffers of rank 0. Its exchange has the context manager `no_sync()`.

    DDP itself reduces its buckets whose tensors all stay dense, bit-identical to a model without grace. So does FSDP if
    no tensor of the model is compressed. With FSDP, each rank gets the mean of its own part of each parameter, so that
    methods that need whole tensors, and communicators, cannot be chosen. On a mesh of replicas and shards (HSDP), FSDP
    reduces within each replica, and the ranks that hold the same part exchange it by any method.

    With `optimizer`, the ranks of `process_group` (all of them without it) step on their own, and exchange the
    changes of their weights, as the option `outer` says. The model may then be any module. In DDP or FSDP2 it trains
    within a site as usual, and the group has the ranks that hold the same weights, one of each site.

    Returns the exchange of the model. An error of the exchange is raised by `backward()`. Raises TypeError for what is
    no model, ConfigError for several models in DDP or FSDP2 and for a model or arguments that are not supported, and
    MismatchError on every rank if the ranks differ in configuration or parameters.
    """
    # Not every PyTorch has torch.distributed.
    from grace.torch.distributed.ddp import DDPExchange, check_model
    from grace.torch.distributed.library import TorchDistributed
    from grace.torch.distributed.module import ModuleExchange, refuse_registered
    from grace.torch.distributed.wrapped import take_hook

    request = Request(config, options, register, WHERE)
    if optimizer is not None:
        library = TorchDistributed(process_group, request.timeout, WHERE)
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        made: Exchange = wrap(request, library, optimizer, _named_tensors_of(model), grad_scaler, sites=ranks).grace
        return made
    model = _parallel_in(model)
    parallel = isinstance(model, (DistributedDataParallel, _sharded_class()))
    if parallel and process_group is not None:
        raise ConfigError(
            f"{WHERE}: process_group names the ranks of a plain model or of outer steps, and DDP and FSDP2 have their "
            "own; leave it out."
        )
    if parallel and not isinstance(model, DistributedDataParallel):
        from grace.torch.distributed.fsdp import register_sharded

        return register_sharded(model, request, grad_scaler=grad_scaler)
    group = model.process_group if isinstance(model, DistributedDataParallel) else process_group
    library = TorchDistributed(group, request.timeout, WHERE)
    with library.session(request, "model") as session:
        refuse_registered(model, WHERE)
        wrapped, parameters = None, parameters_of(model)
        if isinstance(model, DistributedDataParallel):
            check_model(model, WHERE)
            wrapped = take_hook(model, WHERE)
        else:
            refuse_parameters(list(parameters.values()), WHERE)
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        scaler = check_scaler(grad_scaler, trained.values(), WHERE)
        dtypes = {} if wrapped is None else wrapped.dtypes
        specs = [spec_of(name, p, dtypes.get(p)) for name, p in trained.items()]
        session.local = {"model number": session.number, "grad_scaler": scaler is not None}
        # In the first step of a static graph, DDP would count the passes of no_sync() as well.
        references = not (isinstance(model, DistributedDataParallel) and model.static_graph)
        run = session.begin(specs, OPS, average=True, delegate=library.reduces, references=references, auto=True)
    exchange: DDPExchange | ModuleExchange
    if isinstance(model, DistributedDataParallel):
        exchange = DDPExchange(session, library, parameters, scaler, wrapped)
    else:
        exchange = ModuleExchange(session, library, parameters, scaler)
    exchange.attach(model)
    exchange.announce(run.stages)
    return exchange


def _named_tensors_of(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters of a model, and the buffers that are saved with it; caches and the like are not."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    saved = module.state_dict()
    return [*module.named_parameters(), *((name, x) for name, x in module.named_buffers() if name in saved)]


def _sharded_class() -> Any:
    """Return the class of models in FSDP2, or () if none was made: who has applied `fully_shard` has imported it."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())


def _parallel_in(model: torch.nn.Module) -> torch.nn.Module:
    """Return the one model in DDP or FSDP2 that `model` is or holds, as a user's wrapper does, or else `model`."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{WHERE}: expected a model (torch.nn.Module), received {type(model).__qualname__}.")
    fsdp1 = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    found: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, fsdp1):
            raise TypeError(
                f"{WHERE}: expected a plain model, or one in DistributedDataParallel or fully_shard (FSDP2), received "
                "one in FullyShardedDataParallel (FSDP1); shard it by fully_shard."
            )
        inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if not inside and isinstance(module, (DistributedDataParallel, _sharded_class())):
            found[name] = module
    if len(found) > 1:
        names = list(found)
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise ConfigError(
            f"{WHERE}: expected a model that is or holds one model in DistributedDataParallel or fully_shard, "
            f"received {type(model).__qualname__}, which holds {len(names)}: {', '.join(names[:5])}{more}. Register "
            "each of them, or shard the model that holds them as well."
        )
    return next(iter(found.values()), model)
