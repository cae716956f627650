"""Variance-based sparsification: elements that are not clearly above their noise wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grace.core.config.registry import About, Setting, compressors
from grace.core.errors import ConfigError
from grace.core.methods.capabilities import Selecting
from grace.core.methods.compressor import Compressor
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.ops.table import composite
from grace.core.spec import ITEMSIZE, Array, Field, Payload, TensorSpec

if TYPE_CHECKING:
    from grace.core.ops.native import Native

INDEX_BITS = 28
# Three bits count the powers of two by which an element is below the largest one.
STEPS = 7
MANTISSA = {"float32": 23, "float64": 52}
BIAS = {"float32": 127, "float64": 1023}


@compressors.register("variance", About(family="hybrid", adam=False, digits=Setting(options={"alpha": 1.5})))
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

    default_memory = "variance"
    linear_in = ("scale",)

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
        scale, words = power_words(at.ops, x, at.memory.get("variance"), self.alpha)
        return {"scale": scale, "words": words}

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        words, scales = ([payload[name] for payload in payloads] for name in ("words", "scale"))
        return power_sum(at.ops, words, scales, at.spec.numel, out=at.out)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        return power_sum(at.ops, [payload["words"]], [-payload["scale"]], at.spec.numel, onto=x)

    def erase_(self, x: Array, payload: Payload, at: Site) -> Array:
        return self.fade_(x, payload, at, 1.0)

    def fade_(self, x: Array, payload: Payload, at: Site, factor: float) -> Array:
        return power_fade_(at.ops, x, payload["words"], factor)


@composite(one_graph=True)
def power_words(ops: ArrayOps, x: Array, noise: Array | None, alpha: float) -> tuple[Array, Array]:
    """Return the largest power of two, of shape (1,), and the int32 words of the elements that are sent.

    Those are the elements with x^2 > alpha noise whose nearest power is at most STEPS powers below the largest.
    Without `noise`, all elements may be sent.
    """
    dtype = ops.dtype(x)
    exponents = _exponents(ops, x, dtype)
    if noise is not None:
        # In float64: squares of float32 numbers neither overflow nor vanish there.
        wide = ops.cast(x, "float64")
        exponents = ops.where(wide * wide > ops.cast(noise, "float64") * alpha, exponents, 0)
    top = ops.max(exponents)
    # The exponent 0 stands for zero and for values that round to a denormal.
    chosen = ops.nonzero(ops.bit_and(exponents > 0, exponents >= top - STEPS))
    below = top - ops.gather(exponents, chosen)
    words = ops.bit_or(ops.shift_left(below, INDEX_BITS), ops.cast(chosen, "int64"))
    # In two's complement: the sign of the element is the highest bit of the word.
    words = ops.where(ops.gather(x, chosen) < 0, words - 2**31, words)
    return _power(ops, ops.reshape(top, (1,)), dtype), ops.cast(words, "int32")


@power_words.kernel()
def _(ops: Native, x: Array, noise: Array | None, alpha: float) -> tuple[Array, Array] | None:
    dtype = ops.floating(x)
    if dtype is None:
        return None
    inputs = [x] if noise is None else [x, noise]
    scale, words = ops.run("power_words", inputs, (), [alpha], outputs=[dtype, "int32"], lengths=[1, None])
    return scale, words


@composite()
def power_sum(
    ops: ArrayOps,
    words: Sequence[Array],
    scales: Sequence[Array],
    n: int,
    onto: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Return the sum of the results of `power_words`, added in the order of the ranks, to zeros or `onto`.

    It consumes `onto`. Raises PayloadError for an index out of range.
    """
    values = []
    for one, scale in zip(words, scales, strict=True):
        wide, dtype = ops.cast(one, "int64"), ops.dtype(scale)
        below = ops.bit_and(ops.shift_right(wide, INDEX_BITS), STEPS)
        size = scale * _power(ops, BIAS[dtype] - below, dtype)
        values.append(ops.where(wide < 0, -size, size))
    return ops.sparse_sum(values, [_indices(ops, one) for one in words], n, onto, out)


@power_sum.kernel()
def _(
    ops: Native,
    words: Sequence[Array],
    scales: Sequence[Array],
    n: int,
    onto: Array | None = None,
    out: Array | None = None,
) -> Array | None:
    return ops.total("power_sum", [*words, *scales], [len(words), n], n, ops.dtype(scales[0]), onto, out=out)


@composite()
def power_fade_(ops: ArrayOps, x: Array, words: Array, factor: float) -> Array:
    """Return x times the factor, and 0 for the elements with words; consumes x."""
    return ops.put_(x if factor == 1 else ops.scale_(x, factor), _indices(ops, words), 0.0)


@power_fade_.kernel()
def _(ops: Native, x: Array, words: Array, factor: float) -> Array | None:
    dtype = ops.floating(x)
    if dtype is None:
        return None
    lengths = [ops.length(x)]
    return ops.run("power_fade", [x, words], (), [factor], outputs=[dtype], lengths=lengths, consumes=True)[0]


def _indices(ops: ArrayOps, words: Array) -> Array:
    return ops.cast(ops.bit_and(ops.cast(words, "int64"), 2**INDEX_BITS - 1), "int32")


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
