"""Agreement of all ranks on one configuration before the first step."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from grace.core.config.registry import compressors
from grace.core.errors import MismatchError
from grace.core.methods.compressor import Compressor
from grace.core.ops.composites import ArrayOps
from grace.core.plan.plan import Plan
from grace.core.wire.layout import WIRE_FORMAT


def formats(plans: Sequence[Plan], ops: Callable[[str], ArrayOps]) -> dict[str, Any]:
    """Return what decides the bytes of a run beside its configuration: a part of every first description.

    `ops(device)` returns the array operations.
    """
    items = [item for plan in plans for item in (*plan.exchanged, *plan.stateful.values())]
    found: dict[str, Any] = {
        "wire format": WIRE_FORMAT,
        "payload format": {
            name: compressors.about(name).payload_format
            for item in items
            for name in map(compressors.name_of, _methods(item.compressor))
        },
    }
    if any(plan.shards for plan in plans):
        # They depend on the number of ranks on a node, which the launcher may tell each rank differently.
        names = repr([list(plan.stateful) for plan in plans])
        found["units"] = hashlib.blake2b(names.encode(), digest_size=8).hexdigest()
    multiplying = [item for item in items if any(c.multiplies for c in _methods(item.compressor))]
    if multiplying:
        # Other last bits let the replicas drift apart.
        found["matrix products by"] = sorted({ops(item.spec.device).products for item in multiplying})
    return found


def _methods(compressor: Compressor) -> Iterator[Compressor]:
    """Yield a compressor and those that it consists of."""
    yield compressor
    for f in dataclasses.fields(compressor) if dataclasses.is_dataclass(compressor) else ():
        if isinstance(inner := getattr(compressor, f.name), Compressor):
            yield from _methods(inner)


def agree(
    description: dict[str, Any], failure: Exception | None, gather: Callable[[Any], list[Any]], where: str
) -> list[dict[str, Any]]:
    """Return the descriptions of all ranks, in rank order, after checking that they are equal.

    `description` must be JSON-able and equal on every rank, except for the key "of this rank". `failure` is the error
    that keeps this rank from taking part; passing it tells the other ranks, so that they do not wait. `gather`
    exchanges one object per rank. Raises the failure, or MismatchError on every rank if descriptions differ or another
    rank failed.
    """
    everyone = gather({"error": f"{type(failure).__name__}: {failure}"} if failure else description)
    if failure is not None:
        raise failure
    failed = [f"rank {rank}: {d['error']}" for rank, d in enumerate(everyone) if "error" in d]
    if failed:
        raise MismatchError(f"{where} failed on {'; '.join(failed)}")
    for rank, other in enumerate(everyone):
        difference = _difference(_shared_keys(everyone[0]), _shared_keys(other), "")
        if difference:
            raise MismatchError(
                f"rank {rank} and rank 0 were started differently: {difference}. "
                "Every rank must pass the same configuration, arguments and parameters in the same order, and run "
                "the same version of grace, all ranks with kernels or all without."
            )
    return everyone


class Handshake:
    """The point at which the ranks compare what they are about to do; a context.

    Its body prepares, and fills `local`, the description of this rank. An error in it is sent to the other ranks, which
    would wait otherwise. The body ends with `agree` and its errors; afterwards `everyone` has all descriptions.
    """

    def __init__(self, gather: Callable[[Any], list[Any]], where: str) -> None:
        self._gather, self._where = gather, where
        self.local: dict[str, Any] = {}
        self.everyone: list[dict[str, Any]] = []

    def __enter__(self) -> Handshake:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, Exception):
            self.everyone = agree(self.local, error, self._gather, self._where)


def check_steps(steps: Sequence[int]) -> None:
    """Raise MismatchError unless all ranks are before the same step, after they have dropped one."""
    if len(set(steps)) > 1:
        raise MismatchError(
            "the steps under way were dropped, but the ranks are not before the same step: expected one step, "
            f"received {list(steps)}. Some ranks have applied a step that others have not: let all ranks load a "
            "checkpoint of the same step."
        )


def _shared_keys(description: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in description.items() if key != "of this rank"}


def _difference(a: Any, b: Any, path: str) -> str:
    """Return a text that names the first difference of two descriptions; empty if they are equal."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(k for k in b if k not in a)]:
            here = f"{path}, {key}" if path else str(key)
            if key not in a or key not in b:
                return f"{here} exists only on {'the former' if key in b else 'rank 0'}"
            difference = _difference(a[key], b[key], here)
            if difference:
                return difference
        return "" if list(a) == list(b) else f"the order of {path} differs"
    return "" if a == b else f"{path} is {b!r} and {a!r}"
