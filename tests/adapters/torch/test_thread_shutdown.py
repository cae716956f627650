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

def of_gloo():
    found = 0
    for path in pathlib.Path("/proc/self/task").glob("*/comm"):
        # A thread may end while its name is read.
        with contextlib.suppress(OSError):
            found += "gloo" in path.read_text()
    return found

def at_end():
    # The system lists a thread for a moment after it has been joined.
    deadline = time.monotonic() + 5
    while of_gloo() > threads["before"] and time.monotonic() < deadline:
        time.sleep(0.01)
    os.write(1, (json.dumps({**threads, "end": of_gloo()}) + "\\n").encode())

threads = {}
# The last function that runs before Python ends.
atexit.register(at_end)

import torch
import torch.distributed as dist
import grace.torch as grace

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
# A new thread names itself a moment after it has started.
time.sleep(1)
threads["before"] = of_gloo()
exchange = grace.register(model, {"compressor": "topk"})
model(torch.ones(2, 64)).sum().backward()
threads["during"] = of_gloo()
"""


def test_no_thread_of_the_exchange_runs_when_python_ends(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    words = [*command("torchrun", 2), sys.executable, str(script)]
    done = subprocess.run(words, cwd=ROOT, env=environment(), check=True, capture_output=True, text=True)
    ranks = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(ranks) == 2
    for threads in ranks:
        assert threads["during"] > threads["before"] == threads["end"] > 0
