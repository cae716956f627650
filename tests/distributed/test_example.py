"""The digits examples as the README launches them: every method trains, and sends what it promises."""

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

# The weights of at least 1,024 elements, as PowerSGD sees them: conv2, hidden and output.
MATRICES = {
    "torch": [(64, 288), (128, 1024), (10, 128)],
    "keras": [(288, 64), (1024, 128), (128, 10)],
    "tensorflow": [(288, 64), (1024, 128), (128, 10)],
}
# What the tape adds to what Keras' optimizer has in common with it does not depend on the method.
METHODS = {
    "torch": list(compressors),
    "keras": list(compressors),
    "tensorflow": ["none", "fp16", "bf16", "topk", "signsgd", "efsignsgd", "powersgd"],
}


@pytest.fixture(scope="module", params=MATRICES)
def framework(request):
    return request.param


@pytest.fixture(scope="module")
def rows(framework, tmp_path_factory):
    """The final table of one launch that trains with its methods in turn, with the settings that it ships."""
    file = tmp_path_factory.mktemp("example") / "table.json"
    words = [*command("horovodrun-gloo", 2), sys.executable, f"examples/{framework}_digits.py", "--json", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("GRACE_CONFIG", None)
    done = subprocess.run(
        [*words, "--compressor", *METHODS[framework]],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return {row["compressor"]: row for row in json.loads(file.read_text())}


def test_every_method_is_trained_and_described(framework, rows):
    assert set(rows) == set(METHODS[framework])
    for row in rows.values():
        assert set(row) >= KEYS
        assert row["framework"] == framework
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


def test_powersgd_sends_what_its_ranks_predict(framework, rows):
    # Rank 2: (rows + columns) * 2 float32 and a float32 flag for each matrix, and two for the stamp of their bucket.
    predicted = sum(4 * 2 * sum(shape) + 4 for shape in MATRICES[framework]) + 4 * 2
    assert rows["powersgd"]["compressed_wire_bytes_per_step"] == predicted


def test_none_sends_the_dense_bytes(rows):
    assert rows["none"]["wire_bytes_per_step"] == rows["none"]["dense_bytes_per_step"] == 4 * 151_306
