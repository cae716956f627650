"""Yu et al., "GradiVeQ", NeurIPS 2018: principal components of slices, learnt from uncompressed steps."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.config.registry import communicators
from grace.core.errors import ConfigError
from grace.core.ops import get_ops
from grace.core.session.simulation import Simulation
from grace.testing import traced
from grace.testing.harness import array, exchange, host
from tests.papers.common import make, normal, simulate, spec, state, step
from tests.support.registered import every_framework
from tests.support.steps import simulate as simulate_in

K, D = 16, 3
SHAPE = (20, 24)  # 30 slices
CYCLE = {"slice_size": K, "components": D, "training_steps": 2, "compressed_steps": 3}


def slices(x: np.ndarray) -> np.ndarray:
    flat = np.asarray(x, np.float64).ravel()
    return np.concatenate([flat, np.zeros(-len(flat) % K)]).reshape(-1, K)


def flat(rows: np.ndarray, shape=SHAPE) -> np.ndarray:
    return rows.ravel()[: np.prod(shape)].reshape(shape)


def correlated(seed: int, dimension: int = K, shape=SHAPE) -> np.ndarray:
    """Return a gradient whose slices lie in a subspace of this dimension. The subspace is equal for every seed."""
    count = -(-np.prod(shape) // K)
    directions = np.linalg.qr(np.random.default_rng(99).standard_normal((K, K)))[0][:, :dimension]
    strength = 0.5 ** np.arange(dimension)
    rows = normal(count * dimension, seed).reshape(count, dimension) * strength @ directions.T
    return flat(rows, shape).astype(np.float32)


def leading(gradients, components: int = D) -> np.ndarray:
    moment = sum(slices(g).T @ slices(g) for g in gradients)
    return np.linalg.eigh(moment)[1][:, ::-1][:, :components]


def relative_error(a, b):
    return np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("communicator", ["allreduce", "allgather"])
def test_several_cycles_with_plain_numpy(ranks, communicator):
    sim = simulate(ranks, SHAPE, make("gradiveq", **CYCLE), communicator=communicator)
    seen, u = [], None
    for number in range(13):
        xs = [correlated(100 * number + rank) for rank in range(ranks)]
        mean = np.mean(np.array(xs, np.float64), axis=0)
        merged = step(sim, xs)
        if number % 5 < 2:
            assert relative_error(merged, mean) < 1e-6
            seen = [*(seen if number % 5 else []), np.sum(np.array(xs, np.float64), axis=0)]
            u = leading(seen)
        else:
            assert relative_error(merged, flat(slices(mean) @ u @ u.T)) < 1e-5
            assert relative_error(merged, mean) > 0.01
        bases = [state(sim, rank, "basis", "compressor") for rank in range(ranks)]
        assert all(np.array_equal(basis, bases[0]) for basis in bases)
        basis = bases[0].astype(np.float64)
        assert number < 1 or np.abs(basis.T @ basis - np.eye(D)).max() < 1e-6


@every_framework
def test_cycles_are_the_same_in_every_framework(framework):
    chosen = communicators.make("allreduce")
    sims = [_simulation(name, chosen) for name in ("numpy", framework)]
    ops = get_ops(framework)
    for number in range(8):
        xs = [correlated(100 * number + rank) for rank in range(2)]
        expected = sims[0].step([{"w": x} for x in xs])[0]["w"]
        merged = sims[1].step([{"w": array(ops, x, "float32")} for x in xs])
        assert all(relative_error(host(ops, mine["w"]), expected) < 1e-5 for mine in merged)


def _simulation(framework, communicator) -> Simulation:
    from grace.core.config.config import Method
    from grace.core.config.registry import memories

    parts = Method(make("gradiveq", **CYCLE), memories.make("none"), communicator)
    return simulate_in(parts, framework, size=2, specs=[spec(*SHAPE)])


def test_one_graph_serves_both_phases():
    """In a TensorFlow graph, lengths that depend on the state are unknown."""
    pytest.importorskip("tensorflow")
    ops, reference, tensor = get_ops("tensorflow"), get_ops("numpy"), spec(*SHAPE)
    plain, part = make("gradiveq", **CYCLE), traced(make("gradiveq", **CYCLE))
    states = {ops: None, reference: None}
    for number in range(8):
        decoded, lengths = [], []
        for compressor, where in ((part, ops), (plain, reference)):
            ex = exchange(compressor, where, tensor, [correlated(number).ravel()], step=number, state=states[where])
            decoded.append(host(where, compressor.decompress(ex.payloads[0], ex.sites[0])))
            lengths.append(where.length(ex.payloads[0]["values"]))
            states[where] = compressor.learn(ex.payloads, ex.sites[0])
        assert lengths == [480 if number % 5 < 2 else 90] * 2
        assert relative_error(*decoded) < 1e-5
    assert all(set(getattr(part, method).traces.values()) == {1} for method in ("compress", "decompress", "learn"))


@pytest.mark.parametrize("dimension", [1, 3])
def test_gradients_in_one_subspace_are_exact(dimension):
    sim = simulate(2, SHAPE, make("gradiveq", **CYCLE))
    for number in range(5):
        xs = [correlated(10 * number + rank, dimension) for rank in range(2)]
        assert relative_error(step(sim, xs), np.mean(np.array(xs, np.float64), axis=0)) < 1e-5


def test_the_error_is_what_the_eigenvalues_left_out_say():
    """For the training gradients themselves, no other U with as many columns is better."""
    xs = [correlated(number) for number in range(2)]
    sim = simulate(1, SHAPE, make("gradiveq", **CYCLE))
    for x in xs:
        step(sim, [x])
    # The same two gradients again, now compressed.
    error = sum(np.sum((step(sim, [x]) - x.astype(np.float64)) ** 2) for x in xs)
    values = np.sort(np.linalg.eigvalsh(sum(slices(x).T @ slices(x) for x in xs)))
    assert error == pytest.approx(values[:-D].sum(), rel=1e-4)
    other = np.linalg.qr(np.random.default_rng(0).standard_normal((K, D)))[0]
    assert error < sum(np.sum((slices(x) - slices(x) @ other @ other.T) ** 2) for x in xs)


@pytest.mark.parametrize("mean", [0.0, 1.0, 30.0])
def test_one_component_more_makes_up_for_the_mean(mean):
    """The paper's g -> mu + U U^T (g - mu), U from the covariance, is no better with one component less."""
    rng = np.random.default_rng(1)
    shape = (30, K)
    xs = [(rng.standard_normal(shape) * 0.7 ** np.arange(K) + mean).astype(np.float32) for _ in range(2)]
    rows = np.concatenate([slices(x) for x in xs])
    mu = rows.mean(axis=0)
    u = np.linalg.eigh((rows - mu).T @ (rows - mu))[1][:, ::-1][:, : D - 1]
    paper = np.sum((rows - mu - (rows - mu) @ u @ u.T) ** 2)
    sim = simulate(1, shape, make("gradiveq", **CYCLE))
    for x in xs:
        step(sim, [x])
    ours = sum(np.sum((step(sim, [x]) - x.astype(np.float64)) ** 2) for x in xs)
    assert ours <= paper * (1 + 1e-4)


