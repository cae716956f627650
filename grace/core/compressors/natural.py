"""Natural compression: stochastic rounding to powers of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grace.core.config.registry import About, compressors
from grace.core.methods.compressor import Compressor
from grace.core.methods.fusions import compress_checked, merge_scaled
from grace.core.methods.site import Site
from grace.core.ops.base import packed_size
from grace.core.ops.composites import ArrayOps, plus
from grace.core.ops.table import composite
from grace.core.spec import Array, Field, Key, Payload, TensorSpec

if TYPE_CHECKING:
    from grace.core.ops.native import Native

# Bits of the exponent and of the mantissa, and the integer dtype of the same width.
_FORMAT = {"float32": (8, 23, "int32"), "float64": (11, 52, "int64")}
# Random numbers are multiples of 2^-24.
_RANDOM_BITS = 24
_CLIPPED = 127


@compressors.register(
    "natural", About(family="quantization", adam=True, tests=[{"clipped": True}], errors=[{}, {"clipped": True}])
)
@dataclass(frozen=True)
class Natural(Compressor):
    r"""Natural compression: stochastic rounding to a power of two, sent as sign and exponent.

    Formula: C(x)_i = \mathrm{sign}(x_i) \, 2^{e + b_i}, \; b_i \sim \mathrm{Bernoulli}(|x_i| / 2^e - 1)

    e is the exponent of x_i: 2^e <= |x_i| < 2^(e+1). A random number is added to the mantissa, its carry raises the
    exponent, and the mantissa is dropped. Sign and exponent take 9 bits (12 for float64 gradients, whose probabilities
    are multiples of 2^-24). Below the smallest normal number, rounding gives 0 or that number, still unbiased. The
    highest power of two has no neighbor above it; larger values are rounded to it (from 1.7e38 on). Unbiased with
    variance at most |x|^2 / 8; contraction with delta = 7/8.
    `clipped` sends 8 bits: 0 and the 127 exponents up to the tensor's largest after rounding, relative to `base`
    (int32). A value below the lowest of these powers, L, becomes L with probability |x_i| / L, else 0. This is still
    unbiased, and with L <= 2^-125 max|x| the variance bound is the same.

    Error: 0.082 |x|^2 for normal x; 0.082 |x|^2 with `clipped=true`.

    Cost: a few integer passes and one random number per element; no sorting, no state.

    When: a cheap method that keeps relative precision at any scale; 3.5 to 4 times fewer bytes. For fewer bytes take
    qsgd or terngrad. Error feedback is optional (GRACE trains with it, except for recommendation).

    Reference: Horvath et al., "Natural compression for distributed deep learning", arXiv:1905.10988, 2019; MSML 2022.
    """

    clipped: bool = False

    unbiased = True
    harmed_by_feedback = None

    @property
    def joins(self) -> bool:
        return not self.clipped

    def contraction(self, spec: TensorSpec) -> float | None:
        return 7 / 8

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        bits = 8 if self.clipped else {"float32": 9, "float64": 12}[spec.work_dtype]
        codes = Field("codes", "uint8", packed_size(spec.numel, bits), bits=bits)
        return (Field("base", "int32", 1), codes) if self.clipped else (codes,)

    def compress(self, x: Array, at: Site) -> Payload:
        return self.encoded(x, at)[0]

    def encoded(self, x: Array, at: Site) -> tuple[Payload, Array]:
        """Return the payload and the largest magnitude."""
        codes, base, most = natural_encode(at.ops, x, at.private_key, self.clipped, at.out)
        return {"base": base, "codes": codes} if self.clipped else {"codes": codes}, most

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        return self.total(payloads, at)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        return self.total([payload], at, onto=x, negate=True)

    def total(self, payloads: Sequence[Payload], at: Site, **options: Any) -> Array:
        """Return the result of `natural_sum` with these options."""
        ops, spec = at.ops, at.spec
        bases = [payload["base"] if self.clipped else ops.zeros(1, "int32") for payload in payloads]
        codes = [payload["codes"] for payload in payloads]
        return natural_sum(ops, codes, bases, spec.numel, spec.work_dtype, self.clipped, out=at.out, **options)


@compress_checked.of(Natural)
def _(compressor: Natural, x: Array, at: Site) -> tuple[Payload, Array]:
    payload, most = compressor.encoded(x, at)
    # Not a comparison: TensorFlow would turn "not <=" into ">", and NaN is neither.
    return payload, at.ops.finite(most)


@merge_scaled.of(Natural)
def _(compressor: Natural, payloads: Sequence[Payload], factor: float, at: Site) -> Array:
    return compressor.total(payloads, at, factor=factor)


@composite(one_graph=True)
def natural_encode(
    ops: ArrayOps, x: Array, key: Key, clipped: bool, out: Array | None = None
) -> tuple[Array, Array, Array]:
    """Return the packed signs and exponents of natural compression, the base (int32, (1,)), and the largest |x| (1,).

    A code has 9 bits, 12 for float64; with `clipped` 8 bits, with exponents above the base, which is else 0.
    """
    dtype = ops.dtype(x)
    exponent, mantissa, integer = _FORMAT[dtype]
    word = ops.from_bytes(ops.to_bytes(x), integer)
    negative = word < 0
    word = ops.bit_and(word, (1 << exponent + mantissa) - 1)
    u = ops.uniform(ops.length(x), key)
    code, bits, base = _rounded(ops, word, u, dtype), 1 + exponent, ops.zeros(1, "int32")
    if clipped:
        # Code 1 stands for the exponent base + 1, the value `low`.
        low = ops.max(code) - _CLIPPED
        low = ops.where(low > 0, low, 0)
        inverse = ops.shift_left((1 << exponent) - 3 - low, mantissa)
        share = ops.abs(x) * ops.from_bytes(ops.to_bytes(ops.reshape(inverse, (1,))), dtype)
        # The sum is rounded to the nearest step of u, so a share of 2^-30 is not always drawn if u is 0.
        up = ops.cast(u, dtype) + share >= 1
        code = ops.where(ops.shift_right(word, mantissa) > low, code - low, ops.cast(up, integer))
        bits, base = 8, ops.reshape(ops.cast(low, "int32"), (1,))
    sign = ops.shift_left(ops.cast(negative, "int64"), bits - 1)
    return ops.pack(ops.cast(code, "int64") + sign, bits), base, ops.flat_max_abs(x)


@natural_encode.kernel()
def _(ops: Native, x: Array, key: Key, clipped: bool, out: Array | None = None) -> tuple[Array, Array, Array] | None:
    dtype = ops.floating(x)
    if dtype is None:
        return None
    size = packed_size(ops.length(x), 8 if clipped else 1 + _FORMAT[dtype][0])
    integers, outputs = [int(clipped), *ops.key_integers(key)], ["uint8", "int32", dtype]
    lengths = [size, 1, 1]
    codes, base, most = ops.run("natural_encode", [x], integers, outputs=outputs, lengths=lengths, out=out)
    return codes, base, most


def _rounded(ops: ArrayOps, word: Array, u: Array, dtype: str) -> Array:
    """Return the rounded exponents, as they stand in the bits of a float, from the bits of magnitudes."""
    exponent, mantissa, integer = _FORMAT[dtype]
    if mantissa < _RANDOM_BITS:
        noise = ops.cast(u * 2.0**mantissa, integer)
    else:
        # In the middle of its step, so that probabilities are rounded to the nearest multiple.
        shift = mantissa - _RANDOM_BITS
        noise = ops.shift_left(ops.cast(u * 2.0**_RANDOM_BITS, integer), shift) + (1 << shift - 1)
    return ops.clip(ops.shift_right(word + noise, mantissa), 0, (1 << exponent) - 2)


@composite(one_graph=True)
def natural_sum(
    ops: ArrayOps,
    codes: Sequence[Array],
    bases: Sequence[Array],
    n: int,
    dtype: str,
    clipped: bool,
    onto: Array | None = None,
    negate: bool = False,
    factor: float = 1.0,
    out: Array | None = None,
) -> Array:
    """Return a factor times the sum of the powers of two from `natural_encode`; `negate` subtracts them."""
    exponent, mantissa, integer = _FORMAT[dtype]
    bits = 8 if clipped else 1 + exponent
    for data, base in zip(codes, bases, strict=True):
        word = ops.unpack(data, bits, n)
        code = ops.bit_and(word, (1 << bits - 1) - 1)
        if clipped:
            code = ops.where(code > 0, code + ops.cast(base, "int64"), code)
        magnitude = ops.from_bytes(ops.to_bytes(ops.shift_left(ops.cast(code, integer), mantissa)), dtype)
        flipped = ops.shift_right(word, bits - 1) == (0 if negate else 1)
        onto = plus(ops, onto, ops.where(flipped, -magnitude, magnitude))
    return onto if factor == 1 else ops.scale_(onto, factor)


@natural_sum.kernel()
def _(
    ops: Native,
    codes: Sequence[Array],
    bases: Sequence[Array],
    n: int,
    dtype: str,
    clipped: bool,
    onto: Array | None = None,
    negate: bool = False,
    factor: float = 1.0,
    out: Array | None = None,
) -> Array | None:
    integers = [len(codes), n, int(dtype == "float64"), int(clipped), int(negate)]
    return ops.total("natural_sum", [*codes, *bases], integers, n, dtype, onto, [factor], out=out)
