"""Outer steps whose compressed changes correct weights or gradients: CSER, FedCOMGATE, SCALLION, SCAFCOM."""

import copy

import numpy as np
import pytest

import grace
from grace.core.errors import ConfigError
from grace.testing.harness import array, host
from tests.core.test_outer_steps import SHAPES, Training, assert_close, draw

TOPK = {"compressor": "topk", "compress_ratio": 0.1, "default_rules": False, "granularity": "layer"}
frameworks_and_ranks = pytest.mark.parametrize(
    ("framework", "ranks"), [("numpy", 2), ("numpy", 3), ("numpy", 4), ("torch", 3)]
)
LOCAL = {"every": 2, "dense_every": 3, "local_error": True}


def largest(x, count):
    """Return x with all but its largest elements set to zero."""
    kept, flat = np.zeros(x.size), x.reshape(-1)
    chosen = np.argsort(-np.abs(flat), kind="stable")[:count]
    kept[chosen] = flat[chosen]
    return kept.reshape(x.shape)


@frameworks_and_ranks
def test_errors_that_stay_in_the_weights_follow_cser(framework, ranks):
    """The error of a rank is how far its weights are from the common ones, until an uncompressed sync resets it."""
    pytest.importorskip(framework)
    training, resumed = (Training(LOCAL, {**TOPK, "memory": "none"}, ranks, framework) for _ in "ab")
    common = {name: x.astype(np.float64) for name, x in training.start.items()}
    weights = [dict(common) for _ in range(ranks)]
    for step in range(1, 15):
        for each in [training, resumed] if step > 5 else [training]:
            each.step()
        for rank, own in enumerate(weights):
            for name, x in own.items():
                own[name] = x - training.rate * (x - draw(SHAPES[name], rank, step - 1))
        for name, x in common.items() if step % 2 == 0 else ():
            moved = [x - own[name] for own in weights]
            sent = moved if step % 6 == 0 else [largest(d, max(1, int(0.1 * d.size))) for d in moved]
            common[name] = x - sum(sent) / ranks
            for own, d, c in zip(weights, moved, sent, strict=True):
                own[name] = common[name] - (d - c)
        for rank, own in enumerate(weights):
            assert_close(training.values(rank), own, 1e-5)
        if step == 5:
            assert resumed.sim.load_state_dict(copy.deepcopy(training.sim.state_dict()))
            resumed.weights, resumed.steps = list(training.weights), step
        everyone = set(SHAPES) if step % 6 == 0 else {"empty"} | ({"scalar"} if step % 2 == 0 else set())
        assert training.equal_tensors() == everyone
    for rank in range(ranks):
        assert all(x.tobytes() == resumed.values(rank)[name].tobytes() for name, x in training.values(rank).items())
    assert not any(memory for run in training.sim.runs for memory in run.memories().values())


def test_what_would_keep_an_error_twice_is_refused(caplog):
    with pytest.raises(ConfigError, match=r"stays in the weights, and Residual.* would keep it as well"):
        Training(LOCAL, TOPK)
    with pytest.raises(
        ConfigError, match=r"local_error need the mean of what all ranks send, and SignSGD.* takes none"
    ):
        Training({"every": 2, "local_error": True}, {"compressor": "signsgd"})
    for other in ({"delay": 1}, {"alpha": 0.5}, {"optimizer": "elastic"}, {"participation": 0.5}):
        with pytest.raises(ConfigError, match="local_error needs syncs of all ranks with equal weights"):
            grace.make_config(TOPK, outer={"every": 2, "local_error": True, **other})
    # Without local errors, a report warns that what is dropped is lost.
    none = {**TOPK, "memory": "none"}
    assert [t.sim.run.plan.warnings != () for t in (Training({"every": 2}, none), Training(LOCAL, none))] == [
        True,
        False,
    ]
    assert "stays in the rank's own weights" in str(grace.make_config(none, outer=LOCAL).outer)


