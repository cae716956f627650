"""Which scenarios of usage run in which launch, and their results."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.support.launch import TENSORFLOW, run

ALONE, TWO, FOUR = ("python", 1), ("horovodrun-gloo", 2), ("mpirun", 4)
# On four ranks what another number of them could change.
EVERYWHERE = [
    "passes_per_step",
    "overflow_in_fit",
    "overflow_by_hand",
    "one_file",
    "broadcast",
    "metrics",
    "rows_of_a_table",
    "without_rows",
    "tape_checkpoint",
    "local_sources",
    "shapes_of_sources",
    "compiled_by_xla",
    "different_ranks",
    "two_steps_in_one_graph",
    "frozen_layer",
    "changing_kinds",
]
SCENARIOS = {
    ALONE: ["fresh_process"],
    TWO: [
        *EVERYWHERE,
        "ways_to_train",
        "options_of_optimizers",
        "all_optimizers",
        "scale_of_the_day",
        "saved_models",
        "checkpoints",
        "round_trip",
        "learning_rates",
        "statistics",
        "embeddings",
        "tapes",
        "two_models",
        "refused_arguments",
        "refused_steps",
        "dispatch",
        "lists_of_variables",
        "lazy_model",
        "half_precision_weights",
        "different_iterations",
        "odds_and_ends",
    ],
    FOUR: [*EVERYWHERE, "apart"],
}


@functools.cache
def _results(launch: tuple[str, int]) -> list[dict[str, Any]]:
    # One launch runs all scenarios, because starting the ranks costs more than most of them.
    return run(*launch, SCENARIOS[launch], TENSORFLOW)


def scenario(name: str, launch: tuple[str, int] = TWO) -> list[Any]:
    """What every rank reported of a scenario; fails if one of them raised."""
    results = [rank[name] for rank in _results(launch)]
    for rank, result in enumerate(results):
        assert "trace" not in result, f"rank {rank}: {result['trace']}"
    return results


def same(values: list[Any]) -> bool:
    """Whether all ranks report the same."""
    return all(value == values[0] for value in values)


two_and_four = pytest.mark.parametrize("launch", [TWO, FOUR], ids=lambda launch: f"{launch[0]}-{launch[1]}")
