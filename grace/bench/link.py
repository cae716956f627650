"""The command `grace bench link`: the time of allreduces between all ranks, in the columns of nccl-tests."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from grace.advice import probe
from grace.bench.command import check_writable
from grace.bench.run import run_on_ranks
from grace.bench.step.command import add_network
from grace.core.errors import ConfigError
from grace.core.spec import Array
from grace.core.transport.transport import Transport
from grace.machine import installed, python

# Variables of each launcher. horovodrun may start MPI, and a job of MPI may set those of torchrun.
SIGNS = {
    "horovod": ("HOROVOD_RANK", "HOROVOD_CONTROLLER"),
    "torch": ("WORLD_SIZE",),
    "mpi": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
}
COMMAND = "from grace.cli import main; sys.exit(main())"


class Connected(NamedTuple):
    """The means of a rank to measure: its transport, its zeros, a wait for its device, and what to do at the end."""

    transport: Transport
    zeros: Callable[[int], Array]
    settle: Callable[[], Any]
    end: Callable[[], Any]


def add_link(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "link",
        help="time allreduces between ranks, and fit bandwidth and latency of their link",
        description="Time allreduces of several sizes between all ranks, by the library that exchanges gradients, and "
        "print them in the columns of nccl-tests. Start it on every rank by torchrun, horovodrun or mpirun. With "
        "--link, it starts ranks on this machine itself, each behind a link with limited bandwidth.",
    )
    add_network(parser, default=None)
    add = parser.add_argument
    add("--launcher", choices=tuple(SIGNS), help="library of the ranks (default: that of the launcher)")
    sizes = "bytes of float32 per rank (default: 1 KiB to 16 MiB by factors of four)"
    add("--sizes", nargs="+", type=int, default=list(probe.SIZES), metavar="N", help=sizes)
    add("--json", type=Path, metavar="FILE", help="write the points and the fitted link")
    parser.set_defaults(run=run_link)


def run_link(args: argparse.Namespace) -> int:
    """Measure with all ranks, and print and write the results on rank 0. Return the exit status.

    Raises ConfigError for wrong arguments, or if no launcher has started the ranks and no link is given.
    """
    if args.json:
        check_writable(args.json)
    if args.link is not None:
        return _start(args)
    for option in ("ranks", "nodes", "latency"):
        if getattr(args, option) is not None:
            raise ConfigError(
                f"--{option} needs --link, with which the ranks are started here; add it, or leave it out."
            )
    connected = CONNECT[args.launcher or launcher_of(os.environ)]()
    transport = connected.transport
    try:
        points = probe.measure(
            probe.over(transport), connected.zeros, transport.size, args.sizes, settle=connected.settle
        )
    finally:
        connected.end()
    if transport.rank == 0:
        print("\n".join([f"allreduce of {transport.size} ranks", *probe.lines(points, transport.size)]), flush=True)
        if args.json:
            found = {"ranks": transport.size, "points": [point._asdict() for point in points]}
            if len(points) > 1:
                found |= probe.fit(points, transport.size)._asdict()
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def _start(args: argparse.Namespace) -> int:
    """Start this command on ranks of its own, and return the exit status."""
    launcher = args.launcher or "torch"
    if launcher == "mpi":
        raise ConfigError("--link: ranks of MPI are started by mpirun; leave --link out, or use another launcher.")
    own = ["--launcher", launcher, "--sizes", *map(str, args.sizes)]
    if args.json:
        own += ["--json", str(args.json)]
    return run_on_ranks(args, python(COMMAND, "bench", "link", *own), launcher)


def launcher_of(environment: Mapping[str, str]) -> str:
    """Return the library of the launcher that started this process. Raises ConfigError if there is none."""
    for name, signs in SIGNS.items():
        if any(sign in environment for sign in signs):
            return name
    raise ConfigError(
        "grace bench link: no launcher has started this process; call it on every rank, for instance by "
        "torchrun --nproc-per-node 2 -m grace bench link, or add --link to start ranks here."
    )


def _torch() -> Connected:
    import torch
    import torch.distributed as dist

    from grace.torch.distributed.transport import ProcessGroupTransport

    device = torch.device("cpu")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    # NCCL needs a GPU per rank.
    if dist.is_nccl_available() and here <= torch.cuda.device_count():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    transport = ProcessGroupTransport()

    def end() -> None:
        transport.close()
        dist.destroy_process_group()

    settle = torch.cuda.synchronize if device.type == "cuda" else _at_once
    return Connected(transport, lambda n: torch.zeros(n, device=device), settle, end)


def _horovod() -> Connected:
    if not installed("torch"):
        return _tensorflow()
    import horovod.torch as hvd
    import torch

    from grace.torch.horovod.transport import HorovodTransport

    hvd.init()
    return Connected(HorovodTransport(), torch.zeros, _at_once, hvd.shutdown)


def _tensorflow() -> Connected:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from grace.tensorflow.transport import HorovodTransport

    hvd.init()
    return Connected(HorovodTransport(hvd.global_process_set, "link"), lambda n: tf.zeros([n]), _at_once, hvd.shutdown)


def _mpi() -> Connected:
    import numpy as np

    from grace.mpi.transport import MPITransport

    return Connected(MPITransport(), lambda n: np.zeros(n, np.float32), _at_once, _at_once)


def _at_once() -> None:
    """Wait for no device, or end nothing: MPI ends with the process."""


CONNECT: dict[str, Callable[[], Connected]] = {"torch": _torch, "horovod": _horovod, "mpi": _mpi}
