"""The digits example as the README launches it: every method trains, and sends what it promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from grace.core.registry import compressors
from tests.distributed.launch import ROOT, command

pytestmark = pytest.mark.distributed

KEYS = {
    "framework",
    "compressor",
    "accuracy",
    "wire_bytes_per_step",
    "dense_bytes_per_step",
    "seconds_per_step",
    "replicas_identical",
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The final table of one launch that trains with every method in turn, with the settings that it ships."""
    file = tmp_path_factory.mktemp("example") / "table.json"
    words = [*command("horovodrun-gloo", 2), sys.executable, "examples/torch_digits.py", "--json", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("GRACE_CONFIG", None)
    done = subprocess.run(
        [*words, "--compressor", *compressors],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return {row["compressor"]: row for row in json.loads(file.read_text())}


def test_every_method_is_trained_and_described(rows):
    assert set(rows) == set(compressors)
    for row in rows.values():
        assert set(row) >= KEYS
        assert row["framework"] == "torch"
        assert row["replicas_identical"] is True
        assert row["seconds_per_step"] > 0


def test_accuracy_with_the_shipped_settings(rows):
    assert rows["none"]["accuracy"] >= 0.97
    assert {name: row["accuracy"] for name, row in rows.items() if row["accuracy"] < 0.95} == {}


@pytest.mark.parametrize(
    ("name", "most"), [("topk", 0.022), ("signsgd", 0.033), ("efsignsgd", 0.033), ("fp16", 0.501), ("bf16", 0.501)]
)
def test_share_of_the_dense_bytes_of_the_compressed_tensors(rows, name, most):
    row = rows[name]
    assert 0 < row["compressed_wire_bytes_per_step"] <= most * row["compressed_dense_bytes_per_step"]


def test_powersgd_sends_what_its_ranks_predict(rows):
    row = rows["powersgd"]
    # Rank 2: (rows + columns) * 2 float32 for conv2 (64 x 288), hidden (128 x 1024) and output (10 x 128), one float32
    # flag each, and two for the stamp of their bucket.
    predicted = 4 * 2 * ((64 + 288) + (128 + 1024) + (10 + 128)) + 4 * 3 + 4 * 2
    assert row["compressed_wire_bytes_per_step"] == predicted


def test_none_sends_the_dense_bytes(rows):
    assert rows["none"]["wire_bytes_per_step"] == rows["none"]["dense_bytes_per_step"] == 4 * 151_306
