"""A temporary network with limited bandwidth on this machine: one network namespace per node, joined by a bridge.

A node's namespace has one interface, `link0`. The other end of this link is attached to a bridge in another namespace.
So the machine's own network does not change. Both ends limit the rate: a node sends and receives at the bandwidth of
the link. Usually a node has one rank. Several ranks of a node share its link, and reach each other by the loopback of
the namespace, which has no limit.

Without root, the namespaces lie within a user namespace. If the kernel refuses that too, the ranks share the machine's
loopback, and the kernel paces each of their connections (`grace.bench.step.paced`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from grace.bench.step import paced
from grace.core.errors import ConfigError, GraceError, nearest
from grace.machine import python

# Bits per second. None: the ranks share the machine's own loopback, without a limit.
LINKS: dict[str, int | None] = {
    "100mbit": 10**8,
    "1gbit": 10**9,
    "10gbit": 10**10,
    "25gbit": 25 * 10**9,
    "none": None,
}
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
INTERFACE, BRIDGE, PORT = "link0", "bridge0", "port{}"
# The namespaces are isolated from the machine's network; so these addresses cannot collide with its own.
ADDRESS = "10.213.0.{}"
# The hub has the first of these addresses.
MOST_RANKS = 253
HUB = "from grace.bench.step.hub import main; main()"
# Seconds until the hub is killed that should remove the network.
END_S = 20.0
# How to enter new namespaces: with the rights of root, or within a user namespace.
WAYS = (
    ("unshare", "--net", "--mount"),
    ("unshare", "--user", "--map-current-user", "--keep-caps", "--net", "--mount"),
)
# What a network needs, tried in namespaces that end with it.
TRIAL = (
    f"ip link add {INTERFACE} type veth peer name port0 && ip link add {BRIDGE} type bridge && "
    f"tc qdisc add dev {INTERFACE} root tbf rate 1gbit burst 131072 limit 1000000 && "
    "mount --bind /etc/hosts /etc/hosts && unshare --net --mount true"
)


def rate_of(link: str, option: str = "--link") -> int | None:
    """Return the bits per second of a link: a name of LINKS, or a number with a unit, such as 300mbit.

    Raises ConfigError for anything else that the option was given.
    """
    if link in LINKS:
        return LINKS[link]
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", link)
    if not found or not float(found[1]):
        raise ConfigError(
            f"{option}: expected {', '.join(LINKS)}, or a rate such as 300mbit, received '{link}'."
            f"{nearest(link, LINKS)}"
        )
    return round(float(found[1]) * UNITS[found[2]])


@functools.cache
def find_namespace_command() -> tuple[str, ...] | None:
    """Return the command that enters new namespaces, None if this machine or this user cannot have any."""
    path = _with_tools()
    if not all(shutil.which(name, path=path["PATH"]) for name in ("unshare", "nsenter", "ip", "tc", "mount")):
        return None
    for words in WAYS:
        done = subprocess.run([*words, "sh", "-c", TRIAL], env=path, capture_output=True, check=False)
        if done.returncode == 0:
            return words
    return None


def check_link(link: str, latency: str | None, local_size: int = 1) -> None:
    """Raise ConfigError if the link is unknown, or this machine cannot make it."""
    limited = rate_of(link) is not None
    for option, given in (("--latency", latency is not None), ("--nodes", local_size > 1)):
        if given and not limited:
            raise ConfigError(f"{option} needs a link with limited bandwidth; choose one, for example --link 1gbit.")
        if given and find_namespace_command() is None:
            raise ConfigError(
                f"{option} needs network namespaces, which need root, or a kernel that lets users have them, and the "
                "commands unshare and nsenter (util-linux), ip and tc (iproute2); run the command as root (sudo), or "
                f"leave {option} out."
            )
    if latency is not None and not re.fullmatch(r"\d+(\.\d+)?(us|ms|s)", latency):
        raise ConfigError(f"--latency: expected a time such as 100us or 2ms, received '{latency}'.")


def tc_limits(rate: int) -> tuple[str, ...]:
    """Return the words of `tc` for a queue that passes so many bits per second.

    The token bucket holds 1 ms of traffic, and at least two packets of 64 KiB. The queue is larger than a socket's send
    buffer.
    """
    burst = max(128 * 1024, rate // 8 // 1000)
    return "rate", f"{rate}bit", "burst", str(burst), "limit", str(64 * 1024 * 1024)


def failure_text(command: Sequence[str], said: str) -> str:
    """Return the error of a command that failed while a network was made or changed."""
    return f"cannot make the test network: '{' '.join(command)}' failed: {said.strip()}."


def limit_kind(link: str) -> str:
    """Return how a link is made on this machine: "namespaces", "pacing", or "nothing" without a limit."""
    if rate_of(link) is None:
        return "nothing"
    return "pacing" if find_namespace_command() is None else "namespaces"


@dataclass(frozen=True)
class Node:
    """The place of one process in the network: address, interface, and how to get there from this process.

    `namespace` is the process whose namespaces it has, None for the machine's own.
    """

    namespace: int | None
    address: str
    interface: str

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command line that runs a command there, in the current folder."""
        if self.namespace is None:
            return list(words)
        user = ["--user", "--preserve-credentials"] if "--user" in (find_namespace_command() or ()) else []
        return ["nsenter", f"--target={self.namespace}", *user, "--net", "--mount", "--wd", "--", *words]


