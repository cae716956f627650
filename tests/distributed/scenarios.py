"""What one rank does in each multi-process test, and what it reports."""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F

import grace.torch
from grace.core.config import make_config
from grace.core.errors import IncompatibleError
from grace.core.registry import communicators, compressors
from grace.core.simulate import Simulation
from grace.core.spec import TensorSpec

PROCESS_SETS: list[Any] = []

# Fits tensors of every shape in Net, so that nothing is dense unless a method cannot take it.
EVERYTHING = {"default_rules": False}


class Net(torch.nn.Module):
    """A convolution, two matrices, vectors, a scalar and two branches, of which `forward` can leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 6, 3)
        self.left = torch.nn.Linear(216, 40)
        self.right = torch.nn.Linear(216, 40)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.head = torch.nn.Linear(40, 10)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x)).flatten(1)

    def forward(self, x: torch.Tensor, right: bool = True) -> torch.Tensor:
        h = self.features(x)
        h = self.left(h) + self.right(h) if right else self.left(h)
        return self.head(torch.relu(h * self.scale))


def make_net(seed: int = 0) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net()


def batches(steps: int, rank: int, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Data that differ between ranks and are the same in every scenario."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(steps):
        yield torch.randn(8, 1, 8, 8, generator=generator), torch.randint(0, 10, (8,), generator=generator)


def digest(tensors: Any) -> str:
    """Hash of the exact bits of several tensors."""
    sha = hashlib.sha256()
    for t in tensors:
        sha.update(t.detach().to(torch.float64).contiguous().numpy().tobytes())
    return sha.hexdigest()


def sgd(model: torch.nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.01, "momentum": 0.5, **options})


def wrap(model: torch.nn.Module, config: dict[str, Any], **arguments: Any) -> Any:
    optimizer = arguments.pop("optimizer", None) or sgd(model)
    return grace.torch.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), config=config, **arguments
    )


def exchange(optimizer: Any) -> None:
    """Exchange the gradients that are in place and close the step, so that the next one can be put in by hand."""
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()


def train(model: Net, optimizer: Any, steps: int, *, seed: int = 0, start: int = 0) -> float:
    """Train on the batches `start` to `start + steps`; the last loss."""
    loss = torch.zeros(())
    for x, y in itertools.islice(batches(start + steps, hvd.rank(), seed), start, None):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def valid_configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every registered compressor with every communicator that can carry it."""
    for name, communicator in itertools.product(compressors, communicators):
        config = {"compressor": name, "communicator": communicator, **EVERYTHING}
        if name in ("topk", "randomk", "dgc"):
            config["compress_ratio"] = 0.05
        try:
            make_config(config)
        except IncompatibleError:
            continue
        yield f"{name}/{communicator}", config


def every_method() -> dict[str, Any]:
    """20 steps with every method and communicator: exact weights, bytes reported and bytes really sent."""
    results = {}
    for label, config in valid_configs():
        model = make_net()
        optimizer = wrap(model, config)
        loss = train(model, optimizer, 19)
        with spy(optimizer) as sent:
            train(model, optimizer, 1, start=19)
        stats = optimizer.grace.stats()
        results[label] = {
            "weights": digest(model.parameters()),
            "finite": bool(np.isfinite(loss)),
            "reported": stats["wire_bytes"] - sum(p.spec.nbytes for p in optimizer.grace.plan.delegated),
            "sent": sum(nbytes for _, nbytes in sent),
            "fixed": all(p.compressor.fixed_size for p in optimizer.grace.plan.parts),
            "predicted": sum(b.nbytes for b in optimizer.grace.plan.buckets),
        }
    return results


