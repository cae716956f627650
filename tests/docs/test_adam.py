"""The optimizer of the page on Adam trains a model of which some coordinates never have a gradient."""

from __future__ import annotations

import re

import numpy as np
import pytest

import grace
from tests.support.launch import ROOT

torch = pytest.importorskip("torch")

WARM_UP, BETA, STEPS, RANKS = 60, 0.9, 300, 3
ROWS, WIDTH = 64, 32
SIGNS = {"compressor": "efsignsgd", "memory": "shared_momentum", "momentum": BETA, "communicator": "two_shot"}


def optimizer_of_the_page():
    """Return the class that docs/adam.md defines."""
    (source,) = re.findall(
        r"^class MomentumAdam.*?(?=^\S)", (ROOT / "docs/adam.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    scope = {"torch": torch, "WARM_UP": WARM_UP, "BETA": BETA}
    exec(source, scope)
    return scope["MomentumAdam"]


@pytest.mark.parametrize("schedule", [[], [{"step": WARM_UP, **SIGNS}]], ids=["adam", "1-bit adam"])
def test_rows_that_never_occur_stay_and_the_others_are_learnt(schedule):
    rng = np.random.default_rng(0)
    start, target = (torch.tensor(rng.standard_normal((ROWS, WIDTH)), dtype=torch.float32) for _ in "st")
    never = torch.arange(ROWS) % 4 == 0
    weights = torch.nn.Parameter(start.clone())
    optimizer = optimizer_of_the_page()([weights], lr=0.005)
    dense = {"compressor": "none", "memory": "shared_momentum", "momentum": BETA, "default_rules": False}
    simulation = grace.Simulation(RANKS, {"w": (ROWS, WIDTH)}, {**dense, "schedule": schedule}, framework="torch")

    def loss():
        return float((weights.detach() - target)[~never].square().mean())

    first = loss()
    for _ in range(STEPS):
        given = []
        for _ in range(RANKS):
            occurs = torch.tensor(rng.random(ROWS) < 0.5) & ~never
            noise = torch.tensor(rng.standard_normal((ROWS, WIDTH)), dtype=torch.float32)
            given.append({"w": 1e-3 * (weights.detach() - target + noise) * occurs[:, None]})
        weights.grad = simulation.step(given)[0]["w"]
        optimizer.step()
        assert torch.equal(weights.detach()[never], start[never])
    assert loss() < 0.05 * first
