"""The updates of the papers behind the communicator two_shot, in NumPy and by the library."""

from __future__ import annotations

import numpy as np
import pytest

import grace
from grace.core.ops import get_ops
from grace.testing.harness import FRAMEWORKS, array, host

RANKS, STEPS, ETA = 3, 8, 0.1
SHAPE = (48, 64)


def sign(x):
    """C(x) = mean|x| sign(x); there are no zeros here."""
    return np.mean(np.abs(x.astype(np.float64))).astype(np.float32) * np.sign(x)


def top(ratio):
    def kept(x):
        out, chosen = np.zeros_like(x), np.argsort(-np.abs(x), kind="stable")[: max(1, int(ratio * x.size))]
        out[chosen] = x[chosen]
        return out

    return kept


def shards_of(simulation):
    """Return the parts of the flat tensor that the ranks own."""
    pieces = sorted((unit.pieces[0] for unit in simulation.plan.units), key=lambda piece: piece.start)
    assert [unit.pieces for unit in simulation.plan.units if len(unit.pieces) > 1] == []
    assert len(pieces) == RANKS
    return [slice(piece.start, piece.stop) for piece in pieces]


def gradients(step, x):
    """Return the gradients of |x - target|^2 / 2 with noise, one per rank."""
    target = np.random.default_rng(99).standard_normal(x.size)
    noise = [np.random.default_rng((step, rank)).standard_normal(x.size) for rank in range(RANKS)]
    return [(x - target + mine).astype(np.float32) for mine in noise]


@pytest.mark.parametrize(
    ("options", "compress"),
    [
        ({"compressor": "efsignsgd", "memory": "residual"}, sign),
        ({"compressor": "topk", "compress_ratio": 0.1}, top(0.1)),
    ],
    ids=["sign", "topk"],
)
def test_doublesqueeze(options, compress):
    """Algorithm 1: v_i = g_i + d_i, d_i = v_i - C(v_i); v = mean C(v_i) + d, d = v - C(v); x = x - eta C(v)."""
    check_both_ways(options, compress)


def check_both_ways(options, compress, scale=1.0):
    """Compare the library with the algorithms, whose errors are those of `scale` times the gradient."""
    simulation = grace.Simulation(
        RANKS, {"w": SHAPE}, {**options, "communicator": "two_shot", "granularity": "layer", "default_rules": False}
    )
    shards = shards_of(simulation)
    x, y = (np.zeros(SHAPE[0] * SHAPE[1]) for _ in "xy")
    worker, server = np.zeros((RANKS, x.size), np.float32), np.zeros(x.size, np.float32)
    for step in range(STEPS):
        given = gradients(step, x)
        applied = np.zeros(x.size, np.float32)
        for shard in shards:
            sent = []
            for rank in range(RANKS):
                v = np.float32(scale) * given[rank][shard] + worker[rank][shard]
                sent.append(compress(v))
                worker[rank][shard] = v - sent[-1]
            v = sum(sent) / np.float32(RANKS) + server[shard]
            applied[shard] = compress(v)
            server[shard] = v - applied[shard]
        merged = simulation.step([{"w": g.reshape(SHAPE)} for g in gradients(step, y)])[0]["w"].reshape(-1)
        assert np.allclose(scale * merged, applied, rtol=1e-4, atol=1e-5 * scale), step
        x, y = x - ETA / scale * applied, y - ETA * merged
    assert np.abs(worker).max() > 0.1 * scale
    assert np.abs(server).max() > 0.1 * scale


def ternary(ratio):
    """C(x) = mu sign(x) at the largest |x|, with mu their mean."""

    def kept(x):
        out = top(ratio)(x)
        chosen = out != 0
        out[chosen] = sign(out[chosen])
        return out

    return kept


def test_stc():
    """Sattler et al., 2019, Algorithm 2: sparse ternary compression of what goes up and of what comes down."""
    chain = {"name": "chain", "sparsifier": {"name": "topk", "compress_ratio": 0.1}, "quantizer": "efsignsgd"}
    check_both_ways({"compressor": chain, "memory": "residual"}, ternary(0.1))


