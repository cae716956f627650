"""The examples of Accelerate, Lightning and Hugging Face's Trainer, launched as in the documents."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.examples.test_digits import MOST, check_bytes, check_description, check_share
from tests.support.launch import ROOT, environment

pytestmark = pytest.mark.distributed

TRAINERS = ["accelerate", "lightning", "transformers"]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_trains_with_compressed_gradients(trainer, tmp_path):
    if importlib.util.find_spec(trainer) is None:
        pytest.skip(f"{trainer} is not installed; pip install -r scripts/requirements_trainers.txt")
    table = tmp_path / "table.json"
    words = ["--compressor", "none", "topk", "--epochs", "3", "--json", str(table)]
    run_on_two_ranks(f"examples/{trainer}_digits.py", *words)
    rows = {row["compressor"]: row for row in json.loads(table.read_text())}
    check_description(trainer, rows)
    check_bytes("torch", rows, MOST)
    check_share(rows)
    # A network that learns nothing is right about one image in ten.
    assert {name: row["accuracy"] for name, row in rows.items() if row["accuracy"] < 0.5} == {}


def test_a_resumed_run_of_the_trainer_has_the_weights_of_a_run_without_a_break(tmp_path):
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed; pip install -r scripts/requirements_trainers.txt")
    done = run_on_two_ranks("tests/examples/resumed_trainer.py", str(tmp_path))
    assert json.loads(done.splitlines()[-1]) == {"difference": 0.0, "exact": True}


def run_on_two_ranks(*words: str) -> str:
    """Return the output of a script that torchrun starts."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, *words],
        cwd=ROOT,
        env=environment(HF_HUB_OFFLINE="1"),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