@contextmanager
def spy(optimizer: Any) -> Iterator[list[tuple[str, int]]]:
    """Record the name and bytes of what this rank hands to each collective of the exchange."""
    transport, sent = optimizer.grace.engine.transport, []
    originals = {kind: getattr(transport, kind) for kind in ("allreduce", "allgather", "broadcast")}

    def watch(kind: str) -> Callable[..., Any]:
        def call(x: torch.Tensor, **arguments: Any) -> Any:
            if kind != "broadcast" or arguments["root"] == transport.rank:
                sent.append((arguments["name"], x.numel() * x.element_size()))
            return originals[kind](x, **arguments)

        return call

    for kind in originals:
        setattr(transport, kind, watch(kind))
    try:
        yield sent
    finally:
        for kind in originals:
            delattr(transport, kind)


def none_and_horovod() -> dict[str, Any]:
    """The same training with plain Horovod and with compressor none, also with accumulation and predivision."""
    results = {}
    for label, arguments in {
        "plain": {},
        "accumulate": {"backward_passes_per_step": 2},
        "predivide": {"gradient_predivide_factor": 2.0},
        "sum": {"op": hvd.Sum},
    }.items():
        weights = []
        for kind in ("horovod", "grace"):
            model = make_net()
            if kind == "horovod":
                optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **arguments)
            else:
                optimizer = wrap(model, {"compressor": "none"}, **arguments)
            passes = arguments.get("backward_passes_per_step", 1)
            for i, (x, y) in enumerate(batches(20, hvd.rank())):
                F.cross_entropy(model(x), y).backward()
                if (i + 1) % passes == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        results[label] = {
            "equal": bool((weights[0] == weights[1]).all()),
            "distance": float((weights[0] - weights[1]).abs().max()),
            "moved": float((weights[0] - torch.cat([p.detach().reshape(-1) for p in make_net().parameters()])).norm()),
        }
    return results


def simulation() -> dict[str, Any]:
    """The exchange of real processes against the simulated one, on the same gradients."""
    results = {}
    rank, size = hvd.rank(), hvd.size()
    shapes = {name: tuple(p.shape) for name, p in make_net().named_parameters()}

    def gradient(step: int, of_rank: int, name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step * 1000 + of_rank * 100 + len(name))
        return torch.randn(shapes[name], generator=generator)

    for name in compressors:
        config = {"compressor": name, **EVERYTHING}
        model = make_net()
        optimizer = wrap(model, config)
        specs = [TensorSpec(n, s) for n, s in shapes.items()]
        reference = Simulation(size, specs, config, framework="torch")
        worst = 0.0
        for step in range(4):
            for n, p in model.named_parameters():
                p.grad = gradient(step, rank, n)
            exchange(optimizer)
            merged = reference.step([{n: gradient(step, r, n) for n in shapes} for r in range(size)])
            for n, p in model.named_parameters():
                worst = max(worst, float((p.grad - merged[rank][n]).abs().max()))
        results[name] = worst
    return results


def hook_order() -> dict[str, Any]:
    """Gradients that become ready in one order on all ranks, and in opposite orders on odd and even ranks."""
    results = {}
    for name in ("topk", "powersgd", "signsgd", "randomk"):
        weights = []
        for opposite in (False, True):
            model = make_net()
            optimizer = wrap(model, {"compressor": name, "bucket_bytes": 0, **EVERYTHING})
            for x, y in batches(5, hvd.rank()):
                optimizer.zero_grad()
                branches = [model.left, model.right]
                h = model.features(x).detach()
                # Separate losses, so that this order of backward calls is the order of the hooks.
                losses = [F.cross_entropy(branch(h)[:, :10], y) for branch in branches]
                if opposite and hvd.rank() % 2:
                    losses.reverse()
                for loss in losses:
                    loss.backward()
                optimizer.step()
            weights.append(digest(model.parameters()))
        results[name] = weights
    return results


