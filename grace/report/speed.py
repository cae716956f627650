"""The time of a step on a link, by a law from measured parts.

Nothing here is measured on a network: `grace bench step` does that.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from grace.advice.model import LATENCY
from grace.core.transport.collectives import KINDS, Kind, copies

# Links in Gbit/s: those of the GRACE paper.
LINKS = (1, 10, 25)
# Compute and codecs are those of one core, or of a device that is so many times as fast, as the paper's GPUs are.
FASTER = (1, 100)


class Parts(NamedTuple):
    """The parts of a method's step: ranks, seconds of one core, and bytes and number of collectives by their kind."""

    ranks: int
    compute: float
    exchange: float
    collectives: Mapping[Kind, float]
    sends: Mapping[Kind, float]

    def seconds(self, gbit: float, faster: float = 1) -> float:
        """Return the time of a step on a link.

        (compute + exchange) / faster + the sum over collectives of messages * LATENCY + 8 * bytes / (10^9 gbit), where
        the bytes are those that leave a rank in a ring.
        """
        rounds = sum((2 if kind == "allreduce" else 1) * number for kind, number in self.sends.items())
        on_link = rounds * (self.ranks - 1) * LATENCY + 8 * self.link_bytes / (1e9 * gbit)
        return (self.compute + self.exchange) / faster + on_link

    @property
    def link_bytes(self) -> float:
        """The bytes that leave a rank in a step, over all messages."""
        return sum(float(copies(kind, self.ranks)) * nbytes for kind, nbytes in self.collectives.items())

    def link_share(self, gbit: float, faster: float = 1) -> float:
        """Return the part of a step in which the link is busy."""
        return 1 - (self.compute + self.exchange) / faster / self.seconds(gbit, faster)


def parts(results: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], dict[str, Parts]]:
    """Return the parts of a step by task and ranks, and then by method.

    Of several times of the same work the smallest counts, because other programs only add to it: over the seeds for the
    exchange, and over all methods for the computation, which is the same.
    """
    groups: dict[tuple[str, int], dict[str, list[Mapping[str, Any]]]] = {}
    for found in results:
        if "error" not in found:
            cell = found["cell"]
            groups.setdefault((cell["task"], cell["ranks"]), {}).setdefault(cell["method"], []).append(found)
    answer = {}
    for (task, ranks), methods in groups.items():
        compute = min(run["compute_seconds"] for runs in methods.values() for run in runs)
        answer[task, ranks] = {
            method: Parts(
                ranks,
                compute,
                min(run["exchange_seconds"] for run in runs),
                *(
                    {kind: statistics.fmean(run[key][kind] for run in runs) for kind in KINDS}
                    for key in ("collectives", "sends")
                ),
            )
            for method, runs in methods.items()
        }
    return answer


def qualities_at_equal_time(
    run: Mapping[str, Any], seconds: float, dense: Mapping[str, Any], dense_seconds: float
) -> tuple[float, float] | None:
    """Return the qualities of a run and of an uncompressed one at the time when the faster of them has ended.

    Both are interpolated in the curves over steps. The learning rate of the slower one is then still on its way down.
    Times are those of a step. The result is None if a curve has a quality that is not finite.
    """
    end = min(run["curve"][-1][0] * seconds, dense["curve"][-1][0] * dense_seconds)
    found = []
    for curve, of_step in ((run["curve"], seconds), (dense["curve"], dense_seconds)):
        steps, _, values = zip(*curve, strict=True)
        if None in values:
            return None
        found.append(float(np.interp(end / of_step, steps, values)))
    return found[0], found[1]
