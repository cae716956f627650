"""Scenarios about schedules in PyTorch, run by each rank."""

from __future__ import annotations

import copy
import io
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import grace.torch
from grace.core.errors import GraceError
from grace.torch import CompressionScheduler
from tests.adapters.torch.launched import mean, my_rank, total, world_size
from tests.adapters.torch.model import batches, digest, make_net, outcome, sgd, train, wrap
from tests.support.cases import CORRECTED_BY, EVERYTHING

# The first step and the settings of each stage, with all kinds of state: residual, momentum, both, none, warm start.
STAGES = {
    0: {"compressor": "topk", "compress_ratio": 0.1},
    2: {"compressor": "dgc", "compress_ratio": 0.2, "momentum": 0.5},
    4: {"compressor": "powersgd", "compress_rank": 1},
    6: {"compressor": "none"},
    8: {"compressor": "topk", "compress_ratio": 0.3},
}
STEPS = 10
RATES = (0.1, 0.1, 0.4, 0.05, 0.01)


def scheduled() -> dict[str, Any]:
    return {**STAGES[0], **EVERYTHING, "schedule": [{"step": step, **STAGES[step]} for step in list(STAGES)[1:]]}


def weights(net: Any) -> str:
    return digest(list(net.parameters()))


def schedules() -> dict[str, Any]:
    """Change the method by the configuration, by `change`, and by a scheduler; continue one run from a file."""
    by_config = make_net()
    optimizer = wrap(by_config, scheduled())
    sent = []
    for step in range(STEPS):
        train(by_config, optimizer, 1, start=step)
        sent.append(optimizer.grace.stats()["wire_bytes"])
        if step == 4:
            file = io.BytesIO()
            torch.save({"model": by_config.state_dict(), "optimizer": optimizer.state_dict()}, file)
    by_hand = make_net()
    optimizer = wrap(by_hand, {**STAGES[0], **EVERYTHING})
    for step in range(STEPS):
        if step in list(STAGES)[1:]:
            optimizer.grace.change(**STAGES[step])
        train(by_hand, optimizer, 1, start=step)
    by_scheduler = make_net()
    optimizer = wrap(by_scheduler, {**STAGES[0], **EVERYTHING})
    scheduler = CompressionScheduler(optimizer, lambda step: STAGES.get(step) if step else None)
    for step in range(STEPS):
        train(by_scheduler, optimizer, 1, start=step)
        scheduler.step()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = make_net(seed=1)
    resumed.load_state_dict(saved["model"])
    optimizer = wrap(resumed, scheduled())
    optimizer.load_state_dict(saved["optimizer"])
    train(resumed, optimizer, STEPS - 5, start=5)
    nets = {"config": by_config, "hand": by_hand, "scheduler": by_scheduler, "resumed": resumed}
    return {"weights": {name: weights(net) for name, net in nets.items()}, "sent": sent}


def dense_first() -> dict[str, Any]:
    """Start with steps in which Horovod reduces everything, then switch to a method."""
    net = make_net()
    optimizer = wrap(net, {"compressor": "none", **EVERYTHING, "schedule": [{"step": 2, **STAGES[0]}]})
    steps, sent = [], []
    for step in range(4):
        train(net, optimizer, 1, start=step)
        steps.append(optimizer.grace.run.step)
        sent.append(optimizer.grace.stats()["wire_bytes"])
    return {"steps": steps, "sent": sent, "weights": weights(net)}


def resumed_scheduler() -> dict[str, Any]:
    """Compare the options of a scheduler that returns only changes with one that was restored from its state."""
    changes = {1: {"compress_ratio": 0.5}, 3: {"beta": 0.5}}
    first, second = (
        CompressionScheduler(wrap(make_net(), {**STAGES[0], **EVERYTHING}), lambda step: changes.get(step))
        for _ in "ab"
    )
    for _ in range(4):
        first.step()
    second.load_state_dict(first.state_dict())
    try:
        first.load_state_dict({"last_step": 2})
        error = ""
    except GraceError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"options": [repr(s._exchange.config.method) for s in (first, second)], "error": error}


