"""Granularity: layers, buckets or the whole model are compressed as one unit, and long tensors are split."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest

import grace
from grace.core.config.config import Method, make_config
from grace.core.config.registry import communicators, compressors, memories
from grace.core.methods.compressor import sparsifies, usual_communicator
from grace.core.ops import get_ops
from grace.core.plan.plan import make_plan
from grace.core.plan.unit import GRAIN
from grace.core.session.simulation import poll_all
from grace.core.spec import TensorSpec
from grace.testing.harness import FRAMEWORKS, host, same
from tests.support.covering import ALL
from tests.support.reference_step import Reference, reference
from tests.support.steps import (
    CUTS,
    LAYOUTS,
    LONG,
    METHODS,
    MIXED,
    RANKS,
    SPECS,
    TYPICAL,
    assert_same,
    config,
    each,
    each_combination,
    each_cut,
    gradient,
    gradients,
    on_host,
    simulate,
    specs_in,
    states,
    step,
)

FLAT = {name: chosen for name, chosen in TYPICAL.items() if chosen.compressor.flat}
BAD = {"nan": np.nan, "inf": np.inf}
OTHERS = [framework for framework in FRAMEWORKS if framework != "numpy"]


def in_time(row):
    """Return whether a row takes less than seconds: eager TensorFlow solves for the values of a sketch one by one."""
    return ALL or (row["chosen"], row["framework"]) != ("homomorphic", "tensorflow")


def flat_gradients(sim, given):
    """Return the flat gradient of every unit for each rank: its pieces concatenated, in the dtype of its tensors."""
    ops, plan = sim.runs[0]._ops("cpu"), sim.plan
    return [
        {
            unit.spec.name: ops.concat([ops.reshape(mine[p.tensor], (-1,))[p.start : p.stop] for p in unit.pieces])
            for unit in plan.units
        }
        for mine in given
    ]


def assert_units(sim, merged, expected):
    """Assert that every tensor equals the results of the units that contain it."""
    got, wanted = on_host(sim, merged), on_host(sim, expected)
    for mine, theirs in zip(got, wanted, strict=True):
        for name, places in sim.plan.places.items():
            slices = [theirs[unit.spec.name].reshape(-1)[i : i + piece.numel] for unit, i, piece in places]
            assert same(mine[name].reshape(-1), np.concatenate(slices)), name


# --- splits and fusions -----------------------------------------------------------------------------------------


def pieces(plan):
    return [[tuple(piece) for piece in unit.pieces] for unit in plan.units]


def test_every_element_lies_in_one_unit():
    for chosen, options in itertools.product(TYPICAL.values(), [{"granularity": "layer"}, *CUTS.values()]):
        plan = make_plan(MIXED, config(chosen, **options))
        for item in plan.exchanged:
            ends = [0, *(piece.stop for _, _, piece in plan.places[item.spec.name])]
            assert [piece.start for _, _, piece in plan.places[item.spec.name]] == ends[:-1]
            assert ends[-1] == item.spec.numel
        assert len({unit.spec.name for unit in plan.units}) == len(plan.units)
        for unit in plan.units:
            assert unit.spec.numel == sum(piece.numel for piece in unit.pieces)
            assert unit.compressor.unfit(unit.spec) is None


def test_what_is_served_alike_is_one_unit_of_a_bucket():
    specs = [TensorSpec(name, (40, 40)) for name in "abcd"] + [TensorSpec("e", (40, 40), "float64")]
    options = {"compressor": "topk", "rules": [{"match": "b", "compressor": "onebit"}]}
    plan = make_plan(specs, make_config(**options))
    assert len(plan.buckets) == 1
    assert pieces(plan) == [[("e", 0, 1600)], [(name, 0, 1600) for name in "dca"], [("b", 0, 1600)]]
    layers = make_plan(specs, make_config(**options, granularity="layer"))
    assert pieces(layers) == [[(name, 0, 1600)] for name in "edcba"]
    assert all(unit.spec.shape == (40, 40) for unit in layers.units)
    # 6,400 bytes of float32 each, so a bucket contains two.
    plan = make_plan(specs[:4], make_config(compressor="topk", bucket_bytes=12_800))
    assert pieces(plan) == [[("d", 0, 1600), ("c", 0, 1600)], [("b", 0, 1600), ("a", 0, 1600)]]


def test_long_tensors_are_cut_into_about_equal_slices():
    def starts(compressor="topk", **options):
        plan = make_plan([TensorSpec("w", (10, 4096))], make_config(compressor=compressor, **options))
        return [unit.pieces[0].start for unit in plan.units]

    small = {"bucket_bytes": 4 * GRAIN, "split_bytes": 4 * 4 * GRAIN}
    assert starts(**small) == [0, 4 * GRAIN, 8 * GRAIN]
    assert starts(**small, compressor="qsgd") == [0, 4 * GRAIN, 8 * GRAIN]
    assert starts(**{**small, "split_bytes": 0}) == [0]
    assert starts(**{**small, "split_bytes": 10 * 4 * GRAIN}) == [0]
    for granularity in ("layer", "model"):
        assert starts(**small, granularity=granularity) == [0]
    # Slices are never smaller than GRAIN, even if split_bytes is.
    assert starts(bucket_bytes=0, split_bytes=1) == list(range(0, 40960, GRAIN))


SCALES = {"large": 1.0, "middle": 0.1, "small": 0.01, "long": 1.0}


@functools.cache
def lost_of_tensors(name, cut):
    """Return the relative squared errors of tensors of unlike scale, summed over steps; with no cut, of each alone."""
    chosen = dataclasses.replace(TYPICAL[name], memory=memories.make("none"))
    specs = [TensorSpec(name, (150, 100) if name == "long" else (30, 50)) for name in SCALES]
    sim = simulate(chosen, size=1, specs=specs, **({"granularity": "layer"} if cut is None else CUTS[cut]))
    lost = dict.fromkeys(SCALES, 0.0)
    for number in range(20):
        (given,) = gradients(sim, number)
        given = {name: np.float32(SCALES[name]) * x for name, x in given.items()}
        (merged,) = on_host(sim, sim.step([given], lr=0.1))
        for name, x in given.items():
            lost[name] += float(np.sum((x - merged[name]) ** 2.0) / np.sum(x**2.0))
    return lost


DENSE = [name for name, chosen in TYPICAL.items() if not sparsifies(chosen.compressor)]


@each(chosen=DENSE, cut=list(CUTS))
def test_tensors_of_unlike_scale_keep_the_error_they_have_alone(chosen, cut):
    """One scale for all of them would ruin those with small gradients. Sparsifiers choose among all elements."""
    alone, together = lost_of_tensors(chosen, None), lost_of_tensors(chosen, cut)
    assert all(together[name] <= 1.2 * alone[name] + 1e-6 for name in SCALES), (alone, together)


@pytest.mark.parametrize("name", ["powersgd", "gradiveq", "gradzip", "atomo", "truncatedsvd"])
def test_methods_that_look_at_the_shape_stay_with_their_tensors(name):
    specs = [TensorSpec(n, (100, 150)) for n in "abc"]
    for options in CUTS.values():
        plan = make_plan(specs, make_config(compressor=name, **options))
        assert sorted((unit.spec.name, unit.spec.shape) for unit in plan.units) == [(n, (100, 150)) for n in "abc"]


def test_tensors_of_which_a_slice_is_unfit_are_not_cut(monkeypatch):
    options = {"compressor": "topk", "split_bytes": 20_000, "bucket_bytes": 0}
    assert len(make_plan([LONG], make_config(**options)).units) > 1
    topk = type(compressors.make("topk"))
    monkeypatch.setattr(topk, "unfit", lambda self, spec: "short" if spec.numel < 8000 else None)
    plan = make_plan([LONG], make_config(**options))
    assert [unit.spec for unit in plan.units] == [plan.exchanged[0].spec]


def test_tensors_of_different_learning_rates_are_not_compressed_as_one():
    """A memory that corrects for the learning rate has one rate per unit, but optimizers may have several rates."""
    specs = {"a": (40, 40), "b": (40, 40)}
    options = {"compressor": "topk", "compress_ratio": 0.05}
    assert len(grace.Simulation(1, specs, options).plan.units) == 1
    results = []
    for granularity in ("layer", "bucket", "model"):
        sim = grace.Simulation(1, specs, {**options, "lr_correction": True, "granularity": granularity})
        assert len(sim.plan.units) == 2
        (run,) = sim.runs
        for number in range(3):
            for name, rate in (("a", 0.1 * (number + 1)), ("b", 0.5 / (number + 1))):
                run.current.ready(name, gradient(TensorSpec(name, (40, 40)), number, ord(name)), rate)
            merged = run.finish()
        results.append(merged)
    for other in results[1:]:
        assert all(same(results[0][name], other[name]) for name in specs)


# --- layers -----------------------------------------------------------------------------------------------------


@each(chosen=TYPICAL, size=[2, 3, 4])
def test_layers_are_what_the_parts_make_of_every_tensor(chosen, size):
    sim, by_hand = simulate(chosen, size=size), reference(SPECS, config(chosen), get_ops("numpy"), size)
    for number in range(3):
        given = gradients(sim, number)
        assert_same(on_host(sim, by_hand.step(given)), on_host(sim, sim.step(given, lr=0.1)))
    for mine, theirs in zip(states(sim), by_hand.states, strict=True):
        for (name, kind, key), value in mine.items():
            assert same(value, np.asarray(theirs[name][kind][key])), (name, key)


@each(in_time, chosen=TYPICAL, framework=OTHERS)
def test_layers_are_the_same_in_every_framework(chosen, framework):
    specs = specs_in(framework, chosen)
    ops = get_ops(framework)
    sim, by_hand = simulate(chosen, framework, size=2, specs=specs), reference(specs, config(chosen), ops, 2)
    for number in range(2):
        given = gradients(sim, number)
        assert_same(on_host(sim, by_hand.step(given)), on_host(sim, sim.step(given, lr=0.1)))


# --- buckets and models: one flat tensor ------------------------------------------------------------------------


def units_by_hand(sim, ops, size=RANKS):
    """Return the reference step in which every unit is one tensor."""
    return Reference(ops, sim.plan.units, size, sim.config.seed)


@each(chosen=TYPICAL, cut=list(CUTS))
def test_a_unit_is_compressed_as_one_tensor(chosen, cut):
    sim = simulate(chosen, specs=MIXED, **CUTS[cut])
    by_hand = units_by_hand(sim, get_ops("numpy"))
    whole = {piece.tensor for unit in sim.plan.units for piece in unit.pieces if len(unit.pieces) > 1}
    split = {name for name, places in sim.plan.places.items() if len(places) > 1}
    assert bool(whole) == any(item.joins for item in sim.plan.exchanged)
    cuttable = next(item for item in sim.plan.exchanged if item.spec.name == "long").compressor.flat
    assert split == ({"long"} if cut == "small buckets" and cuttable else set())
    for number in range(3):
        given = gradients(sim, number)
        expected = by_hand.step(flat_gradients(sim, given))
        assert_units(sim, sim.step(given, lr=0.1), expected)
    for mine, theirs in zip(states(sim), by_hand.states, strict=True):
        for (name, kind, key), value in mine.items():
            assert same(value, np.asarray(theirs[name][kind][key])), (name, key)


@each(in_time, chosen=TYPICAL, framework=OTHERS)
def test_a_unit_is_compressed_as_one_tensor_in_every_framework(chosen, framework):
    specs = [spec for spec in MIXED if spec.name in ("matrix", "vector", "long", "empty", "double")]
    sim = simulate(chosen, framework, size=2, specs=specs, **CUTS["small buckets"])
    by_hand = units_by_hand(sim, get_ops(framework), 2)
    for number in range(2):
        given = gradients(sim, number)
        expected = by_hand.step(flat_gradients(sim, given))
        assert_units(sim, sim.step(given, lr=0.1), expected)


# Not in eager TensorFlow, which is ten times slower. Its graphs have every method in test_graphs.py.
@each_combination(cut=["layer", "small buckets", "model"], framework=[f for f in FRAMEWORKS if f != "tensorflow"])
def test_all_ranks_get_the_same_bits_and_report_their_bytes(chosen, cut, framework, traffic):
    sim = simulate(chosen, framework, specs=MIXED, **LAYOUTS[cut])
    for run in sim.runs:
        run.track_norms = True
        assert sum(run.stats()["collectives"].values()) == 0
    for number in range(2):
        traffic.clear()
        first, *others = step(sim, number)
        for other in others:
            assert_same([first], [other])
        for spec in MIXED:
            assert (first[spec.name].shape, str(first[spec.name].dtype)) == (spec.shape, spec.dtype)
        for rank, run in enumerate(sim.runs):
            stats = run.stats()
            assert stats["wire_bytes"] == sum(traffic[rank].values())
            assert {kind: n for kind, n in stats["collectives"].items() if n} == traffic[rank]
            fields = sum(int(run.notes["unit", unit.spec.name]) for unit in sim.plan.units)
            assert sum(tensor["wire_bytes"] for tensor in stats["tensors"].values()) == fields
            assert set(stats["tensors"]) == {spec.name for spec in MIXED}
    predicted = sum(bucket.nbytes for bucket in sim.plan.buckets)
    if all(bucket.route.fixed for bucket in sim.plan.buckets):
        assert predicted == sum(traffic[0].values())
        assert sum(sim.plan.bytes_of(item) for item in sim.plan.assignments) == fields
    else:
        assert predicted <= sum(traffic[0].values())


@each(chosen=FLAT, cut=list(CUTS))
def test_norms_of_tensors_add_up_to_those_of_their_units(chosen, cut):
    sim = simulate(chosen, specs=[*SPECS[:2], LONG], **CUTS[cut])
    for run in sim.runs:
        run.track_norms = True
    for number in range(2):
        step(sim, number)
    for run, held in zip(sim.runs, states(sim), strict=True):
        tensors = run.stats()["tensors"]
        residuals = [value for (_, _, key), value in held.items() if key == "residual"]
        if not residuals:
            assert {tensor["residual_norm"] for tensor in tensors.values()} == {None}
            continue
        total = math.fsum(float(np.sum(value.astype(np.float64) ** 2)) for value in residuals)
        assert math.fsum(t["residual_norm"] ** 2 for t in tensors.values()) == pytest.approx(total, rel=1e-5)
        assert all(tensor["relative_error"] is not None for tensor in tensors.values())


@each(chosen=TYPICAL, cut=["layer", *CUTS])
def test_errors_and_entries_of_tensors_are_their_own(chosen, cut):
    """In the first step of one rank the mean is C(x), and x is the gradient."""
    chosen = dataclasses.replace(chosen, memory=memories.make("none"), communicator=communicators.make("allgather"))
    sim = simulate(chosen, size=1, specs=MIXED, **LAYOUTS[cut])
    sim.track_norms = True
    # The elements of a tensor are larger or smaller than those of others.
    scales = {spec.name: 2.0 ** (i - 4) for i, spec in enumerate(MIXED)}
    (given,) = gradients(sim, 0, change=lambda name, rank, x: x * x.dtype.type(scales[name]))
    (merged,) = sim.step([given])
    stats = sim.stats()
    given, merged = (on_host(sim, [each])[0] for each in (given, merged))
    # The fields of some tensors are narrower or wider than the tensors.
    rounded = {"float16": 1e-3, "bfloat16": 1e-2}
    for spec in MIXED:
        x, c = (each[spec.name].astype(np.float64) for each in (given, merged))
        size, error = (math.sqrt(np.sum(each**2)) for each in (x, x - c))
        found, most = stats["tensors"][spec.name]["relative_error"], rounded.get(spec.dtype, 1e-5)
        assert found == pytest.approx(error / size if size else 0.0, rel=most, abs=most), spec.name
    for unit in sim.plan.units:
        if sparsifies(unit.compressor) and any(field.below for field in unit.fields):
            total = int(sim.run.notes["unit", unit.spec.name])
            sent = [np.count_nonzero(merged[p.tensor].reshape(-1)[p.start : p.stop]) for p in unit.pieces]
            tensors = {piece.tensor for piece in unit.pieces}
            if all(len(sim.plan.places[name]) == 1 for name in tensors) and sum(sent):
                for piece, count in zip(unit.pieces, sent, strict=True):
                    bytes_of = stats["tensors"][piece.tensor]["wire_bytes"]
                    assert abs(bytes_of - total * count / sum(sent)) <= 1, piece


def test_a_tensor_of_which_nothing_arrived_has_sent_nothing():
    specs = [TensorSpec("large", (256, 256)), TensorSpec("small", (128, 128))]
    options = {"compressor": "topk", "compress_ratio": 0.01}
    sims = {of: grace.Simulation(2, specs, {**options, "granularity": of}) for of in ("bucket", "layer")}
    rng = np.random.default_rng(0)
    mine = {s.name: rng.standard_normal(s.shape, np.float32) / (1 + 99 * (s.name == "small")) for s in specs}
    for sim in sims.values():
        sim.track_norms = True
        merged = sim.step([mine, mine])[0]
        arrived = {name: np.count_nonzero(x) for name, x in merged.items()}
        for name, tensor in sim.stats()["tensors"].items():
            error = np.linalg.norm(mine[name] - merged[name]) / np.linalg.norm(mine[name])
            assert tensor["relative_error"] == pytest.approx(error, rel=1e-5)
            assert tensor["residual_norm"] == pytest.approx(np.linalg.norm(mine[name] - merged[name]), rel=1e-5)
            assert tensor["wire_bytes"] // 8 == arrived[name]
    of_bucket = sims["bucket"].stats()["tensors"]["small"]
    assert (of_bucket["relative_error"], of_bucket["wire_bytes"]) == (1.0, 0)


@each(chosen=TYPICAL, cut=["layer", *CUTS])
def test_results_do_not_depend_on_the_order_of_gradients(chosen, cut):
    forward, shuffled = (simulate(chosen, specs=MIXED, **LAYOUTS[cut]) for _ in "ab")
    rng = np.random.default_rng(0)
    for number in range(3):
        expected, given = step(forward, number), gradients(shuffled, number)
        calls = [(rank, spec.name) for rank in range(RANKS) for spec in MIXED]
        for i in rng.permutation(len(calls)):
            rank, name = calls[i]
            shuffled.runs[rank].current.ready(name, given[rank][name], 0.1)
        poll_all([shuffled.runs[rank] for rank in rng.permutation(RANKS)])
        merged = {rank: shuffled.runs[rank].finish() for rank in rng.permutation(RANKS)}
        assert_same(expected, on_host(shuffled, [merged[rank] for rank in range(RANKS)]))
    assert_same(states(forward), states(shuffled))


@each(
    chosen={name: parts for name, parts in METHODS.items() if sparsifies(parts.compressor)},
    cut=list(CUTS),
    framework=FRAMEWORKS,
)
def test_a_sparsifier_moves_values_without_rounding(chosen, cut, framework):
    """With one rank, old residual + gradient == applied gradient + new residual, exactly."""
    compressor = chosen.compressor
    chosen = Method(compressor, memories.make("residual"), communicators.make(usual_communicator(compressor)))
    specs = [spec for spec in MIXED if spec.dtype in ("float32", "float64") and compressor.unfit(spec) is None]
    sim = simulate(chosen, framework, size=1, specs=specs, **CUTS[cut])
    old = states(sim)[0]
    for number in range(3):
        given = gradients(sim, number)
        flat = {n: host(sim.runs[0]._ops("cpu"), x) for n, x in flat_gradients(sim, given)[0].items()}
        merged = on_host(sim, flat_gradients(sim, sim.step(given, lr=0.1)))[0]
        new = states(sim)[0]
        for unit in sim.plan.units:
            key = (unit.spec.name, "memory", "residual")
            sent = merged[unit.spec.name]
            assert np.array_equal(old[key] + flat[unit.spec.name], sent + new[key])
            assert not np.any((sent != 0) & (new[key] != 0)), "a coordinate was sent and kept"
        old = new


@each(chosen=TYPICAL, cut=list(CUTS), bad=BAD)
def test_a_bad_gradient_reaches_all_ranks_and_no_state(chosen, cut, bad):
    clean, hit = (simulate(chosen, specs=MIXED, **CUTS[cut]) for _ in "ab")
    for sim in (clean, hit):
        step(sim, 0)

    def poison(name, rank, x):
        if name == "long" and rank == 1:
            x[2, 4999] = bad
        return x

    before = states(hit)
    expected, got = step(clean, 1), step(hit, 1, change=poison)
    unit = hit.plan.places["long"][-1][0]
    with_it = {piece.tensor for piece in unit.pieces if unit.guarded} | {"long"}
    for mine, theirs in zip(got, expected, strict=True):
        assert not np.isfinite(mine["long"][2, 4999])
        for name in set(mine) - with_it:
            assert same(mine[name], theirs[name]), name
        if unit.guarded:
            for piece in unit.pieces:
                assert np.isnan(mine[piece.tensor].reshape(-1)[piece.start : piece.stop].astype(np.float32)).all()
    assert_same([got[0]], [got[1]])
    for old, new in zip(before, states(hit), strict=True):
        assert all(np.isfinite(value.astype(np.float64)).all() for value in new.values())
        assert all(same(old[key], new[key]) for key in old if key[0] == unit.spec.name)
    for mine in step(hit, 2):
        assert all(np.isfinite(x.astype(np.float64)).all() for x in mine.values()), "the step after is a normal one"


@each_cut
def test_tensors_of_nothing_and_of_one_element_are_fused(cut):
    specs = [
        TensorSpec("nothing", (0, 4)),
        TensorSpec("none", (0,)),
        TensorSpec("scalar", ()),
        TensorSpec("one", (1, 1)),
        TensorSpec("many", (30, 40)),
        TensorSpec("end", (7, 0)),
    ]
    for chosen in FLAT.values():
        for some in (specs, specs[:2], specs[:3], specs[3:4]):
            sim = simulate(chosen, specs=some, size=2, **CUTS[cut])
            by_hand = units_by_hand(sim, get_ops("numpy"), 2)
            for number in range(2):
                given = gradients(sim, number)
                expected = by_hand.step(flat_gradients(sim, given))
                merged = sim.step(given, lr=0.1)
                assert_units(sim, merged, expected)
                assert {name: x.shape for name, x in merged[0].items()} == {spec.name: spec.shape for spec in some}


@each(cut=list(CUTS), framework=FRAMEWORKS)
def test_rules_with_several_methods_share_a_bucket(cut, framework):
    specs = [TensorSpec(f"{kind}{i}", (50, 40)) for i in range(3) for kind in ("a", "b", "c", "d")]
    rules = [
        {"match": "b*", "compressor": "onebit"},
        {"match": "c*", "compressor": "powersgd", "memory": "residual"},
        {"match": "d*", "compressor": "qsgd"},
    ]
    made = make_config(compressor="topk", compress_ratio=0.1, seed=5, rules=rules, **CUTS[cut])
    sim = grace.Simulation(2, specs, made, framework=framework)
    by_hand = units_by_hand(sim, get_ops(framework), 2)
    fused = [unit for unit in sim.plan.units if len(unit.pieces) > 1]
    assert all(len({piece.tensor[0] for piece in unit.pieces}) == 1 for unit in fused)
    assert bool(fused) == (cut != "small buckets")
    for number in range(3):
        given = gradients(sim, number)
        expected = by_hand.step(flat_gradients(sim, given))
        assert_units(sim, sim.step(given), expected)


@pytest.mark.parametrize(
    "memory",
    [
        {"name": "residual", "lr_correction": True},
        {"name": "residual", "gradient_clipping": 1.0},
        {"name": "dgc", "gradient_clipping": 1.0},
    ],
)
def test_what_depends_on_a_whole_tensor_is_not_cut_and_with_a_learning_rate_not_fused(memory):
    chosen = {"compressor": "topk", "memory": memory, "default_rules": False}
    specs = [TensorSpec(name, (40, 4096)) for name in "ab"]
    plan = make_plan(specs, make_config(chosen, split_bytes=4096))
    tensors = [{name for name, _, _ in unit} for unit in pieces(plan)]
    assert all(len(names) == 1 for names in tensors)
    # One learning rate holds for all of a tensor, so that it may be cut.
    cut = memory == {"name": "residual", "lr_correction": True}
    assert len(tensors) == (80 if cut else 2)


def test_a_unit_never_grows_beyond_what_the_method_can_compress(monkeypatch):
    """Tensors that fit alone may not fit together: int32 indices address 2^31 elements."""
    monkeypatch.setattr(
        "grace.core.methods.compressor.beyond_int32", lambda spec: "long" if spec.numel >= 1024 else None
    )
    specs = [TensorSpec(name, (400,)) for name in "abcde"]
    for name in ("topk", "randomk"):
        sim = simulate(METHODS[name], specs=specs, granularity="model")
        assert [[piece.tensor for piece in unit.pieces] for unit in sim.plan.units] == [["e", "d"], ["c", "b"], ["a"]]


@pytest.mark.parametrize("name", ["variance", "sketchml"])
def test_tensors_that_fit_alone_are_not_fused_beyond_the_indices_of_the_method(name):
    """Indices of variance have 28 bits, and keys of sketchml count elements in 16 lists."""
    config = make_config({"compressor": name, "granularity": "model", "default_rules": False})
    plan = make_plan([TensorSpec(tensor, (1 << 27,)) for tensor in "abc"], config)
    assert [[piece.tensor for piece in unit.pieces] for unit in plan.units] == [["c"], ["b"], ["a"]]
    assert all(unit.compressor.unfit(TensorSpec("w", (1 << 28,))) for unit in plan.units)
