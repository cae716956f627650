"""Comparison of the replicas: ranks exchange a digest of what must be equal on all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grace.core.errors import MismatchError
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array
from grace.core.wire.checksum import checksum

# Bytes that each rank sends for a comparison of replicas that are equal.
SUMMARY_BYTES = 8
WEIGHTS, STATES = "weights", "weights or shared states"
ADVICE = (
    "Look for what only some ranks do: random numbers in the model, weights that are changed or loaded by hand, other "
    "versions of the frameworks, damaged memory. Load the last good checkpoint on all ranks."
)


def digest(ops: ArrayOps, x: Array) -> int:
    """Return a digest of the bits of an array, a signed number of 64 bits."""
    data = ops.to_bytes(x)
    odd = ops.length(data) % 4
    padded = ops.concat([data, ops.zeros(4 - odd, "uint8")]) if odd else data
    return int(checksum(ops, padded)[0])


def summary(digests: Mapping[str, int]) -> bytes:
    """Return a digest of all digests, in `SUMMARY_BYTES`."""
    return hashlib.blake2b(repr([*digests.items()]).encode(), digest_size=SUMMARY_BYTES).digest()


def is_due(completed: int, every: int) -> bool:
    """Return whether the replicas are compared before a step, with the option `check_replicas = every`.

    `completed` counts the steps of this run. The step in a checkpoint does not count: if only some ranks have loaded
    one, they would compare before other steps than the rest, and wait for them.
    """
    return every > 0 and completed % every == 0


def other_steps_error(rank: int) -> MismatchError:
    """Return the error for ranks that are not at the same step, as a rank has noticed."""
    return MismatchError(
        f"the ranks are not at the same step (seen by rank {rank}): only some of them loaded a checkpoint, they loaded "
        "checkpoints of different steps, a rank called the join() of its library, or only some of them froze a "
        "parameter. Let every rank load its own file of the same step, or all ranks the same file; instead of calling "
        "join(), let all ranks take equally many steps; freeze the same parameters on all ranks."
    )


def check_same_step(steps: Sequence[int], rank: int) -> None:
    """Raise MismatchError, as `rank`, unless all ranks are at the same step.

    Check this before digests: ranks at different steps have different weights, too, and the steps are the cause.
    """
    if len(set(steps)) > 1:
        raise other_steps_error(rank)


def check_digests(digests: Sequence[Mapping[str, int]], what: str, when: str, advice: str) -> None:
    """Raise MismatchError unless the digests of all ranks, by tensor and in rank order, are those of rank 0."""
    for rank, mine in enumerate(digests):
        differing = [name for name, value in digests[0].items() if mine.get(name) != value]
        if differing:
            raise MismatchError(
                f"the {what} of rank {rank} and rank 0 differ {when}, in '{differing[0]}' and {len(differing) - 1} "
                f"other tensors: expected equal {what}, or every rank trains a model of its own. {advice}"
            )


def check_equal(everyone: Sequence[tuple[int, Mapping[str, int]]], rank: int) -> None:
    """Raise MismatchError, as `rank`, unless the steps and the digests of all ranks are equal."""
    steps, digests = zip(*everyone, strict=True)
    check_same_step(steps, rank)
    check_digests(digests, STATES, f"before step {steps[0]}", ADVICE)


def compare(
    mine: Sequence[tuple[int, Mapping[str, int]]], gather: Callable[[Sequence[Any], str], list[Any]], rank: int
) -> None:
    """Raise MismatchError, as `rank`, if digests differ; it names the first such tensor, or says that steps differ.

    `mine` has the step and the digests of each rank in this process. `gather(values, purpose)` returns one value per
    rank of all ranks. The digests themselves are sent only if the digests of all of them differ.
    """
    if len(set(gather([summary(digests).hex() for _, digests in mine], "replicas"))) > 1:
        check_equal(gather(mine, "replicas in detail"), rank)