class Apart:
    """Ranks that take SGD steps on (1 + r) |w - a_r|^2 / 2, corrected by their control variates."""

    def __init__(self, config, ranks, framework="numpy", **outer):
        config = {**config, "default_rules": False}
        self.sim = grace.Simulation(
            ranks, {"w": (30,)}, config, outer={"every": 4, "variates": True, **outer}, framework=framework
        )
        self.ops = self.sim.run.ops("cpu")
        start = {"w": array(self.ops, np.zeros(30), "float32")}
        self.sim.begin(start)
        self.weights = [start] * ranks

    @staticmethod
    def gradient(rank, w):
        return (1 + rank) * (w - rank * draw((30,), 3, rank))

    @staticmethod
    def optimum(ranks):
        return sum((1 + r) * r * draw((30,), 3, r) for r in range(ranks)) / sum(1 + r for r in range(ranks))

    def step(self, lr):
        moved = []
        for rank, own in enumerate(self.weights):
            w, h = (host(self.ops, x["w"]) for x in (own, self.sim.variates(rank)))
            new = w - lr * (self.gradient(rank, w) - h)
            moved.append({"w": array(self.ops, new.astype(np.float32), "float32")})
        self.weights = self.sim.step(moved, lr)

    def values(self):
        return host(self.ops, self.weights[0]["w"])

    def variates(self):
        return np.array([host(self.ops, self.sim.variates(rank)["w"]) for rank in range(len(self.weights))])


RANDOM = {"compressor": "randomk", "compress_ratio": 0.5, "scaled": True}
CONFIGS = {
    "fedcomgate": {**RANDOM, "memory": "none"},
    "scallion": {**RANDOM, "memory": {"name": "diana", "alpha": 0.25, "damped": True}},
    "scafcom": {"compressor": "topk", "compress_ratio": 0.2, "memory": {"name": "ef21", "momentum": 0.7}},
}


@frameworks_and_ranks
@pytest.mark.parametrize("method", list(CONFIGS))
def test_control_variates_of_compressed_changes_follow_the_papers(framework, ranks, method):
    """In the papers' variables: delta of each rank, or c of each rank and of the server, in units of gradients.

    The coordinates that randomk has drawn are seen in what has changed.
    """
    pytest.importorskip(framework)
    lr, steps = 0.02, 4
    training, resumed = (Apart(CONFIGS[method], ranks, framework) for _ in "ab")
    x, server, none = np.zeros(30), np.zeros(30), [np.zeros(30)] * ranks
    c, running = list(none), list(none)
    for sync in range(8):
        before = training.values()
        y = [x] * ranks
        for step in range(steps):
            y = [w - lr * (training.gradient(r, w) - c[r] + server) for r, w in enumerate(y)]
            for each in [training, resumed] if (sync, step) > (3, 1) else [training]:
                each.step(lr)
            if (sync, step) == (3, 1):
                assert resumed.sim.load_state_dict(copy.deepcopy(training.sim.state_dict()))
                resumed.weights = list(training.weights)
        mean_change = (before - training.values()) / (steps * lr)
        # Means of what the ranks have subtracted, and of their gradients.
        own = [(x - w) / (steps * lr) for w in y]
        gradients = [d + mine - server for d, mine in zip(own, c, strict=True)]
        if method == "fedcomgate":
            sent = [2 * d * (mean_change != 0) for d in own]
            change = sum(sent) / ranks
            c = [mine + q - change for mine, q in zip(c, sent, strict=True)]
        else:
            pace = 1.0
            if method == "scallion":
                drawn, pace = np.abs(mean_change - server) > 1e-5, 0.25
                assert drawn.sum() == 15
                sent = [2 * (g - mine) * drawn for g, mine in zip(gradients, c, strict=True)]
            else:
                running = [0.7 * v + 0.3 * g for v, g in zip(running, gradients, strict=True)]
                sent = [largest(v - mine, 6) for v, mine in zip(running, c, strict=True)]
            change = server + pace * sum(sent) / ranks
            c = [mine + pace * q for mine, q in zip(c, sent, strict=True)]
            server = server + pace * sum(sent) / ranks
        x = x - steps * lr * change
        np.testing.assert_allclose(training.values(), x, rtol=1e-4, atol=2e-5)
        np.testing.assert_allclose(training.variates(), np.array(c) - server, rtol=1e-4, atol=2e-4)
    assert (training.values() == resumed.values()).all()
    assert (training.variates() == resumed.variates()).all()


