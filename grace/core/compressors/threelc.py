"""3LC: ternary values with a sparsity multiplier, five per byte, and runs of zeros in one byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grace.core.config.registry import About, compressors
from grace.core.errors import ConfigError, PayloadError
from grace.core.methods.compressor import Compressor
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps, plus
from grace.core.ops.table import composite
from grace.core.spec import Array, Field, Payload, TensorSpec

if TYPE_CHECKING:
    from grace.core.ops.native import Native

DIGITS = 5
POWERS = (81, 27, 9, 3, 1)
# Five zeros, written as the digits 1 1 1 1 1; bytes above 242 stand for 2 to 14 of this one.
ZERO_BYTE = 121
FIRST_RUN = 243
LONGEST_RUN = 14


@compressors.register("3lc", About(family="hybrid", adam=False, tests=[{"sparsity_multiplier": 1.9}]))
@dataclass(frozen=True)
class ThreeLC(Compressor):
    r"""3LC: ternary values, five per byte, and runs of zeros in one byte; at most 1.6 bits per element.

    Formula: C(x)_i = M \, \mathrm{round}(x_i / M), \quad M = s \max_j |x_j|

    s is `sparsity_multiplier`, in [1, 2); a larger one makes more zeros. Halves are rounded away from zero. Five
    consecutive values, plus 1, are the base-3 digits of one byte (0 to 242; the end is filled with zeros). Then 2 to 14
    zero bytes in a row become one byte, 243 to 255, so a tensor of mostly zeros takes down to 0.114 bits per element.
    This coding is lossless. No error exceeds M/2 or |x_i|: a contraction with delta >= s (2 - s) / d.

    Error: 0.91 |x|^2 for normal x; 1 |x|^2 with `sparsity_multiplier=1.9`.

    Cost: some passes over x and over d/5 bytes; no sorting, no random numbers.

    When: few bits without a ratio to tune; the bytes follow the data. For a fixed budget take a sparsifier.

    Reference: Lim, Andersen and Kaminsky, "3LC: lightweight and effective traffic compression for distributed machine
    learning", MLSys 2019.
    """

    sparsity_multiplier: float = 1.0

    default_memory = "residual"
    linear_in = ("scale",)

    def __post_init__(self) -> None:
        if not 1 <= self.sparsity_multiplier < 2:
            raise ConfigError(f"3lc: sparsity_multiplier must lie in [1, 2), received {self.sparsity_multiplier!r}.")

    def contraction(self, spec: TensorSpec) -> float | None:
        return self.sparsity_multiplier * (2 - self.sparsity_multiplier) / max(1, spec.numel)

    def unfit(self, spec: TensorSpec) -> str | None:
        if coded_size(spec.numel) >= 2**31:
            return f"{spec.numel} elements make more bytes than int32 can count"
        return None

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return Field("scale", spec.work_dtype, 1), Field("codes", "uint8", "coded")

    def compress(self, x: Array, at: Site) -> Payload:
        ops = at.ops
        scale = ops.flat_max_abs(x)
        if self.sparsity_multiplier != 1:
            scale = scale * ops.full(1, self.sparsity_multiplier, at.spec.work_dtype)
        return {"scale": scale, "codes": ternary_encode(ops, x, scale)}

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        return ternary_sum(
            at.ops, [p["codes"] for p in payloads], [p["scale"] for p in payloads], at.spec.numel, out=at.out
        )

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        return ternary_sum(at.ops, [payload["codes"]], [-payload["scale"]], at.spec.numel, onto=x)


@composite(one_graph=True)
def ternary_encode(ops: ArrayOps, x: Array, scale: Array) -> Array:
    """Return 1 where x >= scale / 2, -1 where x <= -scale / 2, else 0 (also if both hold), in the bytes of 3LC.

    Plus 1 they are digits, five per byte; the runs make the length depend on the data.
    """
    # Compare rather than divide: this is exact, and for a scale of 0 both sides hold, which gives 0.
    half = scale * ops.cast(0.5, ops.dtype(x))
    digits = ops.cast(x >= half, "int64") - ops.cast(x <= -half, "int64") + 1
    return encode_runs(ops, to_bytes(ops, digits))


@ternary_encode.kernel()
def _(ops: Native, x: Array, scale: Array) -> Array | None:
    if ops.floating(x) is None:
        return None
    return ops.run("ternary_encode", [x, scale], outputs=["uint8"], lengths=[None])[0]


@composite()
def ternary_sum(
    ops: ArrayOps,
    codes: Sequence[Array],
    scales: Sequence[Array],
    n: int,
    onto: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Return the sum of digit * scale over the ranks, onto an array that it consumes.

    Raises PayloadError for codes that are not those of n digits.
    """
    for data, scale in zip(codes, scales, strict=True):
        digits = from_bytes(ops, decode_runs(ops, data, coded_size(n)), n)
        onto = plus(ops, onto, ops.cast(digits - 1, ops.dtype(scale)) * scale)
    return onto


