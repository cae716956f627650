"""Compressors that multiply while they merge give what they give without that."""

from __future__ import annotations

import pytest

from grace.core.compressors.efsignsgd import EFSignSGD
from grace.core.compressors.natural import Natural
from grace.core.memories.efsignsgd import EFSignMemory
from grace.core.memories.none import NoMemory
from grace.core.ops import get_ops
from grace.core.session.simulation import deliver
from grace.core.spec import TensorSpec
from grace.core.state.states import initial
from grace.core.step.unit_step import UnitStep
from grace.testing.harness import FRAMEWORKS, array, draw, host, same, unfused, unit_of

SPEC = TensorSpec("t", (40, 25))


def run(compressor, memory, ops, size, average):
    """Return the result of one step of several ranks, and the factor that is left."""
    unit = unit_of(compressor, memory, SPEC)
    steps = []
    for rank in range(size):
        states = initial(unit, ops, 1, rank)
        step = UnitStep(unit, states, ops, seed=1, step=0, rank=rank, size=size, average=average)
        step.begin(array(ops, draw(SPEC, rank), SPEC.work_dtype))
        steps.append(step)
    payloads, flags = deliver(steps)[0]
    steps[0].remember()
    x, factor, _, _ = steps[0].conclude(payloads, flags)
    return host(ops, x), factor


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize(
    ("compressor", "memory"),
    [(EFSignSGD(), EFSignMemory(lr=0.3)), (Natural(), NoMemory()), (Natural(clipped=True), NoMemory())],
    ids=str,
)
def test_a_step_gives_the_same_with_and_without_it(compressor, memory, framework, size, average):
    ops, plain = get_ops(framework), unfused(compressor)
    assert unit_of(compressor, memory, SPEC).fused.merge_scaled
    assert not unit_of(plain, memory, SPEC).fused.merge_scaled
    x, factor = run(compressor, memory, ops, size, average)
    y, left = run(plain, memory, ops, size, average)
    assert factor == 1
    assert left == memory.gain / (size if average else 1)
    assert same(x, host(ops, ops.scale_(array(ops, y, SPEC.work_dtype), left)))
