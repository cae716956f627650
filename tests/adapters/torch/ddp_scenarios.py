"""Scenarios about `grace.torch.register` with models in DistributedDataParallel, run by each rank."""

from __future__ import annotations

import copy
import functools
import gc
import io
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import grace.torch
from grace.core.memories.residual import Residual
from grace.core.plan.unit import offsets
from grace.torch.model import is_registered
from tests.adapters.torch.launched import GROUPS, mean, my_rank
from tests.adapters.torch.model import (
    backward_of_a_late_rank,
    batches,
    digest,
    flat,
    make_net,
    outcome,
    sgd,
    train,
    warned_of_scaler,
    wrap,
)
from tests.support.cases import EVERYTHING, LAYERS
from tests.support.records import stderr_without_logging

TOPK = {"compressor": "topk", "compress_ratio": 0.1, **EVERYTHING}
NONE = {"compressor": "none", "check_replicas": 2}
# One method of each collective, and one that negotiates. Of the last, only matrices are compressed.
METHODS: dict[str, dict[str, Any]] = {
    "topk": TOPK,
    "qsgd": {"compressor": "qsgd", **LAYERS},
    "signsgd": {"compressor": "signsgd", "granularity": "model", **EVERYTHING},
    "fp16": {"compressor": "fp16", **EVERYTHING},
    "powersgd": {"compressor": "powersgd", **EVERYTHING},
    "two_shot": {"compressor": "terngrad", "communicator": "two_shot", **EVERYTHING},
    "some dense": {**TOPK, "rules": [{"match": "left.weight", "compressor": "none"}]},
}
# The ways in which DDP passes gradients.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "one bucket": {"bucket_cap_mb": 25},
}


class Late:
    """A reduction that is done when it is waited for, not before."""

    real = staticmethod(dist.all_reduce)

    def __init__(self, x: torch.Tensor, group: Any, async_op: bool) -> None:
        self._x, self._group = x, group

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        self.real(self._x, group=self._group)


def parallel(model: torch.nn.Module, **options: Any) -> DistributedDataParallel:
    """Return the model in DDP, with several buckets, the first of which has one tensor until DDP makes them again."""
    return DistributedDataParallel(model, **{"bucket_cap_mb": 0.02, **options})


def steps(ddp: torch.nn.Module, optimizer: torch.optim.Optimizer, data: Any, **options: Any) -> None:
    """Train on batches of data."""
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(ddp(x, **options), y).backward()
        optimizer.step()


def trained_by_ddp() -> dict[str, Any]:
    """Train with each method and each way of DDP, and with the wrapped optimizer: weights and reported bytes."""
    results: dict[str, Any] = {}
    ways = list(WAYS)
    for i, (label, config) in enumerate(METHODS.items()):
        model = make_net()
        optimizer = wrap(model, config)
        train(model, optimizer, 4)
        expected = [digest(model.parameters()), optimizer.grace.stats()["wire_bytes"]]
        dense = label == "some dense"
        for way in ways if label == "topk" else ["one bucket" if dense else ways[i % len(ways)]]:
            model = make_net()
            ddp = parallel(model, **WAYS[way])
            exchange = grace.torch.register(ddp, config)
            with mock.patch.object(dist, "all_reduce", Late) if dense else nullcontext():
                steps(ddp, sgd(model), batches(4, my_rank()))
            received = [digest(model.parameters()), exchange.stats()["wire_bytes"]]
            results[f"{label}/{way}"] = {"expected": expected, "received": received}
    return results


def none_by_ddp() -> dict[str, Any]:
    """Train with plain DDP and with compressor none, also among three ranks and in bfloat16: weights."""
    results: dict[str, Any] = {}
    ways = {**WAYS, **{f"group {g.ranks}": g.argument for g in GROUPS if g.included}, "bfloat16": {}}
    for label, options in ways.items():
        weights, dtype = [], torch.bfloat16 if label == "bfloat16" else torch.float32
        for registered in (False, True):
            model = make_net().to(dtype)
            ddp = parallel(model, **options)
            if registered:
                grace.torch.register(ddp, {"compressor": "none", **EVERYTHING})
            steps(ddp, sgd(model), ((x.to(dtype), y) for x, y in batches(3, my_rank())))
            weights.append(digest(model.parameters()))
        results[label] = weights
    return results


def announced_by_ddp() -> dict[str, Any]:
    """Register models in groups of ranks, and change their exchange: what this rank writes to stderr."""
    results = {}
    groups = {"[]": {}, **{str(group.ranks): group.argument for group in GROUPS if group.included}}
    for ranks, argument in groups.items():
        with stderr_without_logging() as written:
            ddp = parallel(make_net(), **argument)
            exchange = grace.torch.register(ddp, {**TOPK, "schedule": [{"step": 7, "compressor": "qsgd"}]})
            steps(ddp, sgd(ddp), batches(1, my_rank()))
            changed = grace.torch.register(parallel(make_net(), **argument), TOPK)
            changed.change(compressor="qsgd")
        results[ranks] = {"first": exchange.rank == 0, "lines": written.getvalue().splitlines()}
    return results


