"""SZx: one number for a block of nearly equal elements, and the leading bits of all others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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

_FIELDS = ("middles", "lengths", "leads", "bytes")
# What three roundings to float32 can add to an error, relative to the largest magnitude.
_ROUNDING = 2.0**-22
# Differences below it count as 0, because frameworks differ in denormal numbers.
_TINY = 2.0**-60


@compressors.register(
    "szx",
    About(
        family="quantization",
        adam=True,
        tests=[
            {"error_bound": 0.3, "block_size": 8},
            {"error_bound": 2**-12, "block_size": 32},
            {"error_bound": 2**-20},
        ],
        errors=[{"error_bound": 2.0**-exponent} for exponent in (3, 5, 7)],
    ),
)
@dataclass(frozen=True)
class SZx(Compressor):
    r"""SZx: no error exceeds a bound; a block of nearly equal elements is one number, others keep leading bits.

    Formula: C(x)_i = s \, (\mu_b + v_i), \; |x_i - C(x)_i| \le \epsilon s

    epsilon is `error_bound`, and s is the largest magnitude of the tensor. A block b of `block_size` elements has the
    middle mu_b of its least and its largest element, divided by s, and their distance r_b from it. If r_b is at most
    epsilon, v is 0, and nothing else is sent of the block. Otherwise v_i is the difference from mu_b, of which the
    sign, the exponent and p(r_b) - p(epsilon) + 1 bits of the mantissa are kept; p is the exponent of a number. These
    bits are shifted right to the end of a byte. An element sends only the bytes that differ from those of the element
    before it: a code of 2 bits says how many leading bytes, up to three, are equal. The first of a block sends all. The
    arithmetic is that of float32, also for float64 gradients. The paper's bound is absolute, or relative to the range
    of the data; here it is relative to s, as gradients of any size need it. Two fields have a run-time length.

    Error: 0.00022 |x|^2 for normal x; 0.0033 |x|^2 with `error_bound=0.125`.

    Cost: two reductions per block, shifts and comparisons of integers, five compactions and five gathers; no random
    numbers, no sorting, no state.

    When: a bound for each element matters, and neighbours are alike. A block far below the bound takes one number, so
    it suits gradients whose large elements lie together. Where they do not, bytes are too coarse a step: for normal x,
    `qsgd` has less error with 8 bits than this method with 14. The middle of a block is no mean: use error feedback.

    Reference: Yu et al., "Ultrafast error-bounded lossy compression for scientific datasets", HPDC 2022
    (arXiv:2201.13020).
    """

    error_bound: float = 2**-5
    block_size: int = 128

    default_memory = "residual"

    def __post_init__(self) -> None:
        if not 2**-20 <= self.error_bound < 1:
            raise ConfigError(f"szx: error_bound must lie in [2^-20, 1), received {self.error_bound!r}.")
        if self.block_size < 4 or self.block_size % 4:
            raise ConfigError(f"szx: block_size must be a multiple of 4, at least 4; received {self.block_size!r}.")

    @cached_property
    def linear_in(self) -> tuple[str, ...]:
        return ("scale",)

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        blocks = -(-spec.numel // self.block_size)
        return (
            Field("scale", spec.work_dtype, 1),
            Field("middles", "float32", blocks),
            Field("lengths", "uint8", blocks),
            Field("leads", "uint8", "leads"),
            Field("bytes", "uint8", "bytes"),
        )

    def compress(self, x: Array, at: Site) -> Payload:
        scale = at.ops.flat_max_abs(x)
        arrays = leading_encode(at.ops, x, scale, self.error_bound, self.block_size)
        return {"scale": scale, **dict(zip(_FIELDS, arrays, strict=True))}

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        return self._sum(payloads, [payload["scale"] for payload in payloads], at)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        return self._sum([payload], [-payload["scale"]], at, onto=x)

    def _sum(self, payloads: Sequence[Payload], scales: list[Array], at: Site, onto: Array | None = None) -> Array:
        arrays = [tuple(payload[name] for name in _FIELDS) for payload in payloads]
        return leading_sum(at.ops, arrays, scales, self.block_size, at.spec.numel, onto, at.out)


@composite()
def leading_encode(
    ops: ArrayOps, x: Array, scale: Array, bound: float, block: int
) -> tuple[Array, Array, Array, Array]:
    """Encode y = x / scale, or x if the scale is 0, as float32 in blocks; no error exceeds the bound if |y| <= 1.

    Returns the middles of the blocks (float32), how many leading bits their elements keep (uint8; 0 for none), the
    numbers of equal leading bytes, packed, and the other bytes: first the low bytes of all elements, then the next. The
    scale is an array of one element.
    """
    y, n = ops.cast(x / ops.where(scale > 0, scale, 1.0), "float32"), ops.length(x)
    blocks = -(-n // block)
    if not blocks:
        return y, ops.zeros(0, "uint8"), ops.zeros(0, "uint8"), ops.zeros(0, "uint8")
    # The last element fills the last block: it changes neither end of the block.
    rows = ops.concat([y, ops.gather(y, ops.full(blocks * block - n, n - 1, "int64"))])
    rows = ops.reshape(rows, (blocks, block))
    middles = (ops.max(rows, axis=1) - ops.max(-rows, axis=1)) * 0.5
    # A zero has no sign.
    middles = ops.where(ops.abs(middles) > 0, middles, 0.0)
    rows = rows - ops.reshape(middles, (blocks, 1))
    rows = ops.where(ops.abs(rows) < _TINY, 0.0, rows)
    radii = ops.max(ops.abs(rows), axis=1)
    kept = ops.shift_right(_integers(ops, radii), 23) - 127 - (math.frexp(bound)[1] - 1) + 10
    kept = ops.where(radii > bound - _ROUNDING, ops.clip(kept, 9, 32), 0)
    kept_rows = ops.reshape(kept, (blocks, 1))
    words = ops.reshape(_integers(ops, ops.reshape(rows, (blocks * block,))), (blocks, block))
    words = ops.shift_right(words, 32 - kept_rows)
    before = ops.concat([ops.zeros(1, "int64"), ops.reshape(words, (blocks * block,))])[: blocks * block]
    differ = ops.bit_xor(words, ops.reshape(before, (blocks, block)))
    width = ops.shift_right(kept_rows + 7, 3) + ops.zeros(block, "int64")
    sent = sum(ops.cast(differ >= 256**k, "int64") for k in range(4))
    # At most three leading bytes are equal.
    sent = ops.where(sent < width - 3, width - 3, sent)
    sent = ops.where(ops.arange(block, "int64") == 0, width, sent)
    sent = ops.where(width > 0, sent, 0)
    sent, width, words = (ops.reshape(found, (blocks * block,)) for found in (sent, width, words))
    leads = ops.gather(width - sent, ops.nonzero(width > 0))
    planes = [ops.shift_right(ops.gather(words, ops.nonzero(sent > k)), 8 * k) for k in range(4)]
    data = ops.cast(ops.bit_and(ops.concat(planes), 255), "uint8")
    return middles, ops.cast(kept, "uint8"), ops.pack(leads, 2), data


@leading_encode.kernel()
def _(ops: Native, x: Array, scale: Array, bound: float, block: int) -> tuple[Array, Array, Array, Array] | None:
    if ops.floating(x) is None:
        return None
    blocks, outputs = -(-ops.length(x) // block), ["float32", "uint8", "uint8", "uint8"]
    middles, lengths, leads, data = ops.run(
        "leading_encode", [x, scale], [block], [bound], outputs=outputs, lengths=[blocks, blocks, None, None]
    )
    return middles, lengths, leads, data


@composite()
def leading_sum(
    ops: ArrayOps,
    payloads: Sequence[tuple[Array, Array, Array, Array]],
    scales: Sequence[Array],
    block: int,
    n: int,
    onto: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Return the sum of the n numbers of `leading_encode`, times their scales.

    `onto` is an array that the sum starts from and consumes; without it the first payload starts the sum. Raises
    PayloadError if codes and bytes are not as many as the lengths of the blocks ask for.
    """
    for arrays, scale in zip(payloads, scales, strict=True):
        onto = plus(ops, onto, ops.cast(_decode(ops, *arrays, n, block), ops.dtype(scale)) * scale)
    return onto


