"""Scenarios of the optimizers that exchange what they need themselves, run by each rank."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import grace
from grace.torch.optim import OneBitAdam
from tests.adapters.torch.launched import by_torchrun, my_rank, world_size
from tests.adapters.torch.model import Net, batches, digest, make_net, outcome
from tests.support.cases import EVERYTHING, LAYERS

STEPS, FREEZE = 9, 4
BETA = 0.9
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


class MomentaOfThePaper:
    """The exchange of Algorithm 1 in NumPy: mean|x| sign(x) of m + error on each rank, and of the mean at its owner."""

    def __init__(self, plan: Any, momentum: dict[str, np.ndarray]) -> None:
        self.pieces = [(unit, unit.pieces[0]) for unit in plan.units]
        self.momentum = {name: m.astype(np.float32) for name, m in momentum.items()}
        self.worker = [{name: np.zeros_like(m) for name, m in self.momentum.items()} for _ in range(world_size())]
        self.server = {name: np.zeros_like(m) for name, m in self.momentum.items()}

    def step(self, gradients: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        last = {name: m.copy() for name, m in self.momentum.items()}
        for _, piece in self.pieces:
            at, name = slice(piece.start, piece.stop), piece.tensor
            sent = []
            for mine, error in zip(gradients, self.worker, strict=True):
                x = np.float32(BETA) * last[name][at] + np.float32(1 - BETA) * mine[name][at] + error[name][at]
                sent.append(_sign(x))
                error[name][at] = x - sent[-1]
            x = sum(sent) / np.float32(world_size()) + self.server[name][at]
            self.momentum[name][at] = _sign(x) if world_size() > 1 else x
            self.server[name][at] = x - self.momentum[name][at]
        return self.momentum


def _sign(x: np.ndarray) -> np.ndarray:
    return np.float32(np.mean(np.abs(x.astype(np.float64)))) * np.where(x >= 0, np.float32(1), np.float32(-1))


def one_bit_adam() -> dict[str, Any]:
    """Compare with PyTorch's Adam in the warm-up, and with the paper's recursion afterwards; resume from every step."""
    options = {"lr": 0.003, "weight_decay": 0.01, "freeze_step": FREEZE, **ALL}
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
            reference = MomentaOfThePaper(optimizer.grace.plan, momentum)
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
                root = np.sqrt(second[name] / (1 - 0.999**FREEZE)) + 1e-8
                # Where no gradient has been, nothing moves.
                m[second[name] == 0] = 0
                expected[name] = before[name] * (1 - 0.003 * 0.01) - 0.003 / (1 - BETA ** (step + 1)) * m / root
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
        "backend": lambda: make(backend="nccl"),
        "differ": lambda: make(freeze_step=3 + my_rank()),
        "wrapped": lambda: grace.DistributedOptimizer(optimizer, net.named_parameters(), compressor="none"),
        "load": lambda: optimizer.load_state_dict({k: x for k, x in optimizer.state_dict().items() if k != "grace"}),
    }
    errors = {name: outcome(call) for name, call in calls.items()}
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
