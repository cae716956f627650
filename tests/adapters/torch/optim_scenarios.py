"""Scenarios of the optimizers that exchange what they need themselves, run by each rank."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import grace
from grace.torch.optim import Lamb, Lans, OneBitAdam, OneBitLamb, ZeroOneAdam
from tests.adapters.torch.launched import by_torchrun, my_rank, world_size
from tests.adapters.torch.model import Net, batches, digest, make_net, outcome
from tests.support.cases import EVERYTHING, LAYERS
from tests.support.one_bit import BETA, MomentaOfThePaper

STEPS, FREEZE = 9, 4
ALL = {**EVERYTHING, **LAYERS}


def gradients_of(net: Net, step: int) -> list[dict[str, np.ndarray]]:
    """Return the gradients of all ranks in a step, each for the weights as they are."""
    found = []
    for rank in range(world_size()):
        *_, (x, y) = batches(step + 1, rank)
        loss = F.cross_entropy(net(x), y)
        named = dict(net.named_parameters())
        grads = torch.autograd.grad(loss, list(named.values()))
        found.append({name: g.reshape(-1).numpy() for name, g in zip(named, grads, strict=True)})
    return found


def one_bit_adam(scaled: bool) -> dict[str, Any]:
    """Compare with PyTorch's Adam in the warm-up, and with the paper's recursion afterwards; resume from every step."""
    options = {"lr": 0.003, "weight_decay": 0.01, "freeze_step": FREEZE, "scaled": scaled, **ALL}
    net, plain = make_net(), make_net()
    optimizer = OneBitAdam(net.named_parameters(), decoupled_weight_decay=True, **options)
    adam = torch.optim.AdamW(plain.parameters(), lr=0.003, weight_decay=0.01)
    off, saved, reference = [], [], None
    for step in range(STEPS):
        saved.append(copy.deepcopy([net.state_dict(), optimizer.state_dict()]))
        if step == FREEZE:
            # The state of PyTorch's Adam gives what is frozen.
            momentum = {n: adam.state[p]["exp_avg"].reshape(-1).numpy() for n, p in plain.named_parameters()}
            second = {n: adam.state[p]["exp_avg_sq"].reshape(-1).numpy() for n, p in plain.named_parameters()}
            root = {name: np.sqrt(x / (1 - 0.999**FREEZE)) + 1e-8 for name, x in second.items()}
            some = {name: x > 0 for name, x in second.items()}
            unit = {name: np.where(some[name], x, np.inf) if scaled else np.ones_like(x) for name, x in root.items()}
            reference = MomentaOfThePaper(
                optimizer.grace.plan, {name: m / unit[name] for name, m in momentum.items()}, unit, world_size()
            )
        given = gradients_of(net, step)
        before = {name: p.detach().reshape(-1).numpy().copy() for name, p in net.named_parameters()}
        one_step(net, optimizer, step)
        if reference is None:
            adam.zero_grad()
            for name, p in plain.named_parameters():
                p.grad = torch.tensor(np.mean([g[name] for g in given], axis=0)).view(p.shape)
            adam.step()
            expected = {name: p.detach().reshape(-1).numpy() for name, p in plain.named_parameters()}
        else:
            merged, expected = reference.step(given), {}
            for name, m in merged.items():
                # Where no gradient has been, nothing moves.
                m[~some[name]] = 0
                moved = m if scaled else m / root[name]
                expected[name] = before[name] * (1 - 0.003 * 0.01) - 0.003 / (1 - BETA ** (step + 1)) * moved
        off.append(max(np.abs(p.detach().reshape(-1).numpy() - expected[n]).max() for n, p in net.named_parameters()))
    resumed = []
    for start, (model, state) in enumerate(saved):
        again = make_net(seed=1)
        other = OneBitAdam(again.named_parameters(), decoupled_weight_decay=True, **options)
        again.load_state_dict(model)
        other.load_state_dict(state)
        for step in range(start, STEPS):
            one_step(again, other, step)
        resumed.append(weights(again) == weights(net))
    stats = optimizer.grace.stats()
    return {
        "off": [float(x) for x in off],
        "weights": weights(net),
        "resumed": resumed,
        "step": stats["step"],
        "share": stats["compressed_wire_bytes"] / stats["compressed_dense_bytes"],
    }


def one_step(net: Net, optimizer: Any, step: int, rank: int | None = None) -> None:
    """Take a step with the batch of this rank."""
    *_, (x, y) = batches(step + 1, my_rank() if rank is None else rank)
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()
    optimizer.step()


def weights(net: torch.nn.Module) -> str:
    return digest(net.parameters())


def one_bit_adam_in_use() -> dict[str, Any]:
    """Use it as any optimizer: groups, closures, accumulation, schedulers, frozen and unused parameters, a scaler."""
    results: dict[str, Any] = {}

    # Groups, a closure, a learning-rate schedule, two backward passes, a branch that rank 0 does not use.
    net = make_net()
    heads, others = list(net.head.parameters()), [p for n, p in net.named_parameters() if not n.startswith("head")]
    net.conv.bias.requires_grad_(False)
    frozen = net.conv.bias.detach().clone()
    groups = [{"params": heads, "lr": 0.01}, {"params": others, "weight_decay": 0.1}]
    optimizer = OneBitAdam(groups, lr=0.003, total_steps=10, compressor="topk", communicator="two_shot", **EVERYTHING)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    data = batches(8, my_rank())

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        for x, y in (next(data), next(data)):
            loss = F.cross_entropy(net(x, right=my_rank() > 0), y) / 2
            loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        return loss

    apart = []
    for step in range(4):
        if step == 3:
            net.left.weight.requires_grad_(False)
            left = net.left.weight.detach().clone()
        optimizer.step(evaluate)
        scheduler.step()
        apart.append(weights(net))
    results["groups"] = {
        "apart": apart,
        "frozen": torch.equal(frozen, net.conv.bias) and torch.equal(left, net.left.weight),
        "lr": [group["lr"] for group in optimizer.param_groups],
        "freeze_step": optimizer.param_groups[0]["freeze_step"],
    }

    # A loss scaler whose gradients overflow on one rank, before and after the freeze.
    net = make_net()
    plain = make_net()
    optimizer, other = (OneBitAdam(x.named_parameters(), lr=0.01, freeze_step=3, **EVERYTHING) for x in (net, plain))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(8):
        *_, (x, y) = batches(step + 1, my_rank())
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(net(x), y)).backward()
        if step in (1, 5):
            if my_rank() == 0:
                net.head.bias.grad[0] = float("inf")
        else:
            one_step(plain, other, step)
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    pairs = zip(net.parameters(), plain.parameters(), strict=True)
    results["scaler"] = {
        "weights": weights(net),
        "off": max(float((a - b).detach().abs().max()) for a, b in pairs),
        "scale": scaler.get_scale(),
        "steps": optimizer.param_groups[0]["step"],
    }

    # After an error on one rank, the step is dropped on all, before and after the freeze.
    net = make_net()
    optimizer = OneBitAdam(net.named_parameters(), lr=0.01, freeze_step=2, **EVERYTHING)
    for step in range(4):
        start = weights(net)
        optimizer.zero_grad()
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        if my_rank() == 0:
            net.head.weight.grad = torch.ones(10, 40).to_sparse()
            assert "has a sparse gradient" in outcome(optimizer.step)
        optimizer.grace.discard()
        assert weights(net) == start
        assert net.head.weight.grad is None
        one_step(net, optimizer, step)
    results["dropped"] = weights(net)
    return results


def one_bit_adam_refusals() -> dict[str, Any]:
    """Return the errors of what cannot work."""
    net = make_net()
    optimizer = OneBitAdam(net.named_parameters(), freeze_step=3)

    def make(**options: Any) -> OneBitAdam:
        return OneBitAdam(net.named_parameters(), **options)

    calls = {
        "group": lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]}),
        "copy": lambda: copy.deepcopy(optimizer),
        "pickle": lambda: pickle.dumps(optimizer),
        "both": lambda: make(freeze_step=3, total_steps=9),
        "total": lambda: make(total_steps=1),
        "freeze": lambda: make(freeze_step=0),
        "lr": lambda: make(lr=-1.0 if my_rank() == 0 else 1.0),
        "betas": lambda: make(betas=(1.0, 0.999)),
        "eps": lambda: make(eps=0.0),
        "decay": lambda: make(weight_decay=-1.0),
        "outer": lambda: make(outer="update"),
        "typo": lambda: make(weight_dacay=0.1),
        "lamb": lambda: Lamb(net.parameters(), weight_dacay=0.1),
        "backend": lambda: make(backend="nccl"),
        "differ": lambda: make(freeze_step=3 + my_rank()),
        "wrapped": lambda: grace.DistributedOptimizer(optimizer, net.named_parameters(), compressor="none"),
        "load": lambda: optimizer.load_state_dict({k: x for k, x in optimizer.state_dict().items() if k != "grace"}),
    }
    errors = {name: outcome(call) for name, call in calls.items()}
    if not by_torchrun():
        others = hvd.ProcessSet([5])
        others.process_set_id = 0
        errors["outside"] = outcome(lambda: make(process_set=others))
    if by_torchrun():
        model = DistributedDataParallel(make_net())
        exchange = grace.torch.register(model, compressor="qsgd")
        errors["registered"] = outcome(lambda: OneBitAdam(model.parameters()))
        del exchange
    # A checkpoint that one rank alone has loaded, and whose weights all ranks have.
    one_step(net, optimizer, 0)
    fresh = make(freeze_step=3)
    if my_rank() == 0:
        fresh.load_state_dict(optimizer.state_dict())
    errors["alone"] = outcome(lambda: one_step(net, fresh, 1))
    return errors


def trained(make: Any, steps: int, *, resume: bool = True) -> dict[str, Any]:
    """Train, and resume from every step; return the weights after each."""
    net = make_net()
    optimizer = make(net)
    saved, after = [], []
    for step in range(steps):
        saved.append(copy.deepcopy([net.state_dict(), optimizer.state_dict()]))
        one_step(net, optimizer, step)
        after.append(weights(net))
    resumed = []
    for start, (model, state) in enumerate(saved if resume else ()):
        again = make_net(seed=1)
        other = make(again)
        again.load_state_dict(model)
        other.load_state_dict(state)
        for step in range(start, steps):
            one_step(again, other, step)
        resumed.append(weights(again) == after[-1])
    flat = {name: p.detach().reshape(-1).numpy() for name, p in net.named_parameters()}
    return {"after": after, "resumed": resumed, "flat": flat, "stats": optimizer.grace.stats()}


def off(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    return float(max(np.abs(x - expected[name]).max() for name, x in found.items()))


class OfAllRanks:
    """The weights of all ranks in NumPy, and their gradients."""

    def __init__(self) -> None:
        self.nets = [make_net() for _ in range(world_size())]
        self.x = [
            {name: p.detach().reshape(-1).numpy().astype(np.float64) for name, p in net.named_parameters()}
            for net in self.nets
        ]

    def gradients(self, step: int) -> list[dict[str, np.ndarray]]:
        found = []
        for rank, (net, mine) in enumerate(zip(self.nets, self.x, strict=True)):
            named = dict(net.named_parameters())
            with torch.no_grad():
                for name, p in named.items():
                    p.copy_(torch.tensor(mine[name]).view(p.shape))
            *_, (x, y) = batches(step + 1, rank)
            grads = torch.autograd.grad(F.cross_entropy(net(x), y), list(named.values()))
            found.append({n: g.reshape(-1).numpy().astype(np.float64) for n, g in zip(named, grads, strict=True)})
        return found


def zero_one_adam() -> dict[str, Any]:
    """Compare 0/1 Adam without compression with the recursion of the paper; with signs, look at who syncs when."""
    lr, freeze, options = (
        0.003,
        4,
        {"every": {2: 3}, "var_update_scaler": 1, "freeze_step": 4, "lr": 0.003, "eps": 1e-4},
    )

    def make(net: Net, **more: Any) -> ZeroOneAdam:
        return ZeroOneAdam(net.named_parameters(), **options, **ALL, **more)

    exact = trained(lambda net: make(net, compressor="none"), 13)
    ranks = OfAllRanks()
    for name in exact["flat"]:
        for mine in ranks.x:
            mine["m", name], mine["u", name] = np.zeros_like(mine[name]), np.zeros_like(mine[name])
    v = dict.fromkeys(exact["flat"], 0.0)
    anchor, rates, learnt = {name: ranks.x[0][name] for name in v}, 0.0, 0
    for step in range(1, 14):
        each = ranks.gradients(step - 1)
        # After one gradient v is due every second step, after two every fourth.
        learns = step in (1, 3)
        learnt, rate = learnt + learns, lr / (1 - BETA**step)
        rates += rate
        syncs = step <= freeze or step - freeze in (1, 2, 5, 8)
        for name in v:
            if learns:
                v[name] = 0.999 * v[name] + 0.001 * np.mean([g[name] for g in each], axis=0) ** 2
            root = np.sqrt(v[name] / (1 - 0.999**learnt)) + 1e-4
            for mine, g in zip(ranks.x, each, strict=True):
                limit = 0.1 / np.sqrt(0.001) * root
                m = np.clip(BETA * mine["m", name] + (1 - BETA) * g[name], -limit, limit)
                mine["m", name] = np.where(v[name] > 0, m, 0)
                mine["u", name] = mine["u", name] + rate * mine["m", name]
                mine[name] = mine[name] - rate * mine["m", name] / root
            if syncs:
                moved = np.mean([mine["u", name] for mine in ranks.x], axis=0)
                anchor[name] = anchor[name] - moved / root
                for mine in ranks.x:
                    mine[name], mine["m", name], mine["u", name] = anchor[name], moved / rates, np.zeros_like(moved)
        rates = 0.0 if syncs else rates
    signs = trained(make, 13)
    errors = {
        "neither": outcome(lambda: ZeroOneAdam(make_net().named_parameters())),
        "scaler": outcome(lambda: ZeroOneAdam(make_net().named_parameters(), freeze_step=1, var_update_scaler=0)),
        "every": outcome(lambda: ZeroOneAdam(make_net().named_parameters(), freeze_step=1, every=0)),
        "grad_scaler": outcome(with_a_scaler),
        "ranks": outcome(lambda: between_syncs(make)),
    }
    return {
        "off": off(exact["flat"], {name: ranks.x[my_rank()][name] for name in v}),
        "resumed": exact["resumed"] + signs["resumed"],
        "after": signs["after"],
        "step": signs["stats"]["step"],
        "errors": errors,
        "frozen": frozen_between_syncs(make),
    }


def with_a_scaler() -> None:
    net = make_net()
    optimizer = ZeroOneAdam(net.named_parameters(), freeze_step=1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net(torch.ones(1, 1, 8, 8)).sum()).backward()
    scaler.step(optimizer)


def between_syncs(make: Any) -> None:
    """Load the states of another number of ranks that had saved between two syncs."""
    net = make_net()
    optimizer = make(net)
    for step in range(7):
        one_step(net, optimizer, step)
    optimizer.load_state_dict([optimizer.state_dict()] * (world_size() + 1))


def frozen_between_syncs(make: Any) -> bool:
    """Freeze a parameter between two syncs: it returns to the weights after the last one."""
    net = make_net()
    optimizer = make(net)
    for step in range(12):
        if step == 6:
            met = net.left.weight.detach().clone()
        if step == 8:
            assert not torch.equal(met, net.left.weight)
            net.left.weight.requires_grad_(False)
        one_step(net, optimizer, step)
    return torch.equal(met, net.left.weight)


def lamb_and_lans() -> dict[str, Any]:
    """Compare 1-bit LAMB, LAMB and LANS without compression with NumPy; with compressors, compare the ranks."""
    lr, freeze = 0.001, 4

    def one_bit(net: Net, **options: Any) -> OneBitLamb:
        return OneBitLamb(net.named_parameters(), lr=lr, weight_decay=0.01, freeze_step=freeze, **ALL, **options)

    def wrapped(kind: Any, **options: Any) -> Any:
        return lambda net: grace.DistributedOptimizer(
            kind(net.parameters(), lr=lr, weight_decay=0.01), net.named_parameters(), **ALL, **options
        )

    made = {
        "one bit": (lambda net: one_bit(net, compressor="none"), one_bit),
        "lamb": (wrapped(Lamb, compressor="none"), wrapped(Lamb, compressor="qsgd")),
        "clan": (wrapped(Lans, compressor="none"), wrapped(Lans, compressor="topk", communicator="two_shot")),
    }
    results: dict[str, Any] = {}
    for label, (exact, compressed) in made.items():
        ours = trained(exact, 8, resume=False)
        few = trained(compressed, 8)
        results[label] = {
            "off": off(ours["flat"], follow(label, lr, freeze)),
            "resumed": few["resumed"],
            "after": few["after"],
        }
    return results


def follow(label: str, lr: float, freeze: int) -> dict[str, np.ndarray]:
    """Return the weights after eight steps of an algorithm with the mean gradients."""
    ranks, norm = OfAllRanks(), np.linalg.norm
    x = ranks.x[0]
    kept: dict[str, dict[str, Any]] = {name: {"m": 0.0, "v": 0.0, "c": 0.0, "f": 1.0} for name in x}
    for t in range(1, 9):
        each = ranks.gradients(t - 1)
        for name, k in kept.items():
            g = np.mean([mine[name] for mine in each], axis=0)
            g = g / norm(g) if label == "clan" else g
            before, k["m"] = k["m"], BETA * k["m"] + (1 - BETA) * g
            frozen = label == "one bit" and t > freeze
            if frozen:
                limit = 0.1 / np.sqrt(0.001) * k["root"]
                sent = [np.clip(BETA * before + (1 - BETA) * mine[name], -limit, limit) for mine in each]
                k["m"] = np.where(k["v"] > 0, np.mean(sent, axis=0), 0)
            else:
                k["v"] = 0.999 * k["v"] + 0.001 * g * g
                k["root"] = np.sqrt(k["v"] / (1 - 0.999**t)) + 1e-6
            if label == "one bit" and t == freeze:
                k["fresh"] = k["v"] / (1 - 0.999**t)
            update = k["m"] / (1 - BETA**t) / k["root"] + 0.01 * x[name]
            ratio = norm(x[name]) / norm(update)
            if label == "clan":
                other = g / k["root"] + 0.01 * x[name]
                x[name] = x[name] - lr * (BETA * ratio * update + 0.1 * norm(x[name]) / norm(other) * other)
                continue
            if frozen:
                again = (k["m"] - BETA * before) / (1 - BETA)
                k["fresh"] = 0.999 * k["fresh"] + 0.001 * again**2
                now = np.max(np.where(k["v"] > 0, k["root"] / (np.sqrt(k["fresh"]) + 1e-6), 0))
                k["f"] = np.clip(np.clip(now, 0.5, 4), 0.9 * k["f"], 1.1 * k["f"])
                ratio = k["c"] / (1 - 0.9**freeze) * k["f"]
            else:
                ratio = np.clip(ratio, 0.01, 10)
                k["c"] = 0.9 * k["c"] + 0.1 * ratio
            x[name] = x[name] - lr * ratio * update
        for mine in ranks.x[1:]:
            mine.update(x)
    return x
