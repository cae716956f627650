"""The table of codings on the page about the configuration says what a run sends."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import grace

PAGE = (Path(__file__).parent.parent.parent / "docs" / "configuration.md").read_text(encoding="utf-8")
NUMEL = 1_000_000
TABLE = PAGE.partition("Bits per element of a gradient of 1,000,000 normal numbers")[2].partition("\n\nGradients of")[0]
HEAD, _, *ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.strip(":\n").splitlines()]
CODINGS = [name.strip("`") for name in HEAD[1:]]


@pytest.mark.parametrize("row", ROWS, ids=[row[0].replace("`", "") for row in ROWS])
def test_every_figure_of_the_table_is_what_a_run_sends(row):
    name = re.findall(r"`(\w+)`", row[0])[0]
    options = {key: int(value) for key, value in re.findall(r"(\w+) = (\d+)", row[0])}
    gradient = {"w": np.random.default_rng(0).standard_normal(NUMEL).astype(np.float32)}
    for coding, shown in zip(CODINGS, row[1:], strict=True):
        config = {"compressor": name, "communicator": "allgather", "default_rules": False, "coding": coding, **options}
        simulation = grace.Simulation(1, {"w": (NUMEL,)}, config)
        simulation.step([gradient])
        # A wire buffer has less than a thousand bytes beside the fields.
        sent = 8 * simulation.runs[0].stats()["wire_bytes"] / NUMEL
        assert sent == pytest.approx(float(shown), abs=0.015), coding