@leading_sum.kernel()
def _(
    ops: Native,
    payloads: Sequence[tuple[Array, Array, Array, Array]],
    scales: Sequence[Array],
    block: int,
    n: int,
    onto: Array | None = None,
    out: Array | None = None,
) -> Array | None:
    inputs = [field for fields in zip(*payloads, strict=True) for field in fields]
    integers = [len(payloads), block, n]
    return ops.total("leading_sum", [*inputs, *scales], integers, n, ops.dtype(scales[0]), onto, out=out)


def _decode(ops: ArrayOps, middles: Array, lengths: Array, leads: Array, data: Array, n: int, block: int) -> Array:
    """Return the n float32 numbers of `leading_encode` before they are multiplied by the scale."""
    blocks = -(-n // block)
    if not blocks:
        return ops.zeros(0, "float32")
    kept = ops.clip(ops.cast(lengths, "int64"), 0, 32)
    order = ops.cumsum(ops.cast(kept > 0, "int64"))
    error = PayloadError("szx: expected a code and bytes as the lengths of blocks ask for; the payload is damaged.")
    leads = ops.require(ops.count(leads) * 4 == ops.cast(order[blocks - 1] * block, "float64"), error, leads)
    # Before the codes of the blocks that have some stand those of the others.
    codes = ops.concat([ops.zeros(block, "int64"), ops.unpack(leads, 2, ops.length(leads) * 4)])
    places = ops.reshape(ops.where(kept > 0, order, 0) * block, (blocks, 1)) + ops.arange(block, "int64")
    codes = ops.gather(codes, ops.reshape(places, (blocks * block,)))
    width = ops.reshape(ops.shift_right(kept + 7, 3), (blocks, 1)) + ops.zeros(block, "int64")
    width = ops.reshape(width, (blocks * block,))
    orders = [ops.cumsum(ops.cast(width - codes > k, "int64")) for k in range(4)]
    counts = [order[blocks * block - 1] for order in orders]
    data = ops.require(ops.count(data) == ops.cast(sum(counts), "float64"), error, data)
    data = ops.cast(ops.concat([ops.zeros(1, "uint8"), data]), "int64")
    words, start = ops.zeros(blocks * block, "int64"), 0
    for k, (order, count) in enumerate(zip(orders, counts, strict=True)):
        # A byte that an element does not send is that of the last one that does; the first of a block sends all.
        byte = ops.where(width > k, ops.gather(data, start + order), 0)
        words, start = ops.bit_or(words, ops.shift_left(byte, 8 * k)), start + count
    # The bits go back to their places.
    words = ops.reshape(words, (blocks, block)) * ops.reshape(
        ops.shift_right(ops.full(blocks, 2**32, "int64"), kept), (blocks, 1)
    )
    words = ops.reshape(ops.where(words >= 2**31, words - 2**32, words), (blocks * block,))
    rows = ops.reshape(ops.from_bytes(ops.to_bytes(ops.cast(words, "int32")), "float32"), (blocks, block))
    return ops.reshape(rows + ops.reshape(middles, (blocks, 1)), (blocks * block,))[:n]


def _integers(ops: ArrayOps, x: Array) -> Array:
    """Return the 32 bits of each float32 as a number from 0 on (int64)."""
    bits = ops.cast(ops.from_bytes(ops.to_bytes(x), "int32"), "int64")
    return ops.bit_and(bits, 2**32 - 1)
