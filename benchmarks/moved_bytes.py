"""Count the bytes that leave a rank, for every method, communicator and number of ranks.

    python benchmarks/moved_bytes.py docs/results/moved_bytes.json docs/moved_bytes.md

All ranks live in one process (`grace.Simulation`) and exchange one float32 matrix of normal values, with the default
options. What each rank hands to collectives is what a real run sends; an allreduce and an allgather count as rings.
Nothing is timed. It takes some minutes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from grace.core.exchange.simulation import Simulation
from grace.core.values.config import make_config
from grace.core.values.errors import IncompatibleError
from grace.core.values.plan import make_plan
from grace.core.values.registry import communicators, compressors
from grace.core.values.spec import Ranks, TensorSpec
from grace.listing import required

SHAPE, RANKS = (256, 256), (2, 4, 8, 16, 64)
PROGRAMS = ("allreduce", "allgather", "two_shot", "sparse_allreduce")
TEXT = """# Bytes over the number of ranks

Bytes per element that leave a rank in a step, for a float32 matrix of 256 x 256 normal values, by default options; an
uncompressed ring allreduce sends 8 (N - 1) / N of them. `auto`, the default, takes what is bold. Where payloads cannot
be added, `allgather` and `two_shot` move equally much on two ranks, and from three on `two_shot` moves less.
`sparse_allreduce` moves about as much as `two_shot` and must be named. Written by `python benchmarks/moved_bytes.py
docs/results/moved_bytes.json docs/moved_bytes.md`.

"""


def moved(compressor: str, communicator: str, size: int) -> float | None:
    """Return the bytes per element that leave a rank, on average; None if the method cannot travel so."""
    try:
        config = make_config(compressor=compressor, communicator=communicator, default_rules=False)
        compressors.make(compressor).check_ranks(size)
    except IncompatibleError:
        return None
    simulation = Simulation(size, {"w": SHAPE}, config)
    rng = np.random.default_rng(0)
    simulation.step([{"w": rng.standard_normal(SHAPE).astype(np.float32)} for _ in range(size)], lr=0.1)
    shares = {"allreduce": 2 * (size - 1) / size, "allgather": size - 1, "broadcast": size - 1, "alltoall": 1}
    sent = [simulation.stats(rank)["collectives"] for rank in range(size)]
    total = sum(shares[kind] * count for mine in sent for kind, count in mine.items())
    return round(total / size / (SHAPE[0] * SHAPE[1]), 4)


def chosen(compressor: str, size: int) -> str:
    """Return the communicator that `auto` takes."""
    config = make_config(compressor=compressor, default_rules=False)
    (item,) = make_plan([TensorSpec("w", SHAPE)], config, ranks=Ranks(size)).assignments
    return communicators.name_of(item.communicator)


def rows() -> list[dict[str, Any]]:
    """Return one row per method and communicator that fit."""
    found = []
    for name in compressors:
        if required(compressors.get(name)):
            continue
        for program in PROGRAMS:
            sent = {size: moved(name, program, size) for size in RANKS}
            if sent[2] is not None:
                auto = [size for size in RANKS if chosen(name, size) == program]
                found.append({"method": name, "communicator": program, "bytes": sent, "auto": auto})
                print(found[-1], flush=True)
    return found


def page(found: list[dict[str, Any]]) -> str:
    """Return the rows as a page."""
    lines = ["| method | communicator | " + " | ".join(f"{size} ranks" for size in RANKS) + " |", "|---" * 7 + "|"]
    for row in found:
        cells = []
        for size, sent in row["bytes"].items():
            text = "" if sent is None else f"{sent:.3g}"
            cells.append(f"**{text}**" if int(size) in row["auto"] else text)
        lines.append(f"| `{row['method']}` | `{row['communicator']}` | " + " | ".join(cells) + " |")
    return TEXT + "\n".join(lines) + "\n"


if __name__ == "__main__":
    made = rows()
    Path(sys.argv[1]).write_text(json.dumps(made, indent=1) + "\n")
    Path(sys.argv[2]).write_text(page(made))
