"""A run by elastic Horovod in which a process dies, and perhaps another one takes its place."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import ROOT, environment


def check_survivors(
    worker: str, arguments: list[str], comes_back: bool, place: Path, latest: int = 6, ranks: int = 3
) -> None:
    """Run a worker on several ranks, of which one dies in step 6; check what the others hold back, and how it ends.

    Horovod takes names of this machine for hosts, and leaves out the host of a process that has died. The worker gets
    the arguments, the path of a file that exists after that, and the seconds per step then. The others notice at their
    next collective, or at a commit before it, and go on with step 6 to `latest`.
    """
    died, script, others = place / "died", place / "hosts.sh", ranks - 1
    other = f"echo {socket.gethostname()}:1" if comes_back else "true"
    script.write_text(
        f"#!/bin/sh\necho localhost:{others}\nif [ -e {died} ]; then {other}; else echo 127.0.0.1:1; fi\n"
    )
    script.chmod(0o755)
    words = ["horovodrun", "-np", str(ranks), "--min-np", str(others), "--gloo", "--host-discovery-script", str(script)]
    run = subprocess.run(
        [*words, "python", str(ROOT / worker), *arguments, str(died), "0.5"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    told = [json.loads(line) for line in re.findall(r"<stdout>:(\{.*\})$", run.stdout, re.MULTILINE)]
    committed: dict[int, dict[str, Any]] = {}
    entered, held, new = [], [], 0
    for one in told:
        if one["what"] == "commit":
            committed[one["pid"]] = one
        elif one["what"] == "enter" and one["batch"]:
            entered.append(one)
            assert one["step"] == one["batch"]
            if one["pid"] in committed:
                before = committed[one["pid"]]
                assert one["batch"] == before["batch"]
                assert one["held"] == pytest.approx(before["held"], rel=1e-5, abs=1e-4)
                held.append(abs(one["held"]))
            else:
                assert one["held"] == 0.0
                new += 1
    assert len(committed) == (ranks + 1 if comes_back else ranks)
    assert new == comes_back
    assert max(held) > 0.01
    # The new host may be found only after the others have gone on for some steps.
    first, last = entered[0], entered[-1]
    assert 6 <= first["batch"] <= latest
    assert first["size"] in ((others, ranks) if comes_back else (others,))
    assert len([one for one in entered if one["batch"] == first["batch"]]) == first["size"]
    assert last["size"] == (ranks if comes_back else others)
    done = [one for one in told if one["what"] == "done"]
    assert len(done) == last["size"]
    assert {one["step"] for one in done} == {14}
    assert len({one["weights"] for one in done}) == 1
    told_of = rf"of {ranks} ranks, {others} have stayed and (\d) are new. What the other 1 held back is lost"
    assert re.findall(told_of, run.stderr) == [str(first["size"] - others)]
