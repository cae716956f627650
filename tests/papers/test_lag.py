"""Lazily aggregated gradients (LAG, LAQ, CLAG, AQG, AdaCGD): the memory `ef21` with `lazy`."""

from __future__ import annotations

import numpy as np
import pytest

import grace
from tests.papers.common import send

N, XI = 400, 0.1
# Methods whose payload of zeros is short, and what it takes in bytes at most.
EXACT = {"compressor": {"name": "threshold", "threshold": 0.0}, "coding": "smallest"}
QUANTIZED = {"compressor": {"name": "blockwise", "format": "int8", "bucket_size": 0}, "coding": "smallest"}
SPARSE = {"compressor": {"name": "sidco", "compress_ratio": 0.1}}
SIGNS = {"compressor": "efsignsgd", "coding": "smallest"}
# AQG's most bits, and a method that sends 2^(BITS - 1) levels on each side of zero as they are.
BITS = 7
ADAPTIVE = {
    "compressor": {"name": "qsgd", "quantum_num": 2 ** (BITS - 1), "bucket_size": 0},
    "coding": "rans",
    "memory": {"name": "ef21", "lazy": XI, "bits": BITS},
}
# AdaCGD's factor and levels.
ZETA, LEVELS = 0.9, (0.2, 0.5, 0.8)
STEPPED = {"name": "ef21", "lazy": ZETA, "levels": LEVELS}


def started(ranks, **config):
    options = {"memory": {"name": "ef21", "lazy": XI}, "communicator": "allgather", "default_rules": False}
    return grace.Simulation(ranks, {"w": (N,)}, {**options, **config})


def problem(ranks):
    """Return curvatures and optima of the ranks' quadratics. Those of later ranks change faster."""
    random = np.random.default_rng(3)
    return 4.0 ** -np.arange(ranks)[::-1, None] * random.uniform(0.5, 1, (ranks, N)), random.standard_normal((ranks, N))


def descend(simulation, steps, eta=0.5, again=None):
    """Return distances to the optimum, the bytes of each rank in each step, and the merged gradients with their xs."""
    curvature, target = problem(len(simulation.runs))
    best = (curvature * target).sum(axis=0) / curvature.sum(axis=0)
    x, found, sent, merged = np.zeros(N), [], [], []
    for number in range(steps):
        found.append(np.linalg.norm(x - best) / np.linalg.norm(best))
        given = curvature * (x - target)
        mine = [{"w": g.astype(np.float32)} for g in given]
        result = simulation.step(mine)[0]["w"]
        if again is not None and number == steps // 2:
            again.load_state_dict(simulation.state_dict())
        elif again is not None and number > steps // 2:
            assert np.array_equal(again.step(mine)[0]["w"], result)
        sent.append([run.stats()["tensors"]["w"]["wire_bytes"] for run in simulation.runs])
        merged.append((given, result))
        x = x - eta * result
    return np.array(found), np.array(sent), merged


def recursion(compress, gradients):
    """Yield LAG-WK's results, and which ranks upload.

    Equation 7a, where a step moves the weights by eta times the mean: rank i uploads if |g_i - h_i|^2 is above
    xi times the sum of the last ten |mean h|^2.
    """
    held, norms = None, []
    for given in gradients:
        held = np.zeros_like(given) if held is None else held
        news = given - held
        uploads = np.sum(news**2, axis=1) > XI * sum(norms[-10:])
        held = held + np.array([compress(x) if says else 0 * x for x, says in zip(news, uploads, strict=True)])
        result = held.mean(axis=0)
        norms.append(np.sum(result**2))
        yield result, uploads


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize(
    ("config", "numel"),
    # Fewer signs are no shorter if they are coded.
    [(EXACT, N), (QUANTIZED, N), (SPARSE, N), (SIGNS, 4000)],
    ids=["LAG", "LAQ", "CLAG", "LE-SignGD"],
)
def test_the_trigger_and_the_update(config, numel, ranks, monkeypatch):
    monkeypatch.setattr("tests.papers.test_lag.N", numel)
    simulation, again = started(ranks, **config), started(ranks, **config)
    _, sent, merged = descend(simulation, 60, again=again)
    sidco = simulation.plan.assignments[0].compressor
    compress = {
        id(EXACT): lambda x: x,
        id(QUANTIZED): lambda x: np.rint(127 * x / np.abs(x).max()) * np.abs(x).max() / 127,
        id(SIGNS): lambda x: np.abs(x).mean() * np.where(x < 0, -1, 1),
        id(SPARSE): lambda x: send(sidco, x.astype(np.float32)),
    }[id(config)]
    expected, silent = recursion(compress, [given for given, _ in merged]), []
    for (_, result), (reference, uploads), nbytes in zip(merged, expected, sent, strict=True):
        close = np.isclose(result, reference, rtol=1e-3, atol=1e-3 * np.abs(merged[0][1]).max())
        # Signs of differences that are nearly zero may differ.
        assert close.mean() > 0.999
        silent.append(~uploads)
        # A header, and not much more.
        assert (nbytes[~uploads] < 100).all()
        assert (nbytes[uploads] > 100).all()
    silent = np.array(silent)
    assert not silent[0].any()
    assert 0.2 < silent.mean() < 0.95


