"""Compressors that subtract from the residual while they merge give what they give without that."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.compressors.acpsgd import ACPSGD
from grace.core.compressors.gradzip import GradZip
from grace.core.compressors.powersgd import PowerSGD
from grace.core.memories.powersgd import PowerSGDMemory
from grace.core.ops import get_ops
from grace.core.session.simulation import deliver, negotiate
from grace.core.spec import TensorSpec
from grace.core.state.states import initial
from grace.core.step.unit_step import UnitStep
from grace.testing.harness import FRAMEWORKS, array, draw, host, same, unfused, unit_of
from tests.support.steps import each

SPEC = TensorSpec("t", (40, 25))


def run(compressor, memory, ops, size, average, out=False):
    """Return the results and residuals of rank 0 in four steps; in the third, another rank has a NaN."""
    unit, told = unit_of(compressor, memory, SPEC), []
    states = [initial(unit, ops, 1, rank) for rank in range(size)]
    for number in range(4):
        steps = []
        for rank in range(size):
            gradient = draw(SPEC, 10 * number + rank)
            gradient[7] = np.nan if number == 2 and rank == size - 1 else gradient[7]
            step = UnitStep(unit, states[rank], ops, seed=1, step=number, rank=rank, size=size, average=average)
            step.begin(array(ops, gradient, SPEC.work_dtype))
            steps.append(step)
        negotiate(steps)
        for rank, (step, (payloads, flags)) in enumerate(zip(steps, deliver(steps), strict=True)):
            step.remember()
            target = ops.zeros(SPEC.numel, SPEC.work_dtype) if out else None
            x, factor, states[rank], _ = step.conclude(payloads, flags, target)
            if rank == 0:
                residual = states[rank]["memory"]["residual"]
                told.append({"x": host(ops, x) * factor, "e": host(ops, residual).copy()})
    return told


@each(
    compressor={str(c): c for c in (PowerSGD(2), ACPSGD(2), GradZip(2))},
    framework=FRAMEWORKS,
    size=[1, 2, 3, 4],
    average=[True, False],
)
def test_a_step_gives_the_same_with_and_without_it(compressor, framework, size, average):
    ops, plain, memory = get_ops(framework), unfused(compressor), PowerSGDMemory()
    assert unit_of(compressor, memory, SPEC).fused.merge_finish
    assert not unit_of(plain, memory, SPEC).fused.merge_finish
    assert not unit_of(plain, memory, SPEC).fused.propose_sum
    one, two = (run(each, memory, ops, size, average) for each in (compressor, plain))
    for a, b in zip(one, two, strict=True):
        assert np.isfinite(a["e"]).all()
        assert same(a["x"], b["x"])
        assert same(a["e"], b["e"])


def test_a_mean_written_in_place_leaves_the_same_residual():
    ops = get_ops("numpy")
    one, two = (run(PowerSGD(2), PowerSGDMemory(), ops, 2, True, out) for out in (True, False))
    for a, b in zip(one, two, strict=True):
        assert same(a["x"], b["x"])
        assert same(a["e"], b["e"])


def test_a_subclass_that_replaces_finish_is_asked_for_it():
    class Forgets(PowerSGDMemory):
        def finish(self, merged, state, at):
            gradient, state = super().finish(merged, state, at)
            return gradient, {"residual": state["residual"] * 0.5}

    assert not unit_of(PowerSGD(2), Forgets(), SPEC).fused.merge_finish
    plain, halved = (run(PowerSGD(2), memory, get_ops("numpy"), 2, True) for memory in (PowerSGDMemory(), Forgets()))
    assert same(0.5 * plain[0]["e"], halved[0]["e"])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_factors_may_be_strided(framework):
    ops = get_ops(framework)
    a, b, x = (array(ops, draw(SPEC, seed)[:100], SPEC.work_dtype) for seed in range(3))
    p, q = a[:40:2], b[:40:2]
    rest, product = ops.sub_product_(ops.copy(x), p, q, 2)
    assert same(host(ops, product), host(ops, ops.flat_product(p, q, 2)))
    assert same(host(ops, product), host(ops, ops.flat_product(ops.copy(p), ops.copy(q), 2)))
    assert same(host(ops, rest), host(ops, ops.sub_(ops.copy(x), product)))