def conserved_by_ddp() -> dict[str, Any]:
    """Compare, per tensor, what was applied and what is held back with what all ranks computed.

    The right branch of the model has no gradients on some ranks in step 1 and on all in step 2, and gradients of
    several passes are added.
    """
    results = {}
    methods = {"allgather": {**LAYERS, "communicator": "allgather"}, "two_shot": {"communicator": "two_shot"}}
    methods["tree"] = {"communicator": {"name": "sparse_allreduce", "reduction": "tree"}}
    methods["powersgd"] = {"memory": "powersgd", "communicator": "allgather"}
    ways = [(way, "allgather") for way in ("plain", "static")] + [("unused", name) for name in methods]
    for way, method in ways:
        model = make_net()
        ddp = parallel(model, **WAYS[way])
        exchange = grace.torch.register(ddp, {**TOPK, **methods[method]})
        given = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        applied = copy.deepcopy(given)
        for i, (x, y) in enumerate(batches(5, my_rank())):
            right = way != "unused" or not (i == 2 or (i == 1 and my_rank() == 0))
            local = make_net()
            passes = 2 if i == 3 else 1
            for _ in range(passes):
                F.cross_entropy(local(x, right), y).backward()
            for (name, _), p in zip(model.named_parameters(), local.parameters(), strict=True):
                given[name] += 0 if p.grad is None else p.grad
            ddp.zero_grad()
            for k in range(passes):
                with ddp.no_sync() if k < passes - 1 else nullcontext():
                    F.cross_entropy(ddp(x, right), y).backward()
            for name, p in model.named_parameters():
                applied[name] += 0 if p.grad is None else p.grad
        worst, held = 0.0, held_by(exchange)
        for name in given:
            total = applied[name] + mean(held[name], f"r.{name}").reshape(given[name].shape)
            worst = max(worst, float((mean(given[name], name) - total).abs().max()))
        equal = digest(applied.values())
        results[f"{way}, {method}"] = {"worst": worst, "held": float(held["right.weight"].norm()), "applied": equal}
    return results


def held_by(exchange: Any) -> dict[str, torch.Tensor]:
    """Return the residuals of this rank by tensor, flat; the mean over all ranks is what they hold back of the mean."""
    residuals = {item.spec.name: torch.zeros(item.spec.numel) for item in exchange.plan.assignments}
    states, size = exchange.state_dict()["tensors"], exchange.run.transport.size
    for name, unit in exchange.plan.stateful.items():
        mine = states[name]["memory"].get("residual")
        if mine is not None:
            mine = mine * (size / len(unit.owners) if unit.owners else 1.0)
            for piece, start in offsets(unit):
                residuals[piece.tensor][piece.start : piece.stop] += mine[start : start + piece.numel]
    return residuals


def joint_by_ddp() -> dict[str, Any]:
    """Train with memories whose states belong together while one rank does not use a branch: weights."""
    methods: dict[str, dict[str, Any]] = {
        "diana": {"compressor": "qsgd", "memory": "diana"},
        "svrg": {"compressor": "lpc", "memory": "svrg", "period": 3},
        "dore": {"compressor": "qsgd", "memory": "dore", "communicator": "two_shot"},
        "shared_momentum": {"compressor": "efsignsgd", "memory": "shared_momentum", "communicator": "two_shot"},
    }
    results = {}
    for label, config in methods.items():
        model = make_net()
        ddp, optimizer = parallel(model, **WAYS["unused"]), sgd(model)
        grace.torch.register(ddp, {**config, "default_rules": False})
        for i, batch in enumerate(batches(6, my_rank())):
            steps(ddp, optimizer, [batch], right=i % 3 != 1 or my_rank() != 0)
        results[label] = digest(model.parameters())
    return results


def joined_by_ddp() -> dict[str, Any]:
    """Train on as many batches as the rank's number plus two, inside DDP's join(): weights, and those of plain DDP."""
    results = {}
    # A rank that has ended takes no steps of its own, so its weights stay behind.
    unchecked = {"check_replicas": 0}
    methods = {"plain": None, "none": {"compressor": "none", **unchecked}, "topk": {**TOPK, **unchecked}}
    for label, config in methods.items():
        model = make_net()
        ddp = parallel(model)
        if config is not None:
            grace.torch.register(ddp, config)
        optimizer = sgd(model)
        with Join([ddp]):
            steps(ddp, optimizer, batches(2 + my_rank(), my_rank()))
        results[label] = digest(model.parameters())
    return results


def two_models_by_ddp() -> dict[str, Any]:
    """Train two models whose gradients come from one backward pass, and each on its own with the gradients of both."""
    config = {**TOPK, "granularity": "layer"}
    models = [torch.nn.Linear(64, 32, bias=False), torch.nn.Linear(32, 10)]
    for i, model in enumerate(models):
        torch.manual_seed(i)
        torch.nn.init.normal_(model.weight)
        dist.broadcast(model.bias.data, 0) if model.bias is not None else None
    together = torch.nn.Sequential(*copy.deepcopy(models))
    pair = [parallel(model) for model in models]
    for ddp in pair:
        grace.torch.register(ddp, config)
    both = parallel(together)
    grace.torch.register(both, config)
    optimizers = [sgd(torch.nn.ModuleList(models)), sgd(together)]
    for x, y in batches(4, my_rank()):
        for forward, optimizer in zip((lambda x: pair[1](pair[0](x)), both), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(forward(x.flatten(1)), y).backward()
            optimizer.step()
    return {
        "apart": digest(p for model in models for p in model.parameters()),
        "together": digest(together.parameters()),
    }


def compiled_by_ddp() -> dict[str, Any]:
    """Train a compiled model, compiled before or after DDP, and one that is not."""
    results = {}
    for label in ("plain", "inside", "outside"):
        model = make_net()
        inner = torch.compile(model, backend="eager") if label == "inside" else model
        # PyTorch's compiler refuses buckets below its own first one.
        ddp: Any = parallel(inner, bucket_cap_mb=25)
        ddp = torch.compile(ddp, backend="eager") if label == "outside" else ddp
        exchange = grace.torch.register(ddp, TOPK)
        with warnings.catch_warnings():
            # PyTorch's compiler warns of its own parts.
            warnings.simplefilter("ignore")
            steps(ddp, sgd(model), batches(3, my_rank()))
        results[label] = [digest(model.parameters()), [item.spec.name for item in exchange.plan.assignments]]
    torch._dynamo.reset()
    return results


class Holder(torch.nn.Module):
    """A user's wrapper: other modules of its own, and those that it is given."""

    def __init__(self, **held: torch.nn.Module) -> None:
        super().__init__()
        self.local = torch.nn.Linear(2, 2)
        for name, module in held.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


def held_by_wrappers() -> dict[str, Any]:
    """Train a model that lies in others: weights, and what is said of wrappers with several models or none."""
    ways: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
        "model": lambda ddp: ddp,
        "wrapper": lambda ddp: Holder(inner=ddp),
        "twice": lambda ddp: Holder(inner=Holder(inner=ddp)),
        "two names": lambda ddp: Holder(inner=ddp, again=ddp),
        "list": lambda ddp: torch.nn.Sequential(ddp),
        "compiled outside": lambda ddp: torch.compile(Holder(inner=ddp), backend="eager"),
        "compiled inside": lambda ddp: Holder(inner=torch.compile(ddp, backend="eager")),
    }
    results: dict[str, Any] = {"weights": {}, "names": {}}
    for label, way in ways.items():
        model = make_net()
        # PyTorch's compiler refuses buckets below its own first one.
        outer = way(parallel(model, bucket_cap_mb=25))
        exchange = grace.torch.register(outer, TOPK)
        with warnings.catch_warnings():
            # PyTorch's compiler warns of its own parts.
            warnings.simplefilter("ignore")
            steps(outer, sgd(model), batches(3, my_rank()))
        results["weights"][label] = digest(model.parameters())
        results["names"][label] = [item.spec.name for item in exchange.plan.assignments]
    torch._dynamo.reset()
    inside = parallel(torch.nn.Sequential(parallel(make_net())))
    results["nested"] = [item.spec.name for item in grace.torch.register(Holder(inner=inside), TOPK).plan.assignments]
    pair = Holder(one=parallel(make_net()), other=Holder(inner=parallel(make_net())))
    results["several"] = outcome(lambda: grace.torch.register(pair, TOPK))
    results["no module"] = outcome(lambda: grace.torch.register(sgd(make_net()), TOPK))  # type: ignore[arg-type]
    return results


