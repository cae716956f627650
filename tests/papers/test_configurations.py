"""Papers whose methods are configurations of what is there: their updates in NumPy, and what they claim."""

from __future__ import annotations

import numpy as np
import pytest

import grace
from tests.papers.test_two_shot import RANKS, SHAPE, STEPS, gradients, shards_of, sign, top

N, PLAIN = SHAPE[0] * SHAPE[1], {"granularity": "layer", "default_rules": False}


def started(size=RANKS, shapes=None, **config):
    return grace.Simulation(size, shapes or {"w": SHAPE}, {**PLAIN, **config})


def mean_of(simulation, xs):
    """Return the merged gradient of one step, flat and in float64."""
    merged = simulation.step([{"w": np.asarray(x, np.float32).reshape(SHAPE)} for x in xs])
    return merged[0]["w"].reshape(-1).astype(np.float64)


def drawn(steps, **config):
    """Return which coordinates each rank sends in each step; the draw does not depend on the gradients.

    Rank r sends 2^r in every element, so that the sum of a coordinate names its ranks.
    """
    simulation = started(**{**config, "memory": "none"})
    masks = []
    for _ in range(steps):
        total = np.rint(RANKS * mean_of(simulation, [np.full(N, 2.0**rank) for rank in range(RANKS)])).astype(int)
        masks.append(np.array([(total >> rank) & 1 for rank in range(RANKS)], bool))
    return masks


@pytest.mark.parametrize("damped", [False, True])
@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_gmc(momentum, damped):
    """Zhao et al., "Global momentum compression for sparse communication in distributed learning", 2019.

    u_i = g_i - m (x_t - x_{t-1}) / eta, v_i = v_i + u_i, send C(v_i), v_i = v_i - C(v_i); x = x - eta mean C(v_i).
    With the usual dampening the memory keeps (1 - m) v, so the learning rate is eta / (1 - m).
    """
    memory = {"name": "shared_momentum", "momentum": momentum, **({} if damped else {"dampening": 0.0})}
    simulation, eta = started(compressor="topk", compress_ratio=0.1, memory=memory), 0.05
    x, before, y = np.zeros(N), np.zeros(N), np.zeros(N)
    left = np.zeros((RANKS, N))
    for number in range(3 * STEPS):
        left += np.array(gradients(number, x)) - momentum * (x - before) / eta
        sent = np.array([top(0.1)(mine) for mine in left])
        left -= sent
        before, x = x, x - eta * sent.mean(axis=0)
        y -= eta / (1 - momentum if damped else 1) * mean_of(simulation, gradients(number, y))
        assert np.allclose(x, y, atol=1e-4), number
    assert np.linalg.norm(x) > 0.1 * np.sqrt(N)


@pytest.mark.parametrize("ranks", [3, 4])
def test_gmc_with_a_learning_rate_that_changes(ranks):
    """x_t - x_{t-1} is of the last rate, eta of this one: u_i = g_i - m (x_t - x_{t-1}) / eta.

    Without the correction, the momentum is that of PyTorch's SGD.
    """
    rates = [0.02, 0.05, 0.05, 0.01, 0.03, 0.03, 0.002, 0.02]
    memory = {"name": "shared_momentum", "momentum": 0.9, "dampening": 0.0}

    def trained(corrected):
        first, again = (
            started(ranks, compressor="topk", compress_ratio=0.1, memory={**memory, "lr_correction": corrected})
            for _ in range(2)
        )
        x, before, y, last, left, kept = np.zeros(N), np.zeros(N), np.zeros(N), np.zeros(N), np.zeros((ranks, N)), []
        for number, eta in enumerate(rates):
            given = [x - 5 * np.random.default_rng((number, rank)).standard_normal(N) for rank in range(ranks)]
            left += np.array(given) + 0.9 * ((before - x) / eta if corrected else last)
            sent = np.array([top(0.1)(mine) for mine in left])
            left -= sent
            before, x, last = x, x - eta * sent.mean(axis=0), sent.mean(axis=0)
            xs = [{"w": g.astype(np.float32).reshape(SHAPE)} for g in given]
            merged = first.step(xs, lr=eta)[0]["w"].reshape(-1)
            assert np.allclose(merged, last, rtol=1e-3, atol=1e-3), number
            y -= eta * merged
            if number == 3:
                again.load_state_dict(first.state_dict())
            elif number > 3:
                assert np.array_equal(again.step(xs, lr=eta)[0]["w"].reshape(-1), merged)
            kept.append(y.copy())
        assert np.allclose(x, y, atol=1e-3)
        return kept[-1]

    corrected, plain = trained(True), trained(False)
    assert np.linalg.norm(corrected - plain) > 0.1 * np.linalg.norm(plain)


