"""Methods with a second gradient of each batch: MARINA, QSVRG, VR-DIANA and EC-LSVRG."""

from __future__ import annotations

import numpy as np
import pytest

import grace
from grace.core.errors import ConfigError, IncompatibleError, StepError
from tests.support.steps import CUTS

N, BATCHES, ETA = 300, 6, 0.2
# Rounds to the nearest of 255 numbers, so that NumPy can do the same.
ROUNDED = {"name": "blockwise", "format": "int8", "bucket_size": 0}


def rounded(x):
    largest = np.abs(x).max()
    return np.rint(127 * x / largest) * largest / 127 if largest else x


def top(x):
    return np.where(np.abs(x) >= np.sort(np.abs(x))[-N // 10], x, 0)


class Problem:
    """Least squares: every rank has some batches, each with curvatures and an optimum of its own."""

    def __init__(self, ranks):
        random = np.random.default_rng(5)
        self.curvature = random.uniform(0.5, 1.5, (ranks, BATCHES, N))
        self.target = random.standard_normal((ranks, BATCHES, N))
        self.best = (self.curvature * self.target).sum((0, 1)) / self.curvature.sum((0, 1))

    def gradients(self, w, batches):
        """Return the gradient of a batch on each rank; of all batches for None."""
        every = self.curvature * (w - self.target)
        return every.mean(axis=1) if batches is None else every[np.arange(len(batches)), batches]


def started(ranks, memory, compressor=ROUNDED, **options):
    config = {"compressor": compressor, "memory": memory, "communicator": "allgather", "default_rules": False}
    return grace.Simulation(ranks, {"w": (N,)}, {**config, **options})


def descend(problem, simulation, steps, follow, reload=None):
    """Train, and return distances to the optimum, and of each step whether it is full, its gradients and its result.

    `follow` says whether the second gradient is at the weights of the step before, or of the last full round.
    With `reload`, another simulation goes on from a checkpoint in the middle.
    """
    ranks, random = len(problem.target), np.random.default_rng(7)
    w, other, distances, rows = np.zeros(N), np.zeros(N), [], []
    for number in range(steps):
        distances.append(np.linalg.norm(w - problem.best) / np.linalg.norm(problem.best))
        full, batches = simulation.full_round, random.integers(BATCHES, size=ranks)
        first = problem.gradients(w, None if full else batches)
        second = None if full else problem.gradients(other, batches)
        given, references = (
            [{"w": x.astype(np.float32)} for x in (() if xs is None else xs)] for xs in (first, second)
        )
        result, *others = (merged["w"] for merged in simulation.step(given, references=references or None))
        assert all(np.array_equal(result, each) for each in others)
        if reload is not None and number == steps // 2:
            assert reload.load_state_dict(simulation.state_dict())
        elif reload is not None and number > steps // 2:
            assert reload.full_round is full or number + 1 < steps
            assert np.array_equal(reload.step(given, references=references or None)[0]["w"], result)
        rows.append((full, first, second, result))
        if full or follow:
            other = w
        w = w - ETA * result
    return np.array(distances), rows


def marina(rows):
    """Yield the results of MARINA's Algorithm 1."""
    estimate = None
    for full, first, second, _ in rows:
        estimate = first.mean(0) if full else estimate + np.mean([rounded(x) for x in first - second], axis=0)
        yield estimate


def reduced(rows, common=False):
    """Yield the gradients of the ranks of which SVRG has taken the noise; `common` is the mean as full gradient."""
    fixed = None
    for full, first, second, _ in rows:
        fixed = (first.mean(axis=0) if common else first) if full else fixed
        yield full, first if full else first - second + fixed


def qsvrg(rows):
    for full, xs in reduced(rows, common=True):
        yield np.mean(xs if full else [rounded(x) for x in xs], axis=0)


def vr_diana(rows):
    shifts = 0.0
    for _, xs in reduced(rows):
        sent = np.array([rounded(x) for x in xs - shifts])
        yield np.mean(shifts + sent, axis=0)
        shifts = shifts + 0.5 * sent


def ec_lsvrg(rows):
    errors = 0.0
    for _, xs in reduced(rows):
        sent = np.array([top(x) for x in errors + xs])
        errors = errors + xs - sent
        yield sent.mean(axis=0)


PAPERS = {
    "MARINA": (marina, {"name": "marina", "period": 5}, ROUNDED),
    "QSVRG": (qsvrg, {"name": "lsvrg", "period": 5, "exact": True}, ROUNDED),
    "VR-DIANA": (vr_diana, {"name": "lsvrg", "period": 5, "then": {"name": "diana", "alpha": 0.5}}, ROUNDED),
    "EC-LSVRG": (ec_lsvrg, {"name": "lsvrg", "period": 5, "then": "residual"}, {"name": "topk", "compress_ratio": 0.1}),
}


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("paper", PAPERS)
def test_the_recursion(paper, ranks):
    recursion, memory, compressor = PAPERS[paper]
    simulation, again = (started(ranks, memory, compressor) for _ in range(2))
    _, rows = descend(Problem(ranks), simulation, 40, paper == "MARINA", again)
    assert rows[0][0]
    assert 3 < sum(full for full, *_ in rows) < 20
    for (full, _, _, result), expected in zip(rows, recursion(rows), strict=True):
        np.testing.assert_allclose(result, expected, atol=1e-3 * np.abs(rows[0][-1]).max(), err_msg=str(full))


QSGD = {"name": "qsgd", "quantum_num": 15}


@pytest.mark.parametrize(
    ("memory", "follow"),
    [
        ({"name": "marina", "period": 5}, True),
        ({"name": "lsvrg", "period": 5, "exact": True}, False),
        ({"name": "lsvrg", "period": 5, "then": {"name": "diana", "alpha": 0.2}}, False),
    ],
    ids=["MARINA", "QSVRG", "VR-DIANA"],
)
def test_the_noise_of_batches_vanishes(memory, follow):
    """A linear rate to the optimum, with a constant step, where the gradients of batches stall."""
    distances, _ = descend(Problem(4), started(4, memory, QSGD), 150, follow)
    plain, _ = descend(Problem(4), started(4, "none", QSGD), 150, follow)
    assert distances[-1] < 1e-3 < 0.05 < np.median(plain[-20:])


def test_a_full_round_of_marina_sends_what_is_dense():
    simulation = started(3, {"name": "marina", "period": 3})
    sizes = {True: set(), False: set()}
    for _ in range(12):
        full, ones = simulation.full_round, [{"w": np.ones(N, np.float32)}] * 3
        simulation.step(ones, references=None if full else ones)
        sizes[full].add(simulation.stats()["tensors"]["w"]["wire_bytes"])
    assert sizes[True] == {4 * N}
    assert max(sizes[False]) < 2 * N
    assert "one in 3 steps, on average, is a full round, which sends 1,2" in simulation.report()


SHAPES = {"matrix": (50, 100), "vector": (131,), "long": (3, 5000)}
NEEDING = {"marina": {"name": "marina", "period": 3}, "lsvrg": {"name": "lsvrg", "period": 3, "then": "diana"}}


def draw(size, seed):
    random = np.random.default_rng(seed)
    return [{name: random.standard_normal(s).astype(np.float32) for name, s in SHAPES.items()} for _ in range(size)]


@pytest.mark.parametrize("memory", NEEDING)
@pytest.mark.parametrize("cut", CUTS)
def test_cut_and_joined_tensors_give_the_same(cut, memory):
    """A threshold does not depend on what is compressed as one."""
    config = {"compressor": {"name": "threshold", "threshold": 0.5}, "memory": NEEDING[memory], "default_rules": False}
    apart, joined = (grace.Simulation(3, SHAPES, {**config, **more}) for more in ({"granularity": "layer"}, CUTS[cut]))
    for number in range(6):
        given, others = draw(3, number), None if apart.full_round else draw(3, 100 + number)
        assert apart.full_round == joined.full_round
        one, other = (simulation.step(given, references=others)[1] for simulation in (apart, joined))
        assert all(np.array_equal(one[name], other[name]) for name in SHAPES)


@pytest.mark.parametrize("memory", NEEDING)
def test_a_memory_that_starts_again_compresses_gradients(memory):
    """Up to the next full round nothing is known that a difference could be added to."""
    simulation = started(2, NEEDING[memory], {"name": "threshold", "threshold": 0.0})
    xs = [{"w": np.full(N, x, np.float32)} for x in (1.0, 3.0)]
    simulation.step(xs)
    while simulation.full_round:
        simulation.step(xs)
    for run in simulation.runs:
        run.put_memories({"w": {key: 0 * x for key, x in run.units["w"]["memory"].items()}})
    np.testing.assert_allclose(simulation.step(xs, references=xs)[0]["w"], 2.0)


def test_a_step_that_fails_or_is_not_finite_changes_nothing():
    simulation = started(2, NEEDING["marina"])
    x, bad = {"w": np.ones(N, np.float32)}, {"w": np.full(N, np.inf, np.float32)}
    simulation.step([x, x])
    before = {name: each.copy() for name, each in simulation.runs[0].units["w"]["memory"].items()}
    assert np.isnan(simulation.step([x, x], references=[x, bad])[0]["w"]).all()
    assert all(np.array_equal(each, before[name]) for name, each in simulation.runs[0].units["w"]["memory"].items())


def test_second_gradients_are_asked_for():
    simulation = started(2, NEEDING["marina"])
    xs = [{"w": np.ones(N, np.float32)}] * 2
    with pytest.raises(StepError, match="received one in a full round"):
        simulation.step(xs, references=xs)
    simulation.step(xs)
    with pytest.raises(StepError, match="received none in a step that is none"):
        simulation.step(xs)
    with pytest.raises(StepError, match=r"expected a second gradient of shape \(300,\)"):
        simulation.step(xs, references=[{"w": x["w"][1:]} for x in xs])
    assert simulation.run.step == 1


def test_a_residual_is_no_part_of_a_full_gradient():
    simulation = started(2, "residual", "topk")
    with pytest.raises(IncompatibleError, match="carries a residual of an earlier method"):
        simulation.change(memory="marina")


def test_what_cannot_serve_second_gradients_is_refused():
    for communicator in ("two_shot", {"name": "hierarchical", "local_size": 2}):
        with pytest.raises(IncompatibleError, match="cannot serve"):
            started(4, {"name": "marina"}, QSGD, communicator=communicator)
    with pytest.raises(IncompatibleError, match="cannot serve"):
        started(4, {"name": "marina"}, "topk", communicator="sparse_allreduce")
    with pytest.raises(ConfigError, match="of which there is no second gradient"):
        started(2, "marina", QSGD, outer={"every": 2})
    with pytest.raises(ConfigError, match="must be at least 1, received 0"):
        started(2, {"name": "lsvrg", "period": 0})
    with pytest.raises(ConfigError, match=r"to which .* would add what it keeps"):
        started(2, {"name": "lsvrg", "then": "residual", "exact": True})
    with pytest.raises(ConfigError, match="expected another memory as then"):
        started(2, {"name": "lsvrg", "then": "marina"})