class Accumulator:
    """Float32 sums of gradients, which a hook adds to and reduces, as nanotron's does."""

    def __init__(self, model: torch.nn.Module, op: Any) -> None:
        self.parameters, self.op = list(model.parameters()), op
        self.sums = {p: torch.zeros_like(p, dtype=torch.float32) for p in self.parameters}
        self.handles: list[torch.futures.Future[Any]] = []
        # What this rank has added before the last exchange.
        self.given: dict[torch.Tensor, torch.Tensor] = {}

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        for p, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self.sums[p].add_(gradient.view_as(self.sums[p]))
            self.given[p] = self.sums[p].clone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            sums = [self.sums[p].view(-1) for p in bucket.parameters()]
            self.handles.append(dist.all_reduce_coalesced(sums, op=self.op, async_op=True))
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def finish(self) -> None:
        for handle in self.handles:
            handle.wait()
        self.handles.clear()

    def step(self, weights: dict[torch.Tensor, torch.Tensor]) -> None:
        """Apply the means to float32 weights, copy these to the model's, and begin again."""
        size = dist.get_world_size() if self.op == dist.ReduceOp.SUM else 1
        with torch.no_grad():
            for p, x in weights.items():
                p.copy_(x.sub_(0.1 * self.sums[p] / size))
                self.sums[p].zero_()
                p.grad = None


def accumulated_by_ddp(config: Any, op: Any = dist.ReduceOp.SUM, change: bool = False, **options: Any) -> Any:
    """Train with a hook that accumulates in float32; the weights, the largest loss of a gradient, and the exchange."""
    model = make_net().to(torch.bfloat16)
    ddp, accumulator = parallel(model, **options), Accumulator(model, op)
    ddp.register_comm_hook(accumulator, lambda state, bucket: state.hook(bucket))
    exchange = None if config is None else grace.torch.register(ddp, config)
    weights = {p: p.detach().float() for p in model.parameters()}
    given, applied = (dict.fromkeys(weights, 0.0) for _ in "ga")
    for i, (x, y) in enumerate(batches(5, my_rank())):
        # A static graph must see an exchange first.
        alone = i in (1, 3)
        with ddp.no_sync() if alone else nullcontext():
            F.cross_entropy(ddp(x.to(torch.bfloat16)), y).backward()
        if alone:
            for p in weights:
                accumulator.sums[p].add_(p.grad)
                p.grad = None
            continue
        accumulator.finish()
        for p in weights:
            given[p] = given[p] + accumulator.given[p]
            applied[p] = applied[p] + accumulator.sums[p] / (dist.get_world_size() if op == dist.ReduceOp.SUM else 1)
        accumulator.step(weights)
        if change and i == 2 and exchange is not None:
            saved = exchange.state_dict()
            exchange.change(compress_ratio=0.2)
            exchange.change(compress_ratio=0.1)
            exchange.load_state_dict(saved)
    worst = 0.0
    if exchange is not None:
        held = held_by(exchange)
        for name, p in model.named_parameters():
            total = applied[p] + mean(held[name], f"r.{name}").reshape(p.shape)
            worst = max(worst, float((mean(given[p], name) - total).abs().max()))
    return digest(weights.values()), worst, exchange


