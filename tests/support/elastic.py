"""A run by elastic Horovod in which a process dies, and perhaps another one takes its place."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from pathlib import Path

import pytest

from tests.support.launch import ROOT, environment


def check_survivors(worker: str, arguments: list[str], comes_back: bool, place: Path) -> None:
    """Run a worker on three ranks, of which one dies in step 6; check what the others hold back, and how it ends.

    Horovod takes names of this machine for hosts, and leaves out the host of a process that has died. The worker gets
    the arguments, the path of a file that exists after that, and the seconds per step then.
    """
    died, script = place / "died", place / "hosts.sh"
    other = f"echo {socket.gethostname()}:1" if comes_back else "true"
    script.write_text(f"#!/bin/sh\necho localhost:2\nif [ -e {died} ]; then {other}; else echo 127.0.0.1:1; fi\n")
    script.chmod(0o755)
    words = ["horovodrun", "-np", "3", "--min-np", "2", "--gloo", "--host-discovery-script", str(script)]
    run = subprocess.run(
        [*words, "python", str(ROOT / worker), *arguments, str(died), "0.5"],
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
    assert {one["step"] for one in done} == {14}
    assert len({one["weights"] for one in done}) == 1
    assert f"2 have stayed and {int(comes_back)} are new. What the other 1 held back is lost" in run.stderr
