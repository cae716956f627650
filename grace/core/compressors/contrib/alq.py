"""ALQ and AMQ: stochastic quantization to levels that are fitted to the gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from grace.core.codecs.levels import bucket_norms
from grace.core.codecs.listed import round_packed
from grace.core.compressors.contrib.nuqsgd import NUQSGD
from grace.core.config.registry import About, Setting, compressors
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.ops.table import composite
from grace.core.spec import Array, Field, Payload, TensorSpec

if TYPE_CHECKING:
    from grace.core.ops.native import Native

# Magnitudes are multiples of 1 / _UNIT of the norm, so that all sums are exact and all frameworks find equal levels.
_UNIT = 1 << 19
_SAMPLES = 4096
_SWEEPS = 6
# The multipliers that "exponential" tries, in 64ths. Their powers up to the sixth are exact.
_LEAST, _TRIALS = 8, 53
# The random stream of the sample. The rounding draws from stream 0.
_SAMPLE = 1


@compressors.register(
    "alq",
    About(
        family="quantization",
        adam=True,
        tests=[
            {"quantum_num": 4, "bucket_size": 100, "norm": "l2"},
            {"quantum_num": 1},
            {"spacing": "exponential", "bucket_size": 0},
        ],
        errors=[
            *({"quantum_num": levels} for levels in (1, 3, 7)),
            *({"quantum_num": levels, "spacing": "exponential"} for levels in (3, 7)),
        ],
        digits=Setting(options={"quantum_num": 3}),
    ),
)
@dataclass(frozen=True)
class ALQ(NUQSGD):
    r"""ALQ: stochastic quantization to the levels that have the least variance for this gradient.

    Formula: C(x)_i \in \|x\| \{0, \pm l_1, \dots, \pm l_{s - 1}, \pm 1\}, \; \min_l \sum_i (h_i - r_i) (r_i - a_i), \;
    r_i = |x_i| / \|x\|

    a and h are the levels around r, s is `quantum_num`, from 1 to 7, and |x| the largest magnitude ("max") or the
    Euclidean norm ("l2") of the element's bucket of `bucket_size` consecutive elements (0: one bucket for the tensor).
    An element is rounded up or down to one of its two levels. Unbiased for all levels. Each rank fits the levels of a
    tensor in every step, to 4,096 random elements, and sends them.
    `spacing="free"` (ALQ) improves one level after another: between its neighbours a and h the best level l has F(l) =
    F(h) - \sum_{a < r_i \le h} (r_i - a) / (n (h - a)), where F is the distribution of the n sampled r_i. The odd and
    the even levels take turns, six times each.
    `spacing="exponential"` (AMQ): l_j = p^{s - j}, with the best of 53 multipliers p from 1/8 to 15/16.
    A code takes ceil(log2(2 s + 1)) bits, each bucket one float of the working dtype, each tensor s - 1 more.

    Error: 0.024 |x|^2 for normal x; 0.14 |x|^2 with `quantum_num=3`; 0.028 |x|^2 with `spacing="exponential"`.

    Cost: one pass for the norms, one random number and a search among at most 16 levels per element, bit packing, and
    for each tensor some 20 small array operations on the sample, among them sorting it. Without kernels, some 130 more
    (30 if "exponential") fit the levels.

    When: large tensors at 3 or 4 bits without a memory. Its variance is below that of `qsgd` and `nuqsgd` at the same
    bits; `eden` has less without a fit.

    Reference: Faghri et al., "Adaptive gradient quantization for data-parallel SGD", NeurIPS 2020. There the ranks fit
    common levels, to a normal distribution or to samples, a few times in a run.
    """

    spacing: Literal["free", "exponential"] = "free"

    # Its sample has as many elements as the tensor.
    of_any_length = False
    # The fit divides elements by norms, and NumPy warns of NaN there.
    nonfinite = "lost"

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return Field("levels", spec.work_dtype, self.quantum_num - 1), *super().wire(spec)

    def compress(self, x: Array, at: Site) -> Payload:
        ops, n = at.ops, at.spec.numel
        width = self.width(n)
        norms = bucket_norms(ops, x, width, self.norm)
        levels = {"levels": self._fitted(x, norms, at)}
        codes = round_packed(ops, x, norms, self._levels(levels, at), width, at.private_key, at.out)
        return {**levels, "norms": norms, "codes": codes}

    def _levels(self, payload: Payload, at: Site) -> Array:
        ops, s, dtype = at.ops, self.quantum_num, at.spec.work_dtype
        # 0 and all levels, in the order of the table; the signs are exact.
        order = [*range(s, 0, -1), *range(s + 1)]
        order += [s] * ((1 << self.bits) - len(order))
        signs = [-1.0] * s + [1.0] * (len(order) - s)
        known = ops.concat([ops.zeros(1, dtype), payload["levels"], ops.full(1, 1.0, dtype)])
        return ops.gather(known, _constant(ops, order, "int32")) * _constant(ops, signs, dtype)

    def _fitted(self, x: Array, norms: Array, at: Site) -> Array:
        """Return l_1 to l_{s - 1} in the working dtype."""
        ops, n, s = at.ops, at.spec.numel, self.quantum_num
        if n == 0 or s == 1:
            return ops.zeros(s - 1, at.spec.work_dtype)
        buckets = ops.arange(n, "int64") // self.width(n) if n <= _SAMPLES else None
        if buckets is None:
            chosen = ops.sample(n, _SAMPLES, at.private_key, _SAMPLE)
            x, buckets = ops.gather(x, chosen), ops.cast(chosen, "int64") // self.width(n)
        norm = ops.gather(norms, ops.cast(buckets, "int32"))
        share = ops.abs(x) / ops.where(norm > 0, norm, 1.0)
        sizes = ops.sort(ops.clip(ops.floor(ops.cast(share, "float64") * float(_UNIT)), 0.0, float(_UNIT)))
        found = best_levels(ops, sizes, s, self.spacing == "exponential")
        return ops.cast(found[1:-1] * (1 / _UNIT), at.spec.work_dtype)


@composite(one_graph=True)
def best_levels(ops: ArrayOps, sizes: Array, s: int, exponential: bool) -> Array:
    """Return 0, l_1 to l_{s - 1} and _UNIT for ascending sizes; all are integers in float64.

    There is at least one size, and s > 1.
    """
    return _exponential(ops, sizes, s) if exponential else _free(ops, sizes, s)


@best_levels.kernel()
def _(ops: Native, sizes: Array, s: int, exponential: bool) -> Array | None:
    inputs = [sizes, _starts(ops, ops.length(sizes), s)]
    return ops.run("best_levels", inputs, [int(exponential)], outputs=["float64"], lengths=[s + 1])[0]


def _starts(ops: ArrayOps, count: int, s: int) -> Array:
    """Return the indices of the quantiles, among `count` sizes, that the search starts from."""
    return _constant(ops, [int((1 - (1 - j / s) ** 5) * count) for j in range(1, s)], "int32")


def _free(ops: ArrayOps, sizes: Array, s: int) -> Array:
    sums = _sums(ops, sizes)
    # Between powers of two, which suit heavy tails, and quantiles, which suit others. Six sweeps are then enough for a
    # variance within 0.5 % of the least; from powers of two alone it would take 20.
    quantiles = ops.gather(sizes, _starts(ops, ops.length(sizes), s))
    middle = ops.floor((quantiles + _constant(ops, [float(_UNIT >> (s - j)) for j in range(1, s)], "float64")) * 0.5)
    ends = ops.zeros(1, "float64"), ops.full(1, float(_UNIT), "float64")
    first = ops.concat([ends[0], middle, ends[1]])
    apart = [*range(0, s + 1, 2), *range(1, s + 1, 2)]
    evens = s // 2 + 1

    def sweep(state: Array) -> Array:
        even, odd, count = state[:evens], state[evens : s + 1], state[s + 1 :]
        moved = evens - 1
        odd = ops.concat([_between(ops, sizes, sums, odd[:moved], even), odd[moved:]])
        moved = ops.length(odd) - 1
        even = ops.concat([even[:1], _between(ops, sizes, sums, even[1 : 1 + moved], odd), even[1 + moved :]])
        return ops.concat([even, odd, count + 1.0])

    # The last element counts the sweeps.
    state = ops.concat([ops.gather(first, _constant(ops, apart, "int32")), ops.zeros(1, "float64")])
    state = ops.while_loop(lambda state: state[s + 1] < _SWEEPS, sweep, state)
    return ops.gather(state, _constant(ops, [j // 2 + (j % 2) * evens for j in range(s + 1)], "int32"))


def _between(ops: ArrayOps, sizes: Array, sums: Array, levels: Array, around: Array) -> Array:
    """Return the best levels between neighbours; a level without sizes between its neighbours stays."""
    low, high = around[:-1], around[1:]
    below, upto = ops.search_sorted(sizes, low), ops.search_sorted(sizes, high)
    number = ops.cast(upto - below, "float64")
    total = ops.gather(sums, upto) - ops.gather(sums, below) - low * number
    above = ops.floor(total / ops.where(high > low, high - low, 1.0))
    least, rank = ops.cast(below, "float64"), ops.cast(upto, "float64") - above - 1.0
    rank = ops.where(number > 0, ops.where(rank < least, least, rank), 0.0)
    return ops.where(number > 0, ops.gather(sizes, ops.cast(rank, "int32")), levels)


def _exponential(ops: ArrayOps, sizes: Array, s: int) -> Array:
    """Return 0, p^{s - 1} to p and 1, in units, for the multiplier p with the least variance of the sorted sizes."""
    multiplier = (ops.arange(_TRIALS, "float64") + float(_LEAST)) * (1 / 64)
    powers = [ops.full(_TRIALS, float(_UNIT), "float64")]
    for _ in range(s - 1):
        powers.insert(0, powers[0] * multiplier)
    rows = ops.floor(ops.stack([ops.zeros(_TRIALS, "float64"), *powers], axis=1))
    table = ops.reshape(rows, (-1,))
    upto = ops.search_sorted(sizes, table)

    def per_gap(x: Array) -> Array:
        x = ops.reshape(x, (_TRIALS, s + 1))
        return x[:, 1:] - x[:, :-1]

    number = per_gap(ops.cast(upto, "float64"))
    first, second = per_gap(ops.gather(_sums(ops, sizes), upto)), per_gap(ops.gather(_sums(ops, sizes * sizes), upto))
    low, high = rows[:, :-1], rows[:, 1:]
    variance = ops.sum((low + high) * first - second - low * high * number, axis=1)
    least = variance <= ops.min(variance)
    best = ops.min(ops.where(least, ops.arange(_TRIALS, "float64"), float(_TRIALS)))
    at = ops.cast(best, "int32") * (s + 1) + ops.arange(s + 1, "int32")
    return ops.gather(table, at)


def _sums(ops: ArrayOps, x: Array) -> Array:
    """Return the sums of the first 0, 1, 2, ... elements of x, which are integers."""
    return ops.cast(ops.concat([ops.zeros(1, "int64"), ops.cumsum(ops.cast(x, "int64"))]), "float64")


def _constant(ops: ArrayOps, values: list[float] | list[int], dtype: str) -> Array:
    name = ("alq", tuple(values), dtype)
    return ops.constant(name, lambda: ops.concat([ops.full(1, value, dtype) for value in values]))