def wrapped_by_ddp() -> dict[str, Any]:
    """Register models with a hook of their own: weights with and without grace, and what is lost of gradients."""
    results: dict[str, Any] = {"accumulated": {}, "of PyTorch": {}}
    whole = {"compressor": "topk", "compress_ratio": 1.0, "communicator": "allgather", **EVERYTHING}
    dense = {**TOPK, "rules": [{"match": "left.weight", "compressor": "none"}]}
    for way, options in WAYS.items():
        for label, config, op in (
            ("none", {"compressor": "none", **EVERYTHING}, dist.ReduceOp.SUM),
            ("whole", whole, dist.ReduceOp.AVG),
            ("topk", TOPK, dist.ReduceOp.SUM),
            ("some dense", dense, dist.ReduceOp.AVG),
        ):
            plain, *_ = accumulated_by_ddp(None, **options)
            weights, lost, exchange = accumulated_by_ddp(config, op, **options)
            stats = exchange.stats()
            row = {
                "plain": plain,
                "weights": weights,
                "lost": lost,
                "bytes": [stats["wire_bytes"], stats["dense_bytes"]],
            }
            results["accumulated"][f"{way}, {label}"] = row
    results["unchanged"] = [accumulated_by_ddp(TOPK)[0], accumulated_by_ddp(TOPK, change=True)[0]]
    for hook in (allreduce_hook, fp16_compress_hook, fp16_compress_wrapper(allreduce_hook)):
        nets = [make_net() for _ in range(3)]
        for model, config in zip(nets, (None, {"compressor": "none", **EVERYTHING}, whole), strict=True):
            ddp = parallel(model)
            ddp.register_comm_hook(None, hook)
            if config is not None:
                grace.torch.register(ddp, config)
            steps(ddp, sgd(model), batches(3, my_rank()))
        plain, none, all_sent = ([p.detach() for p in model.parameters()] for model in nets)
        difference = max(float((a - b).abs().max()) for a, b in zip(plain, all_sent, strict=True))
        results["of PyTorch"][hook.__qualname__] = [digest(plain), digest(none), digest(all_sent), difference]
    results["refused"] = {label: outcome(lambda hook=hook: _registered_with(hook)) for label, hook in UNFIT.items()}
    results["later"] = outcome(_with_a_hook_that_waits_later)
    return results


def _registered_with(hook: Any) -> None:
    ddp = parallel(make_net())
    ddp.register_comm_hook(None, hook)
    grace.torch.register(ddp, TOPK)


def _with_a_hook_that_waits_later() -> None:
    calls = []

    def hook(_, bucket):
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])
        calls.append(future.wait() if len(calls) > 20 else None)
        return future

    ddp = parallel(make_net())
    ddp.register_comm_hook(None, hook)
    grace.torch.register(ddp, TOPK)
    for x, y in batches(20, my_rank()):
        F.cross_entropy(ddp(x), y).backward()


def _waits(_, bucket):
    dist.all_reduce(bucket.buffer())
    return bucket.buffer()


def _waits_for_its_future(_, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0]).wait()


def _reduces_twice(_, bucket):
    dist.all_reduce(bucket.buffer(), async_op=True)
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future()


def _gathers(_, bucket):
    return dist.all_gather([torch.empty_like(bucket.buffer())] * dist.get_world_size(), bucket.buffer(), async_op=True)


def _does_nothing(_, bucket):
    return bucket.buffer()


def _takes_the_maximum(_, bucket):
    return dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.MAX, async_op=True).get_future()


def _reduces_a_part(_, bucket):
    return dist.all_reduce(bucket.buffer()[:1], async_op=True).get_future()


# Hooks that grace cannot wrap. DDP refuses annotations that are strings.
UNFIT = {
    "waits": _waits,
    "waits for its future": _waits_for_its_future,
    "twice": _reduces_twice,
    "gathers": _gathers,
    "nothing": _does_nothing,
    "maximum": _takes_the_maximum,
    "part": _reduces_a_part,
    "powersgd": powerSGD_hook,
}


def checkpointed_by_ddp() -> dict[str, Any]:
    """Train with layers that are computed again in the backward pass, and without: weights, and what is freed."""
    results = {}
    for label in ("plain", "reentrant", "reentrant, static"):
        model = torch.nn.Sequential(*(torch.nn.Linear(48, 48) for _ in range(4)))
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.copy_(torch.linspace(-0.2, 0.2, p.numel()).roll(i).reshape(p.shape))
        ddp = parallel(Again(model, label != "plain"), static_graph=label.endswith("static"))
        grace.torch.register(ddp, {**TOPK, **LAYERS})
        steps(ddp, sgd(model), ((x.flatten(1)[:, :48], y) for x, y in batches(3, my_rank())))
        freed = weakref.ref(ddp)
        del ddp
        gc.collect()
        results[label] = {"weights": digest(model.parameters()), "freed": freed() is None}
    return results


class Again(torch.nn.Module):
    """Layers, the middle ones of which are computed again in backward passes of their own."""

    def __init__(self, layers: torch.nn.Sequential, again: bool) -> None:
        super().__init__()
        self.layers, self.again = layers, again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            middle = self.again and 0 < i < len(self.layers) - 1
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True) if middle else layer(x))
        return x


class Mixed(torch.nn.Module):
    """An embedding and layers of several dtypes, some computed again in the backward pass, and one that is not used."""

    def __init__(self, dtypes: Sequence[str], sparse: bool, again: str) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 16, sparse=sparse)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16).to(getattr(torch, name)) for name in dtypes)
        self.spare = torch.nn.Linear(16, 1)
        self.again = again

    def forward(self, x: torch.Tensor, spare: bool) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = x.to(layer.weight.dtype)
            x = torch.tanh(checkpoint(layer, x, use_reentrant=self.again == "reentrant") if self.again else layer(x))
        return self.spare(x.float()) if spare else x.float()


