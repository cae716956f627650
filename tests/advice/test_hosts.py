"""The hosts that commands of launchers name."""

from __future__ import annotations

import socket
import sys

import pytest

from grace import cli
from grace.advice import launch
from grace.advice.hosts import elsewhere

# Names that no resolver has (RFC 2606).
FAR = ["a.invalid", "b.invalid"]


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)


@pytest.mark.parametrize(
    ("command", "hosts"),
    [
        ("horovodrun -np 4 -H a.invalid:2,b.invalid:2 python train.py", FAR),
        ("horovodrun -np 4 --hosts=localhost:2,b.invalid:2 python train.py", FAR[1:]),
        ("mpirun -np 4 --host me@a.invalid,b.invalid:2 --bind-to none python train.py", FAR),
        ("/usr/bin/mpiexec -n 4 -hosts a.invalid,b.invalid ./train.py", FAR),
        ("mpirun -np 2 --oversubscribe -H localhost:2,127.0.0.1:2 python train.py -H a.invalid", []),
        # Options of the program.
        ("mpirun -np 2 env python train.py --host a.invalid", []),
        ("mpirun -np 2 env -H a.invalid", []),
        ("horovodrun -np 2 python train.py --hosts a.invalid", []),
        # Started on each node.
        ("torchrun --nnodes 2 --master-addr a.invalid train.py", []),
        ("python train.py -H a.invalid", []),
    ],
)
def test_hosts_of_commands(command, hosts):
    assert elsewhere(command.split()) == hosts


def test_this_machine_is_not_elsewhere():
    assert elsewhere(["mpirun", "-H", f"{socket.gethostname()}:2,localhost", "python", "train.py"]) == []


@pytest.mark.parametrize("option", ["-hostfile", "--hostfile", "--machinefile"])
def test_hosts_of_files(option, tmp_path):
    (tmp_path / "hosts").write_text("# ours\n\nlocalhost slots=2\na.invalid slots=4\n  b.invalid:4\n")
    assert elsewhere(["mpirun", option, str(tmp_path / "hosts"), "python", "train.py"]) == FAR
    # The launcher itself says what is wrong.
    assert elsewhere(["mpirun", option, "missing", "python", "train.py"]) == []


def test_mpi_takes_the_nodes_of_a_slurm_job(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert elsewhere(["mpirun", "python", "train.py"]) == ["the 2 nodes of the Slurm job"]
    assert elsewhere(["mpirun", "-H", "localhost", "python", "train.py"]) == []
    assert elsewhere(["horovodrun", "-np", "2", "python", "train.py"]) == []


def test_advise_refuses_ranks_on_other_hosts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "_run", lambda *_: pytest.fail("the script has run"))
    (tmp_path / "mpirun").write_text("#!/bin/sh\n")
    (tmp_path / "mpirun").chmod(0o755)
    assert cli.main(["advise", "--", str(tmp_path / "mpirun"), "-H", "a.invalid", sys.executable, "train.py"]) == 2
    assert "mpirun would start ranks on a.invalid, where grace advise cannot measure them" in capsys.readouterr().err