class Network:
    """The places of the nodes: a context manager that makes them on entry and always removes them on exit.

    `ranks` is the number of all ranks, `local_size` that of each node. `nodes` has an entry per rank. On exit, and if
    this process is killed, all processes in the namespaces are killed, and with them the namespaces end. `environment`
    belongs to the environment of every rank.

    Raises GraceError with the command that failed, for instance if the kernel lacks a module.
    """

    def __init__(self, ranks: int, link: str, latency: str | None = None, local_size: int = 1) -> None:
        check_link(link, latency, local_size)
        self._rate, self._latency, self.local_size = rate_of(link), latency, local_size
        self._hub: subprocess.Popen[str] | None = None
        self.hub = Node(None, "127.0.0.1", "lo")
        self.nodes = [self.hub] * ranks
        self._paced = self._rate is not None and find_namespace_command() is None

    def environment(self, given: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return variables with which the ranks keep the limit, if their place does not enforce it."""
        if not self._paced or self._rate is None:
            return {}
        return paced.environment(self._rate // 8, given)

    def change(self, link: str) -> None:
        """Limit the links to another rate while processes use them, which needs namespaces.

        Raises GraceError with the command that failed.
        """
        rate = rate_of(link)
        assert self._hub is not None
        assert rate is not None
        nodes = list(dict.fromkeys(self.nodes))
        ends = [(node, INTERFACE) for node in nodes] + [(self.hub, PORT.format(n)) for n in range(len(nodes))]
        for place, device in ends:
            tc = ("tc", "qdisc", "change", "dev", device, "root", "handle", "1:", "tbf", *tc_limits(rate))
            words = place.command(tc)
            done = subprocess.run(words, env=_with_tools(), capture_output=True, text=True, check=False)
            if done.returncode:
                raise GraceError(failure_text(words, done.stderr))

    def __enter__(self) -> Network:
        if self._rate is not None and not self._paced:
            try:
                self._make(self._rate)
            except BaseException:
                self._end()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _make(self, rate: int) -> None:
        numbers = [rank // self.local_size for rank in range(len(self.nodes))]
        addresses = [ADDRESS.format(number + 2) for number in dict.fromkeys(numbers)]
        order = {"hub": ADDRESS.format(1), "nodes": addresses, "rate": rate, "latency": self._latency}
        self._hub = subprocess.Popen(
            [*(find_namespace_command() or ()), *python(HUB)],
            env=_with_tools(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Ctrl-C in a terminal reaches this process alone, which then ends the ranks before their network.
            start_new_session=True,
        )
        assert self._hub.stdin is not None
        assert self._hub.stdout is not None
        self._hub.stdin.write(json.dumps(order) + "\n")
        self._hub.stdin.flush()
        answer = self._hub.stdout.readline()
        if not answer:
            assert self._hub.stderr is not None
            raise GraceError(f"cannot make the test network: {self._hub.stderr.read().strip()}")
        found = json.loads(answer)
        if "error" in found:
            raise GraceError(found["error"])
        self.hub = Node(self._hub.pid, ADDRESS.format(1), BRIDGE)
        self.nodes = [Node(found["nodes"][number], addresses[number], INTERFACE) for number in numbers]

    def _end(self) -> None:
        if self._hub is None:
            return
        hub, self._hub = self._hub, None
        for stream in (hub.stdin, hub.stdout, hub.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        try:
            hub.wait(END_S)
        except subprocess.TimeoutExpired:
            hub.kill()
            hub.wait()


def _with_tools() -> dict[str, str]:
    """Return the environment with a PATH that has the folders of `ip` and `tc`, which users often lack."""
    return {**os.environ, "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])}


def sent_bytes(interface: str) -> int:
    """Return the bytes that an interface of this process' network namespace has sent so far."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()
    figures = next(line.split(":")[1] for line in lines if line.strip().startswith(f"{interface}:"))
    # Eight columns of what it has received come before.
    return int(figures.split()[8])
