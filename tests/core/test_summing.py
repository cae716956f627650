"""Compressors that add the residual themselves give what they give without that."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.compressors.blockwise import Blockwise
from grace.core.compressors.contrib.rtopk import RTopK
from grace.core.compressors.contrib.strom import Strom
from grace.core.compressors.efsignsgd import EFSignSGD
from grace.core.compressors.threshold import Threshold
from grace.core.compressors.topk import TopK
from grace.core.memories.efsignsgd import EFSignMemory
from grace.core.memories.residual import Residual
from grace.core.ops import get_ops
from grace.core.session.simulation import deliver
from grace.core.spec import TensorSpec
from grace.core.state.states import initial
from grace.core.step.unit_step import UnitStep
from grace.testing.harness import FRAMEWORKS, array, draw, host, payload_on_host, same, unfused, unit_of

SPEC = TensorSpec("t", (40, 25))


def run(compressor, memory, ops):
    """Return payloads, results and residuals of four steps, the third of which has a NaN."""
    unit, told = unit_of(compressor, memory, SPEC), []
    states = initial(unit, ops, 1, 0)
    for number in range(4):
        # Coarse, so that some sums equal a threshold.
        gradient = np.round(2 * draw(SPEC, number)) / 2
        gradient[7] = np.nan if number == 2 else gradient[7]
        step = UnitStep(unit, states, ops, seed=1, step=number, rank=0, size=1)
        step.begin(array(ops, gradient, SPEC.work_dtype))
        told.append(payload_on_host(ops, step.payload))
        ((payloads, flags),) = deliver([step])
        step.remember()
        x, factor, states, _ = step.conclude(payloads, flags)
        told.append({"x": host(ops, x) * factor, "e": host(ops, states["memory"]["residual"])})
    return told


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    "memory",
    [Residual(), Residual(beta=0.9, gamma=0.5), Residual(gradient_clipping=1), EFSignMemory(lr=0.25)],
    ids=str,
)
@pytest.mark.parametrize(
    "compressor",
    [
        *(TopK(0.1), TopK(1.0), Threshold(1.0), Threshold(0.5, capacity=0.1), Strom(1.0), RTopK(0.1), EFSignSGD()),
        *(Blockwise(), Blockwise("fp4", 7), Blockwise(bucket_size=0)),
    ],
    ids=str,
)
def test_a_step_gives_the_same_with_and_without_it(compressor, memory, framework):
    ops, plain = get_ops(framework), unfused(compressor)
    one, two = (unit_of(each, memory, SPEC).fused for each in (compressor, plain))
    assert one.compress_sum or one.compress_feedback
    assert not two.compress_sum
    assert not two.compress_feedback
    with np.errstate(invalid="ignore"):
        one, two = run(compressor, memory, ops), run(plain, memory, ops)
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        assert all(same(a[name], b[name]) for name in a)


def test_a_step_that_measures_its_error_keeps_what_it_compressed():
    ops, told = get_ops("numpy"), []
    unit = unit_of(Blockwise(), Residual(), SPEC)
    for measured in (False, True):
        step = UnitStep(unit, initial(unit, ops, 1, 0), ops, seed=1, step=0, rank=0, size=1, measured=measured)
        step.begin(draw(SPEC, 1))
        if measured:
            size, error = step.squares()
            assert size == pytest.approx(float((draw(SPEC, 1).astype("float64") ** 2).sum()))
            assert 0.001 < error / size < 0.1
        step.remember()
        told.append(step.next_states()["memory"]["residual"])
    assert np.array_equal(*told)


def test_a_subclass_that_replaces_compensate_is_asked_for_it():
    class Doubles(Residual):
        def compensate(self, grad, state, at):
            return super().compensate(grad + grad, state, at)

    assert not unit_of(TopK(0.1), Doubles(), SPEC).fused.compress_sum
    plain, doubled = (run(TopK(0.1), memory, get_ops("numpy")) for memory in (Residual(), Doubles()))
    assert np.array_equal(2 * plain[0]["values"], doubled[0]["values"])


def test_a_memory_with_more_to_do_is_asked_to_compensate():
    memory = Residual(lr_correction=True)
    unit = unit_of(TopK(0.1), memory, SPEC)
    step = UnitStep(unit, initial(unit, get_ops("numpy"), 1, 0), get_ops("numpy"), seed=1, step=0, rank=0, size=1)
    step.begin(draw(SPEC, 1), 0.1)
    assert step.memory["lr"] == 0.1
