"""Stochastic rotated quantization: evenly spaced levels behind a random rotation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from grace.core.codecs.rotation import RotatedQuantizer, even_levels
from grace.core.config.registry import About, compressors


@compressors.register(
    "rotated",
    About(
        family="quantization",
        adam=True,
        tests=[{"bits": 2, "shared_rotation": True}, {"bits": 3, "transforms": 1}],
        errors=[
            *({"bits": bits} for bits in (2, 3, 4)),
            {"bits": 4, "shared_rotation": True},
            {"bits": 4, "transforms": 1},
        ],
    ),
)
@dataclass(frozen=True)
class Rotated(RotatedQuantizer):
    r"""Stochastic rotated quantization: a random rotation, then stochastic rounding to evenly spaced levels.

    Formula: C(x) = R^T Q(R x), \; Q(y)_i \in m \{-1, -1 + \delta, \dots, 1\}, \; E[Q(y)] = y, \; m = \max_i |y_i|

    R is a random rotation of `block_size` consecutive elements: random signs and a Hadamard transform, twice; the
    signs differ between ranks and steps. It makes the largest of d elements about sqrt(2 ln d / d) |x|, so the 2^b
    levels, at a distance of \delta = 2 / (2^b - 1), lie closer. b is `bits`, from 1 to 4. Unbiased. A block sends one
    float of the working dtype. The last block is filled with zeros to a power of two. With `shared_rotation`, all ranks
    draw the same signs, so that the sum of all Q(y) is rotated back at once. They still round on their own, so that the
    error of the mean of N ranks is 1 / N of the error below in both cases. With `transforms=1`, R is random signs and
    one transform. The result stays unbiased.

    Error: 0.043 |x|^2 for normal x; 1.1 |x|^2 with `bits=2`. It is the same for all x.

    Cost: a rotation, which is two transforms of log2(d) stages in the cache, or one, to encode, and one for each rank
    to merge, or one for all with `shared_rotation`; one random number per element, and bit packing.

    When: to compare with `eden`, which is more exact at the same bits.

    Reference: Suresh et al., "Distributed mean estimation with limited communication", ICML 2017. There the levels lie
    between the smallest and the largest element; here they are symmetric.
    """

    stochastic = True

    @cached_property
    def levels(self) -> tuple[float, ...]:
        return even_levels(self.bits)
