"""Lin et al., "Deep gradient compression", ICLR 2018: Algorithms 1 and 4, sections 3.1 to 3.3."""

from __future__ import annotations

import numpy as np
import pytest

import grace
from grace.core.errors import ConfigError, IncompatibleError
from grace.testing.harness import exchange
from tests.papers.common import OPS, make, normal, payload, simulate, spec, state, step


def reference(grads, sent_masks, momentum, masking):
    """Run Algorithm 4 for one rank with the given masks of sent coordinates. Return sent values, u and v per step."""
    u = v = np.zeros(grads.shape[1])
    history = []
    for g, mask in zip(grads.astype(np.float64), sent_masks, strict=True):
        u = momentum * u + g
        v = v + u
        sent = np.where(mask, v, 0)
        v = np.where(mask, 0, v)
        if masking:
            u = np.where(mask, 0, u)
        history.append((sent, u, v))
    return history


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_correction_and_factor_masking(momentum, masking):
    """u = m u + g; v = v + u; v is sent at the selected coordinates. Then v is zero there, and with masking also u."""
    n, steps = 120, 8
    memory = {"name": "dgc", "momentum": momentum, "momentum_masking": masking}
    sim = simulate(1, (n,), make("topk", compress_ratio=0.1), memory)
    grads = np.array([normal(n, number) for number in range(steps)])
    merged, us, vs = [], [], []
    for g in grads:
        merged.append(step(sim, [g]))
        us.append(state(sim, 0, "momentum"))
        vs.append(state(sim, 0, "residual"))
    for i, (sent, u, v) in enumerate(reference(grads, [m != 0 for m in merged], momentum, masking)):
        assert np.allclose(merged[i], sent, rtol=1e-4, atol=1e-5)
        assert np.allclose(us[i], u, rtol=1e-4, atol=1e-5)
        assert np.allclose(vs[i], v, rtol=1e-4, atol=1e-5)
        # Top-k of the velocity: every sent value is at least as large as every kept value.
        assert np.abs(sent[sent != 0]).min() >= np.abs(v).max() - 1e-5


def test_momentum_correction_is_momentum_sgd_when_everything_is_sent():
    """Section 3.2: without sparsification and masking, the update is u, as in momentum SGD."""
    n = 50
    sim = simulate(2, (n,), make("topk", compress_ratio=1.0), {"name": "dgc", "momentum_masking": False})
    u = np.zeros(n)
    for number in range(6):
        xs = [normal(n, 2 * number + rank) for rank in range(2)]
        u = 0.9 * u + np.mean(xs, axis=0)
        assert np.allclose(step(sim, xs), u, rtol=1e-4, atol=1e-5)


def test_a_delayed_coordinate_gets_what_dense_momentum_would_have_given_it():
    """Equation 8: a coordinate that was not sent for T steps receives the whole velocity of these T steps."""
    n, waits = 10, 5
    sim = simulate(1, (n,), make("threshold", threshold=4.0), {"name": "dgc", "momentum": 0.5})
    u = velocity = 0.0
    for _ in range(waits):
        u = 0.5 * u + 1.0
        velocity += u
        merged = step(sim, [np.ones(n, np.float32)])
        if velocity > 4.0:
            assert np.allclose(merged, velocity)
            break
        assert not merged.any()
    else:
        raise AssertionError("the threshold was never passed, so nothing was tested")


