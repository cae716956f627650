"""Merged gradients are written to the caller's buffers, and contiguous gradients are not copied."""

from __future__ import annotations

import dataclasses
import importlib.util
import threading

import numpy as np
import pytest

from grace.core.config.registry import communicators, compressors
from grace.core.ops import get_ops
from grace.core.session.simulation import poll_all
from grace.core.spec import TensorSpec
from grace.testing.harness import FRAMEWORKS, array, host, same
from tests.support import registered
from tests.support.steps import (
    LAYOUTS,
    METHODS,
    MIXED,
    TYPICAL,
    assert_same,
    each,
    gradients,
    on_host,
    simulate,
    states,
    step,
)

# --- results in the caller's buffers ----------------------------------------------------------------------------

# TensorFlow's arrays are immutable.
IN_PLACE = [name for name in FRAMEWORKS if name != "tensorflow"]
CUTS = ["layer", "small buckets", "model"]


@each(
    chosen=TYPICAL,
    cut=CUTS,
    size=[1, 2, 3],
    framework=IN_PLACE,
)
def test_results_are_written_where_they_belong(chosen, cut, size, framework):
    """Results are written into the gradients' own buffers, where PyTorch's optimizer reads them, with the same bits."""
    plain, placed = (simulate(chosen, framework, size=size, specs=MIXED, **LAYOUTS[cut]) for _ in "ab")
    for number in range(2):
        expected = step(plain, number)
        given = gradients(placed, number)
        for run, mine in zip(placed.runs, given, strict=True):
            for name, x in mine.items():
                run.current.ready(name, x, 0.1)
        poll_all(placed.runs)
        merged = [run.finish(mine) for run, mine in zip(placed.runs, given, strict=True)]
        assert_same(expected, on_host(placed, merged))
        assert_same(expected, on_host(placed, given))
    assert_same(states(plain), states(placed))


