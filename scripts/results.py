"""Print a digest of what simulated training gives, one line per method, to compare two commits bit for bit.

Only the public interface is used, so that one copy of this file serves both commits. `scripts/compare_commits.sh` runs
it twice and compares the lines.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from typing import Any

import numpy as np

import grace

RANKS, STEPS = 3, 4
TENSORS = {"a": (64, 48), "b": (40,), "c": (3, 5, 7), "d": (90, 30)}
# Small buckets and units, so that tensors are joined and cut.
LAYOUT = {"bucket_bytes": 9000, "split_bytes": 9000, "default_rules": False}
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"memory": "residual"},
    {"communicator": "broadcast"},
    {"communicator": "allgather"},
    {"granularity": "layer", "checksum": True},
    {"granularity": "model", "index_coding": "delta"},
)


def digest(value: Any, into: Any) -> None:
    """Add arrays, and all that dictionaries hold in the order of their keys, to a hash."""
    if isinstance(value, dict):
        for key in sorted(value):
            digest(value[key], into)
    elif hasattr(value, "shape"):
        into.update(np.ascontiguousarray(np.asarray(value)).tobytes())


def trained(framework: str, options: dict[str, Any]) -> str:
    """Return a digest of the gradients, bytes and states of a few steps; the name of the error if there is one."""
    try:
        simulation = grace.Simulation(RANKS, TENSORS, {**LAYOUT, **options}, framework=framework)
    except ValueError as error:
        return type(error).__name__
    random, found = np.random.default_rng(0), hashlib.blake2b(digest_size=12)
    for step in range(STEPS):
        gradients: list[dict[str, Any]] = []
        for _ in range(RANKS):
            gradients.append({n: random.standard_normal(s).astype(np.float32) * 0.01 for n, s in TENSORS.items()})
        if step == 2:
            gradients[1]["a"][0, 0] = np.nan
        if framework == "torch":
            import torch

            gradients = [{name: torch.from_numpy(x) for name, x in mine.items()} for mine in gradients]
        elif framework == "tensorflow":
            import tensorflow as tf

            gradients = [{name: tf.constant(x) for name, x in mine.items()} for mine in gradients]
        for merged in simulation.step(gradients, lr=0.1):
            digest(merged, found)
        found.update(str(simulation.stats()["wire_bytes"]).encode())
    for state in simulation.state_dict()["ranks"]:
        for unit in state["tensors"].values():
            digest({"memory": unit["memory"], "compressor": unit["compressor"]}, found)
    return found.hexdigest()


def main() -> None:
    """Print one line per framework, method and variant."""
    for framework in sys.argv[1:] or ("numpy", "torch"):
        for name in grace.compressors:
            needed = grace.compressors.required(name)
            for variant in VARIANTS:
                print(
                    framework, name, variant, trained(framework, {"compressor": name, **needed, **variant}), flush=True
                )


if __name__ == "__main__":
    np.seterr(all="ignore")
    logging.disable()
    main()
