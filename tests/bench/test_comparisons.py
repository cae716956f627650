"""benchmarks/errors.py compares methods of a researcher's own with those of grace."""

from __future__ import annotations

import json
import os
import re
import runpy
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


def rows_of(*arguments):
    """Run the benchmark in a process of its own; return the rows of the table that it prints."""
    command = [sys.executable, str(ROOT / "benchmarks" / "errors.py"), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if line[:1] == "|"]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


@pytest.fixture
def refusal(monkeypatch, capsys):
    """Return a function that runs the benchmark here, and returns the errors with which it ends."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["errors.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "benchmarks" / "errors.py"), run_name="__main__")
        assert ended.value.code == 2
        return capsys.readouterr().err

    return run


def test_errors_of_given_methods(own):
    rows = rows_of("--compressors", "fp16", "bytes:levels=7", "--import", own)
    stored = json.loads((ROOT / "docs" / "results" / "errors.json").read_text())["rows"]
    (fp16,) = (row for row in stored if row["method"] == "fp16")
    assert [(row["method"], row["setting"]) for row in rows] == [("fp16", ""), ("bytes", "levels 7")]
    assert float(rows[0]["bits per element"]) == fp16["bits"]
    assert float(rows[0]["normal"]) == pytest.approx(fp16["normal"], rel=0.02)
    # A byte per element, and steps of max|x| / 7: about 4.9 standard deviations among 262,144 normal numbers.
    assert rows[1]["bits per element"] == "8.00"
    assert float(rows[1]["normal"]) == pytest.approx((4.9 / 7) ** 2 / 12, rel=0.2)


def test_a_wrong_method_is_one_line(refusal):
    assert "quantum" in refusal("--compressors", "qsgd:quantum=3").splitlines()[-1]


def test_errors_need_a_file_or_methods(refusal):
    assert "expected FILE, for a table" in refusal()
    assert "expected a FILE with rows to renew" in refusal("x.json", "--compressors", "qsgd")
