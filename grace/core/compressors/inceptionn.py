"""INCEPTIONN: as many bits per number as an error bound needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from grace.core.config.registry import About, compressors
from grace.core.errors import ConfigError, PayloadError
from grace.core.methods.compressor import Compressor
from grace.core.methods.site import Site
from grace.core.ops.base import packed_size
from grace.core.ops.composites import ArrayOps, plus
from grace.core.ops.table import composite
from grace.core.spec import Array, Field, Payload, TensorSpec

if TYPE_CHECKING:
    from grace.core.ops.native import Native

_FIELDS = ("full", "words", "bytes", "tags")


@compressors.register(
    "inceptionn",
    About(
        family="quantization",
        adam=True,
        tests=[{"error_bound": 0.7}, {"error_bound": 1e-6}, {"error_bound": 2**-10, "relative": False}],
    ),
)
@dataclass(frozen=True)
class Inceptionn(Compressor):
    r"""INCEPTIONN: 0, 8, 16 or 32 bits per element, as many as an error bound needs.

    Formula: C(x)_i = s \, \Delta_i \, \mathrm{trunc}(y_i / \Delta_i) 1_{|y_i| \ge \epsilon}, \; y = x / s

    epsilon is `error_bound`, and s is the largest magnitude of the tensor, which is sent along; with `relative=False`
    it is 1, as in the paper, and gradients far below the bound are lost without a warning. No error exceeds epsilon s.
    The exponent of |y_i| selects the length and the step Delta_i, and a tag of 2 bits tells the length. Nothing is sent
    of |y_i| < epsilon. Numbers below 2^-m take 8 bits, numbers below 2^-h 16 bits; larger numbers travel as they are
    (32 bits; 64 bits for float64 gradients, which share the short forms). With b = ceil(-log2(epsilon)), m =
    max(ceil(b/2), b-7) is halfway between the bound and 1, and h = max(0, b-15) is 0 for bounds of 2^-15 and above.
    Short forms are integers, truncated towards zero, of steps 2^-(m+7) and 2^-(h+15): a sign, zeros, the leading 1,
    whose position is the exponent, and the bits below it. Both steps are at most 2^-b. For bounds below 2^-15, 16 bits
    cannot hold numbers just below 1, which travel in full. Biased towards zero; the error never exceeds |x| (delta =
    0). Three fields have a run-time length.

    Error: 6.7e-08 |x|^2 for normal x; 9.4e-10 |x|^2 with `relative=false`; 2.3e-05 |x|^2 with `error_bound=0.01`.

    Cost: comparisons, three compactions and three scatters; no random numbers, no sorting, no state.

    When: a bound for each element matters, and most are small. One below the bound takes only 2 bits. Use no error
    feedback (GRACE, Table I).

    Reference: Li et al., "A network-centric hardware/algorithm co-design to accelerate distributed training of deep
    neural networks", MICRO 2018.
    """

    error_bound: float = 2**-10
    relative: bool = True

    harmed_by_feedback = "the error of each element is bounded already, and GRACE trains this method without feedback"

    def __post_init__(self) -> None:
        if not 2**-64 <= self.error_bound < 1:
            raise ConfigError(f"inceptionn: error_bound must lie in [2^-64, 1), received {self.error_bound!r}.")

    @property
    def absolute(self) -> bool:
        return not self.relative

    @cached_property
    def linear_in(self) -> tuple[str, ...]:
        return ("scale",) if self.relative else ()

    @property
    def joins(self) -> bool:
        return not self.relative

    @property
    def nonfinite(self) -> Literal["lost", "shown"]:
        return "shown" if self.relative else "lost"

    def contraction(self, spec: TensorSpec) -> float | None:
        return 0.0

    @property
    def _ends(self) -> tuple[int, int]:
        """Return m and h: the 8-bit form ends below 2^-m, the 16-bit form below 2^-h."""
        bits = math.ceil(-math.log2(self.error_bound))
        return max(-(-bits // 2), bits - 7), max(0, bits - 15)

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        scale = (Field("scale", spec.work_dtype, 1),) if self.relative else ()
        return (
            *scale,
            Field("full", spec.work_dtype, "fulls"),
            Field("words", "int16", "words"),
            Field("bytes", "int8", "bytes"),
            Field("tags", "uint8", packed_size(spec.numel, 2)),
        )

    def compress(self, x: Array, at: Site) -> Payload:
        ops, payload = at.ops, {}
        if self.relative:
            payload["scale"] = ops.flat_max_abs(x)
        arrays = precision_encode(ops, x, self._scale(payload, at), self.error_bound, *self._ends)
        return {**payload, **dict(zip(_FIELDS, arrays, strict=True))}

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        return self._sum(payloads, [self._scale(payload, at) for payload in payloads], at)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        return self._sum([payload], [-self._scale(payload, at)], at, onto=x)

    def _sum(self, payloads: Sequence[Payload], scales: list[Array], at: Site, onto: Array | None = None) -> Array:
        arrays = [tuple(payload[name] for name in _FIELDS) for payload in payloads]
        return precision_sum(at.ops, arrays, scales, *self._ends, at.spec.numel, onto, at.out)

    def _scale(self, payload: Payload, at: Site) -> Array:
        return payload["scale"] if self.relative else at.ops.full(1, 1, at.spec.work_dtype)


@composite(one_graph=True)
def precision_encode(
    ops: ArrayOps, x: Array, scale: Array, bound: float, m: int, h: int
) -> tuple[Array, Array, Array, Array]:
    """Encode y = x / scale, or x if the scale is 0, in 0, 8, 16 or all bits.

    Nothing is sent of |y| < bound. Numbers up to 2^-m become steps of 2^-(m+7) (int8), up to 2^-h steps of
    2^-(h+15) (int16); others stay as they are. Returns the full numbers, the words, the bytes, and packed tags of 2
    bits per element: 3, 2, 1 for these, 0 for nothing. The scale is an array of one element.
    """
    x = x / ops.where(scale > 0, scale, 1.0)
    # Not by `cast`: PyTorch turns a Python number into float32 first.
    size, least = ops.abs(x), ops.full(1, bound, ops.dtype(x))
    tags = 1 + ops.cast(size >= 2.0**-m, "int32") + ops.cast(size >= 2.0**-h, "int32")
    tags = ops.where(size < least, 0, tags)
    byte, word, full = (ops.gather(x, ops.nonzero(tags == tag)) for tag in (1, 2, 3))
    words, bytes_ = ops.cast(word * 2.0 ** (h + 15), "int16"), ops.cast(byte * 2.0 ** (m + 7), "int8")
    return full, words, bytes_, ops.pack(tags, 2)


@precision_encode.kernel()
def _(ops: Native, x: Array, scale: Array, bound: float, m: int, h: int) -> tuple[Array, Array, Array, Array] | None:
    dtype = ops.floating(x)
    if dtype is None:
        return None
    outputs, lengths = [dtype, "int16", "int8", "uint8"], [None, None, None, packed_size(ops.length(x), 2)]
    full, words, bytes_, tags = ops.run(
        "precision_encode", [x, scale], [m, h], [float(bound)], outputs=outputs, lengths=lengths
    )
    return full, words, bytes_, tags


@composite()
def precision_sum(
    ops: ArrayOps,
    payloads: Sequence[tuple[Array, Array, Array, Array]],
    scales: Sequence[Array],
    m: int,
    h: int,
    n: int,
    onto: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Return the sum of the numbers of `precision_encode`, with 0 for nothing, times their scales.

    `onto` is an array that the sum starts from and consumes; without it the first payload starts the sum. Raises
    PayloadError if the counts do not match the tags.
    """
    for (full, words, bytes_, packed), scale in zip(payloads, scales, strict=True):
        dtype, tags = ops.dtype(scale), ops.unpack(packed, 2, n)
        small = ops.cast(bytes_, dtype) * 2.0 ** -(m + 7)
        middle = ops.cast(words, dtype) * 2.0 ** -(h + 15)
        sent = ops.zeros(n, dtype)
        for tag, values in enumerate((small, middle, full), 1):
            places = ops.nonzero(tags == tag)
            error = PayloadError(
                f"inceptionn: expected as many numbers as tags {tag}, received another count; the payload is damaged."
            )
            places = ops.require(ops.length(places) == ops.length(values), error, places)
            sent = ops.scatter_add_(sent, places, values)
        onto = plus(ops, onto, sent * scale)
    return onto


@precision_sum.kernel()
def _(
    ops: Native,
    payloads: Sequence[tuple[Array, Array, Array, Array]],
    scales: Sequence[Array],
    m: int,
    h: int,
    n: int,
    onto: Array | None = None,
    out: Array | None = None,
) -> Array | None:
    inputs = [field for fields in zip(*payloads, strict=True) for field in fields]
    integers = [len(payloads), m, h, n]
    return ops.total("precision_sum", [*inputs, *scales], integers, n, ops.dtype(scales[0]), onto, out=out)