def changes_that_differ() -> dict[str, Any]:
    """Try changes that differ between ranks, and a wrong change on one rank; then continue training."""
    net = make_net()
    optimizer = wrap(net, {**STAGES[0], **EVERYTHING})
    train(net, optimizer, 1)
    errors = []
    for changes in ({"compress_ratio": 0.5 + 0.1 * my_rank()}, {"compress_rate" if my_rank() else "beta": 0.5}):
        try:
            optimizer.grace.change(**changes)
        except GraceError as error:
            errors.append(f"{type(error).__name__}: {error}")
    optimizer.grace.change(compress_ratio=0.5)
    train(net, optimizer, 2, start=1)
    return {"errors": errors, "weights": weights(net), "ratio": optimizer.grace.config.method.compressor.compress_ratio}


def learning_rates() -> dict[str, Any]:
    """Apply constant gradients under changing learning rates, in two groups with rates of their own.

    Return the largest errors of weights and residuals together, by communicator.
    """
    return {name: _learning_rates(communicator) for name, communicator in CORRECTED_BY.items()}


def _learning_rates(communicator: Any) -> dict[str, Any]:
    rates = {"a": RATES, "b": RATES[::-1]}
    parameters = {name: torch.nn.Parameter(torch.zeros(40, 30)) for name in rates}
    slopes = [torch.randn(40, 30, generator=torch.Generator().manual_seed(rank)) for rank in range(world_size())]
    plain = torch.optim.SGD([{"params": [p]} for p in parameters.values()], lr=RATES[0])
    config = {"compressor": "topk", "compress_ratio": 0.05, "lr_correction": True, "communicator": communicator}
    optimizer = grace.torch.DistributedOptimizer(plain, list(parameters.items()), {**config, **EVERYTHING})
    for step in range(len(RATES)):
        for group, name in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rates[name][step]
        sum((p * slopes[my_rank()]).sum() for p in parameters.values()).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
    states, held = optimizer.grace.run.state_dict()["tensors"], {name: torch.zeros(1200) for name in parameters}
    for name, unit in optimizer.grace.plan.stateful.items():
        if unit.is_kept_by(my_rank()):
            # The mean of all ranks follows. A residual of an owner is one of the mean already.
            residual = states[name]["memory"]["residual"] * (1 if unit.owners is None else world_size())
            (piece,) = unit.pieces
            held[piece.tensor][piece.start : piece.stop] += residual
    meant, off = sum(RATES) * sum(slopes) / world_size(), []
    for name, p in parameters.items():
        kept = mean(held[name], f"held.{name}").reshape(40, 30)
        off.append(float((rates[name][-1] * kept - p.detach() - meant).abs().max()))
    return {"off": max(off), "moved": digest(parameters.values())}


def local_steps() -> dict[str, Any]:
    """Exchange weights every third step: with none, the mean over ranks; with topk, equal weights on all ranks."""
    results: dict[str, Any] = {}
    for name, config in {
        "none": {"compressor": "none"},
        "qsparse": {"compressor": "qsparse", "compress_ratio": 0.2},
    }.items():
        net = make_net()
        plain = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        optimizer = grace.torch.DistributedOptimizer(
            plain, net.named_parameters(), {**config, **EVERYTHING}, local_steps=3
        )
        apart = []
        for step in range(7):
            if step == 5:
                saved = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
            train(net, optimizer, 1, start=step)
            apart.append(weights(net))
        again = make_net(seed=1)
        resumed = grace.torch.DistributedOptimizer(
            torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9),
            again.named_parameters(),
            {**config, **EVERYTHING},
            local_steps=3,
        )
        again.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        train(again, resumed, 2, start=5)
        results[name] = {"apart": apart, "resumed": weights(again) == apart[-1]}
        if name == "none":
            alone = make_net()
            lonely = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
            for sync in range(2):
                train(alone, lonely, 3, start=3 * sync)
                with torch.no_grad():
                    for key, p in alone.named_parameters():
                        p.copy_(mean(p, f"alone.{key}"))
            train(alone, lonely, 1, start=6)
            pairs = zip(net.parameters(), alone.parameters(), strict=True)
            results[name]["off"] = max(float((a - b).abs().max()) for a, b in pairs)
    return results


