"""NaN, infinity and overflow reach every rank, enter no state, and do not affect the next step."""

from __future__ import annotations

import re

import numpy as np
import pytest

from grace.core.compressors.fp16 import BF16
from grace.core.config.config import Method, make_config
from grace.core.config.registry import communicators, compressors, memories
from grace.core.methods.memory import holds_residual
from grace.core.plan.plan import make_plan
from grace.core.spec import MAX_MAGNITUDE, TensorSpec
from grace.testing.harness import FRAMEWORKS, same
from tests.support import registered
from tests.support.launch import ROOT
from tests.support.steps import (
    METHODS,
    SPECS,
    TYPICAL,
    assert_same,
    each,
    each_combination,
    simulate,
    specs_in,
    states,
    step,
)

BAD = {"nan": np.nan, "inf": np.inf}


@each(chosen=TYPICAL, framework=FRAMEWORKS, bad=BAD)
def test_a_bad_gradient_reaches_all_ranks_and_no_state(chosen, bad, framework):
    clean, hit = (simulate(chosen, framework, specs=specs_in(framework, chosen)) for _ in "ab")
    step(clean, 0)
    step(hit, 0)

    def poison(name, rank, x):
        if name == "matrix" and rank == 1:
            x[3, 5] = bad
        return x

    before = states(hit)
    expected, got = step(clean, 1), step(hit, 1, change=poison)
    item = next(item for item in hit.plan.assignments if item.spec.name == "matrix")
    for mine, theirs in zip(got, expected, strict=True):
        matrix = mine.pop("matrix")
        assert not np.isfinite(matrix[3, 5])
        if item.guarded:
            assert np.isnan(matrix).all()
        theirs.pop("matrix")
    assert_same(expected, got)
    after = states(hit)
    for old, new in zip(before, after, strict=True):
        assert all(same(old[key], new[key]) for key in old if key[0] == "matrix")
    for mine in step(hit, 2):
        assert all(np.isfinite(x.astype(np.float64)).all() for x in mine.values()), "the step after is a normal one"


@each_combination()
def test_a_gradient_that_overflows_in_the_payload_enters_no_state(chosen):
    """1e30 is finite in float32 and infinite in float16. A residual of it would be NaN."""
    specs = [TensorSpec("matrix", (24, 40))]
    sim = simulate(chosen, specs=specs)
    step(sim, 0)
    before = states(sim)

    def explode(name, rank, x):
        return x * np.float32(1e30) if rank == 1 else x

    first, *others = step(sim, 1, change=explode)
    assert all(same(first["matrix"], other["matrix"]) for other in others)
    finite = bool(np.isfinite(first["matrix"]).all())
    for old, new in zip(before, states(sim), strict=True):
        assert all(np.isfinite(x).all() for x in new.values())
        assert finite or all(same(old[key], new[key]) for key in old)


# A dense sum of them is infinite, as it should be, and NumPy warns of it in a simulation.
@pytest.mark.filterwarnings("ignore:overflow encountered in add:RuntimeWarning")
@each_combination()
def test_large_finite_gradients_overflow_no_state(chosen):
    """In float32, sums over ranks, squares and momenta of 2.5e38 are infinite."""
    sim = simulate(chosen, specs=[TensorSpec("single", (24, 40)), TensorSpec("double", (16, 9), "float64")])
    step(sim, 0)
    cases = [(share, one) for share in (2.0**-10, None) for one in (True, False)]
    for number, (share, one) in enumerate(cases, 1):
        before = states(sim)

        def enlarge(name, rank, x, share=share, one=one):
            dtype = x.dtype.name
            largest = x.dtype.type(np.finfo(dtype).max if share is None else share * MAX_MAGNITUDE[dtype])
            return np.where(np.arange(x.size).reshape(x.shape) == 125, largest, x) if one else np.sign(x) * largest

        first, *others = step(sim, number, change=enlarge)
        assert all(same(first[name], other[name]) for other in others for name in first)
        for old, new in zip(before, states(sim), strict=True):
            assert all(np.isfinite(x).all() for x in new.values())
            for key in old:
                assert np.isfinite(first[key[0]]).all() or same(old[key], new[key])
    for mine in step(sim, len(cases) + 1):
        assert all(np.isfinite(x).all() for x in mine.values()), "the step after is a normal one"


@pytest.mark.parametrize("name", ["qsgd", "eden"])
def test_without_kernels_no_method_computes_with_a_bad_gradient(name, monkeypatch):
    """NumPy would warn of it."""
    monkeypatch.setenv("GRACE_NATIVE", "0")
    chosen = Method(compressors.example(name), memories.make("none"), communicators.make("allgather"))
    sim = simulate(chosen, specs=[TensorSpec("matrix", (24, 40))])

    def poison(name, rank, x):
        return np.where(np.arange(x.size).reshape(x.shape) == 125, x.dtype.type(np.inf), x) if rank == 1 else x

    assert all(np.isnan(mine["matrix"]).all() for mine in step(sim, 0, change=poison))


@pytest.mark.parametrize(
    ("name", "options", "looked_at"),
    [
        ("topk", {}, []),
        ("randomk", {"scaled": True}, ["values"]),
        ("efsignsgd", {}, ["scale"]),
        ("fp16", {}, []),
    ],
)
def test_values_that_a_sparsifier_only_copies_are_not_looked_at(name, options, looked_at):
    """They are elements of an array that was looked at, and a look takes as long as a kernel for a small tensor."""
    config = make_config({"compressor": name, "default_rules": False, **options})
    (unit,) = make_plan([TensorSpec("matrix", (24, 40))], config).units
    assert list(unit.overflowing) == looked_at


