"""The DiLoCo of torchft and that of grace, side by side, as docs/move.md translates it; if torchft is installed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.support.launch import ROOT, environment

pytestmark = [pytest.mark.processes, pytest.mark.slow]
SCRIPT = str(ROOT / "tests/examples/diloco_of_torchft.py")


def test_both_train_the_same(tmp_path):
    coordination = pytest.importorskip("torchft.coordination")
    lighthouse = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=1000)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    found = {}
    for library in ("torchft", "grace"):
        groups = [
            subprocess.Popen(
                [sys.executable, SCRIPT, library, str(group), str(tmp_path), lighthouse.address()],
                env=environment(PYTHONPATH=path),
            )
            for group in range(2)
        ]
        assert [process.wait(300) for process in groups] == [0, 0]
        found[library] = [torch.load(tmp_path / f"{library}{group}.pt") for group in range(2)]
    lighthouse.shutdown()
    for theirs, ours in zip(*found.values(), strict=True):
        assert theirs["syncs"] == ours["syncs"] == 4
        for name, x in ours["model"].items():
            assert torch.allclose(theirs["model"][name], x, rtol=0, atol=1e-6), name