def unused_parameters() -> dict[str, Any]:
    """One branch takes no part on odd ranks, and on no rank in every second step."""
    results = {}
    for name in ("none", "topk", "qsgd", "powersgd", "randomk"):
        model = make_net()
        optimizer = wrap(model, {"compressor": name, **EVERYTHING})
        before = digest(model.right.parameters())
        for i, (x, y) in enumerate(batches(6, hvd.rank())):
            optimizer.zero_grad()
            F.cross_entropy(model(x, right=i % 2 == 0 and hvd.rank() % 2 == 0), y).backward()
            optimizer.step()
        results[name] = {
            "weights": digest(model.parameters()),
            "right moved": digest(model.right.parameters()) != before,
        }
    return results


def not_finite() -> dict[str, Any]:
    """NaN, then infinity, in one tensor on the last rank only; then a good step."""
    results = {}
    for name, bad in itertools.product(compressors, (float("nan"), float("inf"))):
        model = make_net()
        optimizer = wrap(model, {"compressor": name, **EVERYTHING})
        train(model, optimizer, 3)
        engine = optimizer.grace.engine
        guarded = any(p.spec.name == "left.weight" and p.guarded for p in optimizer.grace.plan.parts)
        before = copy.deepcopy(engine.state_dict()["tensors"].get("left.weight"))
        for n, p in model.named_parameters():
            p.grad = torch.full_like(p, 0.01)
            if n == "left.weight" and hvd.rank() == hvd.size() - 1:
                p.grad[3, 5] = bad
        exchange(optimizer)
        after = engine.state_dict()["tensors"].get("left.weight")
        gradients = {n: bool(torch.isfinite(p.grad).all()) for n, p in model.named_parameters()}
        optimizer.zero_grad()
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.01)
        exchange(optimizer)
        results[f"{name}/{bad}"] = {
            "guarded": guarded,
            "bad tensor finite": gradients.pop("left.weight"),
            "others finite": all(gradients.values()),
            "state kept": guarded is False or flat(before) == flat(after),
            "next finite": all(bool(torch.isfinite(p.grad).all()) for p in model.parameters()),
        }
    return results


def flat(states: dict[str, Any] | None) -> str:
    """Hash of all arrays of a tensor's states."""
    if states is None:
        return ""
    return digest(states[kind][key] for kind in ("memory", "compressor") for key in sorted(states[kind]))


def resume() -> dict[str, Any]:
    """10 steps in one go, and 5 steps, a checkpoint through a file, and 5 more in a fresh optimizer."""
    results = {}
    for name in compressors:
        config = {"compressor": name, **EVERYTHING}
        whole = make_net()
        train(whole, wrap(whole, config), 10)
        first = make_net()
        optimizer = wrap(first, config)
        train(first, optimizer, 5)
        file = io.BytesIO()
        torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        second = make_net(seed=1)
        second.load_state_dict(saved["model"])
        optimizer = wrap(second, config)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.load_state_dict(saved["optimizer"])
        train(second, optimizer, 5, start=5)
        ends = [torch.cat([p.detach().reshape(-1) for p in model.parameters()]) for model in (whole, second)]
        results[name] = {
            "weights": digest([ends[1]]),
            "equal": bool((ends[0] == ends[1]).all()),
            "distance": float((ends[0] - ends[1]).abs().max()),
        }
    return results


def foreign_checkpoint() -> dict[str, Any]:
    """Every rank loads the checkpoint of rank 0, as scripts do that save on one rank only."""
    model = make_net()
    optimizer = wrap(model, {"compressor": "topk", **EVERYTHING})
    train(model, optimizer, 3)
    mine = optimizer.state_dict()
    saved = mine if hvd.rank() == 0 else copy.deepcopy(mine)
    saved["grace"]["rank"] = 0
    fresh = wrap(model, {"compressor": "topk", **EVERYTHING})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fresh.load_state_dict(saved)
        messages = [str(w.message) for w in caught]
    state, step = (
        fresh.grace.engine.state_dict()["tensors"]["left.weight"]["memory"]["residual"],
        fresh.grace.engine.step,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain = {k: v for k, v in saved.items() if k != "grace"}
        fresh.load_state_dict(plain)
        without = [str(w.message) for w in caught]
    return {
        "messages": messages,
        "residual": float(state.norm()),
        "step": step,
        "without": without,
    }


def partly_loaded() -> dict[str, str]:
    """Only rank 0 loads a checkpoint, of an earlier step, and the ranks go on."""
    results = {}
    for name in ("topk", "randomk", "powersgd"):
        model = make_net()
        optimizer = wrap(model, {"compressor": name, **EVERYTHING})
        train(model, optimizer, 2)
        state = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, 3)
        if hvd.rank() == 0:
            optimizer.load_state_dict(state)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        try:
            train(model, optimizer, 1)
            results[name] = ""
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results


