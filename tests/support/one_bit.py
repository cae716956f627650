"""The exchange of 1-bit Adam in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

BETA = 0.9


class MomentaOfThePaper:
    """The exchange of Algorithm 1 in NumPy: mean|x| sign(x) of m + error on each rank, and of the mean at its owner."""

    def __init__(self, plan: Any, momentum: dict[str, np.ndarray], unit: dict[str, np.ndarray], ranks: int) -> None:
        self.ranks = ranks
        # What momenta are divided by before they are exchanged: sqrt v + eps, or 1 as in the paper.
        self.scaled = any((x != 1).any() for x in unit.values())
        self.unit = {name: x.astype(np.float32) for name, x in unit.items()}
        self.pieces = [(unit, unit.pieces[0]) for unit in plan.units]
        self.momentum = {name: m.astype(np.float32) for name, m in momentum.items()}
        self.worker = [{name: np.zeros_like(m) for name, m in self.momentum.items()} for _ in range(self.ranks)]
        self.server = {name: np.zeros_like(m) for name, m in self.momentum.items()}

    def step(self, gradients: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        last = {name: m.copy() for name, m in self.momentum.items()}
        for _, piece in self.pieces:
            at, name = slice(piece.start, piece.stop), piece.tensor
            sent = []
            for mine, error in zip(gradients, self.worker, strict=True):
                own = mine[name][at] / self.unit[name][at]
                x = np.float32(BETA) * last[name][at] + np.float32(1 - BETA) * own
                # What m / sqrt v is at most in Adam.
                limit = np.float32(0.1 / np.sqrt(0.001)) if self.scaled else np.inf
                x = np.clip(x, -limit, limit) + error[name][at]
                sent.append(_sign(x))
                error[name][at] = x - sent[-1]
            x = sum(sent) / np.float32(self.ranks) + self.server[name][at]
            self.momentum[name][at] = _sign(x) if self.ranks > 1 else x
            self.server[name][at] = x - self.momentum[name][at]
        return self.momentum


def _sign(x: np.ndarray) -> np.ndarray:
    return np.float32(np.mean(np.abs(x.astype(np.float64)))) * np.where(x >= 0, np.float32(1), np.float32(-1))