@pytest.mark.parametrize("beta", [1.0, 0.9])
@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.1])
def test_ecq_sgd(alpha, beta):
    """Wu et al., "Error compensated quantized SGD and its applications to large-scale distributed optimization", 2018.

    Send Q(g + alpha h); h = beta h + g - Q(g + alpha h). With beta = 1, h is the sum of all errors so far.
    """
    simulation = started(compressor="efsignsgd", memory={"name": "lowpass", "beta": alpha, "decay": beta})
    errors = np.zeros((RANKS, N))
    for number in range(2 * STEPS):
        given = np.array(gradients(number, np.zeros(N)))
        sent = np.array([sign(g + alpha * h) for g, h in zip(given, errors, strict=True)])
        errors = beta * errors + given - sent
        assert np.allclose(mean_of(simulation, given), sent.mean(axis=0), rtol=1e-4, atol=1e-5), number
    assert np.abs(errors).max() > 1


def test_ecq_sgd_is_nearer_to_the_optimum_than_quantized_sgd():
    """Section 4: feeding back a share of the errors lessens the variance that they add."""
    target = np.random.default_rng(3).standard_normal(N)

    def distance(memory):
        simulation, x, found = started(compressor="qsgd", quantum_num=1, memory=memory), np.zeros(N), []
        for number in range(100):
            noise = np.random.default_rng(number).standard_normal((RANKS, N))
            x = x - 0.1 * mean_of(simulation, x - target + noise)
            found.append(np.sum((x - target) ** 2))
        return np.mean(found[50:])

    assert distance({"name": "lowpass", "beta": 0.2, "decay": 0.9}) < 0.75 * distance("none")


@pytest.mark.parametrize("beta", [1.0, 0.2])
def test_loco(beta):
    """Xie et al., "LoCo: low-bit communication adaptor for large-scale model training", 2024, Algorithm 1.

    h = g + e, send Q(h); e = (1 - beta) e + beta (h - Q(h)), and e = 0 after every T-th step.
    """
    memory = {"name": "lowpass", "beta": beta, "reset_every": 5}
    simulation, errors, sizes = started(compressor="efsignsgd", memory=memory), np.zeros((RANKS, N)), []
    for number in range(13):
        given = np.array(gradients(number, np.zeros(N)))
        sent = np.array([sign(mine) for mine in given + errors])
        errors = (1 - beta) * errors + beta * (given + errors - sent)
        if number % 5 == 4:
            errors[:] = 0
        assert np.allclose(mean_of(simulation, given), sent.mean(axis=0), rtol=1e-4, atol=1e-5), number
        held = [run.state_dict()["tensors"]["w"]["memory"]["residual"] for run in simulation.runs]
        assert np.allclose(np.reshape(held, (RANKS, N)), errors, rtol=1e-4, atol=1e-5)
        sizes.append(np.abs(errors).max())
    assert [number for number, size in enumerate(sizes) if size == 0] == [4, 9]


