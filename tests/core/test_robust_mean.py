"""Medians and trimmed means over ranks: allgather with `reduce = "median"` and `reduce = "trimmed"`."""

from __future__ import annotations

import numpy as np
import pytest

import grace
from grace.core.communicators.allgather import Allgather
from grace.core.communicators.broadcast import Broadcast
from grace.core.errors import ConfigError, IncompatibleError
from grace.testing.harness import FRAMEWORKS, array, host
from tests.papers.common import make, send
from tests.support.registered import every_framework
from tests.support.steps import each

MEDIAN = {"reduce": "median"}
TRIMMED = {"reduce": "trimmed", "trim": 1}
N = 300


def started(size, framework="numpy", **options):
    config = {"compressor": "fp16", "communicator": "allgather", "default_rules": False, **options}
    return grace.Simulation(size, {"w": (N,)}, config, framework=framework)


def stepped(sim, given):
    ops = sim.run.ops("cpu")
    found = [host(ops, m["w"]) for m in sim.step([{"w": array(ops, x, "float32")} for x in given])]
    assert all(x.tobytes() == found[0].tobytes() for x in found)
    return found[0]


def rows(ranks, number=0):
    return [np.random.default_rng((number, rank)).standard_normal(N).astype(np.float32) for rank in range(ranks)]


def reference(sent, options):
    """Yin et al., 2018, Definitions 1 and 2: coordinate-wise median and trimmed mean."""
    ordered = np.sort(np.asarray(sent, np.float64), axis=0)
    return np.median(ordered, axis=0) if options is MEDIAN else ordered[1:-1].mean(axis=0)


@every_framework
@pytest.mark.parametrize("options", [MEDIAN, TRIMMED], ids=["median", "trimmed"])
@pytest.mark.parametrize("ranks", [3, 4])
def test_each_coordinate_is_taken_by_itself(framework, ranks, options):
    given = rows(ranks)
    sent = [x.astype(np.float16) for x in given]
    merged = stepped(started(ranks, framework, **options), given)
    np.testing.assert_allclose(merged, reference(sent, options), rtol=1e-6, atol=1e-7)
    assert np.abs(merged - np.mean(given, axis=0)).max() > 0.1


@pytest.mark.parametrize("options", [MEDIAN, TRIMMED], ids=["median", "trimmed"])
@pytest.mark.parametrize("ranks", [3, 4])
def test_memories_work_with_it_and_resume(ranks, options):
    """Error feedback on each rank: x = e + g, send C(x), e = x - C(x); the result is the median of the C(x)."""
    compressor, errors = make("efsignsgd"), np.zeros((ranks, N))
    first, again = (started(ranks, compressor="efsignsgd", memory="residual", **options) for _ in range(2))
    for number in range(6):
        given = rows(ranks, number)
        x = errors + given
        sent = np.array([send(compressor, each.astype(np.float32)) for each in x])
        errors = x - sent
        merged = stepped(first, given)
        np.testing.assert_allclose(merged, reference(sent, options), rtol=1e-4, atol=1e-5)
        if number == 2:
            again.load_state_dict(first.state_dict())
        elif number > 2:
            assert np.array_equal(stepped(again, given), merged)


@pytest.mark.parametrize("options", [MEDIAN, TRIMMED, {}], ids=["median", "trimmed", "mean"])
def test_one_rank_of_four_that_sends_the_opposite_does_no_harm(options):
    """Section 7 of the paper: the mean of all ranks diverges."""
    target = np.random.default_rng(9).standard_normal(N)
    sim, x, distances = started(4, compressor="qsgd", **options), np.zeros(N), []
    for number in range(60):
        noise = np.array(rows(4, number)) * 0.1
        given = [x - target + noise[rank] for rank in range(3)] + [-10 * (x - target)]
        x = x - 0.2 * stepped(sim, [each.astype(np.float32) for each in given])
        distances.append(np.linalg.norm(x - target) / np.linalg.norm(target))
    assert distances[-1] < 0.1 if options else distances[-1] > 10


BYZ_EF21 = {"compressor": {"name": "topk", "compress_ratio": 0.1}}


def known(trim):
    return {**BYZ_EF21, "memory": {"name": "byz_ef21", **({"trim": trim} if trim else {})}}


