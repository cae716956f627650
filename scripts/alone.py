"""Print the seconds of each test function, and how many lines of grace no other one runs.

pip install -r scripts/requirements_coverage.txt
python scripts/alone.py tests/core -n auto          # arguments go to pytest

The longest functions come first. A function that takes long and runs few lines alone belongs to `--all`, or needs fewer
cases. The scenarios that pools of ranks run for tests (tests/support/rank.py) have lines of their own; the seconds of a
test contain those of the scenarios that it is the first to ask for. Lines in all other processes do not count.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree

import coverage


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        times, data = Path(folder) / "times.xml", coverage.CoverageData(f"{folder}/coverage")
        (Path(folder) / "coveragerc").write_text(f"[run]\ndata_file = {data.data_filename()}\n", encoding="utf-8")
        words = ["--cov=grace", "--cov-context=test", "--cov-report=", f"--cov-config={folder}/coveragerc"]
        environment = {**os.environ, "GRACE_TEST_COVERAGE": f"{folder}/ranks"}
        command = [sys.executable, "-m", "pytest", "-q", *words, f"--junitxml={times}", *sys.argv[1:]]
        status = subprocess.call(command, env=environment)
        data.read()
        for path in Path(folder).glob("ranks.*.*"):
            part = coverage.CoverageData(str(path))
            part.read()
            data.update(part)
        alone: Counter[str] = Counter()
        for path in data.measured_files():
            for contexts in data.contexts_by_lineno(path).values():
                ran = {name.partition("[")[0].partition("|")[0] for name in contexts if name}
                if len(ran) == 1:
                    alone[ran.pop().replace(".py::", "::").replace("::", ".").replace("/", ".")] += 1
        seconds: dict[str, float] = defaultdict(float)
        for case in ElementTree.parse(times).iter("testcase"):
            name = f"{case.attrib['classname']}.{case.attrib['name']}"
            seconds[name.partition("[")[0]] += float(case.attrib["time"])
        if (scenarios := Path(folder) / "ranks.seconds").exists():
            for line in scenarios.read_text(encoding="utf-8").splitlines():
                name, taken = line.split("\t")
                seconds[name] += float(taken)
    for name in sorted(seconds, key=lambda name: -seconds[name]):
        print(f"{seconds[name]:8.1f} s {alone[name]:6d} lines  {name}")
    return status


if __name__ == "__main__":
    sys.exit(main())
