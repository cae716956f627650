"""The hosts on which the command of a launcher would start ranks, and which of them are not this machine."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

# Launchers that start ranks on other hosts themselves, with their options that name hosts, and files with hosts.
_MPI = ("-H", "-host", "--host", "-hosts", "--hosts"), ("-hostfile", "--hostfile", "-machinefile", "--machinefile")
_LAUNCHERS = {
    "horovodrun": (("-H", "--hosts"), ("-hostfile", "--hostfile")),
    "mpirun": _MPI,
    "mpiexec": _MPI,
    "orterun": _MPI,
    "prterun": _MPI,
}


def elsewhere(command: Sequence[str]) -> list[str]:
    """Return the hosts other than this one on which a command would start ranks, as far as its arguments tell.

    Without hosts, MPI takes those of a Slurm job.
    """
    launcher = os.path.basename(command[0])
    if launcher not in _LAUNCHERS:
        return []
    named, files = _LAUNCHERS[launcher]
    hosts: list[str] = []
    words = iter(_own(command))
    for word in words:
        option, equals, value = word.partition("=")
        if option not in (*named, *files):
            continue
        value = value if equals else next(words, "")
        if option in named:
            hosts += value.split(",")
        elif os.path.isfile(value):
            lines = Path(value).read_text(encoding="utf-8", errors="replace").splitlines()
            hosts += [line.split()[0] for line in lines if line.strip() and not line.strip().startswith("#")]
    if not hosts and launcher != "horovodrun" and int(os.environ.get("SLURM_JOB_NUM_NODES", 1)) > 1:
        hosts = [f"the {os.environ['SLURM_JOB_NUM_NODES']} nodes of the Slurm job"]
    # Without users and numbers of slots.
    names = dict.fromkeys(re.sub(r":\d+$", "", host.strip().rpartition("@")[2]) for host in hosts)
    return [name for name in names if name and not _is_here(name)]


def _own(command: Sequence[str]) -> list[str]:
    """Return the words of a command that are the launcher's, without the program that it starts."""
    for i in range(1, len(command)):
        word, before = command[i], command[i - 1]
        if word.startswith("-"):
            continue
        is_python = os.path.basename(word).startswith("python") or word.endswith(".py")
        if is_python or (i > 1 and not before.startswith("-") and shutil.which(word)):
            return list(command[1:i])
    return list(command[1:])


def _is_here(host: str) -> bool:
    """Return whether a name or an address is one of this machine: only those can be bound to a socket."""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as end:
            try:
                end.bind(address)
            except OSError:
                continue
            return True
    return False