@ternary_sum.kernel()
def _(
    ops: Native,
    codes: Sequence[Array],
    scales: Sequence[Array],
    n: int,
    onto: Array | None = None,
    out: Array | None = None,
) -> Array | None:
    return ops.total("ternary_sum", [*codes, *scales], [len(codes), n], n, ops.dtype(scales[0]), onto, out=out)


# --- five ternary digits per byte, and runs of zeros in one byte ----------------------------------------------------


def coded_size(n: int) -> int:
    """Return the bytes of n ternary digits before the coding of runs."""
    return -(-n // DIGITS)


def to_bytes(ops: ArrayOps, digits: Array) -> Array:
    """Return one number 0 to 242 (int64) per five digits 0 to 2 (int64), most significant first, padded with ones."""
    n = ops.length(digits)
    filled = ops.concat([digits, ops.full(DIGITS * coded_size(n) - n, 1, "int64")])
    columns = ops.reshape(filled, (coded_size(n), DIGITS))
    value = columns[:, 0] * POWERS[0]
    for j in range(1, DIGITS):
        value = value + columns[:, j] * POWERS[j]
    return value


def from_bytes(ops: ArrayOps, values: Array, n: int) -> Array:
    """Return the n digits of to_bytes."""
    columns = ops.stack([values // power % 3 for power in POWERS], axis=1)
    return ops.reshape(columns, (DIGITS * coded_size(n),))[:n]


def encode_runs(ops: ArrayOps, values: Array) -> Array:
    """Replace runs of 2 to 14 times ZERO_BYTE by one code each (uint8); split longer runs after every 14."""
    n = ops.length(values)
    zero = ops.cast(values == ZERO_BYTE, "int64")
    before = ops.concat([ops.zeros(1, "int64"), zero])[:n]
    first = zero * (1 - before)
    # The start of the run that contains an element; not used outside of runs.
    starts = ops.concat([ops.zeros(1, "int32"), ops.nonzero(first > 0)])
    offset = ops.arange(n, "int32") - ops.gather(starts, ops.cumsum(first))
    heads = ops.nonzero(ops.bit_or(zero == 0, offset % LONGEST_RUN == 0))
    # A head covers the elements up to the next head; outside of runs this is one element.
    ends = ops.concat([heads, ops.full(1, n, "int32")])[1:]
    reach = ops.cast(ends - heads, "int64")
    return ops.cast(ops.where(reach > 1, reach + (FIRST_RUN - 2), ops.gather(values, heads)), "uint8")


def decode_runs(ops: ArrayOps, codes: Array, n: int) -> Array:
    """Return the n numbers (int64) of encode_runs. Raises PayloadError if the codes give another count."""
    wide = ops.cast(codes, "int64")
    reach = ops.where(wide >= FIRST_RUN, wide - (FIRST_RUN - 2), 1)
    error = PayloadError(
        f"3lc: expected codes for {n} bytes of digits, received codes for another number; the payload is damaged."
    )
    reach = ops.require(ops.sum(reach) == n, error, reach)
    starts = ops.cast(ops.cumsum(reach) - reach, "int32")
    rest = ops.where(wide >= FIRST_RUN, 0, wide - ZERO_BYTE)
    return ops.scatter_add_(ops.full(n, ZERO_BYTE, "int64"), starts, rest)
