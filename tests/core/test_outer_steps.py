"""Outer steps: what ranks that step on their own make of their weights when they sync."""

from __future__ import annotations

import copy
import itertools
import re

import numpy as np
import pytest

import grace
from grace.core.communicators.pairs import pair_of
from grace.core.config.outer import PRESETS, OuterSteps, make_outer
from grace.core.config.registry import outer_optimizers
from grace.core.errors import ConfigError, IncompatibleError, StateError, StepError
from grace.core.spec import TensorSpec
from grace.testing.harness import FRAMEWORKS, array, host
from tests.support.registered import every_framework
from tests.support.steps import each

SHAPES = {"a": (24, 10), "scalar": (), "empty": (0, 3), "b": (130,), "c": (7, 5), "d": (16, 16)}
NONE = {"compressor": "none"}
TOPK = {"compressor": "topk", "compress_ratio": 0.1, "default_rules": False}


class Training:
    """Simulated ranks that step by SGD on |w - target|^2 / 2, each with a target of its own that changes.

    The gradients depend on nothing but the rank, the step and the weights, so that a run can go on elsewhere.
    """

    def __init__(
        self, outer, config=NONE, ranks=2, framework="numpy", shapes=SHAPES, rate=0.1, dtype="float32", **options
    ):
        specs = [TensorSpec(name, shape, dtype) for name, shape in shapes.items()]
        self.sim = grace.Simulation(ranks, specs, config, outer=outer, framework=framework, **options)
        self.shapes, self.rate, self.ranks, self.dtype = shapes, rate, ranks, dtype
        self.ops = self.sim.run.ops("cpu")
        start = {name: draw(shape, 99) for name, shape in shapes.items()}
        self.weights = [{name: self.array(x) for name, x in start.items()} for _ in range(ranks)]
        self.start = start
        self.sim.begin(self.weights[0])
        self.steps = 0

    def array(self, x):
        return self.ops.reshape(array(self.ops, x, self.dtype), x.shape)

    def values(self, rank=0):
        return {name: host(self.ops, x).reshape(self.shapes[name]) for name, x in self.weights[rank].items()}

    def inner(self, rank, name, value, step):
        """Return the weights after an inner step."""
        target = draw(self.shapes[name], rank, step)
        return (value - np.float32(self.rate) * (value - target)).astype(self.dtype)

    def step(self, count=1):
        for _ in range(count):
            moved = [
                {name: self.array(self.inner(rank, name, x, self.steps)) for name, x in self.values(rank).items()}
                for rank in range(self.ranks)
            ]
            self.weights = self.sim.step(moved)
            self.steps += 1

    def equal_tensors(self):
        """Return the tensors whose weights all ranks have with the same bits."""
        everyone = [self.values(rank) for rank in range(self.ranks)]
        return {name for name in SHAPES if all(x[name].tobytes() == everyone[0][name].tobytes() for x in everyone)}


def draw(shape, *seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_close(found, expected, tolerance=1e-6):
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=tolerance, atol=tolerance, err_msg=name)


