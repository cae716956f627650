"""Variance-based sparsification: what is not clearly above its noise waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grace.core.compressor import Compressor
from grace.core.errors import ConfigError
from grace.core.ops.composites import ArrayOps
from grace.core.registry import compressors
from grace.core.spec import ITEMSIZE, Array, Field, Payload, Site, TensorSpec

INDEX_BITS = 28
# Three bits tell how many powers of two an element is below the largest one.
STEPS = 7
MANTISSA = {"float32": 23, "float64": 52}


@compressors.register("variance")
@dataclass(frozen=True)
class Variance(Compressor):
    """C(x_i) = the power of two nearest to x_i, where x_i^2 > alpha v_i; else 0: one 32-bit word per element sent.

    v is the variance that the memory `variance` keeps; with any other memory v is 0, and everything in range is
    sent. A word has 1 bit of sign, 3 bits for the exponent, counted down from that of the largest element sent, and
    28 bits of index. Elements that round to less than 2^-7 of the largest wait. Of two equally near powers the
    larger one is taken. (The paper rounds the largest ones down, so as to begin at its own power; this rounds them
    like all others.) The number of words depends on the data and may be 0. An element sent is off by at most a
    third of it, so the error never exceeds |x|.
    Cost: three passes, one of them in float64; no sorting, no random numbers.
    When: the ratio shall follow the noise of the gradient; it has no budget, early steps send a lot.
    Tsuzuku, Imachi and Akiba, "Variance-based gradient compression for efficient distributed deep learning", ICLR
    2018 workshop.
    """

    alpha: float = 1.5

    fixed_size = False
    selects = True
    default_memory = "variance"

    def __post_init__(self) -> None:
        if not self.alpha >= 0:
            raise ConfigError(f"variance: alpha is a number of variances, at least 0; received {self.alpha!r}.")

    def contraction(self, spec: TensorSpec) -> float | None:
        return 0.0

    def unfit(self, spec: TensorSpec) -> str | None:
        if spec.numel >= 2**INDEX_BITS:
            return f"{spec.numel} elements cannot be addressed by indices of {INDEX_BITS} bits"
        return None

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return Field("scale", spec.work_dtype, 1), Field("words", "int32", "sent")

    def compress(self, x: Array, at: Site) -> Payload:
        ops, dtype = at.ops, at.spec.work_dtype
        exponents = _exponents(ops, x, dtype)
        if "variance" in at.memory:
            # In float64, where squares of float32 numbers neither overflow nor vanish.
            wide = ops.cast(x, "float64")
            noise = ops.cast(at.memory["variance"], "float64") * self.alpha
            exponents = ops.where(wide * wide > noise, exponents, 0)
        top = ops.max(exponents)
        # The exponent 0 is that of zero and of what rounds to a denormal.
        chosen = ops.nonzero(ops.bit_and(exponents > 0, exponents >= top - STEPS))
        below = top - ops.gather(exponents, chosen)
        words = ops.bit_or(ops.shift_left(below, INDEX_BITS), ops.cast(chosen, "int64"))
        # As a two's complement: the sign of the element is the highest bit of the word.
        words = ops.where(ops.gather(x, chosen) < 0, words - 2**31, words)
        return {"scale": _power(ops, ops.reshape(top, (1,)), dtype), "words": ops.cast(words, "int32")}

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        indices, values = zip(*(_read(payload, at) for payload in payloads), strict=True)
        return at.ops.sparse_sum(values, indices, at.spec.numel)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        indices, values = _read(payload, at)
        return at.ops.sparse_sum([-values], [indices], at.spec.numel, onto=x)

    def erase_(self, x: Array, payload: Payload, at: Site) -> Array:
        indices, _ = _read(payload, at)
        return at.ops.put_(x, indices, 0.0)


def _exponents(ops: ArrayOps, x: Array, dtype: str) -> Array:
    """Biased exponents of the nearest powers of two (int64); 0 for zero and where that is a denormal."""
    bits = ops.from_bytes(ops.to_bytes(x), f"int{8 * ITEMSIZE[dtype]}")
    width, mantissa = 8 * ITEMSIZE[dtype], MANTISSA[dtype]
    magnitude = ops.bit_and(ops.cast(bits, "int64"), 2 ** (width - 1) - 1)
    # Half a mantissa more carries into the exponent from 1.5 powers on.
    return ops.shift_right(magnitude + 2 ** (mantissa - 1), mantissa)


def _power(ops: ArrayOps, exponents: Array, dtype: str) -> Array:
    """The powers of two with these biased exponents; 0 of exponent 0."""
    bits = ops.cast(ops.shift_left(exponents, MANTISSA[dtype]), f"int{8 * ITEMSIZE[dtype]}")
    return ops.from_bytes(ops.to_bytes(bits), dtype)


def _read(payload: Payload, at: Site) -> tuple[Array, Array]:
    """Indices and values of a payload's words."""
    ops, dtype = at.ops, at.spec.work_dtype
    words = ops.cast(payload["words"], "int64")
    indices = ops.cast(ops.bit_and(words, 2**INDEX_BITS - 1), "int32")
    below = ops.bit_and(ops.shift_right(words, INDEX_BITS), STEPS)
    values = _power(ops, _exponents(ops, payload["scale"], dtype) - below, dtype)
    return indices, ops.where(words < 0, -values, values)