def test_the_map_is_linear_and_a_projection():
    """In the compressed phase, the map is linear, idempotent, and its error never exceeds the gradient."""
    compressor, ops, tensor = make("gradiveq", **CYCLE), get_ops("numpy"), spec(*SHAPE)
    learnt = compressor.init(tensor, ops, 0)
    for number in range(2):
        ex = exchange(compressor, ops, tensor, [correlated(number).ravel()], state=learnt)
        learnt = compressor.learn(ex.payloads, ex.sites[0])

    def sent(x):
        ex = exchange(compressor, ops, tensor, [x.astype(np.float32)], state=learnt)
        return ex.payloads[0]["values"].astype(np.float64), compressor.decompress(ex.payloads[0], ex.sites[0])

    a, b = normal(480, 1), normal(480, 2)
    assert relative_error(sent(2 * a - 3 * b)[0], 2 * sent(a)[0] - 3 * sent(b)[0]) < 1e-5
    once = sent(a)[1]
    assert relative_error(sent(once)[1], once) < 1e-5
    assert np.linalg.norm(a - once) < np.linalg.norm(a)
    assert not sent(0 * a)[1].any()


@pytest.mark.parametrize(("shape", "count"), [(SHAPE, 30), ((7, 11), 5), ((K, K), K), ((K,), 1)])
def test_bytes_of_both_phases(shape, count):
    sim = simulate(2, shape, make("gradiveq", **CYCLE))
    sent = []
    for number in range(6):
        step(sim, [correlated(number, shape=shape)] * 2)
        sent.append(sim.runs[0].stats()["tensors"]["w"]["wire_bytes"])
    full, compressed = 4 * np.prod(shape), 4 * count * D
    assert sent == [full, full, compressed, compressed, compressed, full]


def test_a_step_that_is_lost_does_not_count():
    """If U were learnt at a fixed step, a NaN in that step would leave the whole phase without U."""
    sim = simulate(2, SHAPE, make("gradiveq", **CYCLE))
    bad = np.full(SHAPE, np.nan, np.float32)
    xs = [correlated(0), correlated(1)]
    for given in ([xs[0]] * 2, [bad, xs[1]], [xs[1]] * 2):
        merged = [mine["w"] for mine in sim.step([{"w": x.copy()} for x in given])]
        assert np.isnan(merged[0]).all() == (given[0] is bad)
    u = leading(xs)
    assert relative_error(step(sim, [xs[0]] * 2), flat(slices(xs[0]) @ u @ u.T)) < 1e-5


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_gradients_far_from_one_are_learnt_too(scale):
    xs = [(correlated(number, D).astype(np.float64) * scale).astype(np.float32) for number in range(3)]
    sim = simulate(1, SHAPE, make("gradiveq", **CYCLE))
    for x in xs:
        assert relative_error(step(sim, [x]), x.astype(np.float64)) < 1e-5


def test_options_and_tensors_are_checked():
    for name in ("slice_size", "components", "training_steps", "compressed_steps"):
        with pytest.raises(ConfigError, match=f"gradiveq: {name} must be at least 1, received 0"):
            make("gradiveq", **{name: 0})
    with pytest.raises(ConfigError, match="fewer components"):
        make("gradiveq", slice_size=8, components=8)
    assert "fewer" in make("gradiveq", **CYCLE).unfit(spec(15))
    assert "no fewer" in make("gradiveq", slice_size=16, components=9).unfit(spec(17))
    assert make("gradiveq", **CYCLE).unfit(spec(16)) is None
