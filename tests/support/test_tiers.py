"""Plain `pytest` runs the tests that start no process, with any number of workers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.launch import ROOT

TESTS = """
import pytest

@pytest.mark.parametrize("name", ["topk", "szx", "tensorflow"])
def test_alone(name): pass

@pytest.mark.processes
def test_process(): pass

@pytest.mark.distributed
def test_ranks(): pass

@pytest.mark.kernels
def test_kernel(): pass
"""

# Its tests have a marker at the top, so that only who asks for them imports it.
MARKED = """
import sys, pytest
pytestmark = pytest.mark.distributed
assert "tests" in sys.argv

def test_marked(): pass
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "1 passed"),
        pytest.param(("-n", "0"), "1 passed", marks=pytest.mark.slow),
        (("-k", "alone", "-n", "0"), "3 passed"),
        pytest.param(("-m", "processes"), "1 passed", marks=pytest.mark.slow),
        pytest.param(("-m", "not distributed and not processes and not kernels"), "3 passed", marks=pytest.mark.slow),
        pytest.param(("tests",), "7 passed", marks=pytest.mark.slow),
    ],
    ids=["all cores", "one worker", "words", "a marker", "as in test.sh", "a folder"],
)
def test_plain_pytest_leaves_out_processes_tensorflow_and_the_literature(tmp_path, arguments, expected):
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "test_some.py").write_text(TESTS, encoding="utf-8")
    (folder / "test_marked.py").write_text(MARKED, encoding="utf-8")
    markers = "\n".join(f"    {name}" for name in ("distributed", "first", "kernels", "processes", "slow"))
    settings = f"[pytest]\ntestpaths = tests\nmarkers =\n{markers}\n"
    (tmp_path / "pytest.ini").write_text(settings, encoding="utf-8")
    program = f"import sys, pytest; sys.path.insert(0, {str(ROOT)!r}); sys.exit(pytest.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, "-q", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert expected in done.stdout, done.stdout + done.stderr
