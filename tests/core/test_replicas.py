"""Digests of weights and states tell replicas apart, and a comparison names what differs."""

from __future__ import annotations

import numpy as np
import pytest

import grace
from grace.core.errors import ConfigError, MismatchError
from grace.core.guards.replicas import SUMMARY_BYTES, compare, digest, is_due, summary
from grace.core.spec import ITEMSIZE
from grace.testing.harness import array
from tests.support.registered import BACKENDS, ops_of

MINE = {"a": 1, "b": -2, "c": 3}
TENSORS = {"w": (40, 50), "v": (30, 40)}


def test_digests_are_equal_on_every_backend_and_see_every_element():
    for dtype in ITEMSIZE:
        for n in (0, 1, 3, 8, 1030):
            x = np.arange(n) % 100
            found = [digest(ops_of(b), ops_of(b).reshape(array(ops_of(b), x, dtype), (n, 1))) for b in BACKENDS]
            assert len(set(found)) == 1, (dtype, n)
            for i in (0, n // 2, n - 1) if n else ():
                other = x.copy()
                other[i] += 1
                assert digest(ops_of("numpy"), array(ops_of("numpy"), other, dtype)) != found[0], (dtype, n, i)


def test_a_summary_depends_on_names_values_and_order():
    summaries = [summary(d) for d in (MINE, {**MINE, "b": 2}, {"b": -2, "a": 1, "c": 3}, {**MINE, "d": 0})]
    assert len(set(summaries)) == 4
    assert {len(s) for s in summaries} == {SUMMARY_BYTES}


def met(others, steps=(7, 7)):
    """Compare with other ranks. Return the text of the error, and what was sent."""
    sent = []

    def gather(mine, purpose):
        sent.extend(mine)
        in_detail = [(step, other) for step, other in zip(steps, others, strict=True)]
        return [*mine, *(in_detail if mine == [(7, MINE)] else (summary(other).hex() for other in others))]

    try:
        compare([(7, MINE)], gather, 0)
    except MismatchError as error:
        return str(error), sent
    return "", sent


def test_digests_are_sent_only_if_the_summaries_differ():
    assert met([MINE, MINE]) == ("", [summary(MINE).hex()])
    text, sent = met([MINE, {**MINE, "b": 2, "c": 4}])
    assert sent == [summary(MINE).hex(), (7, MINE)]
    assert text.startswith(
        "the weights or shared states of rank 2 and rank 0 differ before step 7, in 'b' and 1 other tensors: expected "
    )


def test_ranks_at_other_steps_get_the_error_about_their_steps():
    """Their weights differ as well, because only some of them have loaded a checkpoint."""
    text, _ = met([MINE, {**MINE, "b": 2}], steps=(7, 5))
    assert text.startswith("the ranks are not at the same step (seen by rank 0)")


def test_steps_that_are_due():
    assert [step for step in range(7) if is_due(step, 3)] == [0, 3, 6]
    assert not any(is_due(step, 0) for step in range(7))
    with pytest.raises(ConfigError, match=r"^check_replicas must be a number of steps, at least 0; received -1"):
        grace.make_config(compressor="topk", check_replicas=-1)


def simulation(**config):
    sim = grace.Simulation(2, TENSORS, {"default_rules": False, "granularity": "layer", **config})
    return sim, [{n: np.ones(s, np.float32) for n, s in TENSORS.items()}] * 2


def test_shared_states_are_those_of_compressors_and_of_shared_memories():
    for config, expected in (
        ({"compressor": "topk"}, []),
        ({"compressor": "powersgd"}, ["q of the compressor of v", "q of the compressor of w"]),
        ({"compressor": "lpc", "memory": "svrg"}, ["svrg"]),
    ):
        found = simulation(**config)[0].run.shared_states
        if expected == ["svrg"]:
            assert any(name.endswith("of the memory of w") for name in found)
        else:
            assert sorted(found) == expected


@pytest.mark.parametrize(("every", "noticed"), [(0, False), (2, True), (3, False)])
def test_a_simulation_compares_its_states(every, noticed):
    sim, gradients = simulation(compressor="powersgd", check_replicas=every)
    for _ in range(2):
        sim.step(gradients)
    sim.runs[1].units["v"]["compressor"]["q"][0] += 1
    if noticed:
        with pytest.raises(MismatchError, match="before step 2, in 'q of the compressor of v' and 0 other tensors"):
            sim.step(gradients)
    else:
        sim.step(gradients)