def mixed_by_ddp(rows: Sequence[dict[str, Any]]) -> list[Any]:
    """Train models whose gradients DDP passes in several buckets, in each way: the gradients of plain DDP and others.

    None if both are equal: bit by bit with compressor none, and up to rounding if every element is sent.
    """
    every = {"compressor": "topk", "compress_ratio": 1.0, **EVERYTHING}
    every["rules"] = [{"match": "embedding.weight", "compressor": "none"}]
    results = []
    for row in rows:
        config = {"none": {**NONE, **EVERYTHING}, "topk": every}[row["method"]]
        way = row["way"]
        options = WAYS["static" if way == "nested" else way]
        received: list[list[torch.Tensor | None]] = []
        for registered in (False, True):
            with torch.random.fork_rng():
                torch.manual_seed(0)
                model = Mixed(row["dtypes"].split(), row["sparse"], row["again"])
            ddp = DistributedDataParallel(model, bucket_cap_mb=row["megabytes"], **options)
            if registered:
                grace.torch.register(ddp, config, timeout=30)
            found: list[torch.Tensor | None] = []
            generator = torch.Generator().manual_seed(my_rank())
            for _ in range(3):
                ddp.zero_grad()
                x = torch.randint(0, 20, (8,), generator=generator)
                spare = way not in ("static", "nested", "unused")
                forward = functools.partial(ddp, x, spare)
                if way == "nested":
                    # The whole model is in a backward pass within that of another one.
                    one = torch.ones((), requires_grad=True)
                    y = checkpoint(lambda one, forward=forward: forward() * one, one, use_reentrant=True)
                else:
                    y = forward()
                y.square().sum().backward()
                found += [None if p.grad is None else p.grad.to_dense().double() for p in model.parameters()]
            received.append(found)
        tolerance = 0.0 if row["method"] == "none" else 1e-2
        alike = all(
            (a is None) == (b is None) and (a is None or b is None or torch.allclose(a, b, tolerance, tolerance))
            for a, b in zip(*received, strict=True)
        )
        results.append(None if alike else row)
    return results


class Complex(torch.nn.Module):
    """A layer and complex parameters, of one and of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 64)
        self.spectrum = torch.nn.Parameter(torch.ones(8, dtype=torch.complex64))
        self.phase = torch.nn.Parameter(torch.ones(4, 40, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = (self.spectrum * torch.fft.fft(x[0, :8])).sum() + (x[1, 0] * self.phase.conj() ** 2).sum()
        return self.layer(x).square().mean() + turned.real.float() + turned.imag.float()


def complex_by_ddp() -> dict[str, Any]:
    """Train complex parameters beside others: those of plain DDP and of each way of grace, and their reasons."""
    rules = [{"match": "spectrum", "compressor": "none"}]
    configs = {
        "topk": TOPK,
        "default rules": {"compressor": "topk"},
        "by a rule": {**TOPK, "rules": rules},
        "none": NONE,
    }
    results: dict[str, Any] = {}
    for label, config in configs.items():
        weights, reasons = [], []
        for way in ("without grace", "plain", "static", "optimizer"):
            with torch.random.fork_rng():
                torch.manual_seed(0)
                model = Complex()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            forward: Any = model
            if way == "optimizer":
                optimizer = wrap(model, config, optimizer=optimizer)
            else:
                forward = parallel(model, **WAYS[way if way != "without grace" else "plain"])
            exchange = None
            if way in ("plain", "static"):
                exchange = grace.torch.register(forward, config)
            generator = torch.Generator().manual_seed(my_rank())
            for _ in range(3):
                optimizer.zero_grad()
                forward(torch.randn(4, 32, generator=generator)).backward()
                optimizer.step()
            parts = [torch.view_as_real(x.detach()).flatten().double() for x in (model.spectrum, model.phase)]
            weights.append(torch.cat(parts))
            if exchange is not None:
                reasons += [item.reason for item in exchange.plan.assignments if item.spec.complex]
        results[label] = {"off": max(float((w - weights[0]).abs().max()) for w in weights), "reasons": reasons}
    return results


def scaled_by_ddp() -> dict[str, Any]:
    """Train with a GradScaler: its scale grows every step, or one rank overflows in the second. Also without one.

    With "accumulated", two passes are exchanged before each step, and the second one overflows.
    """
    results: dict[str, Any] = {}
    for label in ("unscaled", "growing", "overflow", "accumulated"):
        model = make_net()
        ddp = parallel(model)
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=64.0, growth_interval=1 if label == "growing" else 2000, enabled=label != "unscaled"
        )
        exchange = grace.torch.register(ddp, {**TOPK, **LAYERS}, grad_scaler=scaler)
        optimizer = sgd(model)
        history = []
        for i, (x, y) in enumerate(batches(4, my_rank())):
            before = [digest(model.parameters()), states_of(exchange)]
            optimizer.zero_grad()
            if label == "accumulated":
                scaler.scale(F.cross_entropy(ddp(x), y)).backward()
            loss = F.cross_entropy(ddp(x), y)
            bad = label in ("overflow", "accumulated") and i == 1 and my_rank() == 0
            scaler.scale(loss * (float("inf") if bad else 1.0)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            scaler.step(optimizer)
            scaler.update()
            after = [digest(model.parameters()), states_of(exchange)]
            history.append([a == b for a, b in zip(before, after, strict=True)])
        results[label] = {"weights": after[0], "states": after[1], "kept": history, "scale": scaler.get_scale()}
    ddp = parallel(make_net())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    grace.torch.register(ddp, TOPK, grad_scaler=scaler)
    x, y = next(batches(1, my_rank()))
    scaler.scale(F.cross_entropy(ddp(x), y)).backward()
    results["of some"] = outcome(lambda: scaler.step(sgd(ddp.module.left)))
    results["loaded"] = skipped_after_a_load(list(batches(4, my_rank())))
    for label, config in {"not passed": TOPK, "nothing to scale": {"compressor": "none", **EVERYTHING}}.items():
        data = list(batches(2, my_rank()))
        results[label] = [warned_of_scaler(parallel(make_net()), config, data, used) for used in (False, True)]
    return results


def skipped_after_a_load(data: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Return whether a skipped step leaves the states that were loaded after its first pass."""
    ddp = parallel(make_net())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    exchange = grace.torch.register(ddp, TOPK, grad_scaler=scaler)
    optimizer = sgd(ddp)
    saved, loaded = [], []
    for i, (x, y) in enumerate(data):
        scaler.scale(F.cross_entropy(ddp(x), y) * (float("inf") if i == 3 else 1.0)).backward()
        if i == 2:
            exchange.load_state_dict(saved[0])
            loaded = states_of(exchange)
        else:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        saved.append(copy.deepcopy(exchange.state_dict()))
    return loaded == states_of(exchange)