@pytest.mark.parametrize("framework", IN_PLACE)
@pytest.mark.parametrize("communicator", ["allgather", "two_shot"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_many_small_results_are_written_where_they_belong(framework, communicator, size):
    """Whole tensors are written by one call for all, and those that shards cut one by one, with the same bits."""
    dtypes = ("float32", "float32", "bfloat16" if framework == "torch" else "float16")
    specs = [TensorSpec(f"w{i}", (7 * i % 40, 3), dtypes[i % 3]) for i in range(120)]
    method = dataclasses.replace(METHODS["topk"], communicator=communicators.make(communicator))
    plain, placed = (simulate(method, framework, size=size, specs=specs, granularity="bucket") for _ in "ab")
    assert any(len(unit.pieces) > 10 for unit in plain.plan.units)
    for number in range(2):
        expected = step(plain, number)
        given = gradients(placed, number)
        for run, mine in zip(placed.runs, given, strict=True):
            for name, x in mine.items():
                run.current.ready(name, x)
        poll_all(placed.runs)
        merged = [run.finish(mine) for run, mine in zip(placed.runs, given, strict=True)]
        assert_same(expected, on_host(placed, merged))
        assert_same(expected, on_host(placed, given))


@pytest.mark.parametrize("framework", IN_PLACE)
@pytest.mark.parametrize("name", ["powersgd", "acpsgd", "qsgd"])
def test_kernels_decode_straight_into_the_gradient(name, framework, monkeypatch):
    """No copy follows, and scales tell of NaN, so that no pass looks for it in the gradient."""
    sim = simulate(METHODS[name], framework, size=2, specs=[TensorSpec("matrix", (48, 40))])
    ops = type(sim.runs[0]._ops("cpu"))
    if not ops.runs_kernels:
        pytest.skip("there are no kernels")
    placed, looked, finite = [], [], ops.finite
    monkeypatch.setattr(ops, "place", lambda *arguments: placed.append(arguments))
    monkeypatch.setattr(ops, "finite", lambda self, x: looked.append(len(x)) or finite(self, x))
    for number in range(2):
        given = gradients(sim, number)
        for run, mine in zip(sim.runs, given, strict=True):
            run.current.ready("matrix", mine["matrix"], 0.1)
        poll_all(sim.runs)
        for run, mine in zip(sim.runs, given, strict=True):
            run.finish(mine)
    assert not placed
    assert looked
    assert max(looked) < 48 * 40


@each(chosen=TYPICAL, cut=CUTS, framework=IN_PLACE)
def test_a_bad_gradient_is_written_where_it_belongs(chosen, cut, framework):
    sim = simulate(chosen, framework, size=2, specs=MIXED, **LAYOUTS[cut])

    def poison(name, rank, x):
        if name == "long" and rank == 1:
            x[1, 7] = np.nan
        return x

    step(sim, 0)
    before = states(sim)
    given = gradients(sim, 1, change=poison)
    for run, mine in zip(sim.runs, given, strict=True):
        for name, x in mine.items():
            run.current.ready(name, x, 0.1)
    poll_all(sim.runs)
    merged = [run.finish(mine) for run, mine in zip(sim.runs, given, strict=True)]
    assert_same(on_host(sim, given), on_host(sim, merged))
    got = on_host(sim, given)
    assert_same([got[0]], [got[1]])
    assert np.isnan(got[0]["long"][1, 7])
    hit = sim.plan.places["long"][0][0].spec.name
    for old, new in zip(before, states(sim), strict=True):
        assert all(same(old[key], new[key]) for key in old if key[0] == hit)
        assert all(np.isfinite(value.astype(np.float64)).all() for value in new.values())


@pytest.mark.parametrize("framework", IN_PLACE)
@pytest.mark.parametrize("cut", CUTS)
def test_only_what_was_offered_is_written_to(cut, framework):
    chosen = registered.default_method(compressors.make({"name": "topk", "compress_ratio": 0.1}))
    plain, placed = (simulate(chosen, framework, size=1, specs=MIXED, **LAYOUTS[cut]) for _ in "ab")
    (run,), ops = placed.runs, placed.runs[0]._ops("cpu")
    (expected,) = step(plain, 0)
    (given,) = gradients(placed, 0)
    (before,) = on_host(placed, [given])
    for name, x in given.items():
        run.current.ready(name, x)
    places = {
        name: ops.reshape(ops.full(x.size, 7.0, str(x.dtype)), x.shape)
        for name, x in before.items()
        if name in ("matrix", "half", "long")
    }
    merged = run.finish(places)
    assert_same([before], on_host(placed, [given]))
    assert_same([expected], on_host(placed, [merged]))
    assert_same([{name: expected[name] for name in places}], on_host(placed, [places]))


TOP_HALF = registered.default_method(compressors.make({"name": "topk", "compress_ratio": 0.5}))


@pytest.mark.parametrize("framework", IN_PLACE)
def test_threads_with_an_engine_each_write_to_their_own_arrays(monkeypatch, framework):
    """The threads switch in the middle of both merges, when both have been told where to write."""
    specs, compressor = [TensorSpec("same", (9, 16))], type(TOP_HALF.compressor)
    one, other, alone = (simulate(TOP_HALF, framework, size=1, specs=specs) for _ in "abc")
    expected = [step(alone, number) for number in range(2)]
    given = [gradients(sim, number) for number, sim in enumerate((one, other))]
    merge, inside, resume = compressor.merge, threading.Event(), threading.Event()

    def train(sim, mine):
        (run,), (gradient,) = sim.runs, mine
        run.current.ready("same", gradient["same"])
        run.finish(gradient)

    # The other run is at the step at which `alone` was.
    train(other, gradients(other, 0))
    thread = threading.Thread(target=train, args=(other, given[1]))

    def of_one(self, payloads, site):
        monkeypatch.setattr(compressor, "merge", of_other)
        thread.start()
        assert inside.wait(60)
        merged = merge(self, payloads, site)
        resume.set()
        thread.join()
        return merged

    def of_other(self, payloads, site):
        inside.set()
        assert resume.wait(60)
        return merge(self, payloads, site)

    monkeypatch.setattr(compressor, "merge", of_one)
    train(one, given[0])
    assert_same(expected[0], on_host(one, given[0]))
    assert_same(expected[1], on_host(other, given[1]))


@pytest.mark.parametrize("framework", IN_PLACE)
def test_after_an_error_in_a_merge_no_other_engine_writes_there(monkeypatch, framework):
    one = simulate(TOP_HALF, framework, size=1, specs=[TensorSpec("same", (9, 16))])
    (given,) = gradients(one, 0)
    before = on_host(one, [given])

    def fail(self, payloads, site):
        raise ZeroDivisionError

    one.runs[0].current.ready("same", given["same"])
    with monkeypatch.context() as patch:
        patch.setattr(type(TOP_HALF.compressor), "merge", fail)
        with pytest.raises(ZeroDivisionError):
            one.runs[0].finish(given)
    # Gradients of 16 bits are cast to float32, and casts, too, write where they are told.
    step(simulate(TOP_HALF, framework, size=1, specs=[TensorSpec("half", (9, 16), "float16")]), 0)
    assert_same(before, on_host(one, [given]))


@pytest.mark.parametrize("framework", IN_PLACE)
def test_arrays_end_to_end_are_laid_out(framework):
    ops = get_ops(framework)
    store = array(ops, np.arange(24), "float32")
    views = [store[0:5], store[5:5], store[5:12], store[12:24]]
    laid = ops.lay_out(views)
    assert host(ops, laid).tolist() == list(range(24))
    for apart in (views[::-1], views[::2], [store[0:4], store[5:12]], [store[2:4], store[2:4]]):
        assert host(ops, ops.lay_out(apart)).tolist() == [v for x in apart for v in host(ops, x).tolist()]
    everything = ops.lay_out([array(ops, [1.0], "float32"), array(ops, [], "float32"), array(ops, [2.0], "float32")])
    assert host(ops, everything).tolist() == [1, 2]


@pytest.mark.skipif("torch" not in FRAMEWORKS, reason="PyTorch is not installed")
def test_gradients_that_lie_end_to_end_are_not_copied():
    import torch

    ops = get_ops("torch")
    store = torch.arange(24.0)
    laid = ops.lay_out([store[2:5], store[5:5], store[5:12], store[12:20]])
    assert (laid.data_ptr(), laid.numel()) == (store[2:].data_ptr(), 18)
    first, second = torch.arange(5.0), torch.arange(5.0)
    assert ops.lay_out([first, second]).data_ptr() not in (first.data_ptr(), second.data_ptr())
    # The second begins where the first ends, but in a storage of its own.
    assert ops.lay_out([store[2:5], torch.arange(100.0, 110.0)[5:8]]).tolist() == [2, 3, 4, 105, 106, 107]
    strided = store[::2]
    assert ops.lay_out([strided[:3], strided[3:6]]).tolist() == [0, 2, 4, 6, 8, 10]
    assert ops.lay_out([store[0:4], strided[2:5]]).tolist() == [0, 1, 2, 3, 4, 6, 8]


@pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None or "torch" not in FRAMEWORKS, reason="needs Horovod with PyTorch"
)
def test_buffers_that_overlap_are_not_written_to():
    import torch

    from grace.torch.views import writable

    store = torch.zeros(100)

    def names(**buffers):
        return set(writable(buffers))

    assert names(a=store[:50], b=store[50:]) == {"a", "b"}
    assert names(a=store[:50], b=store[49:], c=torch.zeros(3)) == {"c"}
    assert names(a=store, b=store[10:20], c=store[30:40], d=torch.zeros(3)) == {"d"}
    assert names(a=store, b=store) == set()
    assert names(a=store[:20], b=store[10:40], c=store[35:60], d=store[60:]) == {"d"}
    # Views with gaps may overlap any other buffer.
    assert names(a=store[::2], b=torch.zeros(3)) == set()
    assert names(a=store[:10], b=torch.zeros(0), c=store[10:]) == {"a", "b", "c"}


@pytest.mark.skipif("torch" not in FRAMEWORKS, reason="PyTorch is not installed")
@each(chosen=TYPICAL, cut=CUTS)
def test_results_go_into_one_storage_that_is_no_copy(chosen, cut):
    """If gradients are views into one storage, they are compressed in place and overwritten with the results."""
    import torch

    plain, placed = (simulate(chosen, "torch", size=2, specs=MIXED, **LAYOUTS[cut]) for _ in "ab")
    for number in range(3):
        expected = step(plain, number)
        given = gradients(placed, number)
        stores = []
        for run, mine in zip(placed.runs, given, strict=True):
            # Units contain tensors in the order of the backward pass.
            order = list(mine)
            kinds = {mine[name].dtype for name in order}
            flat = {kind: torch.cat([mine[n].reshape(-1) for n in order if mine[n].dtype == kind]) for kind in kinds}
            taken = dict.fromkeys(flat, 0)
            for name in order:
                shape, dtype = mine[name].shape, mine[name].dtype
                n = mine[name].numel()
                mine[name] = flat[dtype][taken[dtype] : taken[dtype] + n].view(shape)
                taken[dtype] += n
            stores.append(mine)
            for name in mine:
                run.current.ready(name, mine[name], 0.1)
        poll_all(placed.runs)
        for run, mine in zip(placed.runs, stores, strict=True):
            run.finish(mine)
        assert_same(expected, on_host(placed, stores))
    assert_same(states(plain), states(placed))
