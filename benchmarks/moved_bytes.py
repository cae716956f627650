"""Count the bytes that leave a rank, for every method, communicator and number of ranks.

    python benchmarks/moved_bytes.py docs/results/moved_bytes.json docs/results/bytes_by_data.json [METHOD...]

All ranks live in one process (`grace.Simulation`) and exchange one float32 matrix of normal values, with the default
options. What each rank hands to collectives is what a real run sends; an allreduce and an allgather count as rings.
The second file has more steps of the methods whose bytes depend on the data, by `auto`. Nothing is timed. All
methods take half an hour; if methods are named, all other rows stay.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from grace.bench.variants import Variant
from grace.core.config.config import Config, make_config
from grace.core.config.registry import communicators, compressors
from grace.core.errors import IncompatibleError
from grace.core.plan.plan import make_plan
from grace.core.session.simulation import Simulation, poll_all
from grace.core.spec import Ranks, TensorSpec
from grace.core.transport.collectives import Collective, copies
from grace.core.wire.layout import payload_bytes
from grace.listing import sent_fields

SHAPE, RANKS, LOCAL_SIZE = (256, 256), (2, 4, 8, 16, 64), 4
STEPS, DEVIATION = 100, 0.01
# A step of one rank takes a quarter of a second.
FEWER_STEPS = {"atomo": 4}
PROGRAMS: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in ("allreduce", "allgather", "broadcast", "two_shot", "sparse_allreduce")},
    **{f"sparse_allreduce, {kind}": {"name": "sparse_allreduce", "reduction": kind} for kind in ("union", "tree")},
    "hierarchical": {"name": "hierarchical", "local_size": LOCAL_SIZE},
}


def measure_bytes(
    compressor: str, communicator: str, size: int, steps: int = 1, deviation: float = 1.0
) -> list[float] | None:
    """Return the bytes per element that leave a rank in a step, on average; None if the method cannot travel so.

    With hierarchical, the first number is of those for other nodes and the second of those for its own node.
    """
    if not fits(compressor, communicator, size):
        return None
    nodes = communicator == "hierarchical"
    local_size = LOCAL_SIZE if nodes else 1
    simulation = Simulation(size, {"w": SHAPE}, make_configuration(compressor, communicator))
    sent = [0.0, 0.0]
    for rank, run in enumerate(simulation.runs):
        run.transport.start = count_sent_bytes(run.transport.start, rank, size, local_size, sent)  # type: ignore[method-assign]
    rng = np.random.default_rng(0)
    for step in range(steps):
        for run in simulation.runs:
            # The last step need not be finished: nothing more is sent.
            if step:
                run.finish()
            run.current.ready("w", (deviation * rng.standard_normal(SHAPE)).astype(np.float32), 0.1)
        poll_all(simulation.runs)
    return [round(total / steps / size / (SHAPE[0] * SHAPE[1]), 4) for total in (sent if nodes else sent[:1])]


def make_configuration(compressor: str, communicator: str) -> Config:
    """Return the configuration of a method by a program, or by another communicator. Raises IncompatibleError."""
    program = PROGRAMS.get(communicator, communicator)
    return make_config(Variant(compressor).config(communicator=program, default_rules=False))


def fits(compressor: str, communicator: str, size: int) -> bool:
    """Return whether the method can travel so among these ranks; with hierarchical among several nodes."""
    if communicator == "hierarchical" and size <= LOCAL_SIZE:
        return False
    try:
        make_configuration(compressor, communicator)
        compressors.example(compressor).check_ranks(size)
    except IncompatibleError:
        return False
    return True


def count_sent_bytes(
    start: Callable[[Collective, str], Any], rank: int, size: int, local_size: int, sent: list[float]
) -> Any:
    """Return a start of collectives that adds the bytes that leave the rank to `sent`: for other nodes, for its own."""

    def start_and_count(collective: Collective, name: str) -> Any:
        if collective.kind == "alltoall":
            for other, x in enumerate(collective.buffers):
                if other != rank:
                    sent[other // local_size == rank // local_size] += x.nbytes
        else:
            # A ring; a program of nodes sends by alltoalls only.
            share = copies(collective.kind, size)
            sent[0] += float(share * sum(x.nbytes for x in collective.sent_by(rank)))
        return start(collective, name)

    return start_and_count


def find_choice_of_auto(compressor: str, size: int) -> str:
    """Return the program that `auto` takes."""
    config = make_config(Variant(compressor).config(default_rules=False))
    (item,) = make_plan([TensorSpec("w", SHAPE)], config, ranks=Ranks(size)).assignments
    (found,) = (name for name, program in PROGRAMS.items() if communicators.make(program) == item.communicator)
    return found


def list_methods() -> list[str]:
    """Return all methods that can be built without being told options."""
    return [name for name, _ in compressors.ready()]


def measure_rows(names: list[str]) -> list[dict[str, Any]]:
    """Return one row for each of these methods and each communicator that fits."""
    found = []
    for name in names:
        for program in PROGRAMS:
            sent = {size: measure_bytes(name, program, size) for size in RANKS}
            if any(sent.values()):
                auto = [size for size in RANKS if find_choice_of_auto(name, size) == program]
                found.append({"method": name, "communicator": program, "bytes": sent, "auto": auto})
                print(found[-1], flush=True)
    return found


def list_data_dependent() -> list[str]:
    """Return the methods whose bytes depend on the data."""
    return [name for name in list_methods() if payload_bytes(sent_fields(compressors.example(name))) is None]


def measure_mean_bytes(name: str, size: int) -> float:
    """Return the bytes per element that leave a rank by `auto`: the mean of many steps of small gradients."""
    (sent,) = measure_bytes(name, "auto", size, FEWER_STEPS.get(name, STEPS), DEVIATION) or ()
    return sent


def replace_rows(rows: list[dict[str, Any]], found: list[dict[str, Any]]) -> str:
    """Return rows as JSON, with those found in place of all of the same methods."""
    methods = {row["method"] for row in found}
    kept = [row for row in rows if row["method"] not in methods]
    return ",\n".join(json.dumps(row) for row in sorted(kept + found, key=lambda row: row["method"]))


def main(moved_path: Path, data_path: Path, *names: str) -> None:
    """Write both files, or renew the rows of some methods in them."""
    chosen = list(names) or list_methods()
    moved_rows = json.loads(moved_path.read_text()) if names else []
    moved_path.write_text(f"[\n{replace_rows(moved_rows, measure_rows(chosen))}\n]\n")
    fewer = ", ".join(f"`{name}`: {steps}" for name, steps in FEWER_STEPS.items())
    values = f"{SHAPE[0]} x {SHAPE[1]} normal values with standard deviation {DEVIATION}"
    what = f"the mean of {STEPS} steps ({fewer}) on {values}"
    over = [
        {"method": name, **{str(size): measure_mean_bytes(name, size) for size in RANKS[:4]}}
        for name in list_data_dependent()
        if name in chosen
    ]
    by_data_rows = json.loads(data_path.read_text())["rows"] if names else []
    data_path.write_text(f'{{"what": {json.dumps(what)}, "rows": [\n{replace_rows(by_data_rows, over)}\n]}}\n')


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
