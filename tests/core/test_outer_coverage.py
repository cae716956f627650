"""Coverage: whole outer steps over drawn tensors exchange each parameter exactly once per period."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from grace.core.session.simulation import SimulatedTransport
from tests.core.test_outer_steps import NONE, Training, assert_close, recursion
from tests.support import covering

# A case follows from its number.
CASES, SHARE = (10_000, 1_000) if covering.ALL else (150, 150)
SHAPES = [(), (0,), (0, 3), (1,), (5,), (2, 3), (1, 1, 4), (17,), (9, 9), (120,)]


def drawn(case):
    """Return the options of a training, and the least number of its inner steps: three periods and what follows."""
    rng = np.random.default_rng((48, case))
    count = int(rng.integers(1, 9))
    fragments, gap = int(rng.integers(1, min(count, 4) + 1)), int(rng.integers(1, 4))
    outer = {
        "every": fragments * gap,
        "fragments": fragments,
        "delay": int(rng.integers(0, gap)),
        "alpha": float(rng.choice([0.0, 0.25, 0.5])),
        "warmup": int(rng.integers(0, 3)),
        "lr": float(rng.choice([0.7, 1.0])),
        "momentum": 0.5,
        "nesterov": bool(rng.integers(2)),
    }
    names = [f"t{i}" for i in range(count)]
    if fragments > 1 and rng.integers(2):
        # Fragments by name, in another order than the tensors.
        parts = np.array_split(rng.permutation(names), fragments)
        outer["fragments"] = [[str(name) for name in part] for part in parts]
    shapes = {name: SHAPES[rng.integers(len(SHAPES))] for name in names}
    sizes = {"bucket_bytes": int(rng.choice([0, 64, 4096])), "split_bytes": int(rng.choice([0, 64, 4096]))}
    options = {"ranks": int(rng.integers(1, 5)), "shapes": shapes, **sizes}
    return outer, options


@pytest.mark.parametrize("first", range(0, CASES, SHARE))
def test_each_parameter_is_exchanged_once_per_period_and_follows_the_recursion(first, monkeypatch):
    """In float64, momentum would show what is applied twice. Tensors are empty, 0-d, and larger than a bucket."""
    sent, start = [0] * 4, SimulatedTransport._start

    def counting(self, collective, name):
        sent[self.rank] += sum(x.size for x in collective.sent_by(self.rank))
        return start(self, collective, name)

    monkeypatch.setattr(SimulatedTransport, "_start", counting)
    for case in range(first, first + SHARE):
        outer, options = drawn(case)
        training = Training(outer, NONE, dtype="float64", rate=0.125, **options)
        parts = training.sim.config.outer.divide(training.sim._specs)
        assert sorted(itertools.chain(*parts)) == sorted(options["shapes"]), case
        numel = sum(int(np.prod(shape)) for shape in options["shapes"].values())
        # A rank alone sends nothing.
        expected_sent = [numel * (training.ranks > 1)] * training.ranks
        every, warmup = outer["every"], outer["warmup"]
        rows = recursion(training, **{**outer, "fragments": parts})
        for step in range(1, warmup + 2 * every + outer["delay"] + 1):
            training.step()
            for rank, expected in enumerate(next(rows)):
                assert_close(training.values(rank), expected, 1e-12)
            if step <= warmup or (step - warmup) % every == 0:
                assert sent[: training.ranks] == expected_sent, case
                sent[:] = [0] * 4
        sent[:] = [0] * 4