def gradient_buffers() -> dict[str, Any]:
    """Gradients whose memory belongs to somebody else, before, during and after the exchange."""
    config = {"compressor": "topk", "compress_ratio": 0.1, "bucket_bytes": 0, **EVERYTHING}
    w = torch.nn.Parameter(torch.ones(20, 12))
    position = torch.nn.Parameter(torch.ones(20))
    model = torch.nn.Module()
    model.w, model.position = w, position
    optimizer = wrap(model, config, optimizer=torch.optim.SGD([w, position], lr=0.0))
    generator = torch.Generator().manual_seed(hvd.rank())
    x, target = torch.randn(1, 20, generator=generator), torch.randn(1, 12, generator=generator)
    seen: list[float] = []
    w.register_hook(lambda gradient: seen.append(float(gradient.norm())))
    # The gradient of `position` is a view of what the backward pass still needs for w.
    for _ in range(3):
        optimizer.zero_grad()
        ((x + position.view(1, -1)) @ w * target).sum().backward()
        optimizer.step()
    buffer, given = torch.zeros(20), []
    sent = torch.zeros(20)
    optimizer = wrap(model, config, optimizer=torch.optim.SGD([w, position], lr=0.0))
    for step in range(3):
        buffer.copy_(torch.randn(20, generator=torch.Generator().manual_seed(step)))
        given.append(buffer.clone())
        position.grad, w.grad = buffer.view_as(position), torch.zeros_like(w)
        exchange(optimizer)
        sent += position.grad
        # What the optimizer or the user does with the merged gradient must not reach the residual either.
        position.grad.mul_(100.0)
    residual = optimizer.grace.engine.state_dict()["tensors"]["position"]["memory"]["residual"]
    return {"norms": seen, "lost": float((sent + residual - sum(given)).abs().max()), "size": float(residual.norm())}