def unfrozen_by_ddp() -> dict[str, Any]:
    """Freeze a parameter, and let it train at some time: the errors, and the weights after a rollback."""
    results: dict[str, Any] = {}
    for label, config, early in (("topk", TOPK, False), ("none", NONE, False), ("before register", NONE, True)):
        model = make_net()
        weight = model.left.weight.requires_grad_(False)
        ddp = parallel(model)
        weight.requires_grad_(early)
        exchange = grace.torch.register(ddp, config)
        optimizer = sgd(model)
        if not early:
            steps(ddp, optimizer, batches(2, my_rank()))
        weight.requires_grad_(True)
        error = outcome(functools.partial(steps, ddp, optimizer, batches(1, my_rank())))
        weight.requires_grad_(False)
        exchange.discard()
        steps(ddp, optimizer, batches(3, my_rank(), seed=1))
        results[label] = {"error": error, "weights": digest(model.parameters())}
    model = make_net()
    model.left.weight.requires_grad_(False)
    # DDP takes note of it on the model itself.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["left.weight"])
    ddp = parallel(model)
    grace.torch.register(ddp, TOPK)
    model.left.weight.requires_grad_(True)
    # It trains apart, as was asked for, and is not compared.
    results["ignored"] = outcome(lambda: steps(ddp, sgd(model), batches(4, my_rank())))
    for label, before in (("differing", 0), ("differing later", 2)):
        model = make_net()
        weight = model.left.weight.requires_grad_(False)
        ddp = parallel(model)
        grace.torch.register(ddp, TOPK)
        optimizer = sgd(model)
        steps(ddp, optimizer, batches(before, my_rank()))
        weight[0, 0] += my_rank()
        results[label] = outcome(functools.partial(steps, ddp, optimizer, batches(1, my_rank())))
    return results


def compared_by_ddp() -> dict[str, Any]:
    """Compare replicas: with a rank that comes late, with weights that differ, and with steps that differ."""
    results: dict[str, Any] = {}
    model = make_net()
    ddp = parallel(model)
    grace.torch.register(ddp, TOPK, timeout=20)
    steps(ddp, sgd(model), batches(2, my_rank()))
    x, y = next(batches(1, my_rank()))
    loss, tell = F.cross_entropy(ddp(x), y), dist.new_group()
    if my_rank() == 1:
        dist.barrier(tell)
    else:
        # The gradient of the first layer comes last.
        model.conv.weight.register_hook(lambda _: dist.barrier(tell))
    results["late"] = outcome(loss.backward)
    for label, config in (("topk", TOPK), ("none", NONE)):
        model = make_net()
        ddp = parallel(model)
        exchange = grace.torch.register(ddp, config)
        optimizer = sgd(model)
        steps(ddp, optimizer, batches(2, my_rank()))
        with torch.no_grad():
            model.left.weight[0, 0] += my_rank()
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
            error = outcome(functools.partial(steps, ddp, optimizer, batches(1, my_rank())))
        with torch.no_grad():
            model.left.weight[0, 0] -= my_rank()
            dist.broadcast(model.left.weight, 0)
        exchange.discard()
        steps(ddp, optimizer, batches(3, my_rank(), seed=1))
        results[label] = {"error": error, "reduced": reduced.call_count, "weights": digest(model.parameters())}
    scheduled = {**TOPK, "schedule": [{"step": 2, "compressor": "none"}]}
    model = make_net()
    ddp = parallel(model)
    exchange = grace.torch.register(ddp, scheduled)
    steps(ddp, sgd(model), batches(3, my_rank()))
    saved = copy.deepcopy(exchange.state_dict())
    model = make_net()
    ddp = parallel(model)
    exchange = grace.torch.register(ddp, scheduled)
    if my_rank() == 0:
        exchange.load_state_dict(saved)
    results["steps"] = outcome(lambda: steps(ddp, sgd(model), batches(1, my_rank())))
    return results


def states_of(exchange: Any) -> dict[str, str]:
    return {name: flat(states) for name, states in exchange.run.state_dict()["tensors"].items()}


