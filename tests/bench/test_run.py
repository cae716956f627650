"""The command `grace bench run`: programs of the user on ranks of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grace import cli
from grace.machine import python
from tests.support.launch import ROOT

pytestmark = pytest.mark.distributed

COMMAND = "from grace.cli import main; sys.exit(main())"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "GRACE_CONFIG": "mine.toml", "RANK": "7", "HOROVOD_RANK": "8"}


def run(folder, *arguments, program):
    (folder / "train.py").write_text(program)
    return subprocess.Popen(
        python(COMMAND, "bench", "run", *arguments, "--", sys.executable, "train.py", "--lr", "1"),
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts tests in the background makes its children ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finished(*arguments, **options):
    process = run(*arguments, **options)
    output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors


def runs(pid):
    """Return whether a process runs; one that waits for its new parent to notice its end does not."""
    stat = Path("/proc", pid, "stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


TOLD = """
import os, sys
names = "RANK LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK WORLD_SIZE GRACE_CONFIG HOROVOD_RANK".split()
print(*(os.environ.get(name) for name in names), *sys.argv[1:], os.path.basename(os.getcwd()))
"""


def test_ranks_have_the_environment_of_torchrun_and_the_users_folder(tmp_path):
    status, output, errors = finished(tmp_path, "--link", "none", "--ranks", "3", "--prefix", program=TOLD)
    assert status == 0, errors
    expected = [f"[{rank}] {rank} 0 1 {rank} 3 mine.toml None --lr 1 {tmp_path.name}" for rank in range(3)]
    assert sorted(output.splitlines()) == expected


def test_without_prefix_rank_0_alone_is_shown(tmp_path):
    status, output, errors = finished(tmp_path, "--link", "none", program=TOLD)
    assert (status, output) == (0, f"0 0 1 0 2 mine.toml None --lr 1 {tmp_path.name}\n"), errors


REDUCED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(3)
dist.all_reduce(x)
print(int(x.sum()))
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_reduce_over_shaped_links(tmp_path):
    status, output, errors = finished(tmp_path, "--link", "1gbit", "--prefix", program=REDUCED)
    assert status == 0, errors
    assert sorted(output.splitlines()) == ["[0] 6", "[1] 6"], errors


FAILING = "import os, time; rank = int(os.environ['RANK']); print('I am', rank, flush=True); "


def test_the_status_is_that_of_the_rank_that_fails_and_the_others_end(tmp_path):
    begin = time.monotonic()
    program = f"{FAILING}time.sleep(99) if rank == 0 else exit(3)"
    status, output, errors = finished(tmp_path, "--link", "none", program=program)
    assert status == 3
    assert output == "I am 0\n"
    assert "rank 1 ended with status 3\n    | I am 1" in errors
    assert time.monotonic() - begin < 60


def test_a_rank_that_a_signal_ends(tmp_path):
    status, _, errors = finished(
        tmp_path, "--link", "none", program=f"{FAILING}os.kill(os.getpid(), 11) if rank else time.sleep(99)"
    )
    assert status == 128 + 11
    assert "rank 1 ended by signal SIGSEGV" in errors


@pytest.mark.parametrize("link", ["none", "1gbit"])
def test_ctrl_c_ends_all_ranks_and_what_they_started(link, tmp_path):
    program = (
        "import os, subprocess, time; child = subprocess.Popen(['sleep', '998'])\n"
        "open(f'pid{os.environ[\"RANK\"]}', 'w').write(f'{os.getpid()} {child.pid}\\n'); time.sleep(99)"
    )
    process, deadline = run(tmp_path, "--link", link, program=program), time.monotonic() + 60
    while sum(path.stat().st_size > 0 for path in tmp_path.glob("pid*")) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "all ranks and namespaces are removed" in errors
    for path in tmp_path.glob("pid*"):
        assert not any(map(runs, path.read_text().split()))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--link", "none", "--", "no-such-program"], "the program 'no-such-program' was not found"),
        (["--link", "none", "--ranks", "0", "--", "true"], "--ranks: expected at least 1, received 0"),
        (["--link", "none", "--nodes", "2x2", "--", "true"], "--nodes needs a link with limited bandwidth"),
        (["--link", "slow", "--", "true"], "--link: expected 100mbit"),
    ],
)
def test_what_cannot_run_is_refused(arguments, expected, capsys):
    assert cli.main(["bench", "run", *arguments]) == 2
    assert expected in capsys.readouterr().err