def _evaluate(model: Net, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


def closures() -> dict[str, Any]:
    """step(closure) against the same steps without one."""
    weights = []
    for with_closure in (True, False):
        model = make_net()
        optimizer = wrap(model, {"compressor": "topk", "compress_ratio": 0.1, **EVERYTHING})
        losses = []
        for x, y in batches(4, hvd.rank()):
            evaluate = functools.partial(_evaluate, model, optimizer, x, y)
            if with_closure:
                losses.append(float(optimizer.step(evaluate).detach()))
            else:
                losses.append(float(evaluate().detach()))
                optimizer.step()
        weights.append([digest(model.parameters()), losses])
    try:
        wrap(make_net(), {"compressor": "topk"}, optimizer=torch.optim.LBFGS(make_net().parameters()))
        refused = ""
    except Exception as error:
        refused = str(error)
    return {"weights": weights[0][0], "equal": weights[0] == weights[1], "refused": refused}


def synchronized_twice() -> dict[str, Any]:
    """synchronize() and then a plain step(), which Horovod allows, against one exchange; and a load in mid-step."""
    weights = []
    for twice in (False, True):
        model = make_net()
        config = {"compressor": "dgc", "compress_ratio": 0.5, **EVERYTHING}
        optimizer = wrap(model, config, optimizer=sgd(model, momentum=0.0))
        for x, y in batches(4, hvd.rank()):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if twice:
                    optimizer.synchronize()
                optimizer.step()
        weights.append(digest(model.parameters()))
    x, y = next(batches(1, hvd.rank()))
    F.cross_entropy(model(x), y).backward()
    try:
        optimizer.load_state_dict(optimizer.state_dict())
        refused = ""
    except Exception as error:
        refused = str(error)
    optimizer.synchronize()
    optimizer.zero_grad()
    train(model, optimizer, 1)
    return {"weights": weights, "refused": refused, "after": digest(model.parameters())}


def contract_of_horovod() -> dict[str, Any]:
    """What a user of Horovod's optimizer relies on."""
    model = make_net()
    plain = sgd(model)
    optimizer = wrap(model, {"compressor": "topk", "compress_ratio": 0.1, **EVERYTHING}, optimizer=plain)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    x, y = next(batches(1, hvd.rank()))
    F.cross_entropy(model(x), y).backward()
    optimizer.synchronize()
    synchronized = digest(p.grad for p in model.parameters())
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    with optimizer.skip_synchronize():
        optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=False)
    zeroed = all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad(set_to_none=True)
    cleared = all(p.grad is None for p in model.parameters())
    F.cross_entropy(model(x), y).backward()
    try:
        optimizer.zero_grad()
        early = ""
    except Exception as error:
        early = str(error)
    optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(model, optimizer, 2)
    return {
        "instance": isinstance(optimizer, torch.optim.SGD),
        "lr": optimizer.param_groups[0]["lr"],
        "synchronized": synchronized,
        "norm": norm,
        "zeroed": zeroed,
        "cleared": cleared,
        "early": early,
        "weights": digest(model.parameters()),
    }


def mixed_precision() -> dict[str, Any]:
    """A loss scaler whose scaled loss overflows on the last rank only, in the second of three steps."""
    model = make_net()
    optimizer = wrap(model, {"compressor": "topk", "compress_ratio": 0.1, **EVERYTHING})
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    history = []
    for i, (x, y) in enumerate(batches(3, hvd.rank())):
        before = digest(model.parameters())
        residuals = flat(optimizer.grace.engine.state_dict()["tensors"]["left.weight"])
        optimizer.zero_grad()
        overflow = float("inf") if i == 1 and hvd.rank() == hvd.size() - 1 else 1.0
        scaler.scale(F.cross_entropy(model(x), y) * overflow).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        history.append(
            {
                "moved": digest(model.parameters()) != before,
                "residual moved": flat(optimizer.grace.engine.state_dict()["tensors"]["left.weight"]) != residuals,
                "scale": scaler.get_scale(),
                "weights": digest(model.parameters()),
            }
        )
    return {"history": history}


