"""Errors of the cost model's predictions on measured steps, and what was fitted to some of them."""

from __future__ import annotations

from typing import NamedTuple

from grace.advice.model import Overhead


class Accuracy(NamedTuple):
    """Relative errors of predicted steps: median, 95th percentile and worst, on cells that nothing was fitted to.

    `noise` and `noise_high` are median and 95th percentile of how much two measurements of one step differ. `steps` and
    `speedups` are the 2.5th and the 97.5th percentile of measured over predicted seconds, and of measured over
    predicted speed-ups over no compression.
    """

    median: float
    high: float
    worst: float
    cells: int
    noise: float
    noise_high: float
    steps: tuple[float, float]
    speedups: tuple[float, float]
    machine: str

    def band(self, seconds: float) -> tuple[float, float]:
        """Return the seconds between which 95 % of measured steps lay that were predicted to take so many."""
        low, high = self.steps
        return seconds * low, seconds * high

    @property
    def lines(self) -> list[str]:
        """The lines that every output has."""
        return [
            f"Predictions calibrated on 2 ranks missed {self.cells} measured steps that were held out by "
            f"{self.median:.0%} (median), {self.high:.0%} (95th percentile) and {self.worst:.0%} at worst; two "
            f"measurements of one step differ by {self.noise:.0%} (median) and {self.noise_high:.0%} (95th "
            "percentile).",
            f"They were checked on 4 and 8 ranks that shared the cores of one machine: {self.machine}.",
        ]


# All three are written by benchmarks/predictions.py. These are of steps of a model that was held out, after a
# calibration on 2 ranks:
ACCURACY = Accuracy(0.1371, 0.3465, 0.3725, 32, 0.071, 0.2788, (0.735, 1.13), (0.861, 1.321), "AMD EPYC, 2 cores")
#: Without a calibration, as predictions of `what-if` are.
WHAT_IF = Accuracy(0.3563, 0.5766, 0.7294, 96, 0.0667, 0.2738, (1.157, 2.781), (0.592, 1.521), "AMD EPYC, 2 cores")
#: What exchanges over Gloo took there.
OVERHEAD = Overhead(copying=1.61e-10, handling=6.87e-10, serving=0.000714, waking=0.00129)
