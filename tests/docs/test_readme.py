"""Tests of scripts/readme.py, which writes the figure and the generated blocks of README.md."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def readme():
    spec = importlib.util.spec_from_file_location("readme", ROOT / "scripts" / "readme.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        spec.loader.exec_module(module)
        yield module


def test_figure_and_blocks_are_up_to_date():
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "readme.py"), "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_what_everybody_reads_first_is_short(name):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= 130


def test_other_data_make_another_figure(readme):
    data = readme.measurements()
    rows = [{**row, "1gbit": row["1gbit"] + 1} if row["method"] == "topk" else row for row in data["rows"]]
    assert readme.figure({**data, "rows": rows}) != readme.figure(data)


def test_the_figure_is_valid_and_shows_each_measured_bar_in_proportion(readme):
    data = readme.measurements()
    original = {"method": "grace2021-topk", "1gbit": 969, "10gbit": 270}
    rows = [row for row in data["rows"] if row["method"] != original["method"]]
    drawn = ElementTree.fromstring(readme.figure({**data, "rows": [*rows, original]}))
    text = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "original GRACE, topk" in text
    assert "grace, topk" in text
    bars = [e for e in drawn.iter("{http://www.w3.org/2000/svg}rect") if e.get("class") in ("own", "other")]
    times = {row["method"]: row["1gbit"] for row in [*rows, original] if row["method"] in readme.BARS}
    first_panel = bars[: len(times)]
    unit = float(first_panel[0].get("width")) / times["horovod"]
    for bar, method in zip(first_panel, (m for m in readme.BARS if m in times), strict=True):
        assert float(bar.get("width")) == pytest.approx(unit * times[method], abs=0.1)


def test_missing_comments_are_an_error(readme):
    with pytest.raises(SystemExit, match="<!-- begin step-time -->"):
        readme.with_block("# grace\n", "step-time", [])
