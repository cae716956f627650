"""Launchers and the programs that they start on several ranks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

from grace.core.config.registry import compressors

ROOT = Path(__file__).resolve().parents[2]
# The programs that a rank may run.
TORCH = "tests.support.torch_worker"
TENSORFLOW = "tests.support.tensorflow_worker"
MPI = "tests.adapters.mpi.worker"
NAMES = {TORCH: "torch", TENSORFLOW: "tensorflow", MPI: "mpi"}

# By default, mpirun refuses to run as root, and to start more ranks than cores. The tests need both.
_MPI_FLAGS = ["--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]

# Methods whose payloads are summed by an allreduce.
SUMMED = frozenset(name for name in compressors if compressors.example(name).summable)


class Launch(NamedTuple):
    """A program, its launcher ("python" for none) and the number of ranks."""

    worker: str
    launcher: str
    ranks: int

    def __str__(self) -> str:
        return f"{NAMES[self.worker]}-{self.launcher}-{self.ranks}"


def command(launcher: str, ranks: int) -> list[str]:
    """Return the command line that starts `ranks` processes. For "python" it is empty."""
    words = {
        "python": [],
        "horovodrun-gloo": ["horovodrun", "-np", str(ranks), "--gloo"],
        "horovodrun-mpi": [
            *["horovodrun", "-np", str(ranks), "--mpi", f"--mpi-args={' '.join(_MPI_FLAGS)}"],
            # Open MPI 5 does not understand horovodrun's own binding flags.
            "--binding-args=--bind-to none --map-by slot",
        ],
        "torchrun": ["torchrun", "--standalone", "--nproc-per-node", str(ranks), "--no-python"],
        "mpirun": ["mpirun", *_MPI_FLAGS, "--bind-to", "none", "-np", str(ranks)],
    }[launcher]
    assert not words or shutil.which(words[0]), f"{words[0]} is not on the PATH; run the tests by scripts/test.sh"
    return words


def environment(**more: str) -> dict[str, str]:
    """Return the environment of ranks: that of this process, with one thread and without any configuration of grace."""
    kept = {name: value for name, value in os.environ.items() if name != "GRACE_CONFIG"}
    # By default, Horovod's ranks exchange messages every millisecond: six scenarios of Keras take 42 s in place of 34.
    cycle = {"HOROVOD_CYCLE_TIME": "4"}
    return {**kept, **cycle, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", **more}