@pytest.mark.parametrize("ranks", [3, 4])
def test_loco_with_integers(ranks):
    """The same with e in 8 bits: a multiple, above or below, of a 127th of the largest of 64 elements."""
    memory = {"name": "lowpass", "beta": 0.5, "reset_every": 5, "residual_dtype": "int8"}
    simulation, errors = started(ranks, compressor="efsignsgd", memory=memory), np.zeros((ranks, N))
    for number in range(13):
        given = np.array([np.random.default_rng((number, rank)).standard_normal(N) for rank in range(ranks)])
        sent = np.array([sign(mine) for mine in given + errors])
        assert np.allclose(mean_of(simulation, given), sent.mean(axis=0), rtol=1e-3, atol=1e-3), number
        exact = errors + 0.5 * (given - sent) if number % 5 != 4 else np.zeros((ranks, N))
        blocks = np.pad(np.abs(exact), [(0, 0), (0, -N % 64)]).reshape(ranks, -1, 64).max(axis=2)
        steps = np.repeat(blocks, 64, axis=1)[:, :N] / 127
        stored = [run.units["w"]["memory"] for run in simulation.runs]
        assert np.allclose([held["residual_scales"] for held in stored], blocks, rtol=1e-4, atol=1e-6)
        errors = steps * [-held["residual"].view(np.int8).astype(int) for held in stored]
        assert (np.abs(errors - exact) <= steps * (1 + 1e-3)).all(), number
        assert errors.any() == (number % 5 != 4)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"name": "lowpass", "decay": 1.1}, r"decay must lie in \[0, 1\]"),
        ({"name": "lowpass", "reset_every": 0}, "reset_every"),
        ({"name": "residual", "momentum": 1.0}, r"momentum must lie in \[0, 1\)"),
        ({"name": "shared_momentum", "dampening": 1.0}, r"dampening must lie in \[0, 1\)"),
    ],
)
def test_memories_that_grow_or_never_work_are_refused(memory, message):
    with pytest.raises(grace.errors.ConfigError, match=message):
        grace.make_config(compressor="topk", memory=memory)


def test_sega():
    """Hanzely, Mishchenko and Richtarik, "SEGA: variance reduction via gradient sketching", NeurIPS 2018.

    With coordinate sketches S of k of d: v = h + (d / k) (g - h)_S, and h_S = g_S; v is unbiased.
    """
    config = {"compressor": {"name": "randomk", "compress_ratio": 0.25, "scaled": True}}
    simulation = started(**config, memory={"name": "diana", "alpha": 0.25})
    sketch = np.zeros((RANKS, N))
    for number, masks in enumerate(drawn(STEPS, compressor={"name": "randomk", "compress_ratio": 0.25})):
        given = np.array(gradients(number, np.zeros(N)))
        expected = (sketch + 4 * np.where(masks, given - sketch, 0)).mean(axis=0)
        sketch = np.where(masks, given, sketch)
        assert np.allclose(mean_of(simulation, given), expected, rtol=1e-4, atol=1e-4), number
        assert masks.sum() == RANKS * N // 4


def test_sega_solves_a_problem_with_a_proximal_term_where_random_coordinates_do_not():
    """Section 1: min |x - t|^2 / 2 + |x|_1, whose gradient is not zero at the optimum. SEGA learns it."""
    target = 3 * np.random.default_rng(0).standard_normal(N)
    best = np.sign(target) * np.maximum(np.abs(target) - 1, 0)
    config = {"compressor": {"name": "randomk", "compress_ratio": 0.25, "scaled": True}}
    found = {}
    for memory in ({"name": "diana", "alpha": 0.25}, "none"):
        simulation, x, eta = started(1, **config, memory=memory), np.zeros(N), 0.1
        for _ in range(150):
            x = x - eta * mean_of(simulation, [x - target])
            x = np.sign(x) * np.maximum(np.abs(x) - eta, 0)
        found[str(memory)] = np.linalg.norm(x - best) / np.linalg.norm(best)
    sega, plain = found.values()
    assert sega < 1e-4
    assert plain > 0.1


FEDZIP = {"compressor": "m22", "power": 0, "bits": 3, "compress_ratio": 0.1}