@pytest.mark.parametrize("ranks", [1, 4])
def test_local_clipping_scales_with_the_root_of_the_ranks(ranks):
    """Section 3.3: the local bound is the global bound times N^(-1/2)."""
    n = 100
    sim = simulate(
        ranks, (n,), make("topk", compress_ratio=1.0), {"name": "dgc", "momentum": 0.0, "gradient_clipping": 2.0}
    )
    xs = [(10.0 ** (1 - 2 * rank)) * normal(n, rank) for rank in range(ranks)]
    bound = 2.0 / np.sqrt(ranks)
    clipped = [x * min(1.0, bound / np.linalg.norm(x)) for x in xs]
    assert any(np.linalg.norm(x) < bound for x in xs) or ranks == 1
    assert np.allclose(step(sim, [x.astype(np.float32) for x in xs]), np.mean(clipped, axis=0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("communicator", ["allgather", "two_shot"])
@pytest.mark.parametrize("cuts", [{"granularity": "layer"}, {"split_bytes": 400}, {"granularity": "model"}])
def test_local_clipping_may_limit_the_norm_of_all_tensors(cuts, communicator):
    """Section 3.3 clips by the norm of all gradients of a rank, however they are cut or joined."""
    ranks, bound = 3, 2.0 / np.sqrt(3)
    memory = {"name": "dgc", "momentum": 0.0, "gradient_clipping": 2.0, "clipping_norm": "all"}
    shapes = {"a": (30, 40), "b": (7,), "c": (20, 3), "dense": (50,)}
    sim = grace.Simulation(
        ranks,
        shapes,
        {
            "compressor": "topk",
            "compress_ratio": 1.0,
            "memory": memory,
            "default_rules": False,
            **cuts,
            "communicator": communicator,
            "rules": [{"match": "dense", "compressor": "none"}],
        },
    )
    for number in range(2):
        # Rank 2 stays below the bound with all its tensors, rank 1 only with each of them alone.
        sizes = [10.0, bound / 10, bound / 100]
        xs = [
            {name: size * normal(int(np.prod(s)), 10 * number + rank).reshape(s) for name, s in shapes.items()}
            for rank, size in enumerate(sizes)
        ]
        norms = [np.sqrt(sum((x**2).sum() for name, x in mine.items() if name != "dense")) for mine in xs]
        factors = [min(1.0, bound / norm) for norm in norms]
        assert factors[1] < 1 == factors[2]
        merged = sim.step([{name: x.astype(np.float32) for name, x in mine.items()} for mine in xs])
        for name in shapes:
            of = [1.0] * ranks if name == "dense" else factors
            expected = sum(factor * mine[name] for factor, mine in zip(of, xs, strict=True)) / ranks
            assert np.allclose(merged[0][name], expected, rtol=1e-4, atol=1e-6), name


def test_clipping_by_the_norm_of_all_tensors_waits_for_the_last_one():
    memory = {"name": "dgc", "gradient_clipping": 1.0, "clipping_norm": "all"}
    shapes, rules = {"a": (8,), "b": (8,), "dense": (8,)}, [{"match": "dense", "compressor": "none"}]
    sim = grace.Simulation(
        1,
        shapes,
        {"compressor": "topk", "memory": memory, "default_rules": False, "granularity": "layer", "rules": rules},
    )
    (run,), x = sim.runs, np.ones(8, np.float32)
    run.current.ready("b", x)
    assert not any(bucket.steps for bucket in run.current._buckets.values())
    # A step that is given up leaves nothing for the next one.
    run.discard()
    run.current.ready("b", x)
    run.current.ready("a", x)
    assert {step.unit.spec.name for bucket in run.current._buckets.values() for step in bucket.steps} == {"a", "b"}
    run.current.ready("dense", x)
    assert np.allclose(run.finish()["a"].max(), 1 / 4)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"gradient_clipping": None}, ConfigError, "set gradient_clipping to its bound"),
        ({"communicator": "hierarchical", "local_size": 2}, IncompatibleError, "compresses the mean of a node"),
    ],
)
def test_what_cannot_know_the_norm_of_all_tensors_is_refused(options, error, told):
    chosen = {"compressor": "topk", "memory": "dgc", "gradient_clipping": 1.0, "clipping_norm": "all", **options}
    with pytest.raises(error, match=told):
        grace.Simulation(4, {"a": (40, 50)}, {**chosen, "default_rules": False})


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1])
def test_the_sampled_threshold_sends_about_the_share_asked_for(ratio):
    """Section 3.1 (sampling): between k / overshoot and overshoot * k elements are sent, and they are the largest."""
    n = 100_000
    x = normal(n)
    compressor = make("dgc", compress_ratio=ratio, sample_ratio=0.05)
    k = int(ratio * n)
    for number in range(5):
        sent = payload(compressor, x, step=number)
        count = len(sent["values"])
        assert k / 1.3 <= count <= 1.3 * k
        assert np.array_equal(sent["values"], x[sent["indices"]])
        left = np.delete(np.abs(x), sent["indices"])
        assert np.abs(sent["values"]).min() >= left.max(), "the largest travel, whatever the sample said"


def passing(x: np.ndarray, ratio: float, samples: int, number: int) -> int:
    """Return the number of elements that pass the threshold of the sample."""
    at = exchange(make("dgc"), OPS, spec(*x.shape), [x], step=number).sites[0]
    drawn = np.abs(x[OPS.sample(len(x), samples, at.private_key)])
    return int((np.abs(x) >= np.sort(drawn)[-max(1, int(ratio * samples))]).sum())


def test_a_sample_that_misled_is_mended_by_the_exact_top_k():
    """The 4 % threshold of a sample of 50 is usually far too low or too high; then the exact top-k applies."""
    x, ratio, k = normal(5000), 0.04, 200
    compressor = make("dgc", compress_ratio=ratio, sample_ratio=0.01, min_samples=50)
    exact = np.sort(np.argsort(-np.abs(x))[:k])
    cases = {"too few": 0, "too many": 0, "near enough": 0}
    for number in range(60):
        passed = passing(x, ratio, 50, number)
        sent = payload(compressor, x, step=number)["indices"]
        if k / 1.3 <= passed <= 1.3 * k:
            cases["near enough"] += 1
            assert sent.tolist() == np.sort(np.argsort(-np.abs(x))[:passed]).tolist()
        else:
            cases["too few" if passed < k else "too many"] += 1
            assert sent.tolist() == exact.tolist()
    assert min(cases.values()) >= 8, cases


