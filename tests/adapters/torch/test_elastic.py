"""Horovod's elastic state with optimizers of grace."""

from __future__ import annotations

import json
import re
import socket
import subprocess

import pytest

from tests.support.launch import ROOT, TORCH, Launch, environment
from tests.support.ranks import on, scenario, with_all

pytestmark = pytest.mark.distributed


@on(Launch(TORCH, "horovodrun-gloo", 2))
def test_an_elastic_state_keeps_residuals_and_takes_new_ranks(launch):
    ranks = scenario("elastic", launch)
    for rank in ranks:
        without, joint, local = rank["refused"]
        assert "pass the optimizer to grace.torch.horovod.TorchState" in without
        assert "every rank must keep a residual of its own" in joint
        assert "local_steps is not supported in elastic mode" in local
        assert rank["went on"]
        assert rank["restored"] == [True, 3]
        assert rank["step"] == 3
        assert rank["stayed"]
        assert rank["synchronized"] == [3, 3]
    assert ranks[0]["own"]
    assert not ranks[0]["nothing"]
    assert ranks[1]["nothing"]
    for key in ("momentum", "weights"):
        assert ranks[0][key] == ranks[1][key]
    first, *others = [text for text in ranks[0]["told"] if text.startswith("elastic Horovod")]
    assert "2 ranks before, 2 now" in first
    assert any("of 2 ranks, 1 have stayed and 1 are new. What the other 1 held back is lost" in text for text in others)


@with_all
@pytest.mark.parametrize("comes_back", [False, True], ids=["gone", "back"])
def test_survivors_of_a_dead_rank_go_on(comes_back, tmp_path):
    """Horovod takes names of this machine for hosts, and leaves out the host of a process that has died."""
    died, script = tmp_path / "died", tmp_path / "hosts.sh"
    other = f"echo {socket.gethostname()}:1" if comes_back else "true"
    script.write_text(f"#!/bin/sh\necho localhost:2\nif [ -e {died} ]; then {other}; else echo 127.0.0.1:1; fi\n")
    script.chmod(0o755)
    words = ["horovodrun", "-np", "3", "--min-np", "2", "--gloo", "--host-discovery-script", str(script)]
    run = subprocess.run(
        [*words, "python", str(ROOT / "tests/adapters/torch/elastic_worker.py"), str(died), "0.5"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    told = [json.loads(line) for line in re.findall(r"<stdout>:(\{.*\})$", run.stdout, re.MULTILINE)]
    committed = {one["pid"]: one for one in told if one["what"] == "commit" and one["batch"] == 6}
    entered = [one for one in told if one["what"] == "enter" and one["batch"] == 6]
    assert len(committed) == 3
    assert {one["size"] for one in entered} == {3 if comes_back else 2}
    assert all(one["step"] == 6 for one in entered)
    survivors = [one for one in entered if one["pid"] in committed]
    assert len(survivors) == 2
    for one in survivors:
        assert one["held"] == pytest.approx(committed[one["pid"]]["held"], rel=1e-5, abs=1e-4)
        assert abs(one["held"]) > 0.01
    assert [one["held"] for one in entered if one["pid"] not in committed] == [0.0] * comes_back
    done = [one for one in told if one["what"] == "done"]
    assert len(done) == (3 if comes_back else 2)
    assert len({one["weights"] for one in done}) == 1
    assert f"2 have stayed and {int(comes_back)} are new. What the other 1 held back is lost" in run.stderr
