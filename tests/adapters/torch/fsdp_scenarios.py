"""Scenarios about `grace.torch.register` with models that FSDP2 has sharded, run by each rank."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import grace.torch
from grace.core.errors import GraceWarning
from grace.core.memories.residual import Residual
from grace.core.plan.unit import offsets
from grace.torch.distributed import ExchangeState, fsdp
from tests.adapters.torch.launched import my_rank, world_size
from tests.adapters.torch.model import backward_of_a_late_rank, digest, outcome, warned_of_scaler
from tests.support.auto import preferring
from tests.support.cases import EVERYTHING
from tests.support.records import stderr_without_logging

TOPK = {"compressor": "topk", "compress_ratio": 0.1, **EVERYTHING}
# It sends everything by way of grace.
ALL = {"compressor": "threshold", "threshold": 0.0, "memory": "none", "bucket_bytes": 4000, **EVERYTHING}
POLICIES = {
    "float32": MixedPrecisionPolicy(),
    "bfloat16 parameters": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bfloat16": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    "float16": MixedPrecisionPolicy(reduce_dtype=torch.float16),
}


class Net(torch.nn.Module):
    """A network whose tensors do not divide by the number of ranks. Its middle may be used twice, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(37, 50)
        self.middle = torch.nn.Linear(50, 50)
        self.last = torch.nn.Linear(50, 11)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, uses: int = 1) -> torch.Tensor:
        h = torch.relu(self.first(x))
        for _ in range(uses):
            h = torch.relu(self.middle(h)) + h
        return self.last(h * self.scale)


def make(*, frozen: str = "") -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net()
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    return model


