"""The gradients of the benchmark: made from a seed, heavy-tailed like real ones, other ones in every step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from grace.bench.codec import SEED

# The size at which the default threshold, 0.01, with error feedback keeps about as much as the default ratio of top-k.
DEVIATION = 0.001
# Of longer rows every so many columns repeat, or the distance between two steps would be large.
MOST_COLUMNS = 2**16


class Gradients:
    """g_ij = DEVIATION n_ij s_j with n_ij ~ N(0, 1) and s_j = exp(z_j), z_j ~ N(0, 1), scaled to a mean square of 1.

    A column of a weight's gradient belongs to one input of its layer, and inputs differ in size by orders of magnitude:
    so a few columns hold most of what is large. The columns keep their scale s_j from step to step, and every element
    is drawn anew: all gradients are windows of `numel` elements into one array, a multiple of the rows' length apart,
    and aligned as the array is, to 64 bytes.
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
        """The array into which all of them are windows."""
        return self._values

    def window(self, index: int) -> slice:
        """Where the gradient of that number lies, counted over all ranks and steps."""
        start = self._distance * index
        return slice(start, start + self._numel)
