"""Outer steps in pairs of ranks: NoLoCo."""

import copy

import numpy as np
import pytest

import grace
from grace.core.communicators.pairs import pair_of
from grace.core.errors import ConfigError, StateError
from tests.core.test_outer_steps import NONE, SHAPES, TOPK, Training, assert_close, draw

NOLOCO = {"preset": "noloco", "every": 4}


def test_pairs_are_drawn_for_each_sync():
    for size in range(1, 8):
        drawn = [[pair_of(rank, size, 0, step) for rank in range(size)] for step in range(60)]
        for pairs in drawn:
            # Each rank is in one pair, and of an odd number one is alone.
            assert all(rank in pair and pair in [pairs[other] for other in pair] for rank, pair in enumerate(pairs))
            assert sorted(map(len, set(pairs))) == [1] * (size % 2) + [2] * (size // 2)
        # Everybody syncs with everybody.
        assert {other for pairs in drawn for other in pairs[0]} == set(range(size))
    assert [pair_of(0, 6, 0, step) for step in range(9)] != [pair_of(0, 6, 1, step) for step in range(9)]


def recursion(training, steps, fragments, delay, seed):
    """Return the weights of all ranks by the recursion of NoLoCo, with its gamma equal to beta, in float64."""
    parts = training.sim.config.outer.divide(training.sim._specs)
    ranks, gap = training.ranks, 4 // fragments
    slow = [{name: x.astype(np.float64) for name, x in training.start.items()} for _ in range(ranks)]
    delta = [{name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(ranks)]
    fast, arriving = [dict(x) for x in slow], {}
    for step in range(1, steps + 1):
        for rank, own in enumerate(fast):
            for name, x in own.items():
                own[name] = x - training.rate * (x - draw(SHAPES[name], rank, step - 1))
        if step % gap == 0:
            arriving[step + delay] = step // gap - 1, [dict(x) for x in fast]
        sync, sent = arriving.pop(step, (0, None))
        for rank in range(ranks) if sent else ():
            pair = pair_of(rank, ranks, seed, sync // fragments)
            for name in parts[sync % fragments]:
                moved = sum(sent[r][name] - slow[r][name] for r in pair) / len(pair)
                apart = slow[rank][name] - sum(slow[r][name] for r in pair) / len(pair)
                delta[rank][name] = 0.3 * delta[rank][name] + 0.7 * moved - 0.7 * apart
        if sent:
            for rank in range(ranks):
                for name in parts[sync % fragments]:
                    slow[rank][name] = fast[rank][name] = slow[rank][name] + delta[rank][name]
    return fast


@pytest.mark.parametrize(
    ("framework", "ranks", "fragments", "delay"),
    [*(("numpy", ranks, 1, 0) for ranks in (1, 2, 3, 4)), ("numpy", 4, 2, 1), ("torch", 3, 2, 1)],
    ids=str,
)
def test_ranks_that_sync_in_pairs_follow_noloco(framework, ranks, fragments, delay):
    """With a checkpoint in the middle of a period, of a pending exchange if there is one; each rank loads its own."""
    pytest.importorskip(framework)
    outer = {**NOLOCO, "fragments": fragments, "delay": delay}
    training, resumed = (Training(outer, NONE, ranks, framework, seed=5) for _ in "ab")
    for step in range(1, 23):
        for each in [training, resumed] if step > 10 else [training]:
            each.step()
        if step == 10:
            assert resumed.sim.load_state_dict(copy.deepcopy(training.sim.state_dict()))
            resumed.weights, resumed.steps = list(training.weights), step
        if step in (4, 9, 16, 22):
            for rank, expected in enumerate(recursion(training, step, fragments, delay, 5)):
                assert_close(training.values(rank), expected, 1e-5)
    for rank in range(ranks):
        assert all(x.tobytes() == resumed.values(rank)[name].tobytes() for name, x in training.values(rank).items())
    training.sim.check_replicas()
    if ranks == 4 and fragments == 1:
        # A rank sends its weights once, to one other.
        assert training.sim.stats()["collectives"]["alltoall"] <= 4 * sum(x.size for x in training.start.values()) + 256


def test_pairs_come_together():
    """As the ranks have targets of their own, only syncs keep them together; in pairs less than all at once."""
    outer = {"every": 2, "lr": 0.7, "momentum": 0.3}
    spread = {}
    for pairs in (True, False):
        training = Training({**outer, "pairs": pairs}, NONE, ranks=6, rate=0.02)
        training.sim.track_norms = True
        training.step(60)
        models = np.array([np.concatenate([x.ravel() for x in training.values(r).values()]) for r in range(6)])
        spread[pairs] = np.linalg.norm(models - models.mean(axis=0)) / np.linalg.norm(models)
        assert 0 < training.sim.stats()["outer"]["cosine"] <= 1
    assert spread[False] < 1e-6 < 0.01 < spread[True] < 0.5


def test_what_pairs_cannot_do_is_refused():
    for other in ({"alpha": 0.5}, {"optimizer": "elastic"}, {"warmup": 4}, {"dense_every": 2}, {"weight": [1, 2]}):
        with pytest.raises(ConfigError, match="with pairs, there is no mean of all ranks"):
            grace.make_config(NONE, outer={"every": 4, "pairs": True, **other})
    with pytest.raises(ConfigError, match="variates need ranks of equal weight"):
        grace.make_config(NONE, outer={"every": 4, "pairs": True, "variates": True})
    for other in ({"adapt": "loss"}, {"buffers": "first"}):
        with pytest.raises(ConfigError, match="with pairs, a rank knows the loss and the buffers of one other only"):
            grace.make_config(NONE, outer={"every": 4, "pairs": True, **other})
    with pytest.raises(ConfigError, match=r"with pairs, the ranks exchange weights.*received TopK"):
        Training(NOLOCO, TOPK)
    first = Training(NOLOCO, NONE, ranks=2)
    first.step(5)
    with pytest.raises(StateError, match="expected those of 3 ranks, received 2"):
        Training(NOLOCO, NONE, ranks=3).sim.load_state_dict(first.sim.state_dict())
    assert "in pairs" in str(grace.make_config(NONE, outer=NOLOCO).outer)
    assert "pairs" in first.sim.plan.report()
