"""Errors of the cost model's predictions on measured steps, and what was fitted to some of them."""

from __future__ import annotations

from typing import NamedTuple

from grace.advice.model import Overhead


class Accuracy(NamedTuple):
    """Relative errors of predicted steps: median, 95th percentile and worst, on cells held out from the calibration."""

    median: float
    high: float
    worst: float
    cells: int
    noise: float
    machine: str

    @property
    def lines(self) -> list[str]:
        """The lines that every output has."""
        return [
            f"Predictions missed {self.cells} measured steps that were held out by {self.median:.0%} (median), "
            f"{self.high:.0%} (95th percentile) and {self.worst:.0%} at worst; two measurements of one step differ by "
            f"{self.noise:.0%} (median).",
            f"They were checked on 4 and 8 ranks of one machine, after a calibration on 2: {self.machine}.",
        ]


# Both are written by benchmarks/predictions.py.
ACCURACY = Accuracy(0.078, 0.2213, 0.2766, 32, 0.044, "AMD EPYC, 2 cores")
#: What exchanges over Gloo took there.
OVERHEAD = Overhead(copying=1.29e-10, handling=7.25e-10, serving=0.000862, meeting=0.00496)
