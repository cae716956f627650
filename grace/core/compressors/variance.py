"""Variance-based sparsification: elements that are not clearly above their noise wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grace.core.methods.capabilities import Selecting
from grace.core.methods.compressor import Compressor
from grace.core.ops.composites import ArrayOps
from grace.core.values.errors import ConfigError
from grace.core.values.registry import compressors
from grace.core.values.spec import ITEMSIZE, Array, Field, Payload, Site, TensorSpec

INDEX_BITS = 28
# Three bits count the powers of two by which an element is below the largest one.
STEPS = 7
MANTISSA = {"float32": 23, "float64": 52}


@compressors.register("variance")
@dataclass(frozen=True)
class Variance(Compressor, Selecting):
    r"""Variance-based sparsifier: elements clearly above their noise, rounded to powers of two, 32 bits each.

    Formula: C(x)_i = \mathrm{sign}(x_i) \, \mathrm{pow2}(|x_i|) \, 1_{x_i^2 > \alpha v_i}

    v is the variance that the memory `variance` keeps; with any other memory v is 0, and every element in range is
    sent. pow2 takes the nearest power of two, the larger of two equally near ones. A word has 1 bit for the
    sign, 3 bits for the exponent, counted down from that of the largest element sent, and 28 bits for the index.
    Elements that round to less than 2^-7 of the largest wait. (The paper rounds the largest elements down, to start at
    their own power; here they are rounded as all others.) The number of words depends on the data and may be 0. A sent
    element is off by at most a third of its size, so the error never exceeds |x|.

    Error: 0.038 |x|^2 for normal x.

    Cost: three passes, one of them in float64; no sorting, no random numbers.

    When: the ratio should follow the noise of the gradient. There is no budget, and early steps send a lot.

    Reference: Tsuzuku, Imachi and Akiba, "Variance-based gradient compression for efficient distributed deep learning",
    ICLR 2018 workshop.
    """

    alpha: float = 1.5

    fixed_size = False
    default_memory = "variance"

    def __post_init__(self) -> None:
        if not self.alpha >= 0:
            raise ConfigError(f"variance: alpha (in variances) must be at least 0, received {self.alpha!r}.")

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
            # In float64: squares of float32 numbers neither overflow nor vanish there.
            wide = ops.cast(x, "float64")
            noise = ops.cast(at.memory["variance"], "float64") * self.alpha
            exponents = ops.where(wide * wide > noise, exponents, 0)
        top = ops.max(exponents)
        # The exponent 0 stands for zero and for values that round to a denormal.
        chosen = ops.nonzero(ops.bit_and(exponents > 0, exponents >= top - STEPS))
        below = top - ops.gather(exponents, chosen)
        words = ops.bit_or(ops.shift_left(below, INDEX_BITS), ops.cast(chosen, "int64"))
        # In two's complement: the sign of the element is the highest bit of the word.
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
    """Return the biased exponents of the nearest powers of two (int64); 0 for zero and for denormal results."""
    bits = ops.from_bytes(ops.to_bytes(x), f"int{8 * ITEMSIZE[dtype]}")
    width, mantissa = 8 * ITEMSIZE[dtype], MANTISSA[dtype]
    magnitude = ops.bit_and(ops.cast(bits, "int64"), 2 ** (width - 1) - 1)
    # Adding half a mantissa carries into the exponent from 1.5 powers on.
    return ops.shift_right(magnitude + 2 ** (mantissa - 1), mantissa)


def _power(ops: ArrayOps, exponents: Array, dtype: str) -> Array:
    """Return the powers of two with these biased exponents; 0 for the exponent 0."""
    bits = ops.cast(ops.shift_left(exponents, MANTISSA[dtype]), f"int{8 * ITEMSIZE[dtype]}")
    return ops.from_bytes(ops.to_bytes(bits), dtype)


def _read(payload: Payload, at: Site) -> tuple[Array, Array]:
    """Return the indices and values of a payload's words."""
    ops, dtype = at.ops, at.spec.work_dtype
    words = ops.cast(payload["words"], "int64")
    indices = ops.cast(ops.bit_and(words, 2**INDEX_BITS - 1), "int32")
    below = ops.bit_and(ops.shift_right(words, INDEX_BITS), STEPS)
    values = _power(ops, _exponents(ops, payload["scale"], dtype) - below, dtype)
    return indices, ops.where(words < 0, -values, values)
