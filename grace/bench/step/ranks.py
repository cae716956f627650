"""The worker processes of one communication library, one per rank."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import IO, Any

from grace.bench.step.methods import CYCLE_MS, Method
from grace.bench.step.network import Network, Node
from grace.core.errors import GraceError
from grace.machine import SAFE_PATH, python

# Time limits in seconds: to load the libraries and connect the ranks, and for one visit.
START_S, VISIT_S = 180.0, 900.0
# Gloo's default timeout of 30 s would expire while the ranks are stopped. Horovod would then shut down when they
# continue.
PATIENCE_S = 24 * 3600
PORT = 29_513
# glibc returns large freed blocks to the kernel. The gradients of every step then need new pages, which the kernel must
# clear: a step of the mlp without exchange takes 96 to 112 ms with new pages and 70 ms without. All methods keep freed
# pages here. The times then depend more on the exchange, and vary less from step to step.
KEPT_PAGES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(8 * 1024**3)}
RENDEZVOUS = "from grace.bench.step.rendezvous import main; main()"
WORKER = "from grace.bench.step.worker import main; main()"
# Of Linux' prctl(): send the caller a signal when its parent ends.
PR_SET_PDEATHSIG = 1
# Loaded here, because little is allowed between fork and exec.
_libc = ctypes.CDLL(None)


class Ranks:
    """One worker per rank, without ssh: a context manager that starts them and kills them on exit.

    If this process is killed, the kernel kills the workers. `cycle_ms` is Horovod's cycle time in milliseconds.
    `modules` are those of the user, by the names that `import_own` returns.
    `keep_pages` is False if memory is measured instead of time.
    Raises GraceError with the last lines of a worker's log if the worker dies or does not answer in time.
    """

    def __init__(
        self,
        network: Network,
        framework: str,
        model: str,
        library: str,
        cycle_ms: float = CYCLE_MS,
        *,
        modules: Sequence[str] = (),
        keep_pages: bool = True,
    ) -> None:
        self._network, self._framework, self._model, self._library = network, framework, model, library
        self._cycle_ms, self._modules = cycle_ms, modules
        self._allocator = KEPT_PAGES if keep_pages else {}
        self._workers: list[subprocess.Popen[str]] = []
        self._rendezvous: subprocess.Popen[str] | None = None
        # Files without a name: nothing is left of them when the processes have ended, however they ended.
        self._logs: dict[str, IO[bytes]] = {}

    def __enter__(self) -> Ranks:
        try:
            environments = self._horovod() if self._library == "horovod" else torch_environment(self._network)
            for rank, (node, environment) in enumerate(zip(self._network.nodes, environments, strict=True)):
                self._workers.append(self._start(rank, node, environment))
            self._answers(START_S, "start")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def visit(
        self, method: Method, options: Mapping[str, Any], warm_up: int, steps: int, *, metered: bool = False
    ) -> list[dict[str, Any]]:
        """Make all ranks run some steps of a method. Return their answers; `metered` ones say where the time went."""
        order = json.dumps(
            {
                "method": method.name,
                "launcher": method.launcher,
                "options": options,
                "warm_up": warm_up,
                "steps": steps,
                "metered": metered,
            }
        )
        for worker in self._workers:
            assert worker.stdin is not None
            # Of a dead worker, the answer says more.
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.write(order + "\n")
                worker.stdin.flush()
        return self._answers(VISIT_S, method.label)

    def pause(self) -> None:
        """Stop the processes. Even idle ranks use the cores, because Horovod's ranks keep talking to each other."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue after a pause."""
        self._signal(signal.SIGCONT)

    # --- starting -------------------------------------------------------------------------------------------------

    def _horovod(self) -> list[dict[str, str]]:
        """Start Horovod's rendezvous server, and return the environment of each rank."""
        hosts = ",".join(
            f"{node.address}:{_local_size(self._network)}"
            for node in self._network.nodes[:: _local_size(self._network)]
        )
        program = python(RENDEZVOUS, self._network.hub.address, hosts)
        self._rendezvous = self._launch("rendezvous", self._network.hub, program)
        assert self._rendezvous.stdout is not None
        port = self._rendezvous.stdout.readline().strip()
        if not port:
            raise GraceError(f"Horovod's rendezvous server did not start:\n{self._tail('rendezvous')}")
        own = {"HOROVOD_CYCLE_TIME": str(self._cycle_ms), "HOROVOD_GLOO_TIMEOUT_SECONDS": str(PATIENCE_S)}
        return [{**environment, **own} for environment in horovod_environment(self._network, port)]

    def _start(self, rank: int, node: Node, environment: dict[str, str]) -> subprocess.Popen[str]:
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // len(self._network.nodes))
        mine = {cores[(rank * share + i) % len(cores)] for i in range(share)}
        interface = node.interface if node.namespace is not None else "-"
        program = python(WORKER, self._framework, self._library, self._model, interface, *self._modules)
        own = {"OMP_NUM_THREADS": str(share), "TF_CPP_MIN_LOG_LEVEL": "3"}
        return self._launch(
            str(rank),
            node,
            program,
            {
                **without_launcher(os.environ, "GRACE_CONFIG", "MALLOC_"),
                **self._network.environment(),
                **self._allocator,
                **environment,
                **own,
            },
            mine,
        )

    def _launch(
        self,
        name: str,
        node: Node,
        program: list[str],
        environment: Mapping[str, str] = os.environ,
        cores: Collection[int] = (),
    ) -> subprocess.Popen[str]:
        """Start a process in its own session. Its stderr goes to the log with this name."""
        self._logs[name] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in _end
        return subprocess.Popen(
            node.command(program),
            env={**environment, **SAFE_PATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._logs[name],
            text=True,
            start_new_session=True,
            preexec_fn=end_with_parent(cores),
        )

    # --- answers --------------------------------------------------------------------------------------------------

    def _answers(self, seconds: float, what: str) -> list[dict[str, Any]]:
        """Read one line from each rank and return the decoded answers."""
        found: dict[int, dict[str, Any]] = {}
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for rank, worker in enumerate(self._workers):
                assert worker.stdout is not None
                selector.register(worker.stdout, selectors.EVENT_READ, rank)
            while len(found) < len(self._workers):
                ready = selector.select(timeout=max(0.0, end - time.monotonic()))
                if not ready:
                    waiting = [str(rank) for rank in range(len(self._workers)) if rank not in found]
                    raise GraceError(
                        f"{what}: rank {', '.join(waiting)} did not answer in {seconds:g} s:\n{self._tail(waiting[0])}"
                    )
                for key, _ in ready:
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    if not line:
                        raise GraceError(f"{what}: rank {key.data} died:\n{self._tail(str(key.data))}")
                    found[key.data] = json.loads(line)
                    selector.unregister(key.fileobj)
        return [found[rank] for rank in range(len(self._workers))]

    def _tail(self, name: str) -> str:
        log = self._logs[name].fileno()
        # Read without moving the position, which the process shares and writes at.
        lines = os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace").splitlines()
        return "\n".join(f"    | {line}" for line in lines[-30:])

    # --- ending ---------------------------------------------------------------------------------------------------

    def _signal(self, number: int) -> None:
        for process in self._workers:
            if process.poll() is None:
                os.killpg(process.pid, number)

    def _end(self) -> None:
        self._signal(signal.SIGKILL)
        if self._rendezvous is not None and self._rendezvous.poll() is None:
            os.killpg(self._rendezvous.pid, signal.SIGKILL)
        for process in (*self._workers, *filter(None, [self._rendezvous])):
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
        for log in self._logs.values():
            log.close()


def end_with_parent(cores: Collection[int] = ()) -> Callable[[], None]:
    """Return what a child calls before its program: it is killed with this process, and runs on the cores only."""
    parent = os.getpid()

    def prepare() -> None:
        # A stopped process would otherwise stay forever if this one is killed.
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        if cores:
            os.sched_setaffinity(0, cores)

    return prepare


def torch_environment(network: Network) -> list[dict[str, str]]:
    """Return the variables of each rank that torchrun would set, with which torch.distributed finds the others."""
    nodes, local_size = network.nodes, network.local_size
    # In a namespace of their own, the ranks can use any port.
    port = PORT if nodes[0].namespace is not None else _free_port()
    shared = {"MASTER_ADDR": nodes[0].address, "MASTER_PORT": str(port), "WORLD_SIZE": str(len(nodes))}
    return [
        {
            **shared,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % local_size),
            "LOCAL_WORLD_SIZE": str(local_size),
            "GROUP_RANK": str(rank // local_size),
            "GLOO_SOCKET_IFNAME": node.interface,
        }
        for rank, node in enumerate(nodes)
    ]


def horovod_environment(network: Network, port: str) -> list[dict[str, str]]:
    """Return the variables of each rank that horovodrun would set, with the rendezvous server at a port of the hub."""
    nodes, size, local_size = network.nodes, len(network.nodes), _local_size(network)
    shared = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": network.hub.address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    return [
        {
            **shared,
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(size),
            "HOROVOD_LOCAL_RANK": str(rank % local_size),
            "HOROVOD_LOCAL_SIZE": str(local_size),
            "HOROVOD_CROSS_RANK": str(rank // local_size),
            "HOROVOD_CROSS_SIZE": str(size // local_size),
            "HOROVOD_GLOO_IFACE": node.interface,
            "HOROVOD_HOSTNAME": node.address,
        }
        for rank, node in enumerate(nodes)
    ]


def _local_size(network: Network) -> int:
    # Without namespaces, all ranks share the machine's loopback.
    return network.local_size if network.nodes[0].namespace is not None else len(network.nodes)


def without_launcher(environment: Mapping[str, str], *more: str) -> dict[str, str]:
    """Return the environment without the variables of launchers, and without those that begin with one of `more`."""
    launchers = ("HOROVOD_", "OMPI_", "PMIX_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_RANK")
    return {name: value for name, value in environment.items() if not name.startswith((*launchers, *more))}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
