"""Runs with "auto" that go on in new processes, on as many ranks and on others, from what they have saved."""

from __future__ import annotations

import json

import pytest

from tests.support.covering import ALL
from tests.support.ranks import run_script

pytestmark = pytest.mark.distributed

# By way and number of ranks that save.
CASES = [("ddp", 2), ("fsdp", 2), *((("ddp", 3), ("fsdp", 3)) if ALL else ())]


@pytest.mark.parametrize(("way", "size"), CASES)
def test_auto_goes_on_with_its_method_in_new_processes(way, size, tmp_path):
    """From the middle of a trial, and after it, bit for bit; on other ranks with all that was held back."""

    def started(ranks, name):
        script = "tests/adapters/torch/resumed_auto.py"
        done = run_script(script, ranks, str(tmp_path), way, str(size))
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads((tmp_path / f"{way} {name} {rank}").read_text()) for rank in range(ranks)]

    other = 5 - size
    before = started(size, "steps")
    for saved, found in zip(before, started(size, f"on {size}"), strict=True):
        assert saved["steps"][0].startswith("none ")
        assert {point: trial for point, (_, trial) in saved["points"].items()} == {"trial": True, "chosen": False}
        for point, (at, _) in saved["points"].items():
            assert found[point]["exact"]
            assert found[point]["difference"] < 1e-6
            assert found[point]["steps"] == saved["steps"][at:]
            assert found[point]["steps"][-1].startswith("topk ")
            assert found[point]["auto"]
    for found in started(other, f"on {other}"):
        for point in before[0]["points"]:
            assert not found[point]["exact"]
            assert found[point]["difference"] < 1e-6
            assert found[point]["steps"][0].startswith("topk ")
            assert found[point]["auto"]
        # It measures and decides again, after 16 steps.
        assert found["trial"]["steps"][-1].startswith("fp16 ")