OUTER = {
    "local sgd": ({"compressor": "none"}, {"every": 3}),
    "diloco": ({"compressor": "topk", **EVERYTHING}, {"every": 3, "lr": 0.7, "momentum": 0.9, "nesterov": True}),
    "streaming": (
        {"compressor": "topk", **EVERYTHING},
        {"every": 6, "lr": 0.7, "momentum": 0.9, "fragments": 2, "delay": 2, "alpha": 0.5, "warmup": 1},
    ),
    "update": ({"compressor": "efsignsgd", **EVERYTHING}, "update"),
    "local error": (
        {"compressor": "topk", "memory": "none", **EVERYTHING},
        {"every": 3, "local_error": True, "dense_every": 3},
    ),
    "pairs": ({"compressor": "none"}, {"every": 3, "lr": 0.7, "momentum": 0.3, "pairs": True}),
}


def outer_steps() -> dict[str, Any]:
    """Compare real ranks with a simulation of all of them, after every step; drop steps, and resume from a file."""
    return {name: _beside_a_simulation(config, outer, range(9)) for name, (config, outer) in OUTER.items()}


# A part of the ranks contributes, over each communicator on which the others send a header.
OUT = {
    "allgather": ({"compressor": "qsgd", **EVERYTHING, "communicator": "allgather"}, {"every": 1}),
    "two_shot": ({"compressor": "topk", **EVERYTHING, "communicator": "two_shot"}, {"every": 3, "delay": 1}),
    "broadcast": ({"compressor": "eightbit", **EVERYTHING, "communicator": "broadcast"}, {"every": 3, "fragments": 3}),
    "sparse": ({"compressor": "topk", **EVERYTHING, "communicator": "sparse_allreduce"}, {"every": 2}),
}


def outer_participation() -> dict[str, Any]:
    """Do the same where a part of the ranks contributes to each sync; go on while an exchange is pending."""
    found = {
        name: _beside_a_simulation(config, {**outer, "participation": 0.5}, [4])
        for name, (config, outer) in OUT.items()
    }
    # Each rank decides itself.
    config = {"compressor": "none", **EVERYTHING, "communicator": "allgather"}
    return {**found, "relevance": _beside_a_simulation(config, {"every": 1, "relevance": 0.8}, [4])}


def _beside_a_simulation(config: dict[str, Any], outer: Any, restarts: Collection[int]) -> dict[str, Any]:
    net = make_net()
    optimizer = wrap(net, config, outer=outer)
    everyone = [make_net() for _ in range(world_size())]
    inner = [sgd(each) for each in everyone]
    sim = grace.Simulation(
        world_size(),
        {key: tuple(p.shape) for key, p in net.named_parameters()},
        config,
        framework="torch",
        outer=outer,
    )
    sim.begin({key: p.detach() for key, p in net.named_parameters()})
    off, saved, inside, sent = [], [], [], []
    for step in range(9):
        saved.append(copy.deepcopy([net.state_dict(), optimizer.state_dict()]))
        inside.append(optimizer.grace.stats()["outer"]["participates"])
        train(net, optimizer, 1, start=step)
        for rank, (each, own) in enumerate(zip(everyone, inner, strict=True)):
            train(each, own, 1, start=step, rank=rank)
        met = sim.step([{key: p.detach() for key, p in each.named_parameters()} for each in everyone])
        for each, new in zip(everyone, met, strict=True):
            each.load_state_dict(new)
        off.append(weights(net) != weights(everyone[my_rank()]))
        sent.append([found["wire_bytes"] for found in (optimizer.grace.stats(), sim.stats(my_rank()))])
    resumed = []
    for start in restarts:
        model, state = saved[start]
        again = make_net(seed=1)
        other = wrap(again, config, outer=outer)
        again.load_state_dict(model)
        other.load_state_dict(state)
        train(again, other, 9 - start, start=start)
        resumed.append(weights(again) != weights(net))
    return {
        "off": off,
        "resumed": resumed,
        "inside": inside,
        "sent": sent,
        "weights": weights(net),
        "stats": optimizer.grace.stats()["outer"],
    }