def test_fedzip():
    """Malekijoo et al., "FedZip: a compression framework for communication-efficient federated learning", 2021.

    The largest share z of |x| is kept, its values become the centroids of k-means, and their labels are coded by
    Huffman's code. Here the centroids are magnitudes, with a sign each.
    """
    codes = {"coding": {"values/codes": "huffman", "indices": "golomb"}}
    x = np.random.default_rng(0).laplace(size=N)
    coded, plain = (started(1, **FEDZIP, memory="none", **coding) for coding in (codes, {}))
    got = mean_of(coded, [x])
    assert np.array_equal(got, mean_of(plain, [x]))
    kept = np.flatnonzero(top(0.1)(x))
    assert np.array_equal(np.flatnonzero(got), kept)
    centroids = np.unique(np.abs(got[kept]))
    labels = np.abs(np.abs(x[kept])[:, None] - centroids).argmin(axis=1)
    assert np.allclose(np.abs(got[kept]), centroids[labels])
    means = np.array([np.abs(x[kept])[labels == j].mean() for j in range(len(centroids))])

    def distortion(levels):
        return np.sum(np.abs(np.abs(x[kept])[:, None] - levels).min(axis=1) ** 2)

    # A fixed point of Lloyd's algorithm, nearly, and far better than equally wide steps.
    assert distortion(means) <= distortion(centroids) <= 1.05 * distortion(means)
    even = np.linspace(np.abs(x[kept]).min(), np.abs(x[kept]).max(), len(centroids))
    assert distortion(centroids) < 0.7 * distortion(even)
    # The paper reports 40 to 60 times fewer bytes than the model has.
    sent = [s.runs[0].stats()["tensors"]["w"]["wire_bytes"] for s in (coded, plain)]
    assert sent[0] < 0.3 * sent[1]
    assert 4 * N / sent[0] > 30


@pytest.mark.parametrize("bound", [0.01, 0.1])
@pytest.mark.parametrize(("name", "relative"), [("szx", True), ("inceptionn", False)])
def test_c_coll(name, relative, bound):
    """Huang et al., "An optimized error-controlled MPI collective framework integrated with lossy compression", 2024.

    A reduce-scatter of compressed parts and an allgather of compressed sums: with an absolute bound e, the mean of all
    ranks has an error of at most 2 e, however many ranks there are.
    """
    own = {"name": name, "error_bound": bound, **({} if relative else {"relative": False})}
    for size in (3, 8):
        simulation = started(size, compressor=own, memory="none", communicator="two_shot")
        xs = [np.random.default_rng(rank).standard_normal(N).astype(np.float32) for rank in range(size)]
        exact = np.mean(np.array(xs, np.float64), axis=0)
        error = np.abs(mean_of(simulation, xs) - exact).max()
        scales = [np.mean([np.abs(x).max() for x in xs]), (1 + bound) * np.abs(exact).max()] if relative else [1, 1]
        assert 0.1 * bound < error <= bound * sum(scales)
        assert simulation.runs[0].stats()["tensors"]["w"]["wire_bytes"] < 2 * 4 * N


def test_parameter_server():
    """Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014, in step.

    Each rank is also the server of a shard. It gets that part of every gradient, and sends the mean to all ranks.
    """
    simulation = started(compressor="natural", communicator="two_shot")
    shards = shards_of(simulation)
    sizes = [shard.stop - shard.start for shard in shards]
    assert sum(sizes) == N
    assert max(sizes) - min(sizes) <= 8
    # Powers of two pass through the method unchanged in both directions.
    xs = [2.0 ** np.random.default_rng(9).integers(-3, 3, N) for _ in range(RANKS)]
    assert np.array_equal(mean_of(simulation, xs), xs[0])
    # A single server would receive RANKS gradients and send as many; a server of a shard carries its part of that.
    sent = simulation.runs[0].stats()["tensors"]["w"]["wire_bytes"]
    lone = RANKS * N * 9 / 8
    assert sent <= 2 * (lone / RANKS + 200)


