"""Start the worker on several ranks in each supported way, and read what the ranks reported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from grace.core.registry import compressors

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 1200
# The programs that a rank may run.
TORCH = "tests.support.torch_worker"
TENSORFLOW = "tests.support.tensorflow_worker"
MPI = "tests.adapters.mpi.worker"

# mpirun refuses to run as root, and more ranks than cores, unless told otherwise; the tests need both.
_MPI_FLAGS = ["--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]

# Every method costs seconds in every launch: two of them run all, the others one of every way through the engine.
FULL = (("horovodrun-gloo", 2), ("mpirun", 4))
_FEW = (
    *("none", "fp16", "bf16", "topk", "randomk", "threshold", "dgc", "qsgd", "terngrad", "signsgd", "efsignsgd"),
    *("onebit", "powersgd", "gradiveq", "hardthreshold"),
)
# Methods whose payloads are added on the way.
SUMMED = frozenset(name for name in compressors if compressors.make(name).summable)


def methods(launch: tuple[str, int] | None = None) -> list[str]:
    """The methods under test in a launch, by default in the one that this process belongs to."""
    if launch is None:
        launcher, _, ranks = os.environ["GRACE_TEST_LAUNCH"].rpartition("-")
        launch = launcher, int(ranks)
    return [name for name in compressors if launch in FULL or name in _FEW]


def command(launcher: str, ranks: int) -> list[str]:
    """The words that start `ranks` processes; for "python" there are none."""
    return {
        "python": [],
        "horovodrun-gloo": ["horovodrun", "-np", str(ranks), "--gloo"],
        "horovodrun-mpi": [
            *["horovodrun", "-np", str(ranks), "--mpi", f"--mpi-args={' '.join(_MPI_FLAGS)}"],
            # What horovodrun passes by itself is not understood by Open MPI 5.
            "--binding-args=--bind-to none --map-by slot",
        ],
        "mpirun": ["mpirun", *_MPI_FLAGS, "--bind-to", "none", "-np", str(ranks)],
    }[launcher]


def run(launcher: str, ranks: int, scenarios: list[str], worker: str = TORCH) -> list[dict[str, Any]]:
    """Per rank the results of the scenarios. Fails with the output if a rank did not get to its end."""
    words = command(launcher, ranks)
    assert not words or shutil.which(words[0]), f"{words[0]} is not on the PATH; run the tests by scripts/test.sh"
    with tempfile.TemporaryDirectory() as out:
        full = [*words, sys.executable, "-m", worker, out, *scenarios]
        environment = {**os.environ, "GRACE_TEST_RANKS": str(ranks), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment["TF_CPP_MIN_LOG_LEVEL"] = "2"
        environment["GRACE_TEST_LAUNCH"] = f"{launcher}-{ranks}"
        environment.pop("GRACE_CONFIG", None)
        try:
            done = subprocess.run(
                full, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise AssertionError(
                f"{' '.join(full)} hung for {TIMEOUT_S} s\n{_tail(error.stdout, error.stderr)}"
            ) from None
        assert done.returncode == 0, (
            f"{' '.join(full)} exited with {done.returncode}\n{_tail(done.stdout, done.stderr)}"
        )
        return [json.loads((Path(out) / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def _tail(*texts: Any) -> str:
    parts = [t.decode(errors="replace") if isinstance(t, bytes) else (t or "") for t in texts]
    return "\n".join(part[-4000:] for part in parts)