def accumulation() -> dict[str, Any]:
    """backward_passes_per_step=2 against one backward pass of the summed losses."""
    weights = []
    for passes in (2, 1):
        model = make_net().double()
        config = {"compressor": "topk", "compress_ratio": 0.1, **EVERYTHING}
        optimizer = wrap(model, config, backward_passes_per_step=passes)
        data = list(batches(8, hvd.rank()))
        for (x0, y0), (x1, y1) in zip(data[::2], data[1::2], strict=True):
            losses = [F.cross_entropy(model(x.double()), y) for x, y in ((x0, y0), (x1, y1))]
            if passes == 2:
                for loss in losses:
                    loss.backward()
            else:
                (losses[0] + losses[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return {"distance": float((weights[0] - weights[1]).abs().max()), "weights": digest([weights[0]])}


def reductions() -> dict[str, Any]:
    """op=Sum against op=Average of the same gradients, and a predivision that must change nothing."""
    gradients = {}
    for label, arguments in {
        "average": {},
        "sum": {"op": hvd.Sum},
        "predivide": {"gradient_predivide_factor": 4.0},
    }.items():
        model = make_net()
        optimizer = wrap(model, {"compressor": "qsgd", **EVERYTHING}, **arguments)
        x, y = next(batches(1, hvd.rank()))
        F.cross_entropy(model(x), y).backward()
        optimizer.synchronize()
        gradients[label] = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    return {
        "sum": float((gradients["sum"] - gradients["average"] * hvd.size()).abs().max()),
        "predivide": float((gradients["predivide"] - gradients["average"]).abs().max()),
        "size": float(gradients["average"].abs().max()),
    }


def dtypes_and_layouts() -> dict[str, Any]:
    """Half, bfloat16 and double parameters, channels-last and frozen ones, sparse gradients."""
    results = {}
    for name, dtype in itertools.product(compressors, (torch.float16, torch.bfloat16, torch.float64)):
        model = torch.nn.Linear(64, 40, bias=False).to(dtype)
        with torch.no_grad():
            model.weight.fill_(0.5)
        optimizer = wrap(model, {"compressor": name})
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + hvd.rank())
            model.weight.grad = torch.randn(40, 64, generator=generator).to(dtype)
            optimizer.step()
        key = f"{name}/{str(dtype).removeprefix('torch.')}"
        results[key] = {
            "weights": digest(model.parameters()),
            "moved": bool((model.weight != 0.5).any()),
            "finite": bool(torch.isfinite(model.weight).all()),
            "dtype": str(model.weight.grad.dtype) == str(dtype),
        }
    model = make_net().to(memory_format=torch.channels_last)
    model.left.weight.requires_grad_(False)
    frozen = digest([model.left.weight])
    optimizer = wrap(model, {"compressor": "topk", **EVERYTHING})
    train(model, optimizer, 3)
    results["channels last"] = {"weights": digest(model.parameters())}
    results["frozen"] = {
        "kept": digest([model.left.weight]) == frozen,
        "planned": any(p.spec.name == "left.weight" for p in optimizer.grace.plan.parts),
    }
    return results


def sparse_gradients() -> dict[str, Any]:
    """An embedding with sparse gradients: compressed as dense, left to Horovod by a rule, or refused by name."""
    results: dict[str, Any] = {}

    def run(config: dict[str, Any], **arguments: Any) -> str:
        torch.manual_seed(0)
        model = torch.nn.Embedding(64, 32, sparse=True)
        optimizer = wrap(model, config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **arguments)
        for step in range(3):
            model(torch.tensor([step, hvd.rank() + 5, 9])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return digest(model.parameters())

    results["as dense"] = run({"compressor": "topk", "compress_ratio": 0.5}, sparse_as_dense=True)
    results["by rule"] = run({"compressor": "topk", "rules": [{"match": "weight", "compressor": "none"}]})
    try:
        run({"compressor": "topk"})
        results["refused"] = ""
    except Exception as error:
        results["refused"] = f"{type(error).__name__}: {error}"
    return results


def overlap() -> dict[str, Any]:
    """When the first collective of a step starts: before the backward pass ends, or after."""
    model = make_net()
    optimizer = wrap(model, {"compressor": "topk", "bucket_bytes": 0, **EVERYTHING})
    train(model, optimizer, 2)
    x, y = next(batches(1, hvd.rank()))
    optimizer.zero_grad()
    progress: list[int] = []
    with spy(optimizer) as sent:
        # The backward pass reaches the convolution last: what was sent by then was sent while it ran.
        model.conv.weight.register_hook(lambda gradient: progress.append(len(sent)))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {"before the last gradient": progress, "total": len(sent)}


def two_optimizers() -> dict[str, Any]:
    """Two optimizers of one process whose exchanges are under way at the same time, as in a GAN."""
    models = [make_net(seed) for seed in (0, 1)]
    optimizers = [wrap(m, {"compressor": c, **EVERYTHING}) for m, c in zip(models, ("topk", "qsgd"), strict=True)]
    for x, y in batches(4, hvd.rank()):
        sum(F.cross_entropy(m(x), y) for m in models).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {"weights": [digest(m.parameters()) for m in models]}


def refusals() -> dict[str, str]:
    """Arguments that cannot be honoured, and the errors that name them."""
    model = make_net()

    def attempt(**arguments: Any) -> str:
        try:
            wrap(model, arguments.pop("config", {"compressor": "topk"}), **arguments)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    wrapped = wrap(model, {"compressor": "topk"})
    try:
        wrapped.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
        group = ""
    except Exception as error:
        group = str(error)
    return {
        "compression": attempt(compression=hvd.Compression.fp16),
        "groups": attempt(groups=2),
        "num_groups": attempt(num_groups=2),
        "op": attempt(op=hvd.Adasum),
        "typo": attempt(config={"compressor": "topk", "compres_ratio": 0.1}),
        "unknown argument": attempt(backward_passes=2),
        "wrapped": attempt(optimizer=wrapped),
        "not an optimizer": attempt(optimizer=model),
        "process set": attempt(process_set=hvd.ProcessSet([0])),
        "add_param_group": group,
    }


def process_sets() -> dict[str, Any]:
    """Even and odd ranks train apart."""
    mine = PROCESS_SETS[hvd.rank() % 2]
    results = {}
    for name in ("none", "topk", "powersgd", "bf16"):
        model = make_net()
        optimizer = wrap(model, {"compressor": name, **EVERYTHING}, process_set=mine)
        train(model, optimizer, 4)
        results[name] = digest(model.parameters())
    model = make_net()
    optimizer = wrap(model, {"compressor": "topk", "communicator": "broadcast", **EVERYTHING}, process_set=mine)
    train(model, optimizer, 4)
    results["broadcast"] = digest(model.parameters())
    outside = make_net()
    optimizer = wrap(outside, {"compressor": "topk"}, process_set=PROCESS_SETS[0])
    train(outside, optimizer, 2)
    results["only even"] = digest(outside.parameters())
    if hvd.rank() % 2:
        wrap(make_net(), {"compressor": "topk"}, process_set=mine)
    # Odd ranks have built one more optimizer than even ones, which must not matter here.
    together = make_net()
    optimizer = wrap(together, {"compressor": "topk"})
    train(together, optimizer, 2)
    results["together"] = digest(together.parameters())
    return results


def statistics() -> dict[str, Any]:
    """stats() with norms against what an error feedback with a known residual must give."""
    model = make_net()
    optimizer = wrap(model, {"compressor": "topk", "compress_ratio": 0.1, **EVERYTHING})
    train(model, optimizer, 1)
    cheap = optimizer.grace.stats()["tensors"]["left.weight"]
    optimizer.grace.track_norms = True
    train(model, optimizer, 1, start=1)
    tensor = optimizer.grace.stats()["tensors"]["left.weight"]
    return {
        "cheap": [cheap["relative_error"], cheap["residual_norm"]],
        "relative_error": tensor["relative_error"],
        "residual_norm": tensor["residual_norm"],
        "report": optimizer.grace.report(),
    }


def _mismatch(configs: Callable[[int], dict[str, Any]], model: torch.nn.Module) -> dict[str, Any]:
    started = time.monotonic()
    try:
        wrap(model, configs(hvd.rank()))
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - started}
    return {"refused": "", "seconds": time.monotonic() - started}


def different_configurations() -> dict[str, Any]:
    """The last rank has another ratio; then an impossible configuration; then other parameters."""
    last = hvd.size() - 1
    ratio = _mismatch(lambda rank: {"compressor": "topk", "compress_ratio": 0.02 if rank == last else 0.01}, make_net())
    typo = _mismatch(lambda rank: {"compressor": "topkk" if rank == last else "topk"}, make_net())
    net = make_net()
    if hvd.rank() == last:
        net.head = torch.nn.Linear(40, 11)
    parameters = _mismatch(lambda rank: {"compressor": "topk"}, net)
    agreed = _mismatch(lambda rank: {"compressor": "topk"}, make_net())
    return {"ratio": ratio, "typo": typo, "parameters": parameters, "agreed": agreed}