@each(
    lambda row: row["framework"] == "numpy" or row["ranks"] == 3,
    framework=FRAMEWORKS,
    ranks=[3, 4],
    trim=[None, 1],
)
def test_byz_ef21_takes_the_middle_of_the_gradients_as_they_are_known(framework, ranks, trim):
    """h_i = h_i + C(g_i - h_i); the result is the median or the trimmed mean of all h_i, not of all C(g_i - h_i)."""
    first, again = (started(ranks, framework, **known(trim)) for _ in range(2))
    compressor, h = make("topk", compress_ratio=0.1), np.zeros((ranks, N))
    for number in range(8):
        given = rows(ranks, number)
        h = h + [send(compressor, (g - mine).astype(np.float32)) for g, mine in zip(given, h, strict=True)]
        merged = stepped(first, given)
        np.testing.assert_allclose(merged, reference(h, TRIMMED if trim else MEDIAN), rtol=1e-5, atol=1e-6)
        if number == 2:
            # All ranks know the same, so that any of them can go on with the file of another one.
            saved = first.state_dict()["ranks"]
            assert again.load_state_dict([{**saved[0], "rank": rank} for rank in range(ranks)])
        elif number > 2:
            assert np.array_equal(stepped(again, given), merged)


@pytest.mark.parametrize("trim", [None, 1, "mean"])
def test_byz_ef21_converges_beside_a_rank_that_sends_the_opposite(trim):
    target = np.random.default_rng(9).standard_normal(N)
    config = {**BYZ_EF21, "memory": "ef21"} if trim == "mean" else known(trim)
    sim, x = started(4, **config), np.zeros(N)
    for number in range(150):
        noise = np.array(rows(4, number)) * 0.01
        given = [x - target + noise[rank] for rank in range(3)] + [-10 * (x - target)]
        x = x - 0.05 * stepped(sim, [each.astype(np.float32) for each in given])
    distance = np.linalg.norm(x - target) / np.linalg.norm(target)
    assert distance > 10 if trim == "mean" else distance < 0.1


def test_byz_ef21_starts_again_with_other_ranks():
    saving, loading, fresh = started(4, **known(None)), started(3, **known(None)), started(3, **known(None))
    stepped(saving, rows(4))
    with pytest.warns(grace.errors.GraceWarning, match="'shifts' of the memory 'byz_ef21'"):
        assert loading.load_state_dict(saving.state_dict()["ranks"]) is False
    assert np.array_equal(stepped(loading, rows(3)), stepped(fresh, rows(3)))


def test_byz_ef21_needs_the_payloads_of_all_ranks():
    for communicator in ("two_shot", "sparse_allreduce", {"name": "hierarchical", "local_size": 2}):
        with pytest.raises(IncompatibleError, match="merges the payloads of all ranks itself"):
            started(4, **{**known(None), "communicator": communicator})
    with pytest.raises(IncompatibleError, match="merges what the ranks have sent itself, without reduce"):
        started(4, **known(None), reduce="senders")
    with pytest.raises(IncompatibleError, match="trim = 2 leaves out 4 of 4 values"):
        started(4, **known(2))
    with pytest.raises(ConfigError, match="trim is how many of the largest"):
        started(4, **BYZ_EF21, memory={"name": "byz_ef21", "trim": 0})
    with pytest.raises(IncompatibleError, match="carries a residual of an earlier method"):
        started(4, **BYZ_EF21).change(memory="byz_ef21")
    # auto may choose a communicator that adds payloads up for others only.
    unit = started(4, **{**known(None), "compressor": "qsgd", "communicator": "auto"}).plan.units[0]
    assert unit.communicator in (Allgather(), Broadcast())


def test_a_bad_rank_that_sends_nan_is_a_bad_step():
    sim = started(3, compressor="qsgd", **MEDIAN)
    assert np.isnan(stepped(sim, [*rows(2), np.full(N, np.nan, np.float32)])).all()


def test_what_has_no_median_is_refused():
    with pytest.raises(IncompatibleError, match="few ranks send a coordinate"):
        started(3, compressor="topk", **MEDIAN)
    with pytest.raises(IncompatibleError, match="it gives a vote"):
        started(3, compressor="signsgd", **MEDIAN)
    with pytest.raises(IncompatibleError, match="follows the mean over all ranks, not a median"):
        started(3, compressor="qsgd", memory="diana", **MEDIAN)
    with pytest.raises(IncompatibleError, match="trim = 1 leaves out 2 of 2 values"):
        started(2, **TRIMMED)
    for wrong in ({"reduce": "trimmed"}, {"reduce": "trimmed", "trim": 0}, {"reduce": "median", "trim": 1}):
        with pytest.raises(ConfigError, match="trim is how many of the largest"):
            started(3, **wrong)
