"""The gradients of the benchmark: seeded, heavy-tailed like real gradients, and different in every step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from grace.bench.codec import SEED

# With this standard deviation, `threshold` (default 0.01, with error feedback) keeps about as many elements as `topk`
# with its default ratio.
DEVIATION = 0.001
# In longer rows the column scales repeat with this period. Otherwise two steps would be far apart in memory.
MOST_COLUMNS = 2**16


class Gradients:
    """Heavy-tailed gradients: g_ij = DEVIATION n_ij s_j, with n_ij ~ N(0, 1) and log-normal column scales s_j.

    s_j = exp(z_j) with z_j ~ N(0, 1), scaled to a mean square of 1.
    Each column of a weight's gradient belongs to one input of its layer. Inputs differ by orders of magnitude, so a few
    columns hold most of the large elements. The columns keep their scale s_j from step to step; the elements n_ij
    change. All gradients are windows of `numel` elements into one array. Their distance is a multiple of the row length
    and of 64 bytes.
    """

    def __init__(self, shape: tuple[int, int], count: int) -> None:
        self._numel = shape[0] * shape[1]
        columns = min(shape[1], MOST_COLUMNS)
        self._distance = math.lcm(columns, 16)
        generator = np.random.default_rng(SEED)
        scale = np.exp(generator.standard_normal(columns))
        scale *= DEVIATION / np.sqrt(np.mean(scale**2))
        total = self._numel + self._distance * (count - 1)
        rows = -(-total // columns)
        self._values = generator.standard_normal(rows * columns, dtype=np.float32)
        self._values.reshape(rows, columns)[:] *= scale.astype(np.float32)

    def array(self) -> np.ndarray[Any, Any]:
        """Return the array that holds all gradients."""
        return self._values

    def window(self, index: int) -> slice:
        """Return the position of a gradient in the array. The index counts over all ranks and steps."""
        start = self._distance * index
        return slice(start, start + self._numel)