def rare_by_ddp() -> dict[str, Any]:
    """Train models and optimizers that are unusual: sharded optimizer states, memory formats, 16 bits, checkpoints."""
    results: dict[str, Any] = {}
    weights = []
    for kind in (torch.optim.SGD, ZeroRedundancyOptimizer):
        model = make_net()
        ddp = parallel(model)
        grace.torch.register(ddp, TOPK)
        options = {"lr": 0.01, "momentum": 0.5}
        sharded = kind is ZeroRedundancyOptimizer
        optimizer = kind(model.parameters(), **options, **({"optimizer_class": torch.optim.SGD} if sharded else {}))
        steps(ddp, optimizer, batches(3, my_rank()))
        weights.append(digest(model.parameters()))
    results["sharded optimizer"] = weights
    weights = []
    for layout in (torch.contiguous_format, torch.channels_last):
        model = make_net()
        model.conv = torch.nn.Conv2d(1, 6, 3).to(memory_format=layout)
        model.conv.load_state_dict(make_net().conv.state_dict())
        # A second channel, so that the formats differ.
        model.more = torch.nn.Conv2d(6, 6, 3, padding=1).to(memory_format=layout)
        with torch.no_grad():
            model.more.weight.copy_(torch.linspace(-0.1, 0.1, model.more.weight.numel()).view(6, 6, 3, 3))
            model.more.bias.zero_()
        ddp = parallel(Deeper(model))
        # It takes gradients as matrices, so the order of the elements matters.
        grace.torch.register(ddp, {"compressor": "powersgd", "compress_rank": 1, **LAYERS})
        x, y = next(batches(1, my_rank()))
        F.cross_entropy(ddp(x), y).backward()
        weights.append([float(x) for x in model.more.weight.grad.flatten()])
    results["memory formats"] = weights
    model = make_net().to(torch.bfloat16)
    ddp = parallel(model)
    grace.torch.register(ddp, {"compressor": "qsgd", **EVERYTHING})
    steps(ddp, sgd(model), ((x.bfloat16(), y) for x, y in batches(2, my_rank())))
    results["bfloat16"] = digest(model.parameters())
    ends = []
    model = make_net()
    ddp = parallel(model)
    exchange = grace.torch.register(ddp, TOPK)
    steps(ddp, sgd(model, momentum=0), batches(2, my_rank()))
    saved = copy.deepcopy([model.state_dict(), exchange.state_dict()])
    for _ in range(2):
        model = make_net()
        model.load_state_dict(saved[0])
        ddp = parallel(model)
        exchange = grace.torch.register(ddp, TOPK)
        exchange.load_state_dict(copy.deepcopy(saved[1]))
        steps(ddp, sgd(model, momentum=0), batches(2, my_rank(), seed=3))
        ends.append(digest(model.parameters()))
    model = make_net()
    ddp = parallel(model)
    grace.torch.register(ddp, TOPK)
    optimizer = sgd(model, momentum=0)
    steps(ddp, optimizer, batches(2, my_rank()))
    steps(ddp, optimizer, batches(2, my_rank(), seed=3))
    results["checkpoint"] = [*ends, digest(model.parameters())]
    weights = []
    for stages in ([{"step": 2, "compress_ratio": 0.5}], None):
        model = make_net()
        ddp = parallel(model)
        exchange = grace.torch.register(ddp, {**TOPK, **({"schedule": stages} if stages else {})})
        optimizer = sgd(model)
        changes = {2: 0.5} if stages is None else {}
        scheduler = grace.torch.CompressionScheduler(exchange, changes.get) if stages is None else None
        for x, y in batches(4, my_rank()):
            steps(ddp, optimizer, [(x, y)])
            if scheduler is not None:
                scheduler.step()
        weights.append([digest(model.parameters()), exchange.stats()["wire_bytes"]])
    results["schedule"] = weights
    return results


