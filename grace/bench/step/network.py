"""A temporary network with limited bandwidth on this machine: one network namespace per node, joined by a bridge.

Node N runs in the namespace `grace-PID-N`, which has one interface, `link0`. The other end of this link is attached to
a bridge in another namespace. So the machine's own network does not change. Both ends limit the rate: a node sends and
receives at the bandwidth of the link. Usually a node has one rank. Several ranks of a node share its link, and reach
each other by the loopback of the namespace, which has no limit.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from grace.core.errors import ConfigError, GraceError, nearest

# Bits per second. None: the ranks share the machine's own loopback, without a limit.
LINKS: dict[str, int | None] = {
    "100mbit": 10**8,
    "1gbit": 10**9,
    "10gbit": 10**10,
    "25gbit": 25 * 10**9,
    "none": None,
}
INTERFACE = "link0"
HUB = "hub"
# The namespaces are isolated from the machine's network; so these addresses cannot collide with its own.
ADDRESS = "10.213.0.{}"
# The hub has the first of these addresses.
MOST_RANKS = 253
PREFIX = "grace"
HOSTS = Path("/etc/netns")

_NAME = re.compile(rf"{PREFIX}-(\d+)-(?:{HUB}|\d+)")


def check_link(link: str, latency: str | None) -> None:
    """Raise ConfigError if the link is unknown, or this machine cannot make it."""
    if link not in LINKS:
        raise ConfigError(f"--link: unknown link '{link}'.{nearest(link, LINKS)}")
    if LINKS[link] is None:
        if latency is not None:
            raise ConfigError("--latency needs a link with limited bandwidth; choose one, for example --link 1gbit.")
        return
    if os.geteuid() != 0:
        raise ConfigError(
            f"--link {link}: network namespaces and traffic control need root; run the command as root "
            "(sudo), or measure without a bandwidth limit: --link none."
        )
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise ConfigError(f"--link {link}: '{program}' is not installed; install iproute2, or use --link none.")
    if latency is not None and not re.fullmatch(r"\d+(\.\d+)?(us|ms|s)", latency):
        raise ConfigError(f"--latency: expected a time such as 100us or 2ms, received '{latency}'.")


@dataclass(frozen=True)
class Node:
    """The place of one process in the network: namespace (None: the machine's own), address and interface."""

    namespace: str | None
    address: str
    interface: str

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command line that runs a command in the namespace."""
        return ["ip", "netns", "exec", self.namespace, *words] if self.namespace else list(words)

    def sent_bytes(self) -> int | None:
        """Return the bytes that the interface has sent so far, or None if the ranks share one interface."""
        if self.namespace is None:
            return None
        path = f"/sys/class/net/{self.interface}/statistics/tx_bytes"
        return int(_run(self.command(["cat", path])))


class Network:
    """The namespaces of the nodes: a context manager that makes them on entry and always removes them on exit.

    `ranks` is the number of all ranks, `local_size` that of each node. `nodes` has an entry per rank.

    Raises GraceError with the command that failed, for instance if the kernel lacks a module.
    """

    def __init__(self, ranks: int, link: str, latency: str | None = None, local_size: int = 1) -> None:
        check_link(link, latency)
        self._rate = LINKS[link]
        self._latency, self.local_size = latency, local_size
        self._stem = f"{PREFIX}-{os.getpid()}"
        if self._rate is None:
            self.hub = Node(None, "127.0.0.1", "lo")
            self.nodes = [self.hub] * ranks
        else:
            self.hub = Node(f"{self._stem}-{HUB}", ADDRESS.format(1), "bridge0")
            numbers = [rank // local_size for rank in range(ranks)]
            self.nodes = [Node(f"{self._stem}-{node}", ADDRESS.format(node + 2), INTERFACE) for node in numbers]

    def __enter__(self) -> Network:
        if self._rate is not None:
            remove_left_over()
            try:
                self._make()
            except BaseException:
                remove(self._stem)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rate is not None:
            remove(self._stem)

    def _make(self) -> None:
        hub = self.hub.namespace
        assert hub is not None
        self._name(self.hub)
        _run(["ip", "netns", "add", hub])
        _run(["ip", "-n", hub, "link", "add", "bridge0", "type", "bridge"])
        _run(["ip", "-n", hub, "addr", "add", f"{self.hub.address}/16", "dev", "bridge0"])
        for device in ("lo", "bridge0"):
            _run(["ip", "-n", hub, "link", "set", device, "up"])
        for number, node in enumerate(dict.fromkeys(self.nodes)):
            own, port = str(node.namespace), f"port{number}"
            self._name(node)
            _run(["ip", "netns", "add", own])
            pair = ["peer", "name", port, "netns", hub]
            _run(["ip", "-n", own, "link", "add", INTERFACE, "type", "veth", *pair])
            _run(["ip", "-n", own, "addr", "add", f"{node.address}/16", "dev", INTERFACE])
            _run(["ip", "-n", hub, "link", "set", port, "master", "bridge0"])
            for place, device in ((own, "lo"), (own, INTERFACE), (hub, port)):
                _run(["ip", "-n", place, "link", "set", device, "up"])
            self._shape(own, INTERFACE)
            self._shape(hub, port)

    def _shape(self, namespace: str, device: str) -> None:
        assert self._rate is not None
        # The token bucket holds 1 ms of traffic, and at least two packets of 64 KiB. The queue is larger than a
        # socket's send buffer.
        burst = max(128 * 1024, self._rate // 8 // 1000)
        limits = ["rate", f"{self._rate}bit", "burst", str(burst), "limit", str(64 * 1024 * 1024)]
        tc = ["tc", "-n", namespace, "qdisc", "add", "dev", device]
        _run([*tc, "root", "handle", "1:", "tbf", *limits])
        if self._latency is not None and device == INTERFACE:
            _run([*tc, "parent", "1:1", "netem", "delay", self._latency, "limit", "100000"])

    def _name(self, node: Node) -> None:
        """Write the namespace's hosts file. Horovod looks up the host's name and must find the namespace's address."""
        folder = HOSTS / str(node.namespace)
        folder.mkdir(parents=True)
        lines = ["127.0.0.1 localhost", f"{node.address} {os.uname().nodename}"]
        (folder / "hosts").write_text("\n".join(lines) + "\n", encoding="utf-8")


def remove_left_over() -> list[str]:
    """Remove the namespaces of processes that have ended, for instance by a kill. Return their names."""
    dead = sorted(name for name in _present() if not _runs(name.split("-")[1]))
    for name in dead:
        _remove(name)
    return dead


def remove(stem: str) -> None:
    """Remove the namespaces of one network and kill all processes in them."""
    for name in _present():
        if name.rpartition("-")[0] == stem:
            _remove(name)


def _runs(pid: str) -> bool:
    """Return whether the process runs. A zombie does not."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _present() -> set[str]:
    """Return the names of all namespaces that a Network made, and of the folders that belong to them."""
    listed = [line.split()[0] for line in _run(["ip", "netns", "list"]).splitlines() if line.strip()]
    folders = [path.name for path in HOSTS.iterdir()] if HOSTS.is_dir() else []
    return {name for name in (*listed, *folders) if _NAME.fullmatch(name)}


def _remove(name: str) -> None:
    # Ignore errors, so that one failure does not keep the rest from being removed.
    pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout.split()
    for pid in pids:
        subprocess.run(["kill", "-9", pid], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    shutil.rmtree(HOSTS / name, ignore_errors=True)


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip()
        hint = ""
        if "netem" in command:
            hint = " This kernel has no netem (module sch_netem): leave --latency out."
        raise GraceError(f"cannot make the test network: '{' '.join(command)}' failed: {said}.{hint}")
    return done.stdout