@pytest.mark.parametrize("name", ["qsgd", "eden", "signsgd"])
def test_norms_of_a_bad_gradient_are_measured(name):
    chosen = Method(compressors.example(name), memories.make("none"), communicators.make("allgather"))
    sim = simulate(chosen, specs=[TensorSpec("matrix", (24, 40))])
    for run in sim.runs:
        run.track_norms = True
    step(sim, 0, change=lambda name, rank, x: np.full_like(x, np.inf) if rank == 1 else x)
    assert [np.isfinite(run.stats()["tensors"]["matrix"]["relative_error"]) for run in sim.runs] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("communicator", ["allreduce", "allgather"])
def test_a_gradient_that_overflows_in_float16_enters_no_residual(communicator):
    chosen = Method(compressors.make("fp16"), memories.make("residual"), communicators.make(communicator))
    sim = simulate(chosen, specs=[TensorSpec("matrix", (24, 40))])
    step(sim, 0)
    before = states(sim)
    merged = step(sim, 1, change=lambda name, rank, x: np.full_like(x, 1e6) if rank == 1 else x)
    assert all(np.isnan(mine["matrix"]).all() for mine in merged)
    assert_same(before, states(sim))


@pytest.mark.parametrize("communicator", ["allreduce", "allgather"])
def test_a_gradient_that_only_bfloat16_makes_infinite_enters_no_state(communicator, monkeypatch):
    """Almost 2^128 is finite in float32. The gradient itself is too small to be refused before it is compressed."""
    compress, scale = BF16.compress, 2.0**28 * (1 - 2.0**-11)
    monkeypatch.setattr(BF16, "compress", lambda self, x, at: compress(self, x * scale, at))
    parts = Method(compressors.make("bf16"), memories.make("residual"), communicators.make(communicator))
    sim = simulate(parts, specs=[TensorSpec("matrix", (24, 40))])
    step(sim, 0)
    before = states(sim)
    merged = step(sim, 1, change=lambda name, rank, x: np.full_like(x, 2.0**100) if rank == 1 else x)
    assert all(np.isnan(mine["matrix"]).all() for mine in merged)
    assert_same(before, states(sim))


@pytest.mark.parametrize(
    "memory",
    registered.params(
        [m for m in registered.all_memories() if memories.name_of(m) not in registered.MEMORIES_OF_SHARDS]
    ),
)
def test_an_infinite_gradient_enters_no_memory(memory):
    """Memories compute before the check: clipping divides by an infinite norm."""
    compressor = compressors.make({"name": "topk", "compress_ratio": 0.1})
    sim = simulate(Method(compressor, memory, communicators.make("allgather")), specs=SPECS[:2])
    step(sim, 0)
    before = states(sim)

    def poison(name, rank, x):
        return np.where(np.arange(x.size).reshape(x.shape) % 7 == 0, np.inf, x) if rank == 0 else x

    # NumPy warns of infinity times zero, and rightly so.
    with np.errstate(invalid="ignore"):
        merged = step(sim, 1, change=poison)
    assert all(np.isnan(x).all() for mine in merged for x in mine.values())
    assert_same(before, states(sim))


def test_a_bad_gradient_of_a_rank_that_selects_nothing_is_announced():
    chosen = registered.default_method(compressors.make({"name": "threshold", "threshold": 1e9}))
    sim = simulate(chosen, specs=SPECS[:1])
    merged = step(sim, 0, change=lambda name, rank, x: x * (np.float32(np.nan) if rank == 2 else np.float32(1)))
    assert all(np.isnan(mine["matrix"]).all() for mine in merged)


def limits_on_the_page():
    """Return the exponents of docs/limits.md by method; None stands for all others."""
    rows = re.findall(r"^\| 2\^(\d+) \| (.*) \|$", (ROOT / "docs" / "limits.md").read_text(), re.MULTILINE)
    named = {name: int(power) for power, text in rows for name in re.findall("`([^`]+)`", text)}
    return {**named, None: max(int(power) for power, _ in rows)}


LIMITS = limits_on_the_page()


@pytest.mark.parametrize("name", METHODS)
def test_the_page_names_the_largest_gradients_of_each_method(name):
    """A step beyond them delivers NaN for the whole tensor, and its states stay as they were."""
    shape = (256, 256)
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    x /= np.abs(x).max()

    def passes(exponent):
        sim = simulate(METHODS[name], size=2, specs=[TensorSpec("w", shape)])
        given, finite = [{"w": np.ldexp(x, exponent)}] * 2, []
        for _ in range(2):
            before = states(sim)
            merged = sim.step(given, lr=0.1)[0]["w"]
            finite.append(bool(np.isfinite(merged).all()))
            if sim.plan.exchanged and sim.plan.exchanged[0].guarded and not finite[-1]:
                assert np.isnan(merged).all()
                assert_same(before, states(sim))
            assert all(np.isfinite(x).all() for mine in states(sim) for x in mine.values() if x.dtype.kind == "f")
        return all(finite)

    residual = name not in LIMITS and holds_residual(METHODS[name].memory)
    limit = LIMITS.get(name, LIMITS[None])
    with np.errstate(all="ignore"):
        assert passes(limit - residual)
        assert limit == LIMITS[None] or not passes(limit + 1)
        assert passes(-100)