def test_without_overshoot_it_is_top_k():
    x = normal(5000)
    compressor = make("dgc", compress_ratio=0.04, min_samples=50, overshoot=1.0)
    for number in range(10):
        sent = payload(compressor, x, step=number)
        assert sent["indices"].tolist() == np.sort(np.argsort(-np.abs(x))[:200]).tolist()


def test_a_few_large_elements_that_the_sample_caught_are_not_all_that_travels():
    """There are ten large elements, k is 20, and the sample contains all elements except the last one."""
    x = np.concatenate([np.full(10, 100.0), 1 + np.arange(1990) / 1990]).astype(np.float32)
    compressor = make("dgc", compress_ratio=0.01, min_samples=500)
    assert any(passing(x, 0.01, 500, number) < 20 / 1.3 for number in range(40))
    for number in range(40):
        sent = payload(compressor, x, step=number)
        assert 20 / 1.3 <= len(sent["values"]) <= 26
        assert (sent["values"] == 100).sum() == 10


def test_a_full_sample_is_exact_top_k():
    x = normal(1000)
    sent = payload(make("dgc", compress_ratio=0.05), x)
    assert sent["indices"].tolist() == np.sort(np.argsort(-np.abs(x))[:50]).tolist()


def test_overshoot_is_cut_to_the_largest_k():
    """Half of all elements equal the threshold. Not all of them may be sent."""
    x = np.where(np.arange(2000) % 2, 1.0, 0.1).astype(np.float32)
    x[100] = 5.0
    sent = payload(make("dgc", compress_ratio=0.01), x)
    assert len(sent["values"]) == 20
    assert 5.0 in sent["values"]


def test_fewer_than_k_that_are_not_zero():
    x = np.zeros(2000, np.float32)
    x[[7, 1500]] = [1.0, -2.0]
    sent = payload(make("dgc", compress_ratio=0.01), x)
    assert sent["indices"].tolist() == [7, 1500]


def test_zeros_send_nothing():
    assert len(payload(make("dgc"), np.zeros(1000, np.float32))["values"]) == 0


def optimum(update, decay):
    """Return the mean weights of the last third of a run on |w - a|^2 / 2 with weight decay, and a.

    `update` returns what the learning rate multiplies, given the gradients of two ranks.
    """
    n, steps, rate = 200, 1200, 0.02
    rng = np.random.default_rng(0)
    a, w, total = rng.standard_normal(n) * np.exp(rng.standard_normal(n)), np.zeros(n), np.zeros(n)
    for number in range(steps):
        noise = rng.standard_normal((2, n)) / 4
        gradients = [(w - a + mine).astype(np.float32) for mine in noise]
        # Decoupled. Without momentum, the weight decay of an optimizer is the same.
        w *= 1 - rate * decay
        w -= rate * update(gradients)
        total += w * (number >= 800) / 400
    return total, a


def by_dgc(masking):
    """Return the update of `optimum` that SGD without momentum makes of what dgc exchanges."""
    sim = simulate(2, (200,), make("topk", compress_ratio=0.1), {"name": "dgc", "momentum_masking": masking})
    return lambda gradients: step(sim, gradients)


def by_momentum():
    """Return the update of dense SGD with momentum."""
    u = np.zeros(200)

    def update(gradients):
        nonlocal u
        u = 0.9 * u + np.mean(gradients, axis=0)
        return u

    return update


@pytest.mark.parametrize(("masking", "factor", "kept"), [(False, 10, True), (False, 1, False), (True, 10, False)])
def test_weight_decay_divided_by_one_minus_momentum_keeps_the_optimum(masking, factor, kept):
    """Dense training has its optimum at a / (1 + decay). A momentum of 0.9 amplifies gradients, but not the decay."""
    decay = 0.1
    found, a = optimum(by_dgc(masking), factor * decay)
    distance = np.linalg.norm(found - a / (1 + decay)) / np.linalg.norm(a / (1 + decay))
    assert distance < 0.01 if kept else 0.03 < distance < 0.5


@pytest.mark.parametrize(("masking", "kept"), [(False, True), (True, False)])
def test_decoupled_weight_decay_keeps_the_optimum_as_it_is(masking, kept):
    """The momentum of dense training amplifies gradients as much as that of dgc, and neither amplifies the decay."""
    dense, a = optimum(by_momentum(), 1.0)
    assert np.linalg.norm(dense - a / 1.1) / np.linalg.norm(a) < 0.01
    found, _ = optimum(by_dgc(masking), 1.0)
    distance = np.linalg.norm(found - dense) / np.linalg.norm(dense)
    assert distance < 0.01 if kept else 0.03 < distance < 0.5