def shard(model: Net, *, replicas: int = 1, nested: bool = True, **options: Any) -> Any:
    """Return the model in FSDP, in one or more replicas."""
    if replicas > 1:
        options["mesh"] = init_device_mesh("cpu", (replicas, world_size() // replicas), mesh_dim_names=("r", "s"))
    for module in [model.first, model.middle] if nested else []:
        fully_shard(module, **options)
    return fully_shard(model, **options)


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(my_rank())
    for _ in range(steps):
        yield torch.randn(8, 37, generator=generator), torch.randint(0, 11, (8,), generator=generator)


def backward(model: Any, batch: tuple[torch.Tensor, torch.Tensor], **options: Any) -> None:
    x, y = batch
    F.cross_entropy(model(x, **options), y).backward()


def local_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return this rank's part of each gradient; zeros where there is none."""
    return {
        name: (torch.zeros_like(p.to_local()) if p.grad is None else p.grad.to_local()).detach().clone()
        for name, p in model.named_parameters()
    }


def states_of(exchange: Any) -> list[str]:
    """Return a hash of the states of every unit."""
    tensors = exchange.state_dict()["tensors"]
    return [
        digest(x for kind in ("memory", "compressor") for x in states[kind].values()) for states in tensors.values()
    ]


# With all elements sent as they are, it does not matter how tensors are cut.
EXACT = {"compressor": "topk", "compress_ratio": 1.0, "bucket_bytes": 4000, **EVERYTHING}


class _Twice:
    """A model, in DDP or in FSDP, whose steps take second gradients; full rounds have two batches."""

    def __init__(self, wrapped: Callable[[Net], Any], memory: dict[str, Any], scaled: bool) -> None:
        self.net = make()
        self.net.register_buffer("calls", torch.zeros(()))
        self.model = wrapped(self.net)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        self.exchange: Any = grace.torch.register(self.model, {**EXACT, "memory": memory}, grad_scaler=self.scaler)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.alike: list[bool] = []
        # What the buffer has counted after each step.
        self.counted: list[int] = []

    def step(self, number: int) -> None:
        """Take a step, whose random numbers are noted."""
        data = [*batches(4)]
        some = data[:2] if self.exchange.full_round else [data[number % 4]]
        drawn: list[float] = []

        def closure() -> None:
            self.optimizer.zero_grad()
            self.net.calls += 1
            drawn.append(float(torch.rand(1)))
            for batch in some:
                with self._alone(batch is not some[-1]):
                    self.scaler.scale(F.cross_entropy(self.model(batch[0]), batch[1]) / len(some)).backward()

        self.exchange.evaluate(closure)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.alike.append(len(set(drawn)) == 1)
        self.counted.append(int(self.net.calls))

    @contextmanager
    def _alone(self, alone: bool) -> Iterator[None]:
        if not alone:
            yield
        elif isinstance(self.model, torch.nn.parallel.DistributedDataParallel):
            with self.model.no_sync():
                yield
        else:
            self.model.set_requires_gradient_sync(False)
            yield
            self.model.set_requires_gradient_sync(True)

    def weights(self) -> list[torch.Tensor]:
        each = (p.detach() for p in self.net.parameters())
        return [x.full_tensor() if hasattr(x, "full_tensor") else x.clone() for x in each]

    def saved(self) -> Any:
        local = [p.detach().to_local().clone() for p in self.net.parameters()]
        return local, copy.deepcopy(self.exchange.state_dict())

    def load(self, saved: Any) -> None:
        for p, x in zip(self.net.parameters(), saved[0], strict=True):
            p.detach().to_local().copy_(x)
        self.exchange.load_state_dict(saved[1])

    def replace_parameters(self) -> None:
        """Replace the parameters by copies, as a checkpoint that is loaded with `assign` does."""
        self.net.load_state_dict({name: x.clone() for name, x in self.net.state_dict().items()}, assign=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)


def second_gradients_of_shards() -> dict[str, Any]:
    """Compare second gradients in FSDP with those in DDP after each step; load in the middle, also of another rank.

    Before each step, FSDP gathers the weights for a pass without gradients, and keeps them.
    """
    report: dict[str, Any] = {}
    replicas = [1, 2] if world_size() == 4 else [1]
    for count, scaled in itertools.product(replicas, (False, True)):
        # Within one replica, ranks get only parts of a mean, which MARINA would follow.
        for name in ("lsvrg", "marina") if count > 1 else ("lsvrg",):
            memory = {"name": name, "period": 3, **({"then": "residual"} if name == "lsvrg" else {})}
            ddp = _Twice(torch.nn.parallel.DistributedDataParallel, memory, scaled)
            one, other = (_Twice(functools.partial(shard, replicas=count), memory, scaled) for _ in "ab")
            apart, equal, kinds = [], [], []
            for number in range(8):
                kinds.append(one.exchange.full_round)
                if number == 6 and not scaled:
                    one.replace_parameters()
                with torch.no_grad():
                    one.model(next(batches(1))[0])
                for each in (ddp, one, *([other] if number > 4 else [])):
                    each.step(number)
                pairs = [(a - b).abs().max() for a, b in zip(ddp.weights(), one.weights(), strict=True)]
                apart.append(float(max(pairs)))
                if number == 4:
                    other.load(one.saved())
                elif number > 4:
                    equal.append(digest(one.weights()) == digest(other.weights()))
            start = make().parameters()
            moved = max(float((a - b).detach().abs().max()) for a, b in zip(one.weights(), start, strict=True))
            report[f"{name}, {count}, {scaled}"] = {
                "apart": max(apart),
                "equal": equal,
                "kinds": kinds,
                "moved": moved,
                "alike": one.alike,
                "counted": [*one.counted],
            }
            if count == 1:
                foreign = one.exchange.state_dict() | {"rank": 1 - min(my_rank(), 1)}
                report["foreign"] = outcome(lambda e=one, f=foreign: e.exchange.load_state_dict(f))
                less = one.exchange.state_dict() | {"tensors": {}, "earlier": {}}
                report["other tensors"] = outcome(lambda e=one, f=less: e.exchange.load_state_dict(f))
                while one.exchange.full_round:
                    one.step(0)
                report["without"] = outcome(lambda e=one: backward(e.model, next(batches(1))))
    return report


def means_by_fsdp() -> dict[str, Any]:
    """Compute gradients with each policy by plain FSDP and by grace, and return the largest difference."""
    configs: dict[str, dict[str, Any]] = {
        "none": {"compressor": "none", **EVERYTHING},
        "all": ALL,
        "some dense": {**ALL, "rules": [{"match": "first.*", "compressor": "none"}]},
        "qsgd": {"compressor": "qsgd", **EVERYTHING},
    }
    results: dict[str, Any] = {}
    batch = next(batches(1))
    layouts = [1, 2] if world_size() == 4 else [1]
    for (label, policy), replicas in itertools.product(POLICIES.items(), layouts):
        if replicas > 1 and label not in ("float32", "float16"):
            continue
        gradients = {}
        for kind in ("plain", *configs):
            # Both ways to divide the model into modules.
            model = shard(make(), replicas=replicas, mp_policy=policy, nested=label != "bfloat16")
            exchange = grace.torch.register(model, configs[kind]) if kind != "plain" else None
            backward(model, batch)
            gradients[kind] = local_gradients(model)
            if exchange is not None:
                bytes_sent = exchange.stats()["wire_bytes"], exchange.stats()["dense_bytes"]
        largest = max(float(x.abs().max()) for x in gradients["plain"].values() if x.numel())
        results[f"{label}, {replicas}"] = {
            kind: max(
                float((gradients[kind][name] - x).abs().max()) / largest
                for name, x in gradients["plain"].items()
                if x.numel()
            )
            for kind in configs
        } | {"bytes": bytes_sent}
    return results


def announced_by_fsdp(replicas: int) -> list[str]:
    """Register a model, take a step and change its exchange: what this rank writes to stderr."""
    with stderr_without_logging() as written:
        model = shard(make(), replicas=replicas)
        exchange = grace.torch.register(model, TOPK)
        backward(model, next(batches(1)))
        exchange.change(compressor="qsgd")
    return written.getvalue().splitlines()


def held_by_others_in_fsdp() -> dict[str, Any]:
    """Register a sharded model that lies in another one, and one of which only parts are sharded."""
    plain, held = shard(make()), torch.nn.Sequential(shard(make()))
    gradients = []
    for model, called in ((plain, plain), (held, held[0])):
        grace.torch.register(model, TOPK)
        backward(called, next(batches(1)))
        gradients.append(digest(local_gradients(called).values()))
    parts = make()
    for module in (parts.first, parts.middle):
        fully_shard(module)
    return {"gradients": gradients, "parts": outcome(lambda: grace.torch.register(parts, TOPK))}


def conserved_by_fsdp(replicas: int) -> dict[str, Any]:
    """Compare what was applied and what is held back with what all ranks computed.

    Gradients of two passes are added in step 1. The middle of the model is used twice in step 2, and not at all in step
    3. The method changes before step 4. In step 5 its weight is frozen.
    """
    model, plain = shard(make(), replicas=replicas), make()
    exchange = grace.torch.register(model, TOPK)
    given = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    applied = {name: torch.zeros_like(x) for name, x in local_gradients(model).items()}
    weight = model.middle.weight
    frozen: list[bool] = []
    for i, batch in enumerate(batches(7)):
        passes, uses = (2 if i == 1 else 1), {2: 2, 3: 0}.get(i, 1)
        if i == 4:
            exchange.change(compress_ratio=0.2)
        for p in (weight, plain.middle.weight):
            p.requires_grad_(i != 5)
        held_before = held(exchange, "middle.weight")
        model.zero_grad()
        plain.zero_grad()
        for k in range(passes):
            model.set_requires_gradient_sync(k == passes - 1)
            backward(model, batch, uses=uses)
            backward(plain, batch, uses=uses)
        for name, p in plain.named_parameters():
            given[name] += 0 if p.grad is None else p.grad
        for name, x in local_gradients(model).items():
            applied[name] += x
        if i == 5:
            frozen = [weight.grad is None, torch.equal(held_before, held(exchange, "middle.weight"))]
    worst, total_held, apart = 0.0, 0.0, 0.0
    for name, p in model.named_parameters():
        dist.all_reduce(given[name])
        mesh, rows, part = p.device_mesh, len(given[name]), len(p.to_local())
        start = mesh.get_local_rank(-1) * -(-rows // mesh.size(-1))
        own = held(exchange, name)
        mine = own.clone()
        dist.all_reduce(mine, group=mesh.get_group(0))
        if len(own):
            apart = max(apart, float((mine / mesh.size(0) - own).abs().max()))
        # Without replicas, ranks hold residuals of all parts.
        mine = mine.view_as(given[name])[start : start + part] if replicas == 1 else mine.view_as(p.to_local())
        if part:
            expected = given[name][start : start + part] / world_size()
            worst = max(worst, float((expected - applied[name] - mine / mesh.size(0)).abs().max()))
            total_held += float(mine.norm())
    return {
        "worst": worst,
        "held": total_held,
        "apart": apart,
        "frozen": frozen,
        "steps": exchange.state_dict()["modules"],
    }


def loco_by_fsdp() -> dict[str, Any]:
    """Let LoCo exchange equal gradients in ten steps; return the errors of the first one and of means, and memories."""
    memory = {"name": "lowpass", "beta": 0.2, "reset_every": 10, "residual_dtype": "int8"}
    method = {"compressor": {"name": "blockwise", "format": "int4"}, "memory": memory}
    model, plain, batch = shard(make()), shard(make()), next(batches(1))
    exchange = grace.torch.register(model, {**method, **EVERYTHING})
    backward(plain, batch)
    expected, total, errors, memories = local_gradients(plain), None, [], []
    for step in range(10):
        model.zero_grad()
        backward(model, batch)
        found = local_gradients(model)
        total = found if total is None else {name: total[name] + x for name, x in found.items()}
        errors.append(float(sum((total[name] / (step + 1) - x).square().sum() for name, x in expected.items())))
        states = exchange.state_dict()["tensors"].values()
        kept = [state["memory"]["residual"] for state in states if "residual" in state["memory"]]
        memories.append([sorted({str(x.dtype) for x in kept}), any(bool(x.any()) for x in kept)])
    return {"errors": errors, "memories": memories}


def held(exchange: Any, name: str) -> torch.Tensor:
    """Return the residual of a tensor on this rank, flat: of the whole tensor, or of this rank's part with replicas."""
    item = next((item for item in exchange.plan.assignments if item.spec.name == name), None)
    residual = torch.zeros(item.spec.numel if item else 0)
    states = exchange.state_dict()["tensors"]
    for unit in exchange.plan.units:
        for piece, start in offsets(unit):
            if piece.tensor == name:
                mine = states[unit.spec.name]["memory"]["residual"]
                residual[piece.start : piece.stop] = mine[start : start + piece.numel]
    return residual


def bad_by_fsdp() -> dict[str, Any]:
    """Let one row of the last weight be NaN on the last rank: which units keep their states, and which gradients."""
    model = shard(make(), nested=False)
    exchange = grace.torch.register(model, {**TOPK, "granularity": "layer"})
    one, other = batches(2)
    backward(model, one)
    before = states_of(exchange)
    model.zero_grad()

    def spoiled(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[0] = float("nan")
        return gradient

    def spoil(module: torch.nn.Module, _: Any) -> None:
        # Of the weight that FSDP has gathered.
        if my_rank() == world_size() - 1:
            module.weight.register_hook(spoiled)

    handle = model.last.register_forward_pre_hook(spoil)
    backward(model, other)
    handle.remove()
    after = states_of(exchange)
    units = list(exchange.state_dict()["tensors"])
    return {
        "kept": sorted(unit for unit, a, b in zip(units, before, after, strict=True) if a == b),
        "bad": sorted(name for name, x in local_gradients(model).items() if x.isnan().any()),
    }


def resumed_by_fsdp(replicas: int) -> dict[str, Any]:
    """Continue from a checkpoint, and without a break; also refuse the checkpoint of other modules."""
    data = list(batches(5))
    config = {**TOPK, "memory": {"name": "lowpass", "residual_dtype": "int8"}}
    model = shard(make(), replicas=replicas)
    exchange = grace.torch.register(model, {**config, "schedule": [{"step": 3, "compress_ratio": 0.2}]})
    for batch in data[:2]:
        model.zero_grad()
        backward(model, batch)
    file = io.BytesIO()
    torch.save(exchange.state_dict(), file)
    digests = []
    for again in (False, True):
        if again:
            model = shard(make(), replicas=replicas)
            exchange = grace.torch.register(model, {**config, "schedule": [{"step": 3, "compress_ratio": 0.2}]})
            file.seek(0)
            own = exchange.load_state_dict(torch.load(file))
        for batch in data[2:]:
            model.zero_grad()
            backward(model, batch)
        digests.append([digest(local_gradients(model).values()), *states_of(exchange)])
    flat = shard(make(), replicas=replicas, nested=False)
    other = grace.torch.register(flat, config)
    file.seek(0)
    saved = torch.load(file)
    damaged = {**saved, "tensors": {unit: x for unit, x in saved["tensors"].items() if "middle" not in unit}}
    return {
        "equal": digests[0] == digests[1],
        "own": own,
        "refused": outcome(lambda: other.load_state_dict(saved)),
        "damaged": outcome(lambda: exchange.load_state_dict(damaged)),
        "kept": states_of(exchange) == digests[1][1:],
    }


def moved_by_fsdp() -> dict[str, Any]:
    """Load on four ranks what two have saved, and on two what four have: the changes of the mean residuals."""
    results: dict[str, Any] = {"exact": []}
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))["s"]
    everyone = init_device_mesh("cpu", (4,))
    for before, after in ((pair, everyone), (everyone, pair)):
        exchange = grace.torch.register(shard((model := make()), mesh=before), TOPK)
        for batch in batches(2):
            backward(model, batch)
        saved: list[Any] = [None] * world_size()
        kept = {name: held(exchange, name) for name, _ in model.named_parameters()}
        dist.all_gather_object(saved, [exchange.state_dict(), kept])
        # Of two pairs, the first one saves.
        states, held_before = zip(*saved[: before.size()], strict=True)
        other = grace.torch.register(shard(make(), mesh=after), TOPK)
        results["exact"].append(other.load_state_dict(list(states)))
        results[f"{before.size()} to {after.size()}"] = changes = {}
        for name in kept:
            mine = held(other, name)
            dist.all_reduce(mine, group=after.get_group())
            changes[name] = float(
                (mine / after.size() - sum(each[name] for each in held_before) / len(states)).abs().max()
            )
        results["held"] = float(mine.norm())
    by_columns = shard(make(), mesh=pair, shard_placement_fn=lambda p: Shard(int(p.shape == (50, 50))))
    results["columns"] = outcome(lambda: grace.torch.register(by_columns, TOPK).load_state_dict(list(states)))
    return results


def distributed_checkpoint_by_fsdp(replicas: int) -> dict[str, Any]:
    """Load from a distributed checkpoint, from a list of the states of all ranks, and what has other parts."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    exchange = grace.torch.register(shard((model := make()), replicas=replicas), TOPK)
    for batch in batches(2):
        backward(model, batch)
    dcp.save({"grace": ExchangeState(exchange)}, checkpoint_id=folder[0])
    saved: list[Any] = [None] * world_size()
    dist.all_gather_object(saved, exchange.state_dict())
    apart: list[Any] = [None] * world_size()
    dist.all_gather_object(apart, states_of(exchange))
    results: dict[str, Any] = {"exact": [], "equal": [], "apart": len({str(states) for states in apart})}
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraceWarning)
        for way in ("checkpoint", "list"):
            other = grace.torch.register(shard(make(), replicas=replicas), TOPK)
            if way == "list":
                exact = other.load_state_dict(saved[::-1])
            else:
                dcp.load({"grace": ExchangeState(other, folder[0])}, checkpoint_id=folder[0])
                exact = True
            results["exact"].append(exact)
            results["equal"].append(states_of(other) == states_of(exchange))
    others = grace.torch.register(shard(make(), replicas=3 - replicas), TOPK)
    results["refused"] = outcome(lambda: others.load_state_dict(saved))
    return results


def discarded_by_fsdp() -> dict[str, Any]:
    """Drop a step in which a rank fails in its second module, and take it again."""
    results: dict[str, Any] = {}
    one, other = batches(2)
    digests = []
    for attempt in (None, failing_step):
        model = shard(make())
        exchange = grace.torch.register(model, {**TOPK, "timeout": 2})
        backward(model, one)
        model.zero_grad()
        if attempt is not None:
            before = states_of(exchange)
            results["errors"] = attempt(model, other)
            exchange.discard()
            results["states"] = before == states_of(exchange)
            results["gradients"] = all(p.grad is None for p in model.parameters())
        backward(model, other)
        digests.append([digest(local_gradients(model).values()), *states_of(exchange)])
        # A finished step stays.
        exchange.discard()
        results["finished"] = digests[-1][1:] == states_of(exchange)
    model = shard(make())
    exchange = grace.torch.register(model, {**TOPK, "timeout": 2, "rollback": False})
    backward(model, one)
    results["norms"] = [_norms_of(exchange)]
    failing_step(model, other)
    exchange.discard()
    results["norms"].append(_norms_of(exchange))
    backward(model, other)
    results["norms"].append(_norms_of(exchange))
    return results | {"equal": digests[0] == digests[1]}


def _norms_of(exchange: Any) -> list[float]:
    states = exchange.run.state_dict()["tensors"].values()
    return [float(state["memory"]["residual"].norm()) for state in states if state["memory"]]


def waits_by_fsdp() -> str:
    """Let the last rank come late to a dense reduction over replicas; the error of each rank."""
    # It gathers its parameters in the forward pass only, which all ranks run together.
    model = shard(make(), replicas=world_size(), nested=False)
    # The comparison of replicas would be the first to wait.
    grace.torch.register(model, compressor="none", check_replicas=0, timeout=1)
    one, other = batches(2)
    backward(model, one)
    x, y = other
    return backward_of_a_late_rank(F.cross_entropy(model(x), y))


def absent_from_parts() -> dict[str, Any]:
    """Let the last rank stay away when all parts and replicas exchange a value, and drop that: values and errors."""
    exchange = grace.torch.register(shard(make(), replicas=2), TOPK, timeout=2)

    def everyone() -> list[Any]:
        return exchange.everyone(my_rank(), "advice", "this test")

    with mock.patch.object(fsdp, "_connect_parts", wraps=fsdp._connect_parts) as connect:
        together = [everyone() for _ in range(3)]
    error = "" if my_rank() == world_size() - 1 else outcome(everyone)
    exchange.discard()
    return {"together": [*together, everyone()], "connected": connect.call_count, "error": error}


def mismatched_by_fsdp() -> str:
    """Let the last rank leave out the reduction of a module; the error of each rank."""
    model = shard(make(), reshard_after_forward=False)
    grace.torch.register(model, TOPK, timeout=20)
    backward(model, next(batches(1)))
    model.middle.set_requires_gradient_sync(my_rank() < world_size() - 1)
    return outcome(lambda: backward(model, next(batches(1))))


def failing_step(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> list[str]:
    """Fail on the first rank in the second module; return the error, and that of another attempt."""
    real, calls = Residual.terms, itertools.count()

    def fail(*arguments: Any) -> Any:
        # The first module has a unit for each rank.
        if my_rank() == 0 and next(calls) == world_size():
            raise ZeroDivisionError("for this test")
        return real(*arguments)

    with mock.patch.object(Residual, "terms", fail):
        first = outcome(lambda: backward(model, batch))
    model.reset_iter_state()
    return [first, outcome(lambda: backward(model, batch))]


def scaled_by_fsdp() -> dict[str, Any]:
    """Train with a GradScaler, which one rank makes overflow in the second step, and without one.

    With "accumulated", two passes are exchanged before each step, and the second one overflows.
    """
    results: dict[str, Any] = {}
    for label in ("unscaled", "scaled", "overflow", "accumulated"):
        model = shard(make())
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=label != "unscaled")
        exchange = grace.torch.register(model, TOPK, grad_scaler=scaler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept = []
        for i, (x, y) in enumerate(batches(3)):
            before = [digest(p.to_local() for p in model.parameters()), states_of(exchange)]
            optimizer.zero_grad()
            if label == "accumulated":
                scaler.scale(F.cross_entropy(model(x), y)).backward()
            bad = label in ("overflow", "accumulated") and i == 1 and my_rank() == 0
            loss = F.cross_entropy(model(x), y) * (float("inf") if bad else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            after = [digest(p.to_local() for p in model.parameters()), states_of(exchange)]
            kept.append([a == b for a, b in zip(before, after, strict=True)])
        results[label] = {"after": after, "kept": kept, "scale": scaler.get_scale()}
    results["not passed"] = warned_of_scaler(shard(make()), TOPK, list(batches(2)))
    return results


def small_by_fsdp() -> dict[str, Any]:
    """Compare small gradients that FSDP reduces in float16, scaled, with those of plain FSDP."""
    results = {}
    x, y = next(batches(1))
    for replicas in [1, 2] if world_size() == 4 else [1]:
        gradients = []
        for plain in (True, False):
            model = shard(make(), replicas=replicas, mp_policy=POLICIES["float16"])
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**28)
            if not plain:
                grace.torch.register(model, ALL, grad_scaler=scaler)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler.scale(F.cross_entropy(model(x), y) * 2.0**-26).backward()
            scaler.unscale_(optimizer)
            gradients.append(local_gradients(model))
        pairs = [(a, gradients[1][name]) for name, a in gradients[0].items() if a.numel()]
        largest = max(float(a.abs().max()) for a, _ in pairs)
        results[str(replicas)] = {
            "largest": largest,
            "difference": max(float((a - b).abs().max()) for a, b in pairs) / largest,
        }
    return results


def rare_by_fsdp() -> dict[str, Any]:
    """Use other ways of FSDP, each compared with plain FSDP: the largest difference of gradients."""

    def summed(model: Any) -> None:
        for module in (model.first, model.middle, model):
            module.set_force_sum_reduction_for_comms(True)

    def divided(model: Any) -> None:
        summed(model)
        for module in (model.first, model.middle, model):
            module.set_gradient_divide_factor(3.0)

    ways: dict[str, tuple[dict[str, Any], Callable[[Any], None]]] = {
        "sums": ({}, summed),
        "divided": ({}, divided),
        "kept": ({"reshard_after_forward": False}, lambda model: None),
        "offloaded": ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, lambda model: None),
        "columns": (
            {"shard_placement_fn": lambda p: torch.distributed.tensor.Shard(1) if p.shape == (50, 50) else None},
            lambda model: None,
        ),
    }
    results: dict[str, Any] = {}
    batch = next(batches(1))
    for (label, (options, prepare)), replicas in itertools.product(ways.items(), [1, 2] if world_size() == 4 else [1]):
        gradients = []
        for registered in (False, True):
            if label == "columns" and world_size() == 4 and replicas == 1:
                continue
            model = shard(make(frozen="first.bias"), replicas=replicas, **options)
            prepare(model)
            if registered:
                grace.torch.register(model, ALL)
            for _ in range(2):
                backward(model, batch)
            gradients.append(local_gradients(model))
        if gradients:
            plain, mine = gradients
            results[f"{label}, {replicas}"] = max(
                float((mine[n] - x).abs().max()) for n, x in plain.items() if x.numel()
            )
    return results


def converted_by_fsdp(replicas: int) -> dict[str, Any]:
    """Register models that get their storage, or another dtype, afterwards: weights and errors."""
    weights = []
    for meta in (False, True):
        with torch.device("meta" if meta else "cpu"):
            model = shard(Net(), replicas=replicas)
        exchange = grace.torch.register(model, {**TOPK, "check_replicas": 2})
        if meta:
            model.to_empty(device="cpu")
        with torch.no_grad():
            for p in model.parameters():
                part = p.to_local()
                part.copy_(torch.linspace(-0.1, 0.1, part.numel()).reshape(part.shape))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches(3):
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
        weights.append([digest(p.to_local() for p in model.parameters()), *states_of(exchange)])
        # It still belongs to the exchange.
        wrapped = outcome(functools.partial(grace.torch.DistributedOptimizer, optimizer, backend="torch"))
    errors = []
    for config in (TOPK, {"compressor": "none", **EVERYTHING}):
        model = shard(make(), replicas=replicas)
        grace.torch.register(model, config)
        model.to(torch.bfloat16)
        x, y = next(batches(1))
        errors.append(outcome(functools.partial(backward, model, (x.to(torch.bfloat16), y))))
    return {"weights": weights, "wrapped": wrapped, "errors": errors}


def registered_twice_by_fsdp(replicas: int) -> dict[str, Any]:
    """Register models, parts of which are registered already or have another reduce-scatter: the errors."""
    errors: dict[str, Any] = {}
    none = {"compressor": "none"}
    model = shard(make(), replicas=replicas)
    exchange = grace.torch.register(model, TOPK)
    errors["again"] = outcome(functools.partial(grace.torch.register, model, none))
    errors["its part"] = outcome(functools.partial(grace.torch.register, model.middle, none))
    backward(model, next(batches(1)))
    errors["steps"] = exchange.run.step
    model = shard(make(), replicas=replicas)
    grace.torch.register(model.middle, TOPK)
    errors["the whole"] = outcome(functools.partial(grace.torch.register, model, none))
    model = shard(make(), replicas=replicas)
    model.middle.set_custom_reduce_scatter(mock.Mock())
    errors["other"] = outcome(functools.partial(grace.torch.register, model, none))
    return errors


def refused_by_fsdp() -> dict[str, Any]:
    """Ask for what cannot work: the errors."""
    errors: dict[str, Any] = {}
    for label, config in {
        "compressor": {"compressor": "powersgd", **EVERYTHING},
        "learning": {"compressor": "hardthreshold", **EVERYTHING},
        "memory": {"compressor": "topk", "memory": "diana"},
        "clipping": {"compressor": "topk", "memory": "dgc", "gradient_clipping": 1.0},
        "communicator": {"compressor": "topk", "communicator": "allgather"},
        "this rank": {"compressor": "topk", "compress_ratio": 0.1 if my_rank() else 2.0},
        "ranks": {"compressor": "topk", "compress_ratio": 0.1 if my_rank() else 0.2},
    }.items():
        model = shard(make())
        errors[label] = outcome(lambda model=model, config=config: grace.torch.register(model, config))  # type: ignore[misc]
    model = shard(make(frozen="middle.weight"))
    grace.torch.register(model, TOPK)
    model.middle.weight.requires_grad_(True)
    errors["unfrozen"] = outcome(lambda: backward(model, next(batches(1))))
    model = shard(make())
    backward(model, next(batches(1)))
    model.unshard()
    errors["late"] = outcome(lambda: grace.torch.register(model, TOPK))
    if world_size() == 4:
        model = shard(make(), replicas=2)
        with torch.no_grad():
            model.last.bias += float(my_rank() > 1)
        grace.torch.register(model, TOPK)
        bad = {"compressor": "topk", "compress_ratio": 0.1 if my_rank() else 2.0}
        errors["this rank of replicas"] = outcome(lambda: grace.torch.register(shard(make(), replicas=2), bad))
        errors["replicas"] = outcome(lambda: backward(model, next(batches(1))))
        grace.torch.register(shard(make(), replicas=2), {"compressor": "powersgd", **EVERYTHING})
    return errors


def chosen_by_auto() -> dict[str, Any]:
    """Let the compressor "auto" change to qsgd, and return the methods of all steps and what it says."""
    model = shard(make(), replicas=world_size() // 2)
    with preferring("qsgd"):
        exchange = grace.torch.register(model, compressor="auto", **EVERYTHING)
        methods = []
        for batch in batches(36):
            model.zero_grad()
            backward(model, batch)
            methods.append("qsgd" if "qsgd" in exchange.report() else "none")
    return {"methods": methods, "auto": exchange.stats()["auto"]}
