"""benchmarks/errors.py and accuracy.py compare methods of a researcher's own with those of grace."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest

from tests.support.launch import ROOT

pytestmark = pytest.mark.processes

pytest.importorskip("torch")
PAGE = ROOT / "docs" / "extend" / "compressor.md"


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Return a file with the compressor of the page on compressors."""
    (example,) = re.findall(r"```python\n(.*?@grace.register_compressor.*?)simulation =", PAGE.read_text(), re.DOTALL)
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(textwrap.dedent(example), encoding="utf-8")
    return path


def run(name, *arguments, status=0):
    """Run a benchmark; return the rows of the table that it prints, and its errors."""
    command = [sys.executable, str(ROOT / "benchmarks" / name), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == status, done.stdout + done.stderr
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if line[:1] == "|"]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]], done.stderr


def test_errors_of_given_methods(own):
    rows, _ = run("errors.py", "--compressors", "fp16", "bytes:levels=7", "--import", own)
    stored = json.loads((ROOT / "docs" / "results" / "errors.json").read_text())["rows"]
    (fp16,) = (row for row in stored if row["method"] == "fp16")
    assert [(row["method"], row["setting"]) for row in rows] == [("fp16", ""), ("bytes", "levels 7")]
    assert float(rows[0]["bits per element"]) == fp16["bits"]
    assert float(rows[0]["normal"]) == pytest.approx(fp16["normal"], rel=0.02)
    # A byte per element, and steps of max|x| / 7: about 4.9 standard deviations among 262,144 normal numbers.
    assert rows[1]["bits per element"] == "8.00"
    assert float(rows[1]["normal"]) == pytest.approx((4.9 / 7) ** 2 / 12, rel=0.2)


SHORT = ("--lr", 0.1, "--epochs", 1, "--seeds", 0, 3)


@pytest.mark.slow
@pytest.mark.distributed
def test_accuracy_of_given_methods(own):
    rows, _ = run("accuracy.py", "--compressors", "bytes:levels=7", "--import", own, *SHORT)
    assert [(row["method"], row["setting"]) for row in rows] == [("none", ""), ("bytes", "levels 7, lr 0.1")]
    for row in rows:
        seeds = [float(row[f"seed {seed}"]) for seed in (0, 3)]
        assert float(row["mean"]) == pytest.approx(sum(seeds) / 2, abs=0.006)
    # Other seeds begin with other weights.
    assert rows[0]["seed 0"] != rows[0]["seed 3"]
    assert rows[0]["bytes/step"] == ""
    # A byte for each of the 150,784 elements of the three weights, and a number per piece of a weight.
    assert 0 < int(rows[1]["bytes/step"].replace(",", "")) - 150_784 < 100
    assert rows[1]["share, %"] == "25.01"


@pytest.mark.parametrize("name", ["errors.py", "accuracy.py"])
def test_a_wrong_method_is_one_line(name):
    _, said = run(name, "--compressors", "qsgd:quantum=3", status=2)
    assert "Traceback" not in said
    assert "quantum" in said.splitlines()[-1]


@pytest.mark.parametrize("arguments", [("--epochs", 0), pytest.param(("--lr", -1), marks=pytest.mark.slow)])
def test_wrong_numbers_are_refused(arguments):
    _, said = run("accuracy.py", *arguments, status=2)
    assert said.splitlines()[-1] == "accuracy.py: error: expected --epochs of at least 1 and a positive --lr"


def test_errors_need_a_file_or_methods():
    assert "expected FILE, for a table" in run("errors.py", status=2)[1]
    assert "expected a FILE with rows to renew" in run("errors.py", "x.json", "--compressors", "qsgd", status=2)[1]
