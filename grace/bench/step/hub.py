"""The process that makes a test network and holds it, within new namespaces; see `grace.bench.step.network`.

It reads {"hub": address, "nodes": [address, ...], "rate": bits per second, "latency": time or null} as a line of JSON,
and answers {"nodes": [process, ...]}, the processes whose namespaces are those of the nodes, or {"error": text}. At the
end of its input it kills all processes in these namespaces and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from grace.bench.step.network import BRIDGE, INTERFACE, PORT, failure_text, tc_limits
from grace.core.errors import GraceError

# The namespaces of a node live as long as this shell, which ends with its input.
HOLDER = 'mount --bind "$1" /etc/hosts && echo ready && exec cat'


def make(order: dict[str, Any]) -> list[subprocess.Popen[str]]:
    """Make the network and return the holders of its nodes. Raises GraceError with the command that failed."""
    _run("ip", "link", "add", BRIDGE, "type", "bridge")
    _run("ip", "addr", "add", f"{order['hub']}/16", "dev", BRIDGE)
    for device in ("lo", BRIDGE):
        _run("ip", "link", "set", device, "up")
    nodes = []
    for number, address in enumerate(order["nodes"]):
        holder = _start_holder(address, others=order["nodes"])
        nodes.append(holder)
        inside, port = ("nsenter", f"--target={holder.pid}", "--net"), PORT.format(number)
        _run("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", str(holder.pid))
        _run(*inside, "ip", "addr", "add", f"{address}/16", "dev", INTERFACE)
        _run("ip", "link", "set", port, "master", BRIDGE)
        for place, device in ((inside, "lo"), (inside, INTERFACE), ((), port)):
            _run(*place, "ip", "link", "set", device, "up")
        _limit_device(inside, INTERFACE, order["rate"], order["latency"])
        _limit_device((), port, order["rate"], None)
    return nodes


def kill_all_in(holders: Sequence[subprocess.Popen[str]]) -> None:
    """Kill all processes in the nodes, and wait for the holders."""
    inodes = {os.stat(f"/proc/{holder.pid}/ns/net").st_ino for holder in holders if holder.poll() is None}
    for process in filter(str.isdigit, os.listdir("/proc")):
        # It may have ended, or belong to another user.
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{process}/ns/net").st_ino in inodes:
                os.kill(int(process), signal.SIGKILL)
    for holder in holders:
        holder.wait()


def _start_holder(address: str, others: Sequence[str]) -> subprocess.Popen[str]:
    # Horovod looks up the host's name and must find the namespace's address. PyTorch looks up names of addresses.
    names = {"127.0.0.1": "localhost"} | {other: f"node{n}" for n, other in enumerate(others)}
    names[address] = os.uname().nodename
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as hosts:
        hosts.writelines(f"{known} {name}\n::ffff:{known} {name}\n" for known, name in names.items())
        hosts.flush()
        # Horovod may run under another user.
        os.fchmod(hosts.fileno(), 0o644)
        holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", HOLDER, "hold", hosts.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert holder.stdout is not None
        if not holder.stdout.readline():
            assert holder.stderr is not None
            raise GraceError(f"cannot make the test network: {holder.stderr.read().strip()}")
        return holder


def _limit_device(place: Sequence[str], device: str, rate: int, latency: str | None) -> None:
    tc = (*place, "tc", "qdisc", "add", "dev", device)
    _run(*tc, "root", "handle", "1:", "tbf", *tc_limits(rate))
    if latency is not None:
        _run(*tc, "parent", "1:1", "netem", "delay", latency, "limit", "100000")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        hint = ""
        if "netem" in command:
            hint = " This kernel has no netem (module sch_netem): leave --latency out."
        raise GraceError(failure_text(command, done.stderr or done.stdout) + hint)


def main() -> None:
    """Make the network that standard input asks for, hold it until the input ends, and remove it."""
    nodes: list[subprocess.Popen[str]] = []
    try:
        nodes = make(json.loads(sys.stdin.readline()))
        _write_line({"nodes": [holder.pid for holder in nodes]})
        sys.stdin.read()
    except GraceError as error:
        _write_line({"error": str(error)})
    finally:
        kill_all_in(nodes)


def _write_line(what: dict[str, Any]) -> None:
    # The reader may have ended.
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(what), flush=True)
