"""Programs with torch.distributed end: no thread is left that could run into the end of Python."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.launch import ROOT, command, environment

pytestmark = pytest.mark.distributed

SCRIPT = """
import atexit, json, os, pathlib

names = lambda: [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
threads = {}
# The last function that runs before Python ends.
atexit.register(lambda: os.write(1, (json.dumps({**threads, "end": names()}) + "\\n").encode()))

import torch
import torch.distributed as dist
import grace.torch as grace

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
threads["before"] = names()
exchange = grace.register(model, {"compressor": "topk"})
model(torch.ones(2, 64)).sum().backward()
threads["during"] = names()
"""


def test_no_thread_of_the_exchange_runs_when_python_ends(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    words = [*command("torchrun", 2), sys.executable, str(script)]
    done = subprocess.run(words, cwd=ROOT, env=environment(), check=True, capture_output=True, text=True)
    ranks = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(ranks) == 2
    for threads in ranks:
        counts = {when: sum("gloo" in name for name in names) for when, names in threads.items()}
        assert counts["during"] > counts["before"] == counts["end"] > 0