def _normed() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        # A bias before BatchNorm would have gradients of rounding errors only, which Adam blows up.
        first = torch.nn.Linear(20, 16, bias=False)
        return torch.nn.Sequential(first, torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    # A small eps would have rounding errors of gradients near zero move the weights.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def _adam_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    x = torch.randn(6, 20, generator=torch.Generator().manual_seed(100 * step + rank)) + rank
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def _everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [optimizer.state.get(p, {}) for p in model.parameters()]
    arrays = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq") if key in state]
    return [x.detach().clone() for x in (*model.parameters(), *model.buffers(), *arrays) if x.is_floating_point()]


# The options of `state` and `buffers`, and by state the number of syncs between two means.
BESIDE = {
    "periods": ({"state": {"exp_avg": 1, "exp_avg_sq": 2}, "buffers": "local"}, {"exp_avg": 1, "exp_avg_sq": 2}),
    "average": ({"state": "average"}, {"exp_avg": 1, "exp_avg_sq": 1}),
    "reset": ({"state": "reset", "buffers": "first"}, {}),
}


def outer_beside() -> dict[str, Any]:
    """Let states of AdamW and statistics of BatchNorm sync as well; compare with all ranks trained by hand."""
    results: dict[str, Any] = {}
    for name, (options, rounds) in BESIDE.items():
        models = [_normed() for _ in range(world_size())]
        inner = [_adamw(model) for model in models]
        outer = {"every": 2, **options}
        wrapped, registered = _normed(), _normed()
        given = _adamw(wrapped)
        named = [*wrapped.named_parameters(), *wrapped.named_buffers()]
        optimizer = grace.torch.DistributedOptimizer(given, named, {"compressor": "none"}, outer=outer)
        other = _adamw(registered)
        steps: list[Any] = []
        other.register_step_post_hook(lambda *given, steps=steps: steps.append(given))
        exchange = grace.torch.register(registered, {"compressor": "none"}, outer=outer, optimizer=other)
        off, saved = [], []
        assert not steps, "a copy has taken a step to find the states, and called hooks"
        for step in range(9):
            saved.append(copy.deepcopy([wrapped.state_dict(), optimizer.state_dict()]))
            for rank, (model, own) in enumerate(zip(models, inner, strict=True)):
                _adam_step(model, own, step, rank)
            if step % 2:
                for row in zip(*(model.parameters() for model in models), strict=True):
                    mean = sum(p.detach() for p in row) / len(row)
                    for p, own in zip(row, inner, strict=True):
                        p.data.copy_(mean)
                        if name == "reset":
                            own.state.pop(p)
                    for key, every in rounds.items():
                        if (step // 2 + 1) % every == 0:
                            states = [own.state[p] for p, own in zip(row, inner, strict=True)]
                            mean = sum(state[key] for state in states) / len(states)
                            for state in states:
                                state[key].copy_(mean)
                for row in zip(*(model[1].buffers() for model in models), strict=True):
                    if row[0].is_floating_point() and name != "periods":
                        mean = row[0].clone() if name == "reset" else sum(row) / len(row)
                        for buffer in row:
                            buffer.copy_(mean)
            expected = _everything(models[my_rank()], inner[my_rank()])
            for model, own in ((wrapped, optimizer), (registered, other)):
                _adam_step(model, own, step, my_rank())
                pairs = zip(_everything(model, own), expected, strict=True)
                off.append(max(float((a - b).abs().max()) for a, b in pairs))
        resumed = []
        for start in (2, 3, 7):
            model = _normed()
            again = _adamw(model)
            grace.torch.register(model, {"compressor": "none"}, outer=outer, optimizer=again)
            model.load_state_dict(saved[start][0])
            again.load_state_dict(saved[start][1])
            for step in range(start, 9):
                _adam_step(model, again, step, my_rank())
            resumed.append(digest(_everything(model, again)) == digest(_everything(wrapped, optimizer)))
        report = exchange.report()
        results[name] = {"off": max(off), "resumed": resumed, "report": report}
    net = _normed()
    sgd_of = torch.optim.SGD(net.parameters(), lr=0.1)
    adacomm = grace.torch.register(net, {"compressor": "none"}, outer={"every": 4, "adapt": "loss"}, optimizer=sgd_of)
    for step in range(8):
        sgd_of.step(lambda step=step: net[0].weight.square().sum() * 0 + (1 + my_rank()) * (1.0 if step < 4 else 0.25))
    results["adacomm"] = adacomm.stats()["outer"]
    # SCAFFOLD: two groups of parameters with learning rates of their own, and a closure.
    y = [_layers() for _ in range(world_size())]
    net, control = _layers(), [[torch.zeros_like(p) for p in y[0].parameters()] for _ in y]
    groups = [{"params": [p], "lr": 0.05 * (i + 1)} for i, p in enumerate(net.parameters())]
    inner_sgd = torch.optim.SGD(groups)
    variates = {"every": 3, "variates": True}
    grace.torch.register(net, {"compressor": "none"}, outer=variates, optimizer=inner_sgd)
    for step in range(9):
        x = [torch.randn(6, 20, generator=torch.Generator().manual_seed(100 * step + r)) + r for r in range(len(y))]
        inner_sgd.zero_grad()
        net(x[my_rank()]).square().mean().backward()
        inner_sgd.step() if step % 2 else inner_sgd.step(lambda: torch.zeros(()))
        start = [p.detach().clone() for p in y[0].parameters()] if step % 3 == 0 else start
        for model, given, own in zip(y, x, control, strict=True):
            gradients = torch.autograd.grad(model(given).square().mean(), list(model.parameters()))
            with torch.no_grad():
                for i, (p, gradient) in enumerate(zip(model.parameters(), gradients, strict=True)):
                    p -= 0.05 * (i + 1) * (gradient - own[i] + sum(each[i] for each in control) / len(control))
        if step % 3 == 2:
            common = [sum(each[i] for each in control) / len(control) for i in range(len(start))]
            moved = [[a - p.detach() for a, p in zip(start, model.parameters(), strict=True)] for model in y]
            for own, of_rank in zip(control, moved, strict=True):
                for i, d in enumerate(of_rank):
                    own[i] = own[i] - common[i] + d / (3 * 0.05 * (i + 1))
            for model in y:
                for i, p in enumerate(model.parameters()):
                    p.data.copy_(start[i] - sum(of_rank[i] for of_rank in moved) / len(moved))
    pairs = zip(net.parameters(), y[my_rank()].parameters(), strict=True)
    results["variates"] = max(float((a - b).detach().abs().max()) for a, b in pairs)
    net = _normed()
    calls = {
        "momentum": lambda: grace.torch.register(net, {"compressor": "none"}, outer=variates, optimizer=sgd(net)),
        "unknown state": lambda: grace.torch.register(
            net, {"compressor": "none"}, outer={"state": {"exp_av": 2}}, optimizer=torch.optim.Adam(net.parameters())
        ),
        "no state": lambda: grace.torch.register(
            net, {"compressor": "none"}, outer={"state": "average"}, optimizer=torch.optim.SGD(net.parameters())
        ),
        "no step": lambda: grace.torch.register(
            net, {"compressor": "none"}, outer={"state": "average"}, optimizer=torch.optim.SparseAdam(net.parameters())
        ),
    }
    results["errors"] = {name: outcome(call) for name, call in calls.items()}
    return results


def outer_discarded() -> dict[str, Any]:
    """Drop what is on its way and all steps since the last sync; the next steps are those of a fresh run."""
    config, outer = OUTER["streaming"]
    net, twin = make_net(), make_net()
    optimizer = wrap(net, config, outer=outer, optimizer=sgd(net, momentum=0.0))
    other = wrap(twin, config, outer=outer, optimizer=sgd(twin, momentum=0.0))
    train(net, optimizer, 6)
    train(twin, other, 6)
    # The second fragment was sent after step 7 and would be applied after step 9.
    train(net, optimizer, 2, start=6)
    for each in (optimizer, other):
        each.grace.discard()
    train(net, optimizer, 6, start=6)
    train(twin, other, 6, start=6)
    return {"equal": weights(net) == weights(twin), "steps": optimizer.grace.stats()["outer"]["steps"]}


def outer_mean_of_pytorch() -> dict[str, Any]:
    """Average weights by PyTorch's own class for post-local SGD, and by grace. Return the largest differences."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    ours, theirs = make_net(), make_net()
    optimizer = wrap(ours, {"compressor": "none"}, outer={"every": 3})
    # PyTorch counts from 0: it averages after the third, the sixth and the ninth step.
    plain, averager = sgd(theirs), PeriodicModelAverager(period=3, warmup_steps=2)
    apart = []
    for step in range(9):
        train(ours, optimizer, 1, start=step)
        train(theirs, plain, 1, start=step)
        averager.average_parameters(theirs.parameters())
        pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
        apart.append(max(float((a - b).abs().max()) for a, b in pairs))
    return {"apart": apart, "weights": weights(ours)}


# Options of `outer` with syncs after every second step, passes per step, the largest norm, and what is averaged.
BY_HAND = {
    "accumulated and clipped": ({}, 2, 0.5, False),
    "momentum": ({"state": {"momentum_buffer": 1}}, 1, float("inf"), True),
    "learning rate": ({}, 1, float("inf"), False),
    "in part": ({"state": {"momentum_buffer": 1}}, 1, float("inf"), True),
}


def outer_by_hand() -> dict[str, float]:
    """Accumulate and clip gradients, average momenta, or lower the learning rate after each inner step.

    In part, one rank never uses a branch of the model, and the last one names the parameters in another order. Return
    how far the weights are from those of plain PyTorch. There, each rank trains the models of all ranks, and
    sets weights and momenta to their means.
    """

    def inner_step(label: str, model: torch.nn.Module, optimizer: Any, step: int, rank: int) -> None:
        _, passes, norm, _ = BY_HAND[label]
        optimizer.zero_grad()
        for x, y in batches(passes, rank, seed=step):
            F.cross_entropy(model(x, right=label != "in part" or rank != 1), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        schedulers[optimizer].step()

    apart = {}
    for label, (options, *_, momentum) in BY_HAND.items():
        ours, theirs = make_net(), [make_net() for _ in range(world_size())]
        named, plain = list(ours.named_parameters()), [sgd(x) for x in theirs]
        if label == "in part" and my_rank() == world_size() - 1:
            named.reverse()
        outer = {"every": 2, **options}
        config = {"compressor": "none", "check_replicas": 2}
        optimizer = grace.torch.DistributedOptimizer(sgd(ours), named, config, outer=outer)
        rate = 0.7 if label == "learning rate" else 1.0
        schedulers = {x: torch.optim.lr_scheduler.ExponentialLR(x, rate) for x in (optimizer, *plain)}
        for step in range(6):
            inner_step(label, ours, optimizer, step, my_rank())
            for rank, (model, mine) in enumerate(zip(theirs, plain, strict=True)):
                inner_step(label, model, mine, step, rank)
            if step % 2:
                for group in zip(*(model.parameters() for model in theirs), strict=True):
                    arrays = [[p.detach() for p in group]]
                    if momentum:
                        # What was never used has no momentum.
                        pairs = zip(plain, group, strict=True)
                        arrays.append([x.state[p].get("momentum_buffer", torch.zeros_like(p)) for x, p in pairs])
                    for xs in arrays:
                        mean_of_all = torch.stack(xs).mean(0)
                        for x in xs:
                            x.copy_(mean_of_all)
        pairs = zip(ours.parameters(), theirs[0].parameters(), strict=True)
        apart[label] = max(float((a - b).detach().abs().max()) for a, b in pairs)
    return apart


def outer_with_a_scaler() -> dict[str, Any]:
    """Let the gradients of the last rank overflow in one inner step, which it skips; compare with steps by hand."""
    last, rate = world_size() - 1, 0.05
    nets = [make_net() for _ in range(world_size())]
    for sync in range(2):
        for rank, net in enumerate(nets):
            for step, (x, y) in enumerate(batches(6, rank)):
                if step // 3 == sync and not (step == 1 and rank == last):
                    gradients = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
                    with torch.no_grad():
                        for p, gradient in zip(net.parameters(), gradients, strict=True):
                            p -= rate * gradient
        with torch.no_grad():
            for row in zip(*(net.parameters() for net in nets), strict=True):
                average = sum(row) / len(row)
                for p in row:
                    p.copy_(average)
    results: dict[str, Any] = {}
    for label in ("wrapped", "registered"):
        net, scaler = make_net(), torch.amp.GradScaler("cpu", init_scale=64.0)
        optimizer = sgd(net, lr=rate, momentum=0.0)
        options = {"config": {"compressor": "none", "check_replicas": 1}, "outer": {"every": 3}, "grad_scaler": scaler}
        if label == "wrapped":
            optimizer = grace.torch.DistributedOptimizer(optimizer, net.named_parameters(), **options)
        else:
            grace.torch.register(net, optimizer=optimizer, **options)
        for step, (x, y) in enumerate(batches(6, my_rank())):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(net(x), y)).backward()
            if step == 1 and my_rank() == last:
                net.head.bias.grad[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        pairs = zip(net.parameters(), nets[0].parameters(), strict=True)
        results[label] = {
            "off": max(float((a - b).detach().abs().max()) for a, b in pairs),
            "weights": weights(net),
            "scale": scaler.get_scale(),
            "steps": optimizer.grace.stats()["outer"]["steps"],
        }
    return results


def _layers() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(20, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def registered_outer_steps() -> dict[str, Any]:
    """Train plain, in DDP and in FSDP2 within sites of two ranks, or of one, with outer steps between the sites."""
    size = world_size()
    sites = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("between", "within"))
    between = sites["between"].get_group()
    outer = {"every": 3, "lr": 0.7, "momentum": 0.9, "nesterov": True, "fragments": 3, "delay": 0}
    config = {"compressor": "none", "check_replicas": 1}
    results: dict[str, Any] = {}

    def made(label: str, config: dict[str, Any]) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
        model = _layers()
        if label == "ddp":
            model = DistributedDataParallel(model, process_group=sites["within"].get_group())
        if label == "fsdp":
            model = fully_shard(model, mesh=sites["within"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        exchange = grace.torch.register(model, config, outer=outer, optimizer=optimizer, process_group=between)
        return model, optimizer, exchange

    def inner_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        x = torch.randn(6, 20, generator=torch.Generator().manual_seed(100 * step + my_rank()))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for label in ("plain", "ddp", "fsdp") if size == 2 else ("ddp", "fsdp"):
        model, optimizer, exchange = made(label, config)
        for step in range(7):
            inner_step(model, optimizer, step)
        full = [p.full_tensor() if label == "fsdp" else p for p in model.parameters()]
        results[label] = [p.detach().flatten().tolist() for p in full]
        results[f"{label}, rounds"] = exchange.stats()["outer"]["rounds"]
        # The fourth step is the first of a period.
        before, after = (made(label, {"compressor": "topk", "compress_ratio": 0.3}) for _ in range(2))
        for step in range(4):
            inner_step(*before[:2], step)
        with torch.no_grad():
            for p, saved in zip(after[0].parameters(), before[0].parameters(), strict=True):
                p.copy_(saved)
        after[1].load_state_dict(copy.deepcopy(before[1].state_dict()))
        for model, optimizer, _ in (before, after):
            for step in range(4, 10):
                inner_step(model, optimizer, step)
        ends = [[p.to_local() if label == "fsdp" else p for p in model.parameters()] for model, *_ in (before, after)]
        results[f"{label}, resumed"] = digest(ends[0]) == digest(ends[1])
    wrong = _layers()
    calls = {
        "no outer": lambda: grace.torch.register(wrong, config, optimizer=sgd(wrong)),
        "no optimizer": lambda: grace.torch.register(DistributedDataParallel(wrong), config, outer=outer),
        "group": lambda: grace.torch.register(DistributedDataParallel(wrong), config, process_group=between),
    }
    everywhere = fully_shard(_layers(), mesh=init_device_mesh("cpu", (size,)))
    shared = ZeroRedundancyOptimizer(wrong.parameters(), torch.optim.SGD, lr=0.1)
    calls["ZeRO"] = lambda: grace.torch.register(wrong, config, outer=outer, optimizer=shared)
    calls["ZeRO, wrapped"] = lambda: grace.DistributedOptimizer(shared, wrong.named_parameters(), config, outer=outer)
    calls["parts"] = lambda: grace.torch.register(everywhere, config, outer=outer, optimizer=sgd(everywhere))
    results["errors"] = {name: outcome(call) for name, call in calls.items()}
    return results


def local_refusals() -> dict[str, Any]:
    """Try arguments that cannot be combined with local steps."""
    net = make_net()
    wrong = [
        {"local_steps": 0},
        {"local_steps": 2, "op": total()},
        {"local_steps": 2, "backward_passes_per_step": 2},
        {"local_steps": 2, "lr_correction": True},
        {"local_steps": 2, "gradient_as_bucket_view": True},
        {"local_steps": 2, "outer": "diloco"},
        {"local_steps": 2 + my_rank()},
    ]
    errors = []
    for arguments in wrong:
        try:
            wrap(net, {"compressor": "topk", **EVERYTHING}, **arguments)
        except GraceError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return {"errors": errors}


def loaded_in_another_stage() -> dict[str, Any]:
    """Load a checkpoint of a later stage on rank 0 only."""
    first = make_net()
    optimizer = wrap(first, scheduled())
    train(first, optimizer, 3)
    second = make_net()
    fresh = wrap(second, scheduled())
    if my_rank() == 0:
        fresh.load_state_dict(optimizer.state_dict())
    try:
        train(second, fresh, 1)
    except GraceError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}