IN_PART = {"scaffold": {"compressor": "none"}, "scallion": CONFIGS["scallion"], "scafcom": CONFIGS["scafcom"]}


@frameworks_and_ranks
@pytest.mark.parametrize("method", list(IN_PART))
def test_control_variates_follow_the_papers_where_a_part_of_the_ranks_contributes(framework, ranks, method):
    """c_i of a rank changes if it is inside, c of the server by the sum of the changes over all N ranks.

    The weights move by c and the mean over the ranks inside.
    """
    pytest.importorskip(framework)
    lr, steps = 0.02, 4
    training, resumed = (Apart(IN_PART[method], ranks, framework, participation=0.6) for _ in "ab")
    x, server = np.zeros(30), np.zeros(30)
    c, running, drawn_ranks = [np.zeros(30)] * ranks, [np.zeros(30)] * ranks, set()
    for sync in range(10):
        before = training.values()
        inside = [rank for rank in range(ranks) if training.sim.stats(rank)["outer"]["participates"]]
        drawn_ranks.add(tuple(inside))
        y = [x] * ranks
        for step in range(steps):
            y = [w - lr * (training.gradient(r, w) - c[r] + server) for r, w in enumerate(y)]
            for each in [training, resumed] if (sync, step) > (3, 1) else [training]:
                each.step(lr)
            if (sync, step) == (3, 1):
                assert resumed.sim.load_state_dict(copy.deepcopy(training.sim.state_dict()))
                resumed.weights = list(training.weights)
        changes, pace = [np.zeros(30)] * ranks, 1.0
        if method == "scallion":
            pace = 0.25
            drawn = np.abs((before - training.values()) / (steps * lr) - server) > 1e-5
            assert drawn.sum() == 15
        for r in inside:
            gradient = (x - y[r]) / (steps * lr) + c[r] - server
            if method == "scafcom":
                running[r] = 0.7 * running[r] + 0.3 * gradient
                changes[r] = largest(running[r] - c[r], 6)
            else:
                changes[r] = (2 * drawn if method == "scallion" else 1) * (gradient - c[r])
        x = x - steps * lr * (server + pace * sum(changes) / len(inside))
        c = [mine + pace * change for mine, change in zip(c, changes, strict=True)]
        server = server + pace * sum(changes) / ranks
        np.testing.assert_allclose(training.values(), x, rtol=1e-4, atol=4e-5)
        np.testing.assert_allclose(training.variates(), np.array(c) - server, rtol=1e-3, atol=1e-3)
    assert len(drawn_ranks) > 1 or ranks == 2
    for each in (training.values, training.variates):
        assert (each() == getattr(resumed, each.__name__)()).all()


@pytest.mark.parametrize("method", [*CONFIGS, *(f"{method}, in part" for method in IN_PART)])
def test_with_compressed_control_variates_ranks_that_differ_reach_the_optimum_of_all(method):
    method, _, part = method.partition(", ")
    outer = {"participation": 0.6} if part else {}
    training, without = (Apart({**CONFIGS, **IN_PART}[method], 3, **outer) for _ in "ab")
    without.sim.variates = lambda rank: {"w": np.float32(0)}
    for _ in range(520 if part else 320):
        training.step(0.05)
        without.step(0.05)
    assert np.abs(training.values() - Apart.optimum(3)).max() < 0.01
    assert np.abs(without.values() - Apart.optimum(3)).max() > 0.05


def test_control_variates_need_an_error_that_cannot_add_up():
    for config in ({"compressor": "topk", "memory": "none"}, {"compressor": "qsgd", "memory": "momentum"}):
        with pytest.raises(
            ConfigError, match=r"drops would add up in the control variates; use the memory residual, ef21"
        ):
            Apart(config, 2)
    with pytest.raises(ConfigError, match=r"memory ef21: momentum must lie in \[0, 1\)"):
        Apart({"compressor": "topk", "memory": {"name": "ef21", "momentum": 1.0}}, 2)