@pytest.mark.parametrize("config", [EXACT, QUANTIZED], ids=["LAG", "LAQ"])
def test_it_converges_as_gradient_descent_with_fewer_bytes(config):
    """Theorem 1: the linear rate stays. Ranks whose gradients change slowly upload rarely."""
    lazy, sent, _ = descend(started(4, **config), 120)
    eager, all_sent, _ = descend(started(4, **config, memory="ef21"), 120)
    assert eager[-1] < 1e-2
    assert lazy[-1] < 2 * eager[-1]
    assert sent.sum() < 0.5 * all_sent.sum()
    uploads = (sent > 100).mean(axis=0)
    assert uploads[0] < 0.6 * uploads[-1]


def adaptive(gradients):
    """Yield AQG's results, and the bits of each rank: the fewest whose error LAG's trigger lets a silent rank make."""
    held, norms = None, []
    for given in gradients:
        held = np.zeros_like(given) if held is None else held
        allowed, chosen = XI * sum(norms[-10:]), []
        for rank, x in enumerate(given - held):
            largest = np.abs(x).max()
            for bits in range(BITS + 1):
                levels = 2.0 ** (bits - 1)
                kept = np.rint(x / largest * levels) * largest / levels if bits else 0 * x
                if np.sum((x - kept) ** 2) <= allowed:
                    break
            held[rank] += kept
            chosen.append(bits)
        result = held.mean(axis=0)
        norms.append(np.sum(result**2))
        yield result, chosen


@pytest.mark.parametrize("ranks", [3, 4])
def test_bits_change_from_step_to_step(ranks):
    simulation, again = started(ranks, **ADAPTIVE), started(ranks, **ADAPTIVE)
    _, sent, merged = descend(simulation, 60, again=again)
    bits, largest = [], np.abs(merged[0][1]).max()
    for (_, result), (expected, chosen), nbytes in zip(
        merged, adaptive([given for given, _ in merged]), sent, strict=True
    ):
        # Elements in the middle of two levels may differ.
        assert np.isclose(result, expected, rtol=0, atol=2e-3 * largest).mean() > 0.98
        # Of b bits, there are 2^b + 1 levels.
        assert all(nbytes <= N * np.log2(2.0**b + 1) / 8 + 150 for b, nbytes in zip(chosen, nbytes, strict=True))
        bits.append(chosen)
    assert bits[0] == [BITS] * ranks
    assert {0, 1, 2, BITS} <= {b for chosen in bits for b in chosen}
    assert max(map(len, map(set, bits))) > 1


def test_fewer_bits_converge_as_gradient_descent():
    distances, sent, _ = descend(started(4, **ADAPTIVE), 120)
    _, all_sent, _ = descend(started(4, **{**ADAPTIVE, "memory": {"name": "ef21", "lazy": XI}}), 120)
    eager, *_ = descend(started(4, **{**ADAPTIVE, "memory": "ef21"}), 120)
    assert eager[-1] < 1e-2
    assert distances[-1] < 2 * eager[-1]
    silent = sent.min()
    assert silent == all_sent.min()
    assert (sent - silent).sum() < 0.7 * (all_sent - silent).sum()