def test_dist_ef_sgd_at_a_constant_learning_rate():
    """Algorithm 2, with one block per shard: errors at both ends in units of the weights.

    p_i = eta g_i + e_i, e_i = p_i - C(p_i); p = mean C(p_i) + e, e = p - C(p); x = x - C(p).
    """
    check_both_ways({"compressor": "efsignsgd", "memory": "efsignsgd", "lr": ETA}, sign, scale=ETA)


CORRECTED = {"name": "residual", "lr_correction": True}
DIST_EF_SGD = {
    "compressor": "efsignsgd",
    "memory": CORRECTED,
    "communicator": {"name": "two_shot", "shard_memory": CORRECTED},
    "granularity": "layer",
    "default_rules": False,
}


@pytest.mark.parametrize("momentum", [0.0, 0.9], ids=["plain", "Nesterov"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_dist_ef_sgd(framework, momentum):
    """Algorithm 2, and 3 with Nesterov's momentum, with one block per shard and a learning rate eta_t that changes.

    m_i = mu m_i + g_i; p_i = mu m_i + g_i + eta_{t-1} / eta_t e_i, e_i = p_i - C(p_i); p = mean C(p_i) +
    eta_{t-1} / eta_t e, e = p - C(p); x = x - eta_t C(p).
    """
    config = {**DIST_EF_SGD, "memory": {**CORRECTED, "momentum": momentum}}
    simulation, ops = grace.Simulation(RANKS, {"w": SHAPE}, config, framework=framework), get_ops(framework)
    velocity = np.zeros((RANKS, SHAPE[0] * SHAPE[1]), np.float32)
    shards, last = shards_of(simulation), 0.0
    x, y = (np.zeros(SHAPE[0] * SHAPE[1]) for _ in "xy")
    worker, server = np.zeros((RANKS, x.size), np.float32), np.zeros(x.size, np.float32)
    for step, eta in enumerate([0.1, 0.1, 0.05, 0.05, 0.01, 0.002, 0.002, 0.02]):
        given, factor = np.array(gradients(step, x)), np.float32(last / eta if last else 1)
        velocity = np.float32(momentum) * velocity + given
        given += np.float32(momentum) * velocity
        for shard in shards:
            sent = []
            for rank in range(RANKS):
                p = given[rank][shard] + factor * worker[rank][shard]
                sent.append(sign(p))
                worker[rank][shard] = p - sent[-1]
            p = sum(sent) / np.float32(RANKS) + factor * server[shard]
            back = sign(p)
            server[shard] = p - back
            x[shard] -= eta * back
        mine = [{"w": array(ops, g.reshape(SHAPE), "float32")} for g in gradients(step, y)]
        y -= eta * host(ops, simulation.step(mine, lr=eta)[0]["w"]).reshape(-1)
        assert np.allclose(x, y, rtol=1e-4, atol=1e-5 * ETA), step
        last = eta
    assert np.abs(worker).max() > 0.1
    assert np.abs(server).max() > 0.1


@pytest.mark.parametrize(("alpha", "eta", "beta"), [(0.1, 1.0, 1.0), (0.5, 0.5, 0.7)])
@pytest.mark.parametrize(
    ("options", "compress"),
    [({"compressor": "efsignsgd"}, sign), ({"compressor": "topk", "compress_ratio": 0.1}, top(0.1))],
    ids=["sign", "topk"],
)
def test_dore(options, compress, alpha, eta, beta):
    """Liu et al., 2020, Algorithm 2, which is Algorithm 1 without a regularizer, in units of the weights.

    D_i = C(g_i - h_i), h_i += alpha D_i; g = h + mean D_i, h += alpha mean D_i; q = -gamma g + eta e, e = q - C(q);
    x += beta C(q). With grace, SGD has the learning rate beta gamma.
    """
    options = {**options, "memory": "dore", "alpha": alpha, "eta": eta, "communicator": "two_shot"}
    simulation = grace.Simulation(RANKS, {"w": SHAPE}, {**options, "granularity": "layer", "default_rules": False})
    shards = shards_of(simulation)
    x, y = (np.zeros(SHAPE[0] * SHAPE[1]) for _ in "xy")
    worker, server, error = np.zeros((RANKS, x.size), np.float32), *(np.zeros(x.size, np.float32) for _ in "he")
    for step in range(STEPS):
        given = gradients(step, x)
        for shard in shards:
            sent = [compress(given[rank][shard] - worker[rank][shard]) for rank in range(RANKS)]
            worker[:, shard] += np.float32(alpha) * np.array(sent)
            mean = sum(sent) / np.float32(RANKS)
            q = -np.float32(ETA) * (server[shard] + mean) + np.float32(eta) * error[shard]
            server[shard] += np.float32(alpha) * mean
            back = compress(q)
            error[shard] = q - back
            x[shard] += beta * back
        y -= beta * ETA * simulation.step([{"w": g.reshape(SHAPE)} for g in gradients(step, y)])[0]["w"].reshape(-1)
        assert np.allclose(x, y, rtol=1e-4, atol=1e-5 * ETA), step
    assert np.abs(error).max() > 0.1 * ETA
    assert min(np.abs(server).max(), np.abs(worker).max()) > 0.1 * alpha


def distances(config, steps):
    """Return the distances of gradient descent to the optimum of a strongly convex problem, beginning at step 0.

    Every rank has a quadratic of its own, so its gradient at the common optimum is not zero.
    """
    random = np.random.default_rng(7)
    curvature = random.uniform(0.5, 2, (RANKS, SHAPE[0] * SHAPE[1]))
    target = random.standard_normal(curvature.shape)
    best = (curvature * target).sum(axis=0) / curvature.sum(axis=0)
    simulation = grace.Simulation(RANKS, {"w": SHAPE}, {**config, "default_rules": False})
    x, found = np.zeros(best.size), []
    for _ in range(steps):
        found.append(np.linalg.norm(x - best) / np.linalg.norm(best))
        mine = [{"w": (c * (x - t)).astype(np.float32).reshape(SHAPE)} for c, t in zip(curvature, target, strict=True)]
        x = x - 0.3 * simulation.step(mine)[0]["w"].reshape(-1)
    return found


def test_dore_has_a_linear_rate_where_quantizers_stall():
    """Theorem 1, without noise in the gradients: the distance falls by a factor per step. Plain qsgd meets a floor.

    That floor is the error of the gradients at the optimum, which differ between the ranks.
    """
    qsgd = {"compressor": "qsgd", "quantum_num": 7, "communicator": "two_shot"}
    dore, plain = (distances({**qsgd, "memory": memory}, 121) for memory in ("dore", "none"))
    for step in (0, 20, 40, 60):
        assert dore[step + 20] < 0.2 * dore[step], step
    assert dore[-1] < 1e-4
    assert min(plain) > 0.01


BETA, DECAY, EPSILON, WARM_UP = 0.9, 0.999, 1e-8, 10
ONE_BIT_ADAM = {
    "compressor": "none",
    "memory": "shared_momentum",
    "schedule": [{"step": WARM_UP, "compressor": "efsignsgd", "memory": "shared_momentum", "communicator": "two_shot"}],
    "granularity": "layer",
    "default_rules": False,
}


class MomentumAdam:
    """Adam as the paper prints it, on merged momentum; its second moment is frozen after the warm-up."""

    def __init__(self, lr, warm_up=WARM_UP):
        self.lr, self.warm_up, self.steps, self.last, self.square = lr, warm_up, 0, 0.0, 0.0

    def change(self, momentum):
        if self.steps < self.warm_up:
            gradient = (momentum - BETA * self.last) / (1 - BETA)
            self.square = DECAY * self.square + (1 - DECAY) * gradient**2
        self.steps, self.last = self.steps + 1, momentum
        return -self.lr * momentum / (np.sqrt(self.square) + EPSILON)


def test_one_bit_adam():
    """Tang et al., 2021, Algorithm 1: Adam without bias correction, then momentum in one bit per element.

    m_i = beta m + (1 - beta) g_i, send C(m_i + d_i), d_i = m_i + d_i - C(m_i + d_i); the server does the same with the
    mean, and C of it is m; x -= gamma m / sqrt(v), with v from the warm-up.
    """
    simulation = grace.Simulation(RANKS, {"w": SHAPE}, ONE_BIT_ADAM)
    optimizer, gamma = MomentumAdam(0.01), 0.01
    x, y, momentum, square = (np.zeros(SHAPE[0] * SHAPE[1]) for _ in "xymv")
    worker, server = np.zeros((RANKS, x.size), np.float32), np.zeros(x.size, np.float32)
    for step in range(WARM_UP + 2 * STEPS):
        given = gradients(step, x)
        if step < WARM_UP:
            gradient = sum(g.astype(np.float64) for g in given) / RANKS
            momentum = BETA * momentum + (1 - BETA) * gradient
            square = DECAY * square + (1 - DECAY) * gradient**2
        else:
            last = momentum.astype(np.float32)
            for shard in shards_of(simulation):
                sent = []
                for rank in range(RANKS):
                    mine = np.float32(BETA) * last[shard] + np.float32(1 - BETA) * given[rank][shard]
                    mine += worker[rank][shard]
                    sent.append(sign(mine))
                    worker[rank][shard] = mine - sent[-1]
                mean = sum(sent) / np.float32(RANKS) + server[shard]
                momentum[shard] = sign(mean)
                server[shard] = mean - momentum[shard]
        x = x - gamma * momentum / (np.sqrt(square) + EPSILON)
        merged = simulation.step([{"w": g.reshape(SHAPE)} for g in gradients(step, y)])[0]["w"].reshape(-1)
        assert np.allclose(merged, momentum, rtol=1e-4, atol=1e-6), step
        y = y + optimizer.change(merged.astype(np.float64))
        assert np.allclose(x, y, rtol=1e-4, atol=1e-5), step
    assert np.abs(worker).max() > 0.1
    assert np.abs(server).max() > 0.01


def test_one_bit_adam_follows_adam():
    """Section 6: as fast as Adam, by the number of steps. Section 3.2: compressed gradients under Adam are not."""
    scales = 10 ** np.random.default_rng(1).uniform(-1, 1, SHAPE[0] * SHAPE[1])
    target = np.random.default_rng(2).standard_normal(scales.size)

    def losses(config, warm_up, steps=300):
        options = {**ONE_BIT_ADAM, "schedule": [], **config}
        simulation, optimizer = grace.Simulation(RANKS, {"w": SHAPE}, options), MomentumAdam(0.002, warm_up)
        x, momentum, found = np.zeros(scales.size), 0.0, []
        for step in range(steps):
            found.append(np.mean((x - target) ** 2))
            noise = [np.random.default_rng((step, rank)).standard_normal(x.size) for rank in range(RANKS)]
            mine = [{"w": (scales * (x - target + n)).astype(np.float32).reshape(SHAPE)} for n in noise]
            merged = simulation.step(mine)[0]["w"].reshape(-1).astype(np.float64)
            # Without the memory, what comes back is a gradient.
            momentum = merged if options["memory"] == "shared_momentum" else BETA * momentum + (1 - BETA) * merged
            x = x + optimizer.change(momentum)
        return np.array(found)

    schedule = [{**ONE_BIT_ADAM["schedule"][0], "step": 45}]
    signs = {"compressor": "efsignsgd", "memory": "residual", "communicator": "two_shot"}
    adam, one_bit = losses({}, 300), losses({"schedule": schedule}, 45)
    assert adam[-1] < 0.1 * adam[0]
    assert (one_bit < 1.3 * adam).all()
    assert losses(signs, 300)[-1] > 4 * one_bit[-1]
