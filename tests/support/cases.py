"""The factors of the covering arrays for real exchanges: methods, communicators, unit sizes and launchers."""

from __future__ import annotations

import functools
import math
from typing import Any

from grace.core.config.config import make_config
from grace.core.config.registry import communicators, compressors
from grace.core.errors import IncompatibleError
from grace.core.plan.plan import Plan
from tests.support.launch import TENSORFLOW, TORCH, Launch

# Fits tensors of every shape in the models, so that nothing is dense unless a method cannot take it. The ranks compare
# replicas before every second step; a scenario that must not says so.
EVERYTHING = {"default_rules": False, "check_replicas": 2}
LAYERS = {**EVERYTHING, "granularity": "layer"}
# The large matrices of the models are split, and their remainders are fused with smaller tensors.
UNITS = {
    "bucket": {**EVERYTHING, "granularity": "bucket", "bucket_bytes": 20_000, "split_bytes": 16_384},
    "model": {**EVERYTHING, "granularity": "model"},
}
# Communicators by which residuals are corrected for the learning rate: those of the ranks only, or of the owners, too.
CORRECTED_BY = {
    "gathered": "allgather",
    "shots": {"name": "two_shot", "shard_memory": {"name": "residual", "lr_correction": True}},
}
GRANULARITIES = {"default": EVERYTHING, "layer": LAYERS, **UNITS}

# With these options, methods with phases pass through all of them in four steps instead of hundreds.
_QUICK: dict[str, dict[str, Any]] = {
    **{name: {"compress_ratio": 0.05} for name in ("topk", "randomk", "dgc")},
    "gradiveq": {"training_steps": 2, "compressed_steps": 2},
    "hardthreshold": {"tune_steps": 2, "compress_ratio": 0.05},
}

# In the place of a method: memories that are no compressor's default, with the communicator that they are made for;
# codings of payloads, whose lengths differ between ranks; and sparse sums whose ranks have different parts in a round.
_COMBINATIONS: dict[str, dict[str, Any]] = {
    "diana": {"compressor": "qsgd", "memory": "diana", "communicator": "allgather"},
    "dore": {"compressor": "qsgd", "memory": "dore", "communicator": "two_shot"},
    "shared_momentum": {"compressor": "efsignsgd", "memory": "shared_momentum", "communicator": "two_shot"},
    "coded": {
        "compressor": {"name": "chain", "sparsifier": {"name": "topk", "compress_ratio": 0.1}, "quantizer": "qsgd"},
        "communicator": "allgather",
        "index_coding": "golomb",
        "coding": "rans",
    },
    **{
        reduction: {
            "compressor": "topk",
            "compress_ratio": 0.1,
            "communicator": "sparse_allreduce",
            "reduction": reduction,
        }
        for reduction in ("union", "tree")
    },
}

TENSORFLOW_MPI = Launch(TENSORFLOW, "mpirun", 4)
# One process needs no launcher.
_LAUNCHES = (("python", 1), ("horovodrun-gloo", 2), ("horovodrun-gloo", 4), ("mpirun", 2), ("mpirun", 4))
# Only PyTorch has a launcher of its own.
_LAUNCHES_OF_TORCH = (*_LAUNCHES, ("torchrun", 2), ("torchrun", 4))


def launch_factors(worker: str) -> dict[str, list[Any]]:
    """Return the factors "launcher" and "ranks"; with TensorFlow without one process alone."""
    launches = _LAUNCHES_OF_TORCH if worker == TORCH else _LAUNCHES[1:]
    return {"launcher": list(dict.fromkeys(name for name, _ in launches)), "ranks": sorted({n for _, n in launches})}


def method_factors() -> dict[str, list[Any]]:
    """Return the factors "method" and "communicator"."""
    return {"method": list(compressors), "communicator": list(communicators)}


def possible(row: dict[str, Any]) -> bool:
    """Return whether the launch exists and the method works with the communicator."""
    if "launcher" in row and (row["launcher"], row["ranks"]) not in _LAUNCHES_OF_TORCH:
        return False
    return "communicator" not in row or works(row["method"], row["communicator"])


@functools.cache
def works(method: str, communicator: str) -> bool:
    try:
        make_config({"compressor": method, **compressors.required(method), "communicator": communicator})
    except IncompatibleError:
        return False
    return True


def communicator_of(row: dict[str, Any]) -> Any:
    """Return the communicator of a row, as a configuration names it: four ranks count as two nodes."""
    if row["communicator"] != "hierarchical":
        return row["communicator"]
    return {"name": "hierarchical", "local_size": 2 if row.get("ranks") == 4 else 1}


def config_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a row."""
    name = row["method"]
    travels = {"communicator": communicator_of(row)} if "communicator" in row else {}
    method = _COMBINATIONS.get(name) or {"compressor": name, **compressors.required(name)}
    return {**method, **travels, **_QUICK.get(name, {}), **GRANULARITIES[row.get("granularity", "default")]}


def filled(row: dict[str, Any], plan: Plan, rank: int) -> int:
    """Return the bytes by which more than two ranks fill up their slices of sums of 16 bits to one length."""
    if row["method"] not in ("fp16", "bf16") or row["communicator"] not in ("allreduce", "auto") or row["ranks"] == 2:
        return 0
    total, size = 0, row["ranks"]
    for bucket in plan.buckets:
        n = bucket.nbytes // 2
        length = math.ceil(n / size)
        total += 2 * (length - min(max(n - length * rank, 0), length))
    return total


def rows_of_combinations(launches: list[tuple[str, int]], **factors: Any) -> list[dict[str, Any]]:
    """Return a row for each combination and each launch, with these values of the other factors."""
    return [
        {"method": name, "communicator": method["communicator"], **factors, "launcher": launcher, "ranks": ranks}
        for name, method in _COMBINATIONS.items()
        for launcher, ranks in launches
    ]


def label_of(row: dict[str, Any]) -> str:
    """Return the name of a row among those of its launch."""
    return "/".join(str(value) for factor, value in row.items() if factor not in ("launcher", "ranks"))


def launches(worker: str, rows: list[dict[str, Any]]) -> list[Launch]:
    """Return the launches of a covering array, each once."""
    return [
        Launch(worker, *pair) for pair in _LAUNCHES_OF_TORCH if any((r["launcher"], r["ranks"]) == pair for r in rows)
    ]


def rows_of(launch: Launch, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a launch."""
    return [row for row in rows if (row["launcher"], row["ranks"]) == (launch.launcher, launch.ranks)]
