"""Programs with torch.distributed end: no thread is left that could run into the end of Python."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.launch import ROOT, command, environment

pytestmark = pytest.mark.distributed

SCRIPT = """
import atexit, contextlib, json, os, pathlib, time

def threads():
    return {int(path.name) for path in pathlib.Path("/proc/self/task").iterdir()}

def of_gloo(numbers):
    found = set()
    for number in numbers:
        # A thread may end while its name is read.
        with contextlib.suppress(OSError):
            if "gloo" in pathlib.Path(f"/proc/self/task/{number}/comm").read_text():
                found.add(number)
    return found

# A thread names itself a moment after it has started, and the system lists it for a moment after it has been joined.
def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)

def at_end():
    wait_for(lambda: not of_gloo(threads() - before))
    left = of_gloo(threads() - before)
    os.write(1, (json.dumps({"started": started, "left": len(left)}) + "\\n").encode())

# The last function that runs before Python ends.
atexit.register(at_end)

import torch
import torch.distributed as dist
import grace.torch as grace

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
before = threads()
exchange = grace.register(model, {"compressor": "topk"})
model(torch.ones(2, 64)).sum().backward()
wait_for(lambda: of_gloo(threads() - before))
started = len(of_gloo(threads() - before))
"""


@pytest.mark.slow
def test_no_thread_of_the_exchange_runs_when_python_ends(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    words = [*command("torchrun", 2), sys.executable, str(script)]
    done = subprocess.run(words, cwd=ROOT, env=environment(), check=True, capture_output=True, text=True)
    ranks = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["started"] > 0
        assert rank["left"] == 0
