"""Gradient sparsification with the fewest elements for a given variance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grace.core.compressors.topk import advice_on_ratio, check_ratio
from grace.core.config.registry import About, Setting, compressors
from grace.core.errors import ConfigError
from grace.core.methods.compressor import Compressor, beyond_int32, keep_count
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.ops.table import composite
from grace.core.spec import Array, Field, Key, Payload, TensorSpec

if TYPE_CHECKING:
    from grace.core.ops.native import Native


@compressors.register(
    "wangni",
    About(
        family="sparsification",
        adam=True,
        tests=[{"compress_ratio": 0.3}, {"variance_budget": 1.0}],
        digits=Setting(options={"compress_ratio": 0.1}),
    ),
)
@dataclass(frozen=True)
class Wangni(Compressor):
    r"""Wangni sparsifier: random elements, large ones more often; unbiased, the fewest for a given variance.

    Formula: C(x)_i = \frac{x_i}{p_i} b_i, \quad b_i \sim \mathrm{Bernoulli}(p_i), \quad p_i = \min(1, \lambda |x_i|)

    With `variance_budget` (eps; null: none), lambda is the smallest with E|C(x)|^2 <= (1 + eps) |x|^2, which sends the
    fewest elements, `sum_i p_i`, for this variance. Otherwise lambda keeps max(1, int(compress_ratio * d)) elements on
    average. Both are found without sorting. Let s elements be certain (p_i = 1), and A, B the sums of |x_i| and x_i^2
    over the others; then lambda = (k - s) / A, or A / (eps |x|^2 + B), repeated until no more elements become certain.
    This is Newton's method on a piecewise linear convex function, and reaches the exact solution. (For a ratio the
    paper stops after two rounds, which keeps fewer elements than asked for.)
    Certain elements travel as value and index, 8 bytes (12 for float64 gradients). All others decode to the same
    magnitude 1/lambda, so an index with a sign is enough, 4 bytes: i, or -1 - i for a negative element. Probabilities
    are rounded to multiples of 2^-24, so elements with p_i below 2^-25 are never kept.

    Error: 5.4 |x|^2 for normal x; 62 |x|^2 with `compress_ratio=0.01`.

    Cost: one random number per element, and one pass in float64 per round, 2 to 10 rounds.

    When: unbiased sparse gradients without a memory. With a memory, top-k has a smaller error for the same bytes. At 1
    % training stalled or diverged at the learning rate of dense training.

    Reference: Wangni et al., "Gradient sparsification for communication-efficient distributed optimization", NeurIPS
    2018.
    """

    compress_ratio: float = 0.1
    variance_budget: float | None = None

    unbiased = True
    linear_in = ("values", "scale")

    def __post_init__(self) -> None:
        check_ratio("wangni", self.compress_ratio)
        if self.variance_budget is not None and not self.variance_budget > 0:
            raise ConfigError(
                f"wangni: variance_budget (eps in E|C(x)|^2 <= (1 + eps) |x|^2) must be positive or null, "
                f"received {self.variance_budget!r}."
            )

    @property
    def advice(self) -> str | None:
        return advice_on_ratio(self.compress_ratio) if self.variance_budget is None else None

    def unfit(self, spec: TensorSpec) -> str | None:
        return beyond_int32(spec)

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return (
            Field("scale", spec.work_dtype, 1),
            Field("values", spec.work_dtype, "certain"),
            Field("indices", "int32", "certain", below=spec.numel),
            Field("signed", "int32", "drawn"),
        )

    def compress(self, x: Array, at: Site) -> Payload:
        ops = at.ops
        k = keep_count(self.compress_ratio, at.spec.numel)
        odds = keep_odds(ops, x, k, self.variance_budget)
        values, indices, signed = draw_kept(ops, x, odds, at.private_key)
        scale = odds[:1] / ops.where(odds[1:] > 0, odds[1:], 1.0)
        return {
            "scale": ops.cast(scale, at.spec.work_dtype),
            "values": values,
            "indices": indices,
            "signed": signed,
        }

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        values, indices = sparse_entries(at.ops, payloads)
        return at.ops.sparse_sum(values, indices, at.spec.numel, out=at.out)


def sparse_entries(ops: ArrayOps, payloads: Sequence[Payload]) -> tuple[list[Array], list[Array]]:
    """Return the certain values and the drawn ones of each payload, and their indices."""
    values, indices = [], []
    for payload in payloads:
        drawn, places = drawn_entries(ops, payload["signed"], payload["scale"])
        values += [payload["values"], drawn]
        indices += [payload["indices"], places]
    return values, indices


@composite(one_graph=True)
def keep_odds(ops: ArrayOps, x: Array, k: int, budget: float | None) -> Array:
    """Return the largest magnitude and lambda of p_i = min(1, lambda |x_i| / largest) (float64, (2,)).

    lambda is the least for which k elements are kept on average, or for which E|C(x)|^2 <= (1 + budget) |x|^2; 0 if x
    is 0.
    """
    # In float64 and scaled below 1, so that no square overflows or vanishes.
    largest = ops.cast(ops.max_abs(x), "float64")
    size = ops.cast(ops.abs(x), "float64") / ops.where(largest > 0, largest, 1.0)
    squares = ops.sum(size * size)

    def better(factor: Array) -> Array:
        others = ops.where(size * factor < 1, size, 0.0)
        total = ops.sum(others)
        if budget is None:
            certain = ops.sum(ops.cast(size * factor >= 1, "float64"))
            above, below = k - certain, total
        else:
            above, below = total, squares * budget + ops.sum(others * others)
        # 0 if nothing is left to draw, or every element is certain.
        new = ops.where(total > 0, above / ops.where(total > 0, below, 1.0), 0.0)
        return ops.where(new > factor, new, factor)

    zero = ops.cast(0.0, "float64")
    # The pair holds two successive values of lambda; an unchanged set of certain elements gives the same value again.
    found = ops.while_loop(
        lambda pair: pair[1] > pair[0],
        lambda pair: ops.stack([pair[1], better(pair[1])], axis=0),
        ops.stack([zero, better(zero)], axis=0),
    )
    return ops.stack([largest, found[1]], axis=0)


@keep_odds.kernel()
def _(ops: Native, x: Array, k: int, budget: float | None) -> Array | None:
    if ops.floating(x) is None:
        return None
    # No budget is 0.
    return ops.run("keep_odds", [x], [k], [budget or 0.0], outputs=["float64"], lengths=[2])[0]


@composite(one_graph=True)
def draw_kept(ops: ArrayOps, x: Array, odds: Array, key: Key) -> tuple[Array, Array, Array]:
    """Return values and ascending indices of the elements with p_i = 1, and those of the others that are drawn.

    `odds` is the result of `keep_odds`. A drawn element is its index, or -1 - index if the element is negative.
    """
    p = ops.cast(ops.abs(x), "float64") / ops.where(odds[0] > 0, odds[0], 1.0) * odds[1]
    u = ops.cast(ops.uniform(ops.length(x), key), "float64")
    certain = ops.nonzero(p >= 1)
    # Half a step of u is added, so that probabilities are rounded to the nearest multiple and not up.
    drawn = ops.nonzero(ops.bit_and(p < 1, u + 2.0**-25 < p))
    negative = ops.gather(x, drawn) < 0
    return ops.gather(x, certain), certain, ops.where(negative, -1 - drawn, drawn)


@draw_kept.kernel()
def _(ops: Native, x: Array, odds: Array, key: Key) -> tuple[Array, Array, Array] | None:
    dtype = ops.floating(x)
    if dtype is None:
        return None
    outputs, lengths = [dtype, "int32", "int32"], [None, None, None]
    values, indices, signed = ops.run("draw_kept", [x, odds], ops.key_integers(key), outputs=outputs, lengths=lengths)
    return values, indices, signed


@composite()
def drawn_entries(ops: ArrayOps, signed: Array, scale: Array) -> tuple[Array, Array]:
    """Return the values and indices of the drawn elements of `draw_kept`, all of magnitude `scale`, of shape (1,)."""
    negative = signed < 0
    return ops.where(negative, -scale, scale), ops.where(negative, -1 - signed, signed)


@drawn_entries.kernel()
def _(ops: Native, signed: Array, scale: Array) -> tuple[Array, Array] | None:
    dtype, count = ops.floating(scale), ops.length(signed)
    if dtype is None:
        return None
    values, indices = ops.run("drawn_entries", [signed, scale], outputs=[dtype, "int32"], lengths=[count, count])
    return values, indices
