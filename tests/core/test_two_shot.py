"""The communicator two_shot: compressed shards to their owners, and compressed means back, with states at both ends."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import grace
from grace.core.communicators.two_shot import TwoShot
from grace.core.config.config import Method
from grace.core.config.registry import communicators, compressors, memories
from grace.core.errors import ConfigError, IncompatibleError, MismatchError, PayloadError, StateError
from grace.core.methods.capabilities import Stateful
from grace.core.methods.compressor import fixed_size
from grace.core.ops import get_ops
from grace.core.session.simulation import poll_all
from grace.core.spec import TensorSpec
from grace.core.state.carry import iterate_chain
from grace.testing.harness import FRAMEWORKS, host, same
from tests.core.test_contracts import reordered
from tests.support.registered import all_compressors
from tests.support.steps import (
    CUTS,
    METHODS,
    MIXED,
    TYPICAL,
    assert_same,
    each,
    go_to_step,
    gradient,
    gradients,
    on_host,
    simulate,
    states,
    step,
)


def _serves(compressor):
    return TwoShot().obstacle(compressor) is None


# Methods that can travel so, with their default memories.
CHOSEN = {
    name: dataclasses.replace(method, communicator=TwoShot())
    for name, method in TYPICAL.items()
    if _serves(method.compressor) and "tensor" not in method.memory.needs
}
CORRECTED = memories.make({"name": "residual", "lr_correction": True})
METHODS_OF_MEANS = {
    "qsgd with dore": Method(compressors.make("qsgd"), memories.make("dore"), TwoShot()),
    "topk with dore": Method(compressors.make("topk"), memories.make({"name": "dore", "alpha": 1.0}), TwoShot()),
    "efsignsgd with shared_momentum": Method(
        compressors.make("efsignsgd"), memories.make("shared_momentum"), TwoShot()
    ),
    "dist-EF-SGD": Method(compressors.make("efsignsgd"), CORRECTED, TwoShot(shard_memory=CORRECTED)),
}
SPECS = [TensorSpec("long", (3, 2000)), TensorSpec("short", (131,)), TensorSpec("empty", (0, 4))]
SPECS += [TensorSpec("half", (30, 60), "float16"), TensorSpec("double", (16, 90), "float64")]
# What these hold is that of another gradient than the one given; test_joint_memories.py and the papers have them.
OTHERS = ("dgc", "variance", "signum")
FEEDBACK = {name: m for name, m in CHOSEN.items() if m.memory.feeds_back and name.partition("-")[0] not in OTHERS}

CHOSEN |= METHODS_OF_MEANS


def held(sim):
    """Return what all ranks hold back of the mean, per tensor and element, in units of the gradient."""
    total = {spec.name: np.zeros(spec.numel) for spec in sim._specs}
    scales = {onward.spec.name: scale for unit in sim.plan.units for onward, scale in iterate_chain(unit)}
    for run in sim.runs:
        for name, unit in sim.plan.stateful.items():
            residual = run.units[name]["memory"].get("residual")
            if residual is None:
                continue
            x, start = host(run._ops("cpu"), residual).astype(np.float64), 0
            x /= scales[name] if unit.owners is not None else unit.memory.residual_scale * len(sim.runs)
            for piece in unit.pieces:
                total[piece.tensor][piece.start : piece.stop] += x[start : start + piece.numel]
                start += piece.numel
    return total


def test_most_methods_travel_so():
    assert {"3lc", "dgc", "efsignsgd", "qsgd", "signsgd", "terngrad", "topk", "threshold"} <= {
        name for name, method in METHODS.items() if _serves(method.compressor)
    }


@each(
    chosen=CHOSEN,
    size=[1, 2, 3, 5],
    cut=["layer", *CUTS],
)
def test_all_ranks_get_the_same_bits_and_send_what_is_predicted(chosen, size, cut, traffic):
    options = CUTS.get(cut, {"granularity": "layer"})
    sim = simulate(chosen, size=size, specs=SPECS, **options)
    for number in range(2):
        traffic.clear()
        first, *others = step(sim, number)
        for other in others:
            assert_same([first], [other])
        for spec in SPECS:
            assert (first[spec.name].shape, str(first[spec.name].dtype)) == (spec.shape, spec.dtype)
        for rank, run in enumerate(sim.runs):
            stats = run.stats()
            assert stats["wire_bytes"] == sum(traffic[rank].values())
            assert {kind: n for kind, n in stats["collectives"].items() if n} == {
                kind: n for kind, n in traffic[rank].items() if n
            }
    if fixed_size(chosen.compressor):
        mean = np.mean([sum(mine.values()) for mine in traffic.values()])
        assert abs(sum(bucket.nbytes for bucket in sim.plan.buckets) - mean) <= len(sim.plan.buckets)


@each(
    chosen=FEEDBACK,
    size=[2, 3, 5],
    cut=["layer", *CUTS],
)
def test_nothing_is_lost(chosen, size, cut):
    """Applied plus what all ranks hold back is what was given."""
    options = CUTS.get(cut, {"granularity": "layer"})
    wide = [spec for spec in SPECS if spec.dtype in ("float32", "float64")]
    sim = simulate(chosen, size=size, specs=wide, **options)
    given, applied = ({spec.name: np.zeros(spec.numel) for spec in wide} for _ in "ab")
    for number in range(6):
        first, *_ = step(sim, number)
        for spec in wide:
            mine = [gradient(spec, number, rank).astype(np.float64) for rank in range(size)]
            given[spec.name] += sum(mine).reshape(-1) / size
            applied[spec.name] += first[spec.name].reshape(-1)
    kept = held(sim)
    for name, total in given.items():
        scale = np.abs(total).max(initial=0.0) + sum(np.abs(kept[name]).max(initial=0.0) for _ in "a")
        assert np.abs(applied[name] + kept[name] - total).max(initial=0.0) <= 2e-5 * scale, name


@each(chosen=CHOSEN, framework=FRAMEWORKS[1:])
def test_frameworks_agree(chosen, framework):
    specs = SPECS[:2]
    numpy, other = (simulate(chosen, which, size=2, specs=specs) for which in ("numpy", framework))
    exact = reordered(chosen.compressor, "float32") is None
    for number in range(2):
        ours, theirs = step(numpy, number), step(other, number)
        if exact:
            assert_same(ours, theirs)
        for mine, its in zip(ours, theirs, strict=True):
            for name, x in mine.items():
                np.testing.assert_allclose(its[name], x, rtol=0, atol=1e-5)
    if exact:
        assert_same(states(numpy), states(other))


def by_tensor(sim):
    """Return the states of all ranks that have them, in rank order: which rank owns a whole tensor may differ."""
    found = {}
    for mine in states(sim):
        for key, x in mine.items():
            found.setdefault(key, []).append(x)
    return {(*key, i): x for key, ranks in found.items() for i, x in enumerate(ranks)}


@each(chosen=CHOSEN, size=[2, 3])
def test_results_do_not_depend_on_buckets_or_on_the_order_of_gradients(chosen, size):
    alone, together, shuffled = (
        simulate(chosen, size=size, specs=SPECS, bucket_bytes=n) for n in (0, 4 * 2**20, 4 * 2**20)
    )
    rng = np.random.default_rng(0)
    for number in range(2):
        expected = step(alone, number)
        assert_same(expected, step(together, number))
        given = gradients(shuffled, number)
        calls = [(rank, spec.name) for rank in range(size) for spec in SPECS]
        for i in rng.permutation(len(calls)):
            rank, name = calls[i]
            shuffled.runs[rank].current.ready(name, given[rank][name], 0.1)
        poll_all([shuffled.runs[rank] for rank in rng.permutation(size)])
        merged = {rank: shuffled.runs[rank].finish() for rank in rng.permutation(size)}
        assert_same(expected, on_host(shuffled, [merged[rank] for rank in range(size)]))
    assert_same([by_tensor(alone)], [by_tensor(together)])
    assert_same(states(together), states(shuffled))


@each(
    # A tensor that a method cannot compress has no owner.
    chosen={name: method for name, method in CHOSEN.items() if method.compressor.unfit(SPECS[0]) is None},
    framework=["numpy", "torch"],
    value={"nan": np.nan, "-inf": -np.inf},
)
def test_a_bad_gradient_rolls_its_shard_back_on_all_ranks(chosen, framework, value):
    """The owner passes the flag on, so that its own memory of the mean is rolled back, too."""
    sim = simulate(chosen, framework, size=3, specs=SPECS[:2])
    step(sim, 0)
    before = states(sim)

    def poison(name, rank, x):
        return np.where(np.arange(x.size).reshape(x.shape) == 700, value, x).astype(x.dtype) if rank == 1 else x

    first, *others = step(sim, 1, change=poison)
    for other in others:
        assert_same([first], [other])
    hit = next(u for u in sim.plan.units if any(p.tensor == "long" and p.start <= 700 < p.stop for p in u.pieces))
    (piece,) = hit.pieces
    flat = first["long"].reshape(-1)
    assert np.isnan(flat[piece.start : piece.stop]).all()
    assert np.isfinite(np.delete(flat, np.s_[piece.start : piece.stop])).all()
    assert np.isfinite(first["short"]).all()
    for old, new in zip(before, states(sim), strict=True):
        for key in old:
            if key[0] in (hit.spec.name, hit.onward.spec.name):
                assert same(old[key], new[key]), key
    assert all(np.isfinite(x).all() for mine in step(sim, 2) for x in mine.values())


@each(chosen=CHOSEN, framework=["numpy", "torch"])
def test_a_checkpoint_continues_bit_for_bit(chosen, framework):
    whole, begun, resumed = (simulate(chosen, framework, size=3, specs=SPECS) for _ in "abc")
    for number in range(2):
        step(whole, number)
        step(begun, number)
    for old, new in zip(begun.runs, resumed.runs, strict=True):
        assert new.load_state_dict(old.state_dict(), lambda saved, current: saved)
    assert_same(step(whole, 2), step(resumed, 2))


def test_a_checkpoint_of_another_rank_starts_the_memories_again():
    sim, fresh = (simulate(CHOSEN["topk"], size=2, specs=SPECS) for _ in "ab")
    step(sim, 0)
    target = sim.runs[1]
    assert target.load_state_dict(sim.runs[0].state_dict(), lambda saved, current: saved) is False
    assert_same([states(sim)[1]], [states(fresh)[1]])


@pytest.mark.parametrize("name", ["topk", "dgc"])
@pytest.mark.parametrize("sizes", [(2, 3), (3, 1), (1, 4)])
def test_a_checkpoint_of_another_number_of_ranks_starts_the_memories_again(name, sizes):
    """auto may have chosen another communicator for it."""
    chosen = dataclasses.replace(CHOSEN[name], communicator=communicators.make("auto"))
    before, sim, fresh = (simulate(chosen, size=size, specs=SPECS) for size in (*sizes, sizes[1]))
    step(before, 0)
    for run in sim.runs:
        assert run.load_state_dict(before.runs[0].state_dict(), lambda saved, current: saved) is False
        assert run.step == 1
    assert_same(states(sim), states(fresh))
    step(sim, 1)
    other = simulate(chosen, size=sizes[1], specs=SPECS[:1])
    with pytest.raises(StateError, match="units of compression differ"):
        other.runs[0].load_state_dict(before.runs[0].state_dict(), lambda saved, current: saved)


@pytest.mark.parametrize("name", ["topk", "efsignsgd"])
@pytest.mark.parametrize("after", [{"communicator": "allgather"}, {"bucket_bytes": 8192}, {"compress_ratio": 0.2}])
def test_a_change_keeps_what_owners_hold(name, after):
    if name != "topk" and "compress_ratio" in after:
        pytest.skip("efsignsgd has no ratio")
    options = {"compressor": name, "communicator": "two_shot", "default_rules": False}
    sim = grace.Simulation(3, SPECS[:2], options)
    for number in range(3):
        step(sim, number)
    before = held(sim)
    assert any(np.abs(x).max() > 0 for x in before.values())
    if "bucket_bytes" in after:
        config = grace.make_config({**sim.config.to_dict(), **after})
        plan = grace.Simulation(3, SPECS[:2], config).plan
        for run in sim.runs:
            run.change(plan)
        kept = held(sim)
    else:
        sim.change(**after)
        kept = held(sim) if sim.plan.shards else _held_by_ranks(sim)
    for tensor, x in before.items():
        assert np.allclose(kept[tensor], x, rtol=1e-5, atol=1e-6 * np.abs(x).max()), tensor


def test_a_change_to_no_memory_sends_what_only_owners_held():
    """The ranks had no memory before the change and have none after it; the mean of the owners is still owed."""
    specs, zero = [TensorSpec("w", (64, 64))], np.zeros((64, 64), np.float32)
    travels = {"name": "two_shot", "second": {"name": "topk", "compress_ratio": 0.1}, "shard_memory": "residual"}
    sim = grace.Simulation(3, specs, {"compressor": "qsgd", "communicator": travels, "default_rules": False})
    step(sim, 0)
    owed = held(sim)["w"].reshape(64, 64)
    assert np.abs(owed).max() > 0
    sim.change(compressor="none", communicator="allreduce")
    for merged in sim.step([{"w": zero}] * 3):
        assert np.allclose(merged["w"], owed, rtol=1e-5, atol=1e-6 * np.abs(owed).max())
    assert all((merged["w"] == 0).all() for merged in sim.step([{"w": zero}] * 3))


def _held_by_ranks(sim):
    total = {spec.name: np.zeros(spec.numel) for spec in sim._specs}
    for run in sim.runs:
        for unit in sim.plan.units:
            x, start = run.units[unit.spec.name]["memory"]["residual"].astype(np.float64), 0
            for piece in unit.pieces:
                mine = x[start : start + piece.numel] / unit.memory.residual_scale / len(sim.runs)
                total[piece.tensor][piece.start : piece.stop] += mine
                start += piece.numel
    return total


# A byte, two bits or one bit per element and its scales, and 8 bytes for one of a hundred elements.
@pytest.mark.parametrize(
    ("name", "nbytes"), [("qsgd", 1 + 4 / 512), ("terngrad", 1 / 4), ("efsignsgd", 1 / 8), ("topk", 0.08)]
)
def test_bytes_do_not_grow_with_the_ranks(name, nbytes, crossed):
    """Each rank sends 2 (N - 1) / N payloads, counting what the allgather forwards; gathering brings N - 1 of them."""
    n = 1 << 20
    for size in (2, 4, 8):
        crossed.clear()
        sim = grace.Simulation(size, {"w": (1024, n // 1024)}, {"compressor": name, "communicator": "two_shot"})
        rng = np.random.default_rng(0)
        sim.step([{"w": rng.standard_normal((1024, n // 1024)).astype(np.float32)} for _ in range(size)], lr=0.1)
        assert 4 * max(crossed.values()) <= 1.03 * 2 * (size - 1) / size * nbytes * n, size


def test_the_second_compressor_and_its_memory_can_be_named():
    options = {"compressor": "qsgd", "communicator": "two_shot", "second": "none", "shard_memory": "none"}
    sim = grace.Simulation(3, {"w": (64, 48)}, {**options, "default_rules": False})
    assert {type(u.onward.compressor) for u in sim.plan.units} == {type(compressors.make("none"))}
    config = grace.make_config(options)
    assert grace.make_config(config.to_dict()) == config
    # The mean is sent as it is: what comes out is the mean of what qsgd sent.
    g = [{"w": np.random.default_rng(rank).standard_normal((64, 48)).astype(np.float32)} for rank in range(3)]
    merged = sim.step(g)[0]["w"]
    mean = sum(x["w"] for x in g) / 3
    assert np.abs(merged - mean).max() <= np.abs(mean).max() / 30


@pytest.mark.parametrize("second", ["none", "qsgd"])
@pytest.mark.parametrize(
    "first", [{"name": "qsparse", "sparsifier": "randomk"}, {"name": "chain", "sparsifier": "randomk"}]
)
def test_owners_know_the_fields_that_do_not_travel(first, second):
    """Random indices are equal on all ranks."""
    config = {"compressor": first, "memory": "none", "default_rules": False, "seed": 3}
    there, back = ({**config, "communicator": c} for c in ({"name": "two_shot", "second": second}, "allgather"))
    given = [{"w": np.full(400, rank, np.float32)} for rank in range(3)]
    # One unit, and one shard: the same indices.
    (merged, *others), (expected, *_) = (grace.Simulation(3, {"w": (400,)}, c).step(given) for c in (there, back))
    assert_same([merged] * 2, others)
    assert np.array_equal(merged["w"] != 0, expected["w"] != 0)
    assert np.allclose(merged["w"], expected["w"], rtol=0.02)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"compressor": "powersgd"}, "its payloads can be added"),
        ({"compressor": "acpsgd"}, "its payloads can be added"),
        ({"compressor": "hardthreshold"}, "learns from the payloads of all ranks"),
        ({"compressor": "qsgd", "second": "randomk"}, "keeps a field on the rank"),
        ({"compressor": "qsgd", "second": {"name": "terngrad", "shared_scale": True}}, "negotiates"),
        ({"compressor": "qsgd", "second": "atomo"}, "the compressor of the mean needs a whole tensor"),
        (
            {
                "compressor": "topk",
                "shard_memory": {"name": "dgc", "gradient_clipping": 1.0, "clipping_norm": "all"},
            },
            "shard_memory .* needs the norm of whole tensors or of all gradients",
        ),
        *(
            ({"compressor": "topk", "shard_memory": memory}, "shard_memory .* changes the gradient after it was merged")
            for memory in ("efsignsgd", "powersgd", "shared_momentum", "diana", "dore", "svrg")
        ),
    ],
)
def test_what_cannot_travel_is_refused_by_name(options, told):
    with pytest.raises(IncompatibleError, match=told):
        grace.make_config({**options, "communicator": "two_shot"})


def test_no_owner_feeds_back_what_the_ranks_feed_back():
    config = {"compressor": "topk", "memory": "powersgd", "communicator": "two_shot", "default_rules": False}
    onward = grace.Simulation(3, {"w": (64, 64)}, config).plan.units[0].onward
    assert onward.memory == memories.make("none")
    with pytest.raises(IncompatibleError, match="would feed back a part of it again: leave shard_memory out"):
        grace.Simulation(3, {"w": (64, 64)}, {**config, "shard_memory": "residual"})


@pytest.mark.parametrize("nodes", [False, True])
def test_an_owner_cannot_correct_for_the_learning_rate_alone(nodes):
    """Its tensors would be joined with others, whose learning rates may differ."""
    travels = {"name": "two_shot", "shard_memory": {"name": "residual", "lr_correction": True}}
    if nodes:
        travels = {"name": "hierarchical", "local_size": 2, "between": travels}
    with pytest.raises(IncompatibleError, match=r"does not correct for the learning rate, while shard_memory .* does"):
        grace.Simulation(4, SPECS, {"compressor": "topk", "communicator": travels, "default_rules": False})


def test_a_memory_of_whole_tensors_keeps_them():
    """The norm that `gradient_clipping` limits is that of the tensor."""
    options = {"compressor": "threshold", "threshold": 0.0, "second": "none", "default_rules": False}
    sim = grace.Simulation(
        3, {"w": (40, 50)}, {**options, "communicator": "two_shot", "memory": "residual", "gradient_clipping": 1.0}
    )
    assert [unit.spec.numel for unit in sim.plan.units] == [2000]
    g = [{"w": np.random.default_rng(rank).standard_normal((40, 50)).astype(np.float32)} for rank in range(3)]
    expected = sum(x["w"] / np.linalg.norm(x["w"]) / np.sqrt(3) for x in g) / 3
    assert np.allclose(sim.step(g)[0]["w"], expected, atol=1e-6)


def test_a_typo_in_an_option_is_told():
    with pytest.raises(ConfigError, match="shard_memory"):
        grace.make_config(compressor="qsgd", communicator="two_shot", shard_memry="none")


def test_ranks_at_different_steps_are_noticed():
    sim = simulate(CHOSEN["topk"], size=2, specs=SPECS[:2])
    step(sim, 0)
    go_to_step(sim.runs[1], 5)
    with pytest.raises(MismatchError, match="not at the same step"):
        step(sim, 1)


def test_a_checksum_covers_both_shots():
    for damaged_round in (0, 1):
        sim = simulate(CHOSEN["topk"], size=2, specs=SPECS[:1], checksum=True)
        first, second = gradients(sim, 0)
        sim.runs[0].current.ready("long", first["long"], 0.1)
        sim.runs[1].current.ready("long", second["long"], 0.1)
        # The second rank has found the buffers of the first round and has started the next one.
        (waiting,) = (x for name, x in sim.network.buffers.items() if name.endswith(f"/{damaged_round}.0"))
        waiting[1][0][-100] ^= 1
        with pytest.raises(PayloadError, match="checksum"):
            poll_all(sim.runs)


@pytest.mark.parametrize("ranks", range(1, 6))
def test_the_owners_of_whole_tensors_have_about_equal_shares(ranks):
    widths = np.random.default_rng(0).integers(30, 200, 24)
    shapes = {f"layer.{i}": (16, int(width)) for i, width in enumerate(widths)}
    for bucket_bytes, buckets in ((1 << 30, 1), (1, 24)):
        options = {"bucket_bytes": bucket_bytes, "communicator": "two_shot", "default_rules": False}
        sim = grace.Simulation(ranks, shapes, {"compressor": "truncatedsvd", "memory": "none", **options})
        assert len(sim.plan.buckets) == buckets
        owned = np.zeros(ranks)
        for unit in sim.plan.units:
            (owner,) = unit.onward.owners
            owned[owner] += unit.spec.numel
        # The rank with the largest share had the smallest one before it got its last tensor.
        assert owned.max() - owned.min() <= 16 * widths.max()
        assert owned.sum() == 16 * widths.sum()


@pytest.mark.parametrize("average", [True, False])
def test_sums_are_the_size_times_the_average(average):
    chosen = Method(compressors.make("qsgd"), memories.make("none"), TwoShot(compressors.make("none")))
    sim = simulate(chosen, size=4, specs=MIXED[:2], average=average)
    merged = step(sim, 0)[0]["matrix"]
    total = sum(gradient(MIXED[0], 0, rank).astype(np.float64) for rank in range(4)) / (4 if average else 1)
    finite = np.isfinite(total)
    assert np.abs(merged - total)[finite].max() <= np.abs(total[finite]).max() / 20


def test_compressors_know_whether_they_keep_a_state():
    learning = compressors.make({"name": "chain", "sparsifier": "dct", "quantizer": "qsgd"})
    stateful = [compressor for compressor in (*all_compressors(), learning) if isinstance(compressor, Stateful)]
    kept = [bool(compressor.init(TensorSpec("w", (64, 32)), get_ops("numpy"), 0)) for compressor in stateful]
    assert [compressor.keeps_state for compressor in stateful] == kept
    assert {True, False} == set(kept)