def recursion(training, *, every, lr=1.0, momentum=0.0, nesterov=False, fragments=None, delay=0, alpha=0.0, warmup=0):
    """Yield the weights of all ranks after each step of the published recursion, in float64, without a library."""
    parts = fragments or [list(training.shapes)]
    gap = every // len(parts)
    anchor = {name: np.array(x, np.float64) for name, x in training.start.items()}
    buffer = {name: np.zeros(shape) for name, shape in training.shapes.items()}
    w = [dict(anchor) for _ in range(training.ranks)]
    sent = {}
    for s in itertools.count(1):
        for rank in range(training.ranks):
            for name in training.shapes:
                target = draw(training.shapes[name], rank, s - 1)
                w[rank][name] = w[rank][name] - training.rate * (w[rank][name] - target)
        mean = {name: sum(own[name] for own in w) / training.ranks for name in training.shapes}
        if s <= warmup:
            anchor, w = dict(mean), [dict(mean) for _ in w]
        elif (s - warmup) % gap == 0:
            part = parts[((s - warmup) // gap - 1) % len(parts)]
            sent[s + delay] = {n: anchor[n] - mean[n] for n in part}
        for name, change in sent.pop(s, {}).items():
            buffer[name] = momentum * buffer[name] + change
            direction = change + momentum * buffer[name] if nesterov else buffer[name]
            anchor[name] = anchor[name] - lr * direction
            for rank in range(training.ranks):
                w[rank][name] = alpha * w[rank][name] + (1 - alpha) * anchor[name]
        yield w


def held_back(training):
    """Return what each rank holds back of each tensor."""
    found = []
    for run in training.sim.runs:
        residuals = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        for unit in run.plan.units:
            residual = run.units[unit.spec.name]["memory"].get("residual")
            flat = np.zeros(unit.spec.numel) if residual is None else host(training.ops, residual)
            at = 0
            for piece in unit.pieces:
                residuals[piece.tensor].reshape(-1)[piece.start : piece.stop] += flat[at : at + piece.numel]
                at += piece.numel
        found.append(residuals)
    return found


# --- invariants ---------------------------------------------------------------------------------------------------


@every_framework
def test_a_mean_after_every_step_is_synchronous_sgd(framework):
    """On whole numbers, floats are exact: bit for bit."""
    shapes = {"w": (40, 3)}
    sim = grace.Simulation(4, shapes, NONE, outer={"every": 1}, framework=framework)
    ops = sim.run.ops("cpu")
    synchronous = np.float32(np.arange(120).reshape(40, 3) * 64)
    sim.begin({"w": array(ops, synchronous, "float32")})
    own = [synchronous] * 4
    for step in range(3):
        gradients = [np.float32(np.random.default_rng((rank, step)).integers(-9, 9, (40, 3)) * 4) for rank in range(4)]
        moved = [{"w": array(ops, w - g, "float32")} for w, g in zip(own, gradients, strict=True)]
        synchronous = synchronous - sum(gradients) / np.float32(4)
        own = [host(ops, merged["w"]).reshape(40, 3) for merged in sim.step(moved)]
        assert all((w == synchronous).all() for w in own)


def test_with_adam_a_mean_after_every_step_is_the_mean_of_the_steps_of_adam():
    """The inner optimizer is PyTorch's, and the reference a loop of its own. Adam on mean gradients ends elsewhere."""
    torch = pytest.importorskip("torch")
    ranks, start = 3, draw((20, 3), 99)
    own = [torch.nn.Parameter(torch.from_numpy(start.copy())) for _ in range(ranks)]
    adams = [torch.optim.Adam([p], lr=0.05, betas=(0.8, 0.9), eps=1e-6) for p in own]
    sim = grace.Simulation(ranks, {"w": (20, 3)}, NONE, outer="update")
    sim.begin({"w": start})
    mean, of_mean = start.astype(np.float64), start.astype(np.float64)
    first, second = np.zeros((2, ranks, 20, 3))
    synchronous = np.zeros((2, 20, 3))
    for t in range(1, 9):
        for rank, (p, adam) in enumerate(zip(own, adams, strict=True)):
            p.grad = p.detach() - torch.from_numpy(draw((20, 3), rank, t))
            adam.step()
        for p, new in zip(own, sim.step([{"w": p.detach().numpy().copy()} for p in own]), strict=True):
            p.data = torch.from_numpy(new["w"].copy())
        gradients = np.stack([mean - draw((20, 3), rank, t) for rank in range(ranks)])
        first, second = 0.8 * first + 0.2 * gradients, 0.9 * second + 0.1 * gradients**2
        mean = mean - (0.05 * first / (1 - 0.8**t) / (np.sqrt(second / (1 - 0.9**t)) + 1e-6)).mean(0)
        gradient = of_mean - np.mean([draw((20, 3), rank, t) for rank in range(ranks)], axis=0)
        synchronous = np.stack([0.8 * synchronous[0] + 0.2 * gradient, 0.9 * synchronous[1] + 0.1 * gradient**2])
        corrected = synchronous / np.array([1 - 0.8**t, 1 - 0.9**t]).reshape(2, 1, 1)
        of_mean = of_mean - 0.05 * corrected[0] / (np.sqrt(corrected[1]) + 1e-6)
        assert all(torch.equal(p, own[0]) for p in own)
        np.testing.assert_allclose(own[0].detach().numpy(), mean, atol=2e-6)
    assert abs(mean - of_mean).max() > 0.01


def test_local_sgd_takes_the_mean_of_the_weights():
    training = Training({"every": 3}, ranks=3)
    training.step(2)
    before = [training.values(rank) for rank in range(3)]
    moved = [{name: training.inner(rank, name, x, 2) for name, x in before[rank].items()} for rank in range(3)]
    training.step()
    assert training.equal_tensors() == set(SHAPES)
    assert_close(training.values(), {name: sum(m[name] for m in moved) / 3 for name in SHAPES})


@pytest.mark.parametrize(("nesterov", "ranks"), [(False, 1), (True, 1), (True, 3)])
def test_one_rank_is_lookahead_with_momentum(nesterov, ranks, monkeypatch):
    """So are several ranks with equal data. The reference is PyTorch's own SGD, if it is there."""
    torch = pytest.importorskip("torch")
    outer = {"every": 4, "lr": 0.7, "momentum": 0.9, "nesterov": nesterov}
    training = Training(outer, ranks=ranks)
    inner = training.inner
    monkeypatch.setattr(training, "inner", lambda rank, *given: inner(0, *given))
    slow = {name: torch.nn.Parameter(torch.from_numpy(x.copy())) for name, x in training.start.items()}
    optimizer = torch.optim.SGD(slow.values(), lr=0.7, momentum=0.9, nesterov=nesterov)
    for sync in range(5):
        fast = {name: p.detach().numpy().copy() for name, p in slow.items()}
        for step in range(4 * sync, 4 * sync + 4):
            fast = {name: training.inner(0, name, x, step) for name, x in fast.items()}
        for name, p in slow.items():
            p.grad = p.detach() - torch.from_numpy(np.asarray(fast[name]))
        optimizer.step()
        training.step(4)
        assert_close(training.values(), {name: p.detach().numpy() for name, p in slow.items()})


def test_a_sync_lowers_the_loss():
    """The change of the weights has the sign of a gradient: otherwise a step would climb."""
    shapes = {"w": (50,)}
    sim = grace.Simulation(2, shapes, NONE, outer={"every": 2, "lr": 0.7, "momentum": 0.9, "nesterov": True})
    w = np.float32(np.linspace(1, 3, 50))
    sim.begin({"w": w})
    own = [{"w": w}] * 2
    losses = [float((w**2).sum())]
    for _ in range(3):
        gradient = 2 * own[0]["w"]
        for _ in range(2):
            own = sim.step([{"w": x["w"] - np.float32(0.05) * x["w"]} for x in own])
        assert sim.outers[0].state.kept["w"]["momentum"] @ gradient > 0
        losses.append(float((own[0]["w"] ** 2).sum()))
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 4


@pytest.mark.parametrize(
    ("every", "fragments", "delay", "alpha"),
    [(4, 1, 0, 0.0), (4, 1, 3, 0.0), (6, 3, 0, 0.0), (6, 3, 1, 0.5), (8, 2, 2, 0.0), (4, 1, 2, 1.0), (4, 2, 0, 0.25)],
)
def test_fragments_delay_and_alpha_follow_the_recursion(every, fragments, delay, alpha):
    options = {"every": every, "lr": 0.7, "momentum": 0.5, "nesterov": True}
    training = Training({**options, "fragments": fragments, "delay": delay, "alpha": alpha}, ranks=2)
    parts = training.sim.config.outer.divide(training.sim._specs)
    rows = recursion(training, **options, fragments=parts, delay=delay, alpha=alpha)
    for expected in itertools.islice(rows, 3 * every + 1):
        training.step()
        for rank in range(2):
            assert_close(training.values(rank), expected[rank], 2e-5)


def test_ranks_that_keep_all_of_their_own_weights_never_mix():
    training = Training({"every": 2, "alpha": 1.0})
    training.step(6)
    for rank in range(2):
        alone = dict(training.start)
        for step in range(6):
            alone = {name: training.inner(rank, name, x, step) for name, x in alone.items()}
        assert all((training.values(rank)[name] == x).all() for name, x in alone.items())


@every_framework
@pytest.mark.parametrize("config", [NONE, TOPK], ids=["none", "topk"])
def test_all_ranks_have_the_same_bits_after_a_sync(framework, config):
    outer = {"every": 6, "lr": 0.7, "momentum": 0.9, "fragments": [["a", "scalar"], ["b", "c", "d"], "empty"]}
    training = Training(outer, config, ranks=3, framework=framework)
    met = [set(part) | {"empty"} for part in training.sim.config.outer.divide(training.sim._specs)]
    for step in range(1, 13):
        training.step()
        due = met[(step // 2 - 1) % 3] if step % 2 == 0 else {"empty"}
        assert training.equal_tensors() == due


def test_what_is_held_back_and_what_was_sent_is_what_has_moved():
    """Error feedback loses nothing: per element, over all syncs. In float64, where sums round less than 1e-6."""
    training = Training({"every": 2, "lr": 0.5, "momentum": 0.9}, TOPK, ranks=2, dtype="float64")
    moved = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    arrived = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for _ in range(8):
        training.step()
        anchor = {n: np.array(x).reshape(SHAPES[n]) for n, x in training.sim.outers[0].state.anchors.items()}
        momentum = {n: s["momentum"].reshape(SHAPES[n]) for n, s in training.sim.outers[0].state.kept.items()}
        before = [training.values(rank) for rank in range(2)]
        steps = training.steps
        own = [{n: training.inner(rank, n, x, steps) for n, x in before[rank].items()} for rank in range(2)]
        training.step()
        for name in SHAPES:
            moved[name] += sum(anchor[name].astype(np.float64) - w[name] for w in own) / 2
            new = training.sim.outers[0].state.kept[name]["momentum"].reshape(SHAPES[name])
            arrived[name] += new.astype(np.float64) - 0.9 * momentum[name].astype(np.float64)
    held = held_back(training)
    residuals = {name: sum(of_rank[name] for of_rank in held) / 2 for name in SHAPES}
    assert max(abs(r).max() for r in residuals.values() if r.size) > 0.1
    for name in SHAPES:
        np.testing.assert_allclose(arrived[name] + residuals[name], moved[name], rtol=0, atol=1e-6)


def test_every_tensor_syncs_once_per_period():
    """10,000 random shapes, fragments and delays; the coverage that torchft's buckets lack."""
    rng = np.random.default_rng(5)
    for _ in range(10_000):
        count = int(rng.integers(1, 12))
        fragments = int(rng.integers(1, count + 1))
        gap = int(rng.integers(1, 6))
        outer = OuterSteps(
            outer_optimizers.make("average"),
            every=gap * fragments,
            fragments=fragments,
            delay=int(rng.integers(0, gap)),
            warmup=int(rng.integers(0, 4)),
        )
        sizes = rng.choice([0, 1, 3, 10, 1000, 10**7], count)
        specs = [TensorSpec(f"t{i}", (int(n),) if n != 1 else ()) for i, n in enumerate(sizes)]
        parts = outer.divide(specs)
        assert [name for part in parts for name in part] == [spec.name for spec in specs]
        assert len(parts) == fragments
        assert all(parts)
        assert all(list(outer.fragments_sent(step)) == list(range(fragments)) for step in range(1, outer.warmup + 1))
        start = outer.warmup + int(rng.integers(0, 3)) * outer.every
        sent = [i for step in range(start + 1, start + outer.every + 1) for i in outer.fragments_sent(step)]
        assert sent == list(range(fragments))


def test_the_warm_up_takes_the_mean_after_every_step():
    training = Training({"every": 4, "lr": 0.7, "momentum": 0.9, "fragments": 2, "warmup": 3})
    for _ in range(3):
        training.step()
        assert training.equal_tensors() == set(SHAPES)
    kept = training.sim.outers[0].state.kept
    assert all(not state["momentum"].any() for state in kept.values())
    training.step()
    assert training.equal_tensors() == {"empty"}
    training.step()
    first, _ = training.sim.config.outer.divide(training.sim._specs)
    assert training.equal_tensors() == {*first, "empty"}


def test_a_period_may_begin_later():
    """Post-local SGD: the ranks sync after every step at first, later after every third."""
    training = Training({"every": {4: 3}})
    met = []
    for _ in range(10):
        training.step()
        met.append(training.equal_tensors() == set(SHAPES))
    assert met == [True] * 4 + [False, False, True] * 2


def test_periods_that_grow_by_a_share_of_the_first():
    """After n syncs that follow the warm-up, a period is 2 (1 + n / 2) steps long: 2, 3, 4."""
    training = Training({"every": 2, "adapt": 0.5, "warmup": 1})
    met = []
    for step in range(1, 17):
        training.step()
        met += [step] if training.equal_tensors() == set(SHAPES) else []
    assert met == [1, 3, 6, 10, 15]
    assert training.sim.stats()["outer"]["every"] == 6
    assert [make_outer({"every": 10, "adapt": 0.1}).period(0, rounds) for rounds in (0, 1, 2, 3)] == [10, 11, 12, 13]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_periods_that_follow_the_loss_are_those_of_adacomm(framework):
    """The ranks agree on the mean of their losses, and go on from a checkpoint in the middle of a period."""
    pytest.importorskip(framework)
    options = {"outer": {"every": 6, "adapt": "loss"}, "ranks": 2, "framework": framework}
    training = Training(**options)

    def losses(step):
        return [8.0 * 0.8**step * (1 + 0.5 * apart) for apart in (-1, 1)]

    expected, last, first, period = [], 0, None, 6
    for step in range(1, 31):
        if step == last + period:
            mean = np.mean([losses(s) for s in range(last + 1, step + 1)])
            first = first or mean
            last, period = step, int(np.ceil(np.sqrt(mean / first) * 6))
            expected.append(step)
    met, resumed = [], None
    for step in range(1, 31):
        for run in [training] if resumed is None else [training, resumed]:
            run.sim.note_loss(*losses(step))
            run.step()
        if training.equal_tensors() == set(SHAPES):
            met.append(step)
        if step == 8:
            resumed = Training(**options)
            assert resumed.sim.load_state_dict(copy.deepcopy(training.sim.state_dict()))
            resumed.weights, resumed.steps = list(training.weights), step
    assert met == expected
    assert len(set(np.diff(met))) > 2
    assert all(x.tobytes() == resumed.values()[name].tobytes() for name, x in training.values().items())


def test_losses_must_be_told_where_periods_follow_them():
    training = Training("adacomm")
    with pytest.raises(StepError, match="expected one loss for each of 2 ranks here that take outer steps, received 1"):
        training.sim.note_loss(1.0)
    with pytest.raises(StepError, match="expected one loss for each of 0 ranks"):
        grace.Simulation(2, SHAPES, NONE).note_loss(1.0, 1.0)
    for loss in (0.0, float("nan")):
        with pytest.raises(StepError, match="the periods follow the square root of the loss"):
            training.sim.note_loss(loss, loss)
    training.step(15)
    with pytest.raises(StepError, match=r"none was noted since the last sync; call note_loss\(loss\)"):
        training.step()
    training.sim.note_loss(1.0, 2.0)
    training.step()
    assert training.sim.stats()["outer"]["rounds"] == 1
    assert [training.sim.scalars(rank)["grace/loss"] for rank in range(2)] == [1.0, 2.0]
    saved = copy.deepcopy(training.sim.state_dict())
    saved["ranks"][0]["outer"]["losses"]["first"] = "x"
    with pytest.raises(StateError, match="outer, losses, first"):
        training.sim.load_state_dict(saved)


def test_adam_follows_the_paper():
    training = Training({"every": 2, "optimizer": "adam", "lr": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 1e-2})
    anchor = {name: np.array(x, np.float64) for name, x in training.start.items()}
    first, second = ({name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in "mv")
    for _ in range(4):
        training.step()
        own = [{n: training.inner(r, n, x, training.steps) for n, x in training.values(r).items()} for r in range(2)]
        training.step()
        for name in SHAPES:
            change = anchor[name] - (own[0][name].astype(np.float64) + own[1][name]) / 2
            first[name] = 0.8 * first[name] + 0.2 * change
            second[name] = 0.9 * second[name] + 0.1 * change**2
            anchor[name] = anchor[name] - 0.1 * first[name] / (np.sqrt(second[name]) + 1e-2)
        assert_close(training.values(), anchor, 1e-4)


@pytest.mark.parametrize(("delay", "warmup"), [(0, 0), (0, 2), (1, 0)])
def test_elastic_averaging_follows_the_paper(delay, warmup):
    """Equations 5 and 6: p ranks move towards the centre by alpha, and the centre towards their mean by p alpha."""
    ranks, alpha = 3, 0.2
    training = Training(
        {"every": 2, "optimizer": "elastic", "lr": ranks * alpha, "pull": alpha, "delay": delay, "warmup": warmup},
        ranks=ranks,
    )
    centre = {name: np.array(x, np.float64) for name, x in training.start.items()}
    own, total = [dict(centre) for _ in range(ranks)], {}
    for step in range(1, 12):
        training.step()
        for rank in range(ranks):
            for name, x in own[rank].items():
                own[rank][name] = x - training.rate * (x - draw(SHAPES[name], rank, step - 1))
        if step <= warmup:
            centre = {name: sum(w[name] for w in own) / ranks for name in SHAPES}
            own = [dict(centre) for _ in range(ranks)]
        elif (step - warmup) % 2 == 0:
            total = {name: sum(w[name] - x for w in own) for name, x in centre.items()}
        if total and (step - warmup - delay) % 2 == 0:
            own = [{name: x - alpha * (x - centre[name]) for name, x in w.items()} for w in own]
            centre = {name: x + alpha * total[name] for name, x in centre.items()}
        for rank in range(ranks):
            assert_close(training.values(rank), own[rank], 1e-5)
        assert_close({n: host(training.ops, x) for n, x in training.sim.common_weights().items()}, centre, 1e-5)


@every_framework
@pytest.mark.parametrize("optimizer", list(outer_optimizers))
def test_frameworks_agree_bit_for_bit(optimizer, framework):
    found, expected = (Training({"every": 2, "optimizer": optimizer}, TOPK, framework=f) for f in (framework, "numpy"))
    for training in (found, expected):
        training.step(4)
    assert all(x.tobytes() == expected.values()[name].tobytes() for name, x in found.values().items())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@every_framework
def test_weights_keep_their_dtype(dtype, framework):
    sim = grace.Simulation(
        2, [TensorSpec("w", (40,), dtype)], NONE, outer={"every": 1, "momentum": 0.5}, framework=framework
    )
    ops = sim.run.ops("cpu")
    sim.begin({"w": array(ops, np.zeros(40), dtype)})
    for mean, expected in ((1, 1), (2.5, 3)):
        new = sim.step([{"w": array(ops, np.full(40, mean + apart), dtype)} for apart in (-0.5, 0.5)])
        assert ops.dtype(new[0]["w"]) == dtype
        assert (host(ops, new[0]["w"]).astype(float) == expected).all()
    assert ops.dtype(sim.outers[0].state.kept["w"]["momentum"]) == ("float64" if dtype == "float64" else "float32")


def desloc(state, ranks, syncs, *, betas, proportional):
    """Train Adam on Rosenbrock's function with noisy gradients, and let the weights x sync every 192 steps.

    The moments u and v sync at every so many syncs of x, stay "local", or are "reset" after each. The noise is the same
    everywhere, or proportional to the gradient. Return all x at the end, those of the same recursion without a library,
    and the losses after the syncs of the last third.
    """
    rounds = {} if isinstance(state, str) else state
    specs = [TensorSpec("x", (2,), "float64"), *(TensorSpec(k, (2,), "float64", rounds=n) for k, n in rounds.items())]
    sim = grace.Simulation(ranks, specs, NONE, outer="update")
    rng = np.random.default_rng(0)
    now = {"x": np.tile([-1.0, 1.0], (ranks, 1)), "u": np.zeros((ranks, 2)), "v": np.zeros((ranks, 2))}
    plain = {key: x.copy() for key, x in now.items()}
    losses, t = [], 0
    sim.begin({spec.name: now[spec.name][0] for spec in specs})
    for sync in range(1, syncs + 1):
        for _ in range(192):
            t, noise = t + 1, 1.5 * rng.standard_normal((ranks, 2))
            corrections = 1 - betas[0] ** t, 1 - betas[1] ** t
            for run in (now, plain):
                a, b = run["x"].T
                gradient = np.stack([2 * (a - 1) - 400 * a * (b - a * a), 200 * (b - a * a)], axis=1)
                gradient += noise * gradient if proportional else noise
                run["u"] = betas[0] * run["u"] + (1 - betas[0]) * gradient
                run["v"] = betas[1] * run["v"] + (1 - betas[1]) * gradient**2
                scale = np.sqrt(run["v"] / corrections[1]) + 1e-8
                run["x"] = run["x"] - 0.01 * (run["u"] / corrections[0]) / scale
        met = sim.step([{spec.name: now[spec.name][rank] for spec in specs} for rank in range(ranks)])
        now |= {spec.name: np.array([own[spec.name] for own in met]) for spec in specs}
        due = [key for key, n in {"x": 1, **rounds}.items() if sync % n == 0]
        plain |= {key: np.tile(plain[key].mean(0), (ranks, 1)) for key in due}
        if state == "reset":
            t = 0
            for run in (now, plain):
                run |= {key: np.zeros((ranks, 2)) for key in "uv"}
        a, b = now["x"][0]
        losses.append((1 - a) ** 2 + 100 * (b - a * a) ** 2)
    return now["x"], plain["x"], np.array(losses[-syncs // 3 :])


PERIODS = {"u": 3, "v": 6}


@pytest.mark.parametrize("rounds", [PERIODS, {"u": 1, "v": 4}])
def test_moments_of_adam_that_sync_at_periods_of_their_own_follow_the_recursion(rounds):
    """DES-LOC's example, with noise of the same size everywhere."""
    found, expected, losses = desloc(rounds, 16, 20, betas=(0.95, 0.9999), proportional=False)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
    assert losses.mean() < 1e-3


def test_moments_that_sync_converge_where_those_that_stay_local_oscillate():
    """DES-LOC's example, with noise that is proportional to the gradient; moments that are reset oscillate as well."""
    losses = {
        name: desloc(state, 32, 40, betas=(0.995, 0.9999), proportional=True)[2]
        for name, state in {"periods": PERIODS, "local": "local", "reset": "reset"}.items()
    }
    assert losses["periods"].max() < 1e-6
    for name in ("local", "reset"):
        assert np.median(losses[name]) > 1e-5
        assert min((np.diff(losses[name]) > 0).sum(), (np.diff(losses[name]) < 0).sum()) > 2


@every_framework
@pytest.mark.parametrize("at", [0, 8, 11])
def test_what_accompanies_the_weights_syncs_with_the_last_fragment(at, framework):
    """In a period of 6 steps with two fragments, it is sent after the sixth step, and is applied two steps later."""
    shapes = {"a": (24, 10), "b": (130,)}
    beside = {"often": 1, "rarely": 2}
    outer = {"every": 6, "fragments": 2, "delay": 2, "warmup": 2}
    specs = [TensorSpec(name, shape) for name, shape in shapes.items()]
    specs += [TensorSpec(name, (5,), rounds=rounds) for name, rounds in beside.items()]

    def start():
        return grace.Simulation(2, specs, TOPK, outer=outer, framework=framework)

    def steps(sim, now, count, first):
        for step in range(first, first + count):
            more = [array(ops, np.full(1, rank + 1 + step), "float32") for rank in range(2)]
            moved = [{n: w[n] + more[rank] for n in w} for rank, w in enumerate(now)]
            now = sim.step(moved)
            history.append([{n: float(host(ops, w[n]).reshape(-1)[0]) for n in beside} for w in now])
        return now

    history = []
    sim, shape_of = start(), {spec.name: spec.shape for spec in specs}
    assert "accompanies the weights" in sim.report()
    ops = sim.run.ops("cpu")
    first = {n: ops.reshape(array(ops, np.zeros(s), "float32"), s) for n, s in shape_of.items()}
    sim.begin(first)
    now = steps(sim, [first, first], at, 0)
    saved = copy.deepcopy(sim.state_dict())
    steps(sim, now, 16 - at, at)
    equal = {name: [step + 1 for step, (a, b) in enumerate(history) if a[name] == b[name]] for name in beside}
    # Syncs 1 and 2 are the warm-up, and 3 and 4 are applied two steps after steps 8 and 14.
    assert equal == {"often": [1, 2, 10, 16], "rarely": [2, 16]}
    other, expected = start(), history[at:]
    other.begin(first)
    other.load_state_dict(saved)
    history = []
    steps(other, now, 16 - at, at)
    assert history == expected


@every_framework
def test_a_weighted_mean_over_a_part_of_the_ranks_is_federated_averaging(framework):
    """Against the paper's sum in float64; whoever is out starts from the new weights, too."""
    weight, ranks = [600, 200, 100, 50, 50], 5
    outer = {"every": 2, "participation": 0.5, "weight": weight}
    training = Training(outer, ranks=ranks, framework=framework)
    drawn = []
    for _ in range(12):
        inside = [rank for rank in range(ranks) if training.sim.stats(rank)["outer"]["participates"]]
        training.step()
        own = [
            {n: training.inner(rank, n, x, training.steps) for n, x in training.values(rank).items()}
            for rank in range(ranks)
        ]
        training.step()
        assert training.equal_tensors() == set(SHAPES)
        total = sum(weight[rank] for rank in inside)
        assert_close(
            training.values(),
            {n: sum(weight[r] / total * own[r][n].astype(np.float64) for r in inside) for n in SHAPES},
        )
        drawn.append(tuple(inside))
    assert all(len(inside) == 3 for inside in drawn)
    assert len(set(drawn)) > 4
    assert {rank for inside in drawn for rank in inside} == set(range(ranks))
    other = Training({**outer, "weight": [1.0] * ranks}, ranks=ranks, seed=1)
    other.step()
    assert [other.sim.stats(rank)["outer"]["participates"] for rank in range(ranks)].count(True) == 3


@pytest.mark.parametrize("participation", [0.5, 1.0])
def test_quantized_changes_of_some_or_all_ranks_are_fedpaq_and_pqasgd(participation):
    """Per element, qsgd rounds by at most one of 127 levels of the norm of what a rank has moved."""
    training = Training(
        {"every": 2, "participation": participation}, {"compressor": "qsgd", "default_rules": False}, ranks=4
    )
    for _ in range(4):
        before = training.values()
        inside = [rank for rank in range(4) if training.sim.stats(rank)["outer"]["participates"]]
        training.step()
        own = [{n: training.inner(r, n, x, training.steps) for n, x in training.values(r).items()} for r in range(4)]
        training.step()
        assert training.equal_tensors() == set(SHAPES)
        for name, found in training.values().items():
            bound = sum(np.linalg.norm(own[r][name] - before[name]) for r in inside) / len(inside) / 127
            apart = np.abs(found - sum(own[r][name] for r in inside) / len(inside))
            assert (apart <= bound + 1e-6).all(), name


def mixing(kind, ranks, step):
    """Return the matrix W of cooperative SGD: weight `[i, j]` of what rank j brings in what rank i goes on with."""
    if kind == "average":
        return np.full((ranks, ranks), 1 / ranks)
    matrix = np.zeros((ranks, ranks))
    for rank in range(ranks):
        pair = pair_of(rank, ranks, 0, step)
        matrix[rank, list(pair)] = 1 / len(pair)
    return matrix


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("kind", "outer"),
    [("average", {"every": 3}), ("pairs", {"every": 3, "lr": 1.0, "pairs": True})],
)
def test_local_steps_with_a_mixing_matrix_are_cooperative_sgd(kind, outer, ranks):
    """X <- (X - lr G) W every few steps. Elastic averaging is its third case, and has a test of its own."""
    training = Training(outer, ranks=ranks)
    expected = [{name: x.astype(np.float64) for name, x in training.start.items()} for _ in range(ranks)]
    for step in range(1, 13):
        training.step()
        for rank, own in enumerate(expected):
            for name, x in own.items():
                own[name] = x - training.rate * (x - draw(SHAPES[name], rank, step - 1))
        if step % 3 == 0:
            matrix = mixing(kind, ranks, step // 3 - 1)
            assert np.allclose(matrix.sum(axis=0), 1)
            expected = [
                {name: sum(share * own[name] for share, own in zip(row, expected, strict=True)) for name in SHAPES}
                for row in matrix
            ]
        for rank, own in enumerate(expected):
            assert_close(training.values(rank), own, 1e-5)


def test_rotated_random_parts_of_the_changes_are_those_of_konecny():
    """Local steps, a random mask, a rotation and one bit per value: without bias, and in 1/25 of the bits."""
    method = {
        "name": "chain",
        "sparsifier": {"name": "randomk", "compress_ratio": 0.25},
        "quantizer": {"name": "rotated", "bits": 1},
    }
    config = {"compressor": method, "memory": "none", "default_rules": False}
    sim = grace.Simulation(3, {"w": (64, 32)}, config, outer={"every": 4, "lr": 4.0})
    # The ranks go the same way from every sync, and only the random numbers differ.
    moves = [draw((64, 32), 9) + draw((64, 32), rank) / 2 for rank in range(3)]
    common, runs = np.zeros((64, 32), np.float32), []
    sim.begin({"w": common})
    for _ in range(300):
        ranks = [common] * 3
        for _ in range(4):
            moved = [{"w": w + move / 4} for w, move in zip(ranks, moves, strict=True)]
            ranks = [merged["w"] for merged in sim.step(moved)]
        runs.append(ranks[0] - common)
        common = ranks[0]
    moved, mean, spread = np.mean(moves, axis=0), np.mean(runs, axis=0), np.std(runs, axis=0)
    apart = (mean - moved) / (spread / np.sqrt(len(runs)))
    assert spread.min() > 0
    assert np.abs(apart).max() < 5.5
    assert abs(apart.mean()) < 5 / np.sqrt(apart.size)
    assert np.linalg.norm(mean - moved) < 0.3 * np.linalg.norm(moved)
    assert 25 * sim.stats()["wire_bytes"] < sim.stats()["dense_bytes"]


def test_rare_syncs_send_less_and_go_on_with_the_residual():
    """The co-design of frequency and compression: light at first, then signs of what rare syncs bring."""
    config = {
        "compressor": {"name": "topk", "compress_ratio": 0.25},
        "default_rules": False,
        "granularity": "layer",
        "schedule": [{"step": 4, "compressor": "efsignsgd", "memory": "residual"}],
    }
    training = Training({"every": {0: 2, 8: 6}}, config, ranks=3)
    moved, sizes = {name: np.zeros(shape) for name, shape in SHAPES.items()}, []
    for step in range(1, 27):
        for rank, own in enumerate([training.values(rank) for rank in range(3)]):
            for name, x in own.items():
                moved[name] += (training.inner(rank, name, x, step - 1).astype(np.float64) - x) / 3
        training.step()
        if training.equal_tensors() == set(SHAPES):
            sizes.append((step, training.sim.stats()["wire_bytes"]))
    assert [step for step, _ in sizes] == [2, 4, 6, 8, 14, 20, 26]
    assert sizes[4][1] < 0.3 * sizes[3][1]
    # Nothing is lost at the switch: what all have moved is what has come, and what they hold back with the other sign.
    behind = {name: sum(own[name] for own in held_back(training)) / 3 for name in SHAPES}
    assert max(np.abs(x).max() for x in behind.values() if x.size) > 0.1
    for name, x in training.values().items():
        np.testing.assert_allclose(x - training.start[name], moved[name] + behind[name], rtol=0, atol=1e-5)


@every_framework
def test_who_is_out_keeps_the_residual_and_sends_a_header(framework):
    config = {"compressor": "threshold", "threshold": 0.2, "default_rules": False}
    training = Training({"every": 1, "participation": 0.5}, config, ranks=2, framework=framework, shapes={"w": (40, 8)})
    training.sim.track_norms = True
    sent = {True: [], False: []}
    for _ in range(8):
        inside = [training.sim.stats(rank)["outer"]["participates"] for rank in range(2)]
        held = [
            [host(training.ops, x) for s in run.memories().values() for x in s.values()] for run in training.sim.runs
        ]
        training.step()
        for rank, run in enumerate(training.sim.runs):
            now = [host(training.ops, x) for s in run.memories().values() for x in s.values()]
            same = all((a == b).all() for a, b in zip(held[rank], now, strict=True))
            assert same == (not inside[rank])
            sent[inside[rank]].append(training.sim.stats(rank)["wire_bytes"])
    assert max(sent[False]) <= 16 < min(sent[True])


FEW = {"compressor": "threshold", "threshold": 1e-9, "memory": "none", "default_rules": False}
GATHERED = {"compressor": "none", "communicator": "allgather", "default_rules": False}


@each(framework=["numpy", "torch"], config={"of run-time length": FEW, "of fixed length": GATHERED})
def test_ranks_whose_change_has_other_signs_than_the_last_send_a_header(framework, config):
    """CMFL: the share of equal signs decides, and the mean is over those that send; nothing moves if none does."""
    pytest.importorskip(framework)
    ranks, bound = 3, 0.5
    training = Training({"every": 1, "relevance": bound}, config, ranks=ranks, framework=framework)
    start = {name: np.array(x, np.float64) for name, x in training.start.items()}
    last, counts, resumed = None, [], None
    for step in range(24):
        own = [{n: training.inner(r, n, x, step) for n, x in training.values(r).items()} for r in range(ranks)]
        d = [{n: start[n] - w[n].astype(np.float64) for n in SHAPES} for w in own]
        inside = list(range(ranks))
        if last is not None:
            signs = [[np.sign(x[n]) == np.sign(last[n]) for n in SHAPES] for x in d]
            shares = [np.concatenate([np.ravel(s) for s in of_rank]).mean() for of_rank in signs]
            inside = [rank for rank in range(ranks) if shares[rank] >= bound]
        last = {n: np.mean([d[r][n] for r in inside], axis=0) if inside else np.zeros(SHAPES[n]) for n in SHAPES}
        start = {n: x - last[n] for n, x in start.items()}
        for run in [training] if resumed is None else [training, resumed]:
            run.step()
        assert_close(training.values(), start, 1e-5)
        assert training.equal_tensors() == set(SHAPES)
        sent = [training.sim.stats(rank)["wire_bytes"] for rank in range(ranks)]
        assert all(sent[rank] > 1000 if rank in inside else sent[rank] == 16 for rank in range(ranks)), sent
        counts.append(len(inside))
        start = {name: np.array(x, np.float64) for name, x in training.values().items()}
        if step == 11:
            resumed = Training({"every": 1, "relevance": bound}, config, ranks=ranks, framework=framework)
            assert resumed.sim.load_state_dict(copy.deepcopy(training.sim.state_dict()))
            resumed.weights, resumed.steps = list(training.weights), step + 1
    assert len(set(counts)) > 2, counts
    assert all(x.tobytes() == resumed.values()[name].tobytes() for name, x in training.values().items())
    assert 0 <= training.sim.stats()["outer"]["relevance"] <= 1


class Apart:
    """Ranks that take SGD steps on (1 + rank) |w - rank|^2 / 2, in a simulation and by the paper's Algorithm 1."""

    optimum = sum((1 + rank) * rank for rank in range(3)) / 6

    def __init__(self, config, outer, framework="numpy"):
        self.sim = grace.Simulation(3, {"w": (30,)}, config, outer=outer, framework=framework)
        self.ops = self.sim.run.ops("cpu")
        self.sim.begin({"w": array(self.ops, np.zeros(30), "float32")})
        self.weights = [{"w": array(self.ops, np.zeros(30), "float32")} for _ in range(3)]

    def step(self, lr):
        moved = []
        for rank, own in enumerate(self.weights):
            w, h = (host(self.ops, x["w"]) for x in (own, self.sim.variates(rank)))
            gradient = (1 + rank) * (w - rank) - h
            moved.append({"w": array(self.ops, (w - lr * gradient).astype(np.float32), "float32")})
        self.weights = self.sim.step(moved, lr)

    def values(self, rank=0):
        return host(self.ops, self.weights[rank]["w"])


@every_framework
def test_control_variates_follow_scaffold(framework):
    """With Option II of the paper, c_i of each rank and c of the server, and a learning rate that changes."""
    outer = {"every": 4, "variates": True, "lr": 0.9, "optimizer": "sgd"}
    training = Apart(NONE, outer, framework)
    x, c, own_c = np.zeros(30), np.zeros(30), [np.zeros(30) for _ in range(3)]
    for sync in range(6):
        rates = [0.05 / (1 + sync)] * 3 + [0.02]
        y = [x.copy() for _ in range(3)]
        for lr in rates:
            training.step(lr)
            y = [w - lr * ((1 + i) * (w - i) - own_c[i] + c) for i, w in enumerate(y)]
        new_c = [own_c[i] - c + (x - w) / sum(rates) for i, w in enumerate(y)]
        x = x + 0.9 * (sum(y) / 3 - x)
        c, own_c = c + sum(n - o for n, o in zip(new_c, own_c, strict=True)) / 3, new_c
        np.testing.assert_allclose(training.values(), x, rtol=1e-5, atol=1e-6)
        found = [host(training.ops, training.sim.variates(rank)["w"]) for rank in range(3)]
        np.testing.assert_allclose(found, np.array(own_c) - c, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [NONE, TOPK], ids=["none", "topk"])
def test_with_control_variates_ranks_that_differ_reach_the_optimum_of_all(config):
    """Without them, local steps end elsewhere; with a checkpoint in the middle of a period, the bits are the same."""
    with_variates, resumed, without = (
        Apart(config, {"every": 8, "variates": variates}) for variates in (True, True, False)
    )
    without.sim.variates = lambda rank: {"w": np.float32(0)}
    for step in range(500):
        if step == 101:
            assert resumed.sim.load_state_dict(copy.deepcopy(with_variates.sim.state_dict()))
            resumed.weights = list(with_variates.weights)
        for training in (with_variates, without) if step < 101 else (with_variates, resumed, without):
            training.step(0.05)
    assert np.abs(with_variates.values() - Apart.optimum).max() < 1e-3
    assert np.abs(without.values() - Apart.optimum).max() > 0.02
    assert (resumed.values() == with_variates.values()).all()
    for damage in ({"rates": {"w": -1.0}}, {"variates": {}}, {"rates": 5}):
        saved = copy.deepcopy(with_variates.sim.state_dict())
        saved["ranks"][0]["outer"].update(damage)
        with pytest.raises(StateError, match="checkpoint"):
            with_variates.sim.load_state_dict(saved)


def test_control_variates_need_learning_rates_and_outer_steps():
    with pytest.raises(StepError, match="need the learning rate of each inner step"):
        Training({"every": 2, "variates": True}).step()
    with pytest.raises(StepError, match="variates: no outer steps are taken here"):
        grace.Simulation(2, SHAPES, NONE).variates()
    with pytest.raises(StepError, match="common_weights: no outer steps are taken here"):
        grace.Simulation(2, SHAPES, NONE).common_weights()
    with pytest.raises(ConfigError, match=r"what TopK.* drops would add up in the control variates"):
        Training({"every": 2, "variates": True}, {**TOPK, "memory": "none"})


def test_what_accompanies_weights_needs_outer_steps():
    with pytest.raises(ConfigError, match="tensor 'u': rounds is the number of syncs"):
        grace.Simulation(2, [TensorSpec("w", (3,)), TensorSpec("u", (3,), rounds=1)], NONE)
    with pytest.raises(ConfigError, match=r"does not know the states of an inner optimizer.*rounds=1"):
        grace.Simulation(2, SHAPES, NONE, outer={"every": 2, "state": "average"})


# --- checkpoints, errors and what users see -----------------------------------------------------------------------

STREAMING = {"every": 6, "lr": 0.7, "momentum": 0.9, "nesterov": True, "fragments": 2, "delay": 2, "alpha": 0.5}


DENSE = {"every": 2, "dense_every": 3, "delay": 1}
STOPS = {f"streaming {at}": (STREAMING, at) for at in range(1, 13)}
STOPS |= {f"dense {at}": (DENSE, at) for at in (5, 6, 7, 12)}


@each(framework=FRAMEWORKS, stop=STOPS)
def test_a_run_goes_on_from_anywhere_in_two_periods(framework, stop):
    """In mid-period, with a pending exchange, and in the cycles of fragments and of uncompressed syncs."""
    outer, at = stop
    first, second = (Training(outer, TOPK, framework=framework) for _ in "ab")
    first.step(at)
    saved, weights = copy.deepcopy(first.sim.state_dict()), list(first.weights)
    first.step(7)
    assert second.sim.load_state_dict(saved)
    second.weights, second.steps = weights, at
    second.step(7)
    for rank in range(2):
        for name, x in first.values(rank).items():
            assert x.tobytes() == second.values(rank)[name].tobytes(), name


@pytest.mark.parametrize("at", [5, 6, 12])
def test_other_ranks_go_on_in_the_cycle_of_uncompressed_syncs(at):
    first, other = Training(DENSE, TOPK, ranks=2), Training(DENSE, TOPK, ranks=3)
    first.step(at)
    other.sim.load_state_dict(first.sim.state_dict()["ranks"])
    other.weights, other.steps = [first.weights[0]] * 3, at
    sent = []
    for _ in range(3):
        other.step(2)
        sent.append(other.sim.stats()["wire_bytes"])
    assert sorted(sent)[2] > 3 * sorted(sent)[1]
    assert "one of 3 syncs uncompressed" in other.sim.report()


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 2), (3, 1), (1, 3)])
def test_other_ranks_go_on_with_what_was_held_back_and_was_on_its_way(before, after):
    """From any inner step of two periods."""
    first, exchanges = Training(STREAMING, TOPK, ranks=before), 0
    for at in range(1, 13):
        first.step()
        second = Training(STREAMING, TOPK, ranks=after)
        saved = copy.deepcopy(first.sim.state_dict()["ranks"])
        assert not second.sim.load_state_dict(saved)
        old, new = ([o.state for o in t.sim.outers] for t in (first, second))
        assert {(s.steps, s.synced_at, s.rounds) for s in new} == {(at, old[0].synced_at, old[0].rounds)}
        for state in new:
            assert all((x == old[0].anchors[name]).all() for name, x in state.anchors.items())
        pending = [] if old[0].pending is None else list(old[0].pending.changes)
        exchanges += bool(pending)
        for name in pending:
            means = [sum(s.pending.changes[name] for s in states) / len(states) for states in (old, new)]
            np.testing.assert_allclose(*means, rtol=1e-5, atol=1e-6)
        held = [held_back(t) for t in (first, second)]
        means = [{n: sum(own[n] for own in of_all) / len(of_all) for n in SHAPES} for of_all in held]
        assert_close(means[1], means[0], 1e-5)
        assert at < 6 or max(abs(x).max() for x in means[0].values() if x.size) > 0.05
        second.weights, second.steps = [first.weights[0]] * after, at
        second.step(8)
        assert np.isfinite(second.values()["a"]).all()
    assert exchanges > 4


def test_a_checkpoint_of_another_kind_is_refused():
    local, plain = Training({"every": 2}), grace.Simulation(2, SHAPES, NONE)
    local.step()
    with pytest.raises(StateError, match="was saved by a run with outer steps"):
        plain.load_state_dict(local.sim.state_dict())
    with pytest.raises(StateError, match="expected the state of a run with outer steps"):
        local.sim.load_state_dict(plain.state_dict())
    with pytest.raises(StateError, match=r"outer optimizer of 'a'.*expected float32.*'momentum', received nothing"):
        Training({"every": 2, "momentum": 0.9}).sim.load_state_dict(local.sim.state_dict())
    other = Training({"every": 2}, shapes={**SHAPES, "e": (2,)})
    with pytest.raises(StateError, match="only on one side"):
        other.sim.load_state_dict(local.sim.state_dict())


@pytest.mark.parametrize(
    "damage",
    [
        lambda outer: outer.pop("steps"),
        lambda outer: outer.update(steps=-1),
        lambda outer: outer.update(anchors=None),
        lambda outer: outer["anchors"].pop("a"),
        lambda outer: outer["anchors"].update(a=np.zeros(3, np.float32)),
        lambda outer: outer["anchors"].update(b=np.full(130, np.nan, np.float32)),
        lambda outer: outer["kept"].pop("a"),
        lambda outer: outer["kept"].update(a=5),
        lambda outer: outer["flight"].update(sent="x"),
        lambda outer: outer["flight"].update(changes=7),
        lambda outer: outer["flight"]["changes"].update(unknown=np.zeros(1, np.float32)),
    ],
)
def test_damaged_outer_states_are_refused_and_nothing_is_loaded(damage):
    training = Training(STREAMING, TOPK)
    training.step(3)
    saved = copy.deepcopy(training.sim.state_dict())
    assert saved["ranks"][1]["outer"]["flight"]["sent"] == 3
    damage(saved["ranks"][1]["outer"])
    before = [(outer.state, run.states) for outer, run in zip(training.sim.outers, training.sim.runs, strict=True)]
    with pytest.raises(StateError, match="checkpoint"):
        training.sim.load_state_dict(saved)
    after = [(outer.state, run.states) for outer, run in zip(training.sim.outers, training.sim.runs, strict=True)]
    assert all(a[0] is b[0] for a, b in zip(before, after, strict=True))


def test_a_step_that_fails_leaves_everything_as_it_was():
    """The first rank has received what was on its way when the second one fails; it is sent again."""
    training, twin = (Training(STREAMING, TOPK) for _ in "ab")
    for t in (training, twin):
        t.step(4)
    assert "a" in training.sim.outers[0].state.pending.changes
    wrong = [dict(weights) for weights in training.weights]
    wrong[1]["a"] = np.zeros((3, 3), np.float32)
    with pytest.raises(StepError, match=r"expected weights of float32 and shape \(24, 10\) for tensor 'a'"):
        training.sim.step(wrong)
    with pytest.raises(StepError, match="only on one side"):
        training.sim.step([{"a": w["a"]} for w in wrong])
    for t in (training, twin):
        t.step(6)
    for rank in range(2):
        assert all((x == twin.values(rank)[name]).all() for name, x in training.values(rank).items())
    with pytest.raises(StepError, match="call begin"):
        grace.Simulation(2, SHAPES, NONE, outer="local_sgd").step(training.weights)


@pytest.mark.parametrize("fragments", [1, 2])
def test_each_third_sync_is_uncompressed_and_brings_what_is_held_back(fragments):
    """Here all ranks end with the mean of what they have moved and held back, and hold back nothing more."""
    outer = {"every": 2, "dense_every": 3, "fragments": fragments}
    training = Training(outer, TOPK, ranks=2)
    parts = training.sim.config.outer.divide(training.sim._specs)
    sent = []
    for step in range(1, 19):
        before, held = [training.values(rank) for rank in range(2)], held_back(training)
        anchors = {n: np.array(x).reshape(SHAPES[n]) for n, x in training.sim.outers[0].state.anchors.items()}
        own = [{n: training.inner(r, n, x, step - 1) for n, x in before[r].items()} for r in range(2)]
        training.step()
        if step * fragments % 2:
            continue
        sync, part = divmod(step * fragments // 2 - 1, fragments)
        names = parts[part]
        sent.append(training.sim.stats()["wire_bytes"])
        moved = {n: sum(anchors[n] - own[r][n] + held[r][n] for r in range(2)) / 2 for n in names}
        exact = {n: anchors[n] - moved[n] for n in names}
        now = training.values()
        apart = max(abs(now[n] - exact[n]).max() for n in names if exact[n].size > 20)
        left = max(abs(e[n]).max() for e in held_back(training) for n in names if exact[n].size > 20)
        assert (apart < 1e-6, left == 0) == (sync % 3 == 2,) * 2, step
    assert max(sent) > 3 * min(sent)


@pytest.mark.parametrize("moment", ["send", "finish"])
def test_a_rank_may_be_lost_at_any_step_of_two_periods(moment, monkeypatch):
    """The step is repeated if the rank lives on, and otherwise all go on from the last checkpoint: the same bits."""
    twin = Training(STREAMING, TOPK, ranks=3)
    twin.step(13)
    for at in range(12):
        training = Training(STREAMING, TOPK, ranks=3)
        training.step(at)
        saved, weights = copy.deepcopy(training.sim.state_dict()), list(training.weights)
        lost = training.sim.outers[at % 3]
        with monkeypatch.context() as patch:
            patch.setattr(lost, moment, _lose)
            with pytest.raises(ConnectionError):
                training.step()
        resumed = Training(STREAMING, TOPK, ranks=3)
        assert resumed.sim.load_state_dict(saved)
        resumed.weights, resumed.steps = weights, at
        for alive in (training, resumed):
            alive.step(13 - at)
            for rank in range(3):
                for name, x in twin.values(rank).items():
                    assert x.tobytes() == alive.values(rank)[name].tobytes(), (at, name)


def _lose(*given, **options):
    raise ConnectionError


def test_ranks_compare_what_must_be_equal():
    training = Training({"every": 2, "momentum": 0.5}, check_replicas=1)
    training.step(4)
    state = training.sim.outers[1].state
    moved = {**state.anchors, "a": state.anchors["a"] + np.float32(1)}
    training.sim.outers[1].restore(state._replace(anchors=moved))
    with pytest.raises(grace.errors.MismatchError, match="'a'"):
        training.step(2)


def test_statistics_say_how_far_the_ranks_were_apart():
    training = Training({"every": 4}, TOPK, ranks=2)
    training.sim.track_norms = True
    training.step(3)
    assert training.sim.stats()["outer"] == {
        "steps": 3,
        "rounds": 0,
        "bytes_per_step": 0,
        "distance": None,
        "cosine": None,
        "loss": None,
        "utilisation": None,
        "needed_bandwidth": None,
        "participates": True,
    }
    training.step(5)
    found = training.sim.stats()["outer"]
    assert (found["steps"], found["rounds"]) == (8, 2)
    assert found["bytes_per_step"] == pytest.approx(training.sim.stats()["wire_bytes"] / 4, rel=0.05)
    assert 0 < found["distance"] < 10
    assert 0.2 < found["cosine"] < 1


@pytest.mark.parametrize("delay", [0, 2])
def test_statistics_say_what_share_of_the_time_syncs_take(delay, monkeypatch):
    """By a clock that goes on by 0.2 s in an inner step, and by 0.05 s in a sync."""
    from grace.core.step.step import Step

    now, finish = [0.0], Step.finish

    def slowly(self, *given):
        now[0] += 0.05
        return finish(self, *given)

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(Step, "finish", slowly)
    training = Training({"every": 4, "delay": delay}, ranks=1, shapes={"w": (500,)})
    for step in range(4 + delay):
        now[0] += 0.2
        training.step()
        training.sim.note_loss(step)
    assert training.sim.stats()["outer"]["utilisation"] is None
    for _ in range(8):
        now[0] += 0.2
        training.step()
    found = training.sim.stats()["outer"]
    assert found["utilisation"] == pytest.approx(0.8 / 0.85)
    # A single rank needs no link.
    assert found["needed_bandwidth"] == 0
    assert training.sim.scalars()["grace/utilisation"] == found["utilisation"]
    monkeypatch.undo()
    many = Training({"every": 4, "delay": delay}, ranks=4, shapes={"w": (500,)})
    many.step(4 + delay + 4)
    meter = many.sim.outers[0].record.occupied
    assert (meter.syncs, meter.steps, meter.link_bytes) == (1, 4, 2 * 3 / 4 * many.sim.stats()["wire_bytes"])
    meter._computing, meter._exchanging = 4 * 0.2, 1.0
    allowed = 4 * 0.2 / 19 + delay * 0.2
    needed = many.sim.stats()["outer"]["needed_bandwidth"]
    assert needed == pytest.approx(8 * meter.link_bytes / allowed)


def test_the_log_says_once_what_network_would_suffice(caplog):
    training = Training({"every": 2}, ranks=2)
    with caplog.at_level("INFO", logger="grace"):
        training.step(8)
        assert not caplog.records, "a simulation sends nothing"
        training.sim.outers[0].record.logs_need = True
        training.step(8)
    (record,) = caplog.records
    assert re.fullmatch(
        r"grace: the ranks sync every [\d.e-]+ s, and inner steps take [\d.]+ % of the time\. For 95 %, a link must "
        r"carry [\d.e+]+ [kMG]?bit/s\.",
        record.getMessage(),
    )


def test_a_change_of_options_keeps_outer_steps():
    training = Training({"every": 2, "fragments": 2, "lr": 0.7}, TOPK)
    training.step(4)
    training.sim.change(compress_ratio=0.5)
    training.step(4)
    assert training.sim.config.outer.count == 2
    assert training.sim.stats()["outer"]["rounds"] == 8
    weighted = Training({"every": 2, "weight": [1, 2]}, TOPK)
    with pytest.raises(ConfigError, match="need the mean of what all ranks send"):
        weighted.sim.change(compressor="signsgd")


def test_the_report_says_what_a_preset_stands_for():
    report = Training("streaming_diloco").sim.report()
    assert report.startswith(
        "outer steps: every 100 steps; SGD(lr=0.7, momentum=0.9, nesterov=True); 4 fragments; applied 5 steps later; "
        "0.5 of the rank's own weights kept\n"
    )


@pytest.mark.parametrize("name", PRESETS)
def test_presets_and_tables_say_the_same(name):
    made = make_outer(name)
    assert make_outer(name.replace("_", "-").upper()) == made
    assert make_outer({"preset": name}) == made
    assert make_outer(made.to_config()) == made
    config = grace.make_config(compressor="none", outer=name)
    assert config.outer == made
    assert grace.make_config(config.to_dict()) == config
    assert grace.make_config(config, outer=None).outer is None


def test_options_replace_those_of_a_preset():
    made = make_outer({"preset": "diloco", "every": 30, "momentum": 0.5})
    assert make_outer({"state": {"exp_avg": 3}}).to_config()["state"] == {"exp_avg": 3}
    assert made == OuterSteps(outer_optimizers.make({"name": "sgd", "lr": 0.7, "momentum": 0.5, "nesterov": True}), 30)
    assert make_outer({"preset": "diloco", "optimizer": "average"}) == OuterSteps(outer_optimizers.make("average"), 500)


def test_toml_and_the_environment_say_it(tmp_path, monkeypatch):
    path = tmp_path / "grace.toml"
    path.write_text('compressor = "none"\n[outer]\nlr = 0.7\nfragments = [["a*"], "b"]\n[outer.every]\n100 = 20\n')
    monkeypatch.setenv("GRACE_CONFIG", str(path))
    with pytest.raises(ConfigError, match="every = 1 is no multiple of 2 fragments"):
        grace.make_config()
    path.write_text(path.read_text().replace("100 =", "0 ="))
    made = grace.make_config().outer
    assert (made.phases, made.fragments) == ([(0, 20)], (("a*",), "b"))


@pytest.mark.parametrize(
    ("outer", "told"),
    [
        ({"every": 10, "fragments": 4}, "every = 10 is no multiple of 4 fragments.*set every = 8 or 12"),
        ({"every": 2, "fragments": 4}, "set every = 4 or 4"),
        ({"every": 12, "fragments": 4, "delay": 3}, "delay = 3 must be less than every / fragments = 3"),
        ({"every": 0}, "every must be at least 1"),
        ({"every": {10: 4, 15: 8}}, "changes at step 15, in the middle of a period of 4.*at step 18"),
        ({"every": {}}, "a table of periods by step"),
        ({"every": {"x": 3}}, "a table of periods by step"),
        ({"every": {5: 3}, "warmup": 5}, "leave warmup = 5 out"),
        ({"every": 2.5}, "option 'every': expected"),
        ({"every": 2, "alpha": 1.5}, "alpha is the share"),
        ({"every": 2, "fragments": 0}, "fragments must be at least 1"),
        ({"every": 2, "delay": -1}, "delay is a number of steps"),
        ({"every": 2, "fragments": "a"}, "option 'fragments': expected"),
        ({"every": 2, "evry": 3}, "no option 'evry'. Did you mean 'every'"),
        ({"sync_every": 20}, "'sync_every' is 'every' here"),
        ({"every": 20, "fragment_sync_delay": 2}, "'fragment_sync_delay' is 'delay' here"),
        ({"every": 20, "fragment_update_alpha": 0.5}, "'fragment_update_alpha' is 'alpha' here"),
        ({"every": 20, "num_fragments": 2}, "'num_fragments' is 'fragments' here"),
        ({"semi_sync_method": "diloco"}, "'semi_sync_method' is 'preset' here"),
        ({"every": 20, "optimizer": object}, "expected one of adam, average.*with its options beside it.*'lr': 0.7"),
        ({"every": 20, "error_decay": 0.9}, "'error_decay' is beta of the memory residual"),
        ({"every": 20, "should_quantize": True}, "'should_quantize' is a compressor"),
        ({"every": 20, "reduce": "senders"}, "'reduce' is an option of the communicator: .*'allgather'"),
        ({"every": 20, "clip": "median_norm"}, "a number; received 'median_norm'.*the communicator: .*'senders'"),
        ({"every": 2, "state": "mean"}, "option 'state': expected"),
        ({"every": 2, "state": {"exp_avg": 0}}, r"state\['exp_avg'\] is the number of syncs"),
        ({"every": 2, "buffers": "mean"}, "option 'buffers': expected .*average"),
        ({"every": 2, "optimizer_state_policy": "local"}, "'optimizer_state_policy' is 'state' here"),
        ({"every": 2, "participation": 0.0}, "participation is a share of the ranks"),
        ({"every": 2, "weight": [1, 0]}, "each weight must be positive"),
        ({"every": 2, "weight": [1, 2], "buffers": "first"}, "the first rank may be out of a sync"),
        ({"every": 2, "fraction_fit": 0.1}, "'fraction_fit' is 'participation' here"),
        ({"every": 2, "adapt": -1.0}, "adapt must be at least 0"),
        ({"every": 2, "adapt": "fast"}, "option 'adapt': expected"),
        ({"every": {4: 2}, "adapt": 0.5}, "changes the periods of the model and needs a number as every"),
        ({"every": 4, "variates": True, "delay": 1}, "variates need ranks of equal weight"),
        ({"every": 4, "variates": True, "optimizer": "elastic"}, "variates need ranks of equal weight"),
        ({"every": 2, "dense_every": 1}, "dense_every is the number of syncs"),
        ({"every": 2, "relevance": 1.0}, "relevance is a share of the elements"),
        ({"every": 2, "relevance": 0.5, "weight": [1, 2]}, "who contributes follows from the changes of a rank"),
        ({"every": 2, "lr": 0.0}, "lr must be positive"),
        ({"every": 2, "momentum": 1.0}, r"momentum must lie in \[0, 1\)"),
        ({"every": 2, "nesterov": True}, "nesterov needs momentum"),
        ({"every": 2, "optimizer": "adam", "beta2": 1.0}, "beta2 must lie in"),
        ({"every": 2, "optimizer": "elastic", "pull": 0.0}, r"elastic: pull must lie in \(0, 1\]"),
        ({"every": 2, "optimizer": "adamm"}, "unknown outer optimizer 'adamm'.*Did you mean 'adam'"),
        ({"preset": "dilco"}, "unknown preset 'dilco'.*Did you mean 'diloco'"),
        ({"preset": 5}, "expected the name of a preset"),
        ("diloko", "unknown preset 'diloko'.*Did you mean 'diloco'"),
        (30, "expected the name of a preset or a table"),
    ],
)
def test_errors_say_what_to_write(outer, told):
    with pytest.raises(ConfigError, match=f"(?s){told}"):
        make_outer(outer)


def test_fragments_must_have_all_tensors():
    with pytest.raises(ConfigError, match="no fragment has the tensor 'd'"):
        Training({"every": 2, "fragments": [["a", "scalar", "empty"], "[bc]"]})
    with pytest.raises(ConfigError, match="the fragment 'x' has no tensor"):
        Training({"every": 2, "fragments": ["*", "x"]})
    with pytest.raises(ConfigError, match="7 fragments need as many tensors, and there are 6"):
        Training({"every": 7, "fragments": 7})
    named = make_outer({"every": 2, "fragments": ["layers.1", "*"]})
    specs = [TensorSpec(name, (2,)) for name in ("layers.1.w", "layers.10.w", "layers.1.norm.b")]
    assert named.divide(specs) == [["layers.1.w", "layers.1.norm.b"], ["layers.10.w"]]


def test_what_cannot_be_combined_is_refused():
    with pytest.raises(ConfigError, match="average the change of the weights"):
        Training({"every": 2}, average=False)
    with pytest.raises(ConfigError, match="already includes the learning rate"):
        Training({"every": 2}, {"compressor": "topk", "lr_correction": True})
    with pytest.raises(ConfigError, match="outer has 3 numbers as weight, and there are 2 ranks"):
        Training({"every": 2, "weight": [1, 2, 3]})
    with pytest.raises(ConfigError, match="with participation below 1 or relevance, some ranks contribute"):
        Training({"every": 2, "participation": 0.5}, {"compressor": "topk", "memory": "diana"})
    with pytest.raises(ConfigError, match=r"need the mean of what all ranks send, and SignSGD.* takes none"):
        Training({"every": 2, "weight": [1, 2]}, {"compressor": "signsgd"})
    with pytest.raises(ConfigError, match="dense_every = 3 is a schedule that begins again"):
        Training({"every": 2, "dense_every": 3}, {**TOPK, "schedule": [{"step": 5, "compress_ratio": 0.2}]})
    with pytest.raises(ConfigError, match="or dense_every of outer steps, and its next stage"):
        Training({"every": 2, "dense_every": 3}, TOPK).sim.change(compress_ratio=0.2)
    dgc = {**TOPK, "memory": "dgc", "clipping_norm": "all", "gradient_clipping": 1.0}
    with pytest.raises(IncompatibleError, match="fragments of outer steps"):
        Training({"every": 2, "fragments": 2}, dgc)