class Deeper(torch.nn.Module):
    """A network with a second convolution, `more`."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.net.more(torch.relu(self.net.conv(x)))).flatten(1)
        return self.net.head(torch.relu(self.net.left(h) + self.net.right(h)) * self.net.scale)


def failed_by_ddp() -> dict[str, Any]:
    """Train through bad gradients and failed steps, each of which is dropped."""
    results: dict[str, Any] = {}
    model = make_net()
    ddp = parallel(model)
    exchange = grace.torch.register(ddp, {**TOPK, **LAYERS}, timeout=2)
    optimizer = sgd(model)
    steps(ddp, optimizer, batches(2, my_rank()))
    before = states_of(exchange)
    x, y = next(batches(1, my_rank(), seed=5))
    ddp.zero_grad()
    F.cross_entropy(ddp(x * (float("nan") if my_rank() == 0 else 1.0)), y).backward()
    bad = [not torch.isfinite(p.grad).all() for p in model.parameters()]
    results["nan"] = {"everywhere": all(bad), "states kept": states_of(exchange) == before}

    real = Residual.terms
    before = states_of(exchange)

    def fail(*arguments: Any) -> Any:
        if my_rank() == 0:
            raise ZeroDivisionError("for this test")
        return real(*arguments)

    def backward() -> None:
        ddp.zero_grad()
        F.cross_entropy(ddp(x), y).backward()

    with mock.patch.object(Residual, "terms", fail):
        results["failed"] = outcome(backward)
    results["refused"] = outcome(backward)
    exchange.discard()
    results["states kept"] = states_of(exchange) == before
    steps(ddp, optimizer, batches(2, my_rank(), seed=6))
    results["weights"] = digest(model.parameters())
    return results


def waits_by_ddp() -> str:
    """Let the last rank come late to a dense reduction; the error of each rank."""
    model = make_net()
    ddp = parallel(model)
    # The comparison of replicas would be the first to wait.
    grace.torch.register(ddp, compressor="none", check_replicas=0, timeout=1)
    # DDP itself exchanges something until its second step.
    steps(ddp, sgd(model), batches(2, my_rank()))
    x, y = next(batches(1, my_rank()))
    return backward_of_a_late_rank(F.cross_entropy(ddp(x), y))


def converted_by_ddp() -> dict[str, str]:
    """Convert a model, or a part of it, after it was registered: the errors of its next backward pass."""
    errors = {}
    for way in ("plain", "static", "unused"):
        for label in ("the whole", "a part"):
            ddp = parallel(make_net(), **WAYS[way])
            grace.torch.register(ddp, NONE)
            steps(ddp, sgd(ddp), batches(2, my_rank()))
            part = label == "a part"
            (ddp.module.head if part else ddp).to(torch.bfloat16)
            x, _ = next(batches(1, my_rank()))
            with torch.autocast("cpu", torch.bfloat16, enabled=part):
                loss = ddp(x if part else x.bfloat16()).sum()
            errors[f"{label}, {way}"] = outcome(loss.backward)
    return errors


def waits_beside_ddp(way: str) -> str:
    """Let the last rank come late to the first step, in which DDP itself reduces something; the error of each rank."""
    model = Mixed(["float32", "bfloat16"], sparse=True, again="")
    for p in model.parameters():
        dist.broadcast(p.detach(), 0)
    ddp = parallel(model, **WAYS[way])
    grace.torch.register(ddp, compressor="none", timeout=1)
    return backward_of_a_late_rank(ddp(torch.arange(8), True).sum())


def on_device(device: str) -> dict[str, Any]:
    """Train on a device, by plain DDP, with compressor none, with top-k and by a wrapped optimizer; the weights."""
    results = {}
    methods = {"plain": None, "none": {"compressor": "none", **EVERYTHING}, "topk": TOPK, "optimizer": TOPK}
    for label, config in methods.items():
        model = make_net().to(device)
        optimizer: Any = sgd(model)
        forward: torch.nn.Module = model
        if label == "optimizer":
            optimizer = wrap(model, TOPK, optimizer=optimizer)
        else:
            forward = parallel(model)
            if config is not None:
                grace.torch.register(forward, config)
        steps(forward, optimizer, ((x.to(device), y.to(device)) for x, y in batches(3, my_rank())))
        results[label] = digest(p.cpu() for p in model.parameters())
    return results


def autocast_by_ddp() -> dict[str, Any]:
    """Train under autocast to bfloat16, by plain DDP, with none and with top-k, and without autocast: weights."""
    results: dict[str, Any] = {}
    methods = {"float32": None, "plain": None, "none": {"compressor": "none", **EVERYTHING}, "topk": TOPK}
    for label, config in methods.items():
        model = make_net()
        ddp = parallel(model)
        if config is not None:
            grace.torch.register(ddp, config)
        with torch.autocast("cpu", torch.bfloat16, enabled=label != "float32"):
            steps(ddp, sgd(model), batches(3, my_rank()))
        dtypes = sorted({str(p.grad.dtype) for p in model.parameters()})
        results[label] = {"weights": digest(model.parameters()), "gradients": dtypes}
    return results


def saved_by_ddp() -> dict[str, Any]:
    """Save and copy registered models. Train what came back as it is, and registered, beside fresh models."""

    def loaded(ddp: DistributedDataParallel) -> DistributedDataParallel:
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.save(ddp, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    def trained(ddp: DistributedDataParallel, config: Any = None) -> str:
        if config is not None:
            grace.torch.register(ddp, config)
        steps(ddp, sgd(ddp.module), batches(2, my_rank(), seed=1))
        return digest(ddp.module.parameters())

    results: dict[str, Any] = {}
    for way, options in WAYS.items():
        # PyTorch itself does not reduce the gradients of a copy of a static graph that has begun.
        for begun in (False, True)[: 1 if way == "static" else 2]:
            model = make_net()
            ddp = parallel(model, **options)
            grace.torch.register(ddp, TOPK)
            if begun:
                steps(ddp, sgd(model), batches(1, my_rank()))
            fresh = [parallel(copy.deepcopy(model), **options) for _ in range(2)]
            twins = [make(ddp) for make in (copy.deepcopy, loaded) for _ in range(2)]
            claimed = any(is_registered(twin.parameters()) for twin in twins)
            results[f"{way}/{begun}"] = {
                "plain": [trained(twin) for twin in (fresh[0], *twins[::2])],
                "registered": [trained(twin, TOPK) for twin in (fresh[1], *twins[1::2])],
                "claimed": claimed,
            }
    return results


def refused_by_ddp() -> dict[str, Any]:
    """Register what cannot work: the errors."""

    def hooked() -> Any:
        ddp = parallel(make_net())
        grace.torch.register(ddp, TOPK)
        return grace.torch.register(ddp, TOPK)

    def overlapped(first: bool) -> Any:
        ddp = parallel(make_net())
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.01)
        # PyTorch refuses Gloo.
        with mock.patch.object(dist, "get_backend", return_value="nccl"):
            hook = hook_with_zero_step(allreduce_hook, ddp, optimizer)
        if first:
            ddp.register_comm_hook(None, hook)
        grace.torch.register(ddp, TOPK)
        ddp.register_comm_hook(None, hook)

    def sparse(rules: list[dict[str, Any]]) -> Any:
        model = torch.nn.Sequential(torch.nn.Embedding(50, 8, sparse=True), torch.nn.Linear(8, 4))
        ddp = parallel(model)
        grace.torch.register(ddp, {**TOPK, "rules": rules})
        ddp(torch.tensor([1, 2, 3 + my_rank()])).sum().backward()
        means = model[0].weight.grad.to_dense().sum(1)
        return [float(means[i]) for i in (1, 3)]

    def applied_in_backward() -> Any:
        model = make_net()
        _apply_optimizer_in_backward(torch.optim.SGD, model.head.parameters(), {"lr": 0.1})
        return grace.torch.register(parallel(model), TOPK)

    def mixed() -> Any:
        ddp = parallel(make_net())
        ddp.mixed_precision = object()
        return grace.torch.register(ddp, TOPK)

    def wrapped() -> Any:
        model = make_net()
        exchange = grace.torch.register(parallel(model), TOPK)
        refused = outcome(lambda: wrap(model, TOPK))
        gone = weakref.ref(exchange)
        del exchange
        # The thread of the transport may hold it for a moment.
        for _ in range(1000):
            gc.collect()
            if gone() is None:
                break
            time.sleep(0.001)
        wrap(model, TOPK)
        return refused

    def sharded() -> Any:
        model = make_net()
        # The scalar cannot be sharded.
        torch.distributed.fsdp.fully_shard(model.head)
        return wrap(model, TOPK)

    results = {
        "wrapped": wrapped(),
        "sharded": outcome(sharded),
        "applied in backward": outcome(applied_in_backward),
        "twice": outcome(hooked),
        "mixed": outcome(mixed),
        "overlapped": [outcome(functools.partial(overlapped, first)) for first in (True, False)],
        "typo": outcome(lambda: grace.torch.register(parallel(make_net()), TOPK, grad_scalar=None)),
        "differing": outcome(
            lambda: grace.torch.register(parallel(make_net()), {**TOPK, "compress_ratio": 0.1 + 0.1 * my_rank()})
        ),
        "on one rank": outcome(
            lambda: grace.torch.register(parallel(make_net()), {"compressor": "topk" if my_rank() else "top"})
        ),
        "sparse": outcome(lambda: sparse([])),
    }
    results["sparse and dense"] = sparse([{"match": "0.weight", "compressor": "none"}])
    return results