def test_optimus_cc():
    """Song et al., "Optimus-CC: efficient large NLP model training with 3D parallelism aware compression", ASPLOS 2023.

    Selective stage compression: only the stages on the critical path compress what they exchange between replicas, by
    PowerSGD with error feedback; the gradients of all others are exact.
    """
    shapes = {f"stage{stage}.weight": (40, 30) for stage in range(4)}
    rules = [{"match": ["stage2.*", "stage3.*"], "compressor": "none"}]
    simulation = started(2, shapes, compressor="powersgd", compress_rank=2, rules=rules)
    random = np.random.default_rng(0)
    given = [{k: random.standard_normal(s).astype(np.float32) for k, s in shapes.items()} for _ in range(2)]
    means = {k: (given[0][k] + given[1][k]).astype(np.float64) / 2 for k in shapes}
    total, errors = {k: np.zeros(s) for k, s in shapes.items()}, []
    for number in range(1, 41):
        merged = simulation.step(given)[0]
        for k, value in merged.items():
            compressed = k < "stage2"
            assert np.linalg.matrix_rank(value, tol=1e-3) == (2 if compressed else 30)
            assert compressed or np.allclose(value, means[k], atol=1e-6)
            total[k] += value
        errors.append(max(np.linalg.norm(total[k] / number - m) / np.linalg.norm(m) for k, m in means.items()))
    # Error feedback: what was not sent arrives later.
    assert errors[0] > 0.8
    assert errors[-1] < 0.3
    sizes = {k: t["wire_bytes"] for k, t in simulation.runs[0].stats()["tensors"].items()}
    assert sizes["stage0.weight"] < 0.15 * sizes["stage3.weight"]


@pytest.mark.parametrize("ranks", [2, 8])
def test_large_batches(ranks):
    """Goyal et al., "Accurate, large minibatch SGD", 2017: k small steps at eta are one of k batches at k eta.

    The ranks' mean is the gradient of the joint batch. The difference from `ranks` steps is of second order in eta, and
    one exchange replaces `ranks` of them.
    """
    target = np.random.default_rng(1).standard_normal((ranks, N))
    gaps = []
    for eta in (0.01, 0.005):
        simulation, x, y = started(ranks, compressor="none"), np.zeros(N), np.zeros(N)
        x = x - ranks * eta * mean_of(simulation, [x - t for t in target])
        for t in target:
            y = y - eta * (y - t)
        gaps.append(np.linalg.norm(x - y) / np.linalg.norm(y))
    assert gaps[0] < ranks * 0.01
    assert gaps[1] == pytest.approx(gaps[0] / 2, rel=0.1)


IBCD = {"compressor": {"name": "rtopk", "compress_ratio": 1 / RANKS, "spread": float(RANKS)}, "memory": "none"}


def test_ibcd():
    """Mishchenko, Hanzely and Richtarik, "99% of worker-master communication ... is not needed", UAI 2020, Algorithm 1.

    Each of n workers sends a share tau of its coordinates, drawn by itself: x = x - eta / n sum_i (grad f_i)_{U_i}.
    """
    simulation = started(**IBCD)
    for number, masks in enumerate(drawn(STEPS, **IBCD)):
        given = np.array(gradients(number, np.zeros(N)))
        assert np.allclose(mean_of(simulation, given), np.where(masks, given, 0).mean(axis=0), atol=1e-6), number
        assert (masks.sum(axis=1) == N // RANKS).all()
        # The draws are independent: two workers share a ninth of the coordinates.
        assert np.mean(masks[0] & masks[1]) == pytest.approx(1 / RANKS**2, abs=0.03)


def test_ibcd_needs_no_more_steps_with_a_share_of_1_over_n():
    """Theorem 1: with gradients that vanish at a common optimum, eta may grow by n / (tau n + 1 - tau)."""
    curvature = np.random.default_rng(7).uniform(0.5, 2, (RANKS, N))
    target, share = np.random.default_rng(8).standard_normal(N), 1 / RANKS

    def steps(config, eta):
        simulation, x = started(**config), np.zeros(N)
        for number in range(1000):
            if np.linalg.norm(x - target) < 1e-3 * np.linalg.norm(target):
                return number
            x = x - eta * mean_of(simulation, [c * (x - target) for c in curvature])
        return None

    dense = steps({"compressor": "none"}, 0.5)
    assert dense is not None
    assert steps(IBCD, 0.5 * RANKS / (share * RANKS + 1 - share)) < 2.5 * dense