class Ladder:
    """AdaCGD's three-point compressor on each rank, with the largest elements as levels."""

    def __init__(self, ranks):
        self.held, self.before = np.zeros((ranks, N)), np.zeros((ranks, N))

    def step(self, given):
        """Return the mean of what the ranks hold, and how many elements each has sent."""
        counts = []
        allowed = ZETA * np.sum((given - self.before) ** 2, axis=1)
        for rank, x in enumerate(given - self.held):
            for count in [0, *(int(level * N) for level in LEVELS)]:
                kept = np.zeros(N)
                largest = np.argsort(-np.abs(x), kind="stable")[:count]
                kept[largest] = x[largest]
                if np.sum((x - kept) ** 2) <= allowed[rank]:
                    break
            self.held[rank] += kept
            counts.append(count)
        self.before = given
        return self.held.mean(axis=0), counts


@pytest.mark.parametrize("ranks", [3, 4])
def test_levels_send_the_fewest_elements_that_will_do(ranks):
    simulation, again = (started(ranks, **EXACT, memory=STEPPED) for _ in "ab")
    ladder, random, found = Ladder(ranks), np.random.default_rng(2), []
    for number in range(40):
        # Every fourth step goes towards what is held, so that there is nothing to say.
        towards = -0.6 * (ladder.before - ladder.held)
        moved = (
            towards if number % 4 == 3 else random.standard_normal((ranks, N)) * random.choice([0.1, 1, 3], (ranks, 1))
        )
        mine = [{"w": g.astype(np.float32)} for g in ladder.before + moved]
        expected, counts = ladder.step(ladder.before + moved)
        result = simulation.step(mine)[0]["w"]
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
        sent = [run.stats()["tensors"]["w"]["wire_bytes"] for run in simulation.runs]
        # Four bytes an element, and at most a bitmap of all for the indices.
        assert all(abs(nbytes - 4 * count) < 100 for nbytes, count in zip(sent, counts, strict=True))
        if number == 20:
            again.load_state_dict(simulation.state_dict())
        elif number > 20:
            assert np.array_equal(again.step(mine)[0]["w"], result)
        found += counts
    assert set(found) == {0, *(int(level * N) for level in LEVELS)}


def test_levels_converge_with_fewer_bytes_than_the_finest():
    distances, sent, _ = descend(started(4, **EXACT, memory=STEPPED), 120)
    finest, all_sent, _ = descend(started(4, compressor={"name": "topk", "compress_ratio": 0.8}, memory="ef21"), 120)
    assert finest[-1] < 1e-2
    assert distances[-1] < 2 * finest[-1]
    assert sent.sum() < 0.5 * all_sent.sum()


@pytest.mark.parametrize(
    "options", [{"levels": [0.2]}, {"lazy": 0.1, "levels": [0.2, 0.1]}, {"lazy": 0.1, "levels": [2.0]}]
)
def test_levels_must_ascend(options):
    with pytest.raises(grace.errors.ConfigError, match=r"levels are shares of the elements"):
        grace.make_config(compressor="topk", memory={"name": "ef21", **options})


@pytest.mark.parametrize("options", [{"bits": 4}, {"lazy": 0.1, "bits": 16}, {"lazy": 0.1, "bits": 4, "levels": [0.2]}])
def test_bits_need_a_rule(options):
    with pytest.raises(grace.errors.ConfigError, match=r"bits, the most bits of an element, must lie in 0 to 15"):
        grace.make_config(compressor="qsgd", memory={"name": "ef21", **options})


@pytest.mark.parametrize("lazy", [-0.1, 1.0])
def test_a_factor_that_never_lets_a_rank_speak_is_refused(lazy):
    with pytest.raises(grace.errors.ConfigError, match=r"lazy, the factor of the latest squared norms"):
        grace.make_config(compressor="topk", memory={"name": "ef21", "lazy": lazy})


@pytest.mark.parametrize("config", [QUANTIZED, ADAPTIVE], ids=["LAQ", "AQG"])
def test_nan_is_no_silence(config):
    simulation = started(3, **config)
    x = np.ones(N, np.float32)
    simulation.step([{"w": x}] * 3)
    assert np.isnan(simulation.step([{"w": x}, {"w": x * np.nan}, {"w": x}])[0]["w"]).all()
