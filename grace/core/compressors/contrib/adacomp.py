"""AdaComp: elements that the latest gradient, added once more, would make the largest of their bin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grace.core.codecs.levels import bucket_norms, rows_of
from grace.core.config.registry import About, compressors
from grace.core.errors import ConfigError
from grace.core.methods.capabilities import Selecting
from grace.core.methods.compressor import Compressor, beyond_int32
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.ops.table import composite
from grace.core.spec import Array, Field, Payload, TensorSpec

if TYPE_CHECKING:
    from grace.core.ops.native import Native


@compressors.register("adacomp", About(family="hybrid", adam=False, tests=[{"bin_size": 7}]))
@dataclass(frozen=True)
class AdaComp(Compressor, Selecting):
    r"""AdaComp: the elements of each bin that reach its maximum if the latest gradient is added once more.

    Formula: C(x)_i = s \, \mathrm{sign}(x_i) \, 1_{|x_i + g_i| \ge m_b}, \; m_b = \max_{j \in b} |x_j|

    x is the residual plus the latest gradient g. Bins hold `bin_size` consecutive elements; the last one may be
    shorter. b is the bin of element i, and s the mean of the maxima of all bins. The memory `adacomp` knows g. With any
    other memory, x itself takes the place of g, and elements of at least half the maximum travel. The number of
    elements depends on the gradients of each layer: it is small where the residual dominates, and larger where a bin
    has no outlier. Zeros never travel. The payload is s and two ascending lists of int32 indices, one per sign: 4 bytes
    per element. (The paper codes an index within its bin in 6 or 14 bits, and takes bins of 50 elements for
    convolutions and of 500 for other layers.) If the maximum of a bin is small, its elements are sent too large. The
    residual corrects this later, but the error can exceed |x|.

    Error: 0.73 |x|^2 for normal x.

    Cost: five passes, one of them a sum in float64; nothing is sorted, no random numbers.

    When: layers need different ratios, and you do not want to choose them.

    Reference: Chen et al., "AdaComp: adaptive residual gradient compression for data-parallel distributed training",
    AAAI 2018, Algorithm 2.
    """

    bin_size: int = 500

    default_memory = "adacomp"
    linear_in = ("scale",)

    def __post_init__(self) -> None:
        if self.bin_size < 1:
            raise ConfigError(f"adacomp: bin_size must be at least 1 element, received {self.bin_size!r}.")

    def unfit(self, spec: TensorSpec) -> str | None:
        return beyond_int32(spec)

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return (
            Field("scale", spec.work_dtype, 1),
            Field("positive", "int32", "positives", below=spec.numel),
            Field("negative", "int32", "negatives", below=spec.numel),
        )

    def compress(self, x: Array, at: Site) -> Payload:
        ops, n, dtype = at.ops, at.spec.numel, at.spec.work_dtype
        if n == 0:
            return {"scale": ops.zeros(1, dtype), "positive": ops.zeros(0, "int32"), "negative": ops.zeros(0, "int32")}
        maxima = bucket_norms(ops, x, self.bin_size, "max")
        positive, negative = select_in_bins(ops, x, at.memory.get("gradient", x), maxima, self.bin_size)
        # In float64, because a sum of large float32 numbers can overflow even if their mean does not.
        scale = ops.sum(ops.cast(maxima, "float64")) / ops.cast(ops.length(maxima), "float64")
        return {"scale": ops.reshape(ops.cast(scale, dtype), (1,)), "positive": positive, "negative": negative}

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        parts = [part for payload in payloads for part in _parts(payload, payload["scale"], at)]
        values, indices = zip(*parts, strict=True)
        return at.ops.sparse_sum(values, indices, at.spec.numel, out=at.out)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        values, indices = zip(*_parts(payload, -payload["scale"], at), strict=True)
        return at.ops.sparse_sum(values, indices, at.spec.numel, onto=x)

    def erase_(self, x: Array, payload: Payload, at: Site) -> Array:
        return at.ops.put_(at.ops.put_(x, payload["positive"], 0.0), payload["negative"], 0.0)


def _parts(payload: Payload, scale: Array, at: Site) -> list[tuple[Array, Array]]:
    """Return the values and indices of both lists."""
    return [
        (at.ops.full(at.ops.length(payload[name]), value, at.spec.work_dtype), payload[name])
        for name, value in (("positive", scale[0]), ("negative", -scale[0]))
    ]


@composite()
def select_in_bins(ops: ArrayOps, x: Array, gradient: Array, maxima: Array, width: int) -> tuple[Array, Array]:
    """Return the ascending indices of the positive and of the negative x with |x + gradient| >= the maximum of its bin.

    Bins have `width` elements, but for the last one.
    """
    reached = rows_of(ops, ops.abs(x + gradient), width) >= ops.reshape(maxima, (-1, 1))
    reached = ops.reshape(reached, (-1,))[: ops.length(x)]
    return ops.nonzero(ops.bit_and(reached, x > 0)), ops.nonzero(ops.bit_and(reached, x < 0))


@select_in_bins.kernel()
def _(ops: Native, x: Array, gradient: Array, maxima: Array, width: int) -> tuple[Array, Array] | None:
    if ops.floating(x) is None or ops.floating(gradient) is None:
        return None
    outputs, lengths = ["int32", "int32"], [None, None]
    positive, negative = ops.run("select_in_bins", [x, gradient, maxima], [width], outputs=outputs, lengths=lengths)
    return positive, negative
