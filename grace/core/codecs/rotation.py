"""Rotated quantization: a random rotation of blocks, and rounding of the rotated elements to a few levels."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grace.core.codecs.listed import bits_for, constant_levels, indices_of_levels
from grace.core.errors import ConfigError
from grace.core.methods.compressor import Compressor
from grace.core.methods.site import Site
from grace.core.ops.base import packed_size
from grace.core.ops.composites import ArrayOps, plus
from grace.core.ops.random import MASK
from grace.core.ops.table import composite
from grace.core.spec import MAX_MAGNITUDE, Array, Field, Key, Payload, TensorSpec

if TYPE_CHECKING:
    from grace.core.ops.native import Native

MOST_BITS = 4
SHORTEST, LONGEST = 128, 4096
# The signs of both halves of a rotation. The rounding draws from stream 0.
_FIRST, _SECOND = 1, 2
# By bits: positive halves of Lloyd's and Max's levels for the standard normal distribution, and their squared error.
_NORMAL_HALVES = {
    1: (0.7978845608,),
    2: (0.4527800346, 1.5104176085),
    3: (0.2450941789, 0.7560052812, 1.3439092785, 2.1519457045),
    4: (0.1283950299, 0.3880482995, 0.6567591185, 0.9423404565, 1.2562311973, 1.6180463860, 2.0690172265, 2.7325895710),
}
NORMAL_ERRORS = {1: 0.3633802276, 2: 0.1174816466, 3: 0.0345477555, 4: 0.0095010083}


@dataclass(frozen=True)
class RotatedQuantizer(Compressor):
    """Base of quantizers behind a random rotation; they define `levels`, and whether they fit the scale or add noise.

    Raises ConfigError for bits outside 1 to 4, for blocks that are not a power of two from 128 to 4096, and for another
    number of transforms than 1 or 2.
    """

    bits: int = 4
    block_size: int = 4096
    shared_rotation: bool = False
    transforms: int = 2

    nonfinite = "shown"
    linear_in = ("scales",)
    # The scale makes each decoded block unbiased; otherwise it maps the outermost levels to the largest magnitude.
    fit = False
    # Round up or down at random, in place of to the nearest level.
    stochastic = False

    def __post_init__(self) -> None:
        name = type(self).__name__.lower()
        if not 1 <= self.bits <= MOST_BITS:
            raise ConfigError(f"{name}: bits must be a number from 1 to {MOST_BITS}, received {self.bits!r}.")
        if not SHORTEST <= self.block_size <= LONGEST or self.block_size & (self.block_size - 1):
            raise ConfigError(
                f"{name}: block_size must be a power of two from {SHORTEST} to {LONGEST}, received {self.block_size!r}."
            )
        if self.transforms not in (1, 2):
            raise ConfigError(f"{name}: transforms must be 1 or 2, received {self.transforms!r}.")

    @property
    def unbiased(self) -> bool:
        # After one transform, a block that a few elements dominate has few values, and not the normal distribution.
        return self.stochastic or self.transforms == 2

    @property
    @abstractmethod
    def levels(self) -> tuple[float, ...]:
        """Return the 2^bits levels, ascending."""

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        widths = rotated_widths(spec.numel, self.block_size)
        scales = Field("scales", spec.work_dtype, len(widths))
        codes = Field("codes", "uint8", packed_size(sum(widths), self.bits), bits=self.bits)
        return (scales, codes) if self.shared_rotation else (scales, Field("salt", "int32", 1), codes)

    def compress(self, x: Array, at: Site) -> Payload:
        ops, key = at.ops, at.private_key
        salt = at.key.rank if self.shared_rotation else None
        how = (self.block_size, self.fit, self.stochastic)
        codes, scales = rotated_encode(ops, x, self._levels(at), *how, key, salt, self.transforms, at.out)
        if self.shared_rotation:
            return {"scales": scales, "codes": codes}
        return {"scales": scales, "salt": ops.full(1, key.rank, "int32"), "codes": codes}

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        return self._sum(payloads, [payload["scales"] for payload in payloads], at)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        return self._sum([payload], [-payload["scales"]], at, onto=x)

    def _sum(self, payloads: Sequence[Payload], scales: list[Array], at: Site, onto: Array | None = None) -> Array:
        codes, rest = [payload["codes"] for payload in payloads], (self._levels(at), self.block_size, at.spec.numel)
        if self.shared_rotation:
            return shared_rotated_sum(at.ops, codes, scales, *rest, at.key, onto, self.transforms, at.out)
        salts = [payload["salt"] for payload in payloads]
        return rotated_sum(at.ops, codes, scales, salts, *rest, at.key, onto, self.transforms, at.out)

    def _levels(self, at: Site) -> Array:
        return constant_levels(at.ops, self.levels, at.spec.work_dtype)


def normal_levels(bits: int) -> tuple[float, ...]:
    """Return the 2^bits levels with the least squared error for standard normal numbers, ascending."""
    half = _NORMAL_HALVES[bits]
    return (*(-level for level in reversed(half)), *half)


def even_levels(bits: int) -> tuple[float, ...]:
    """Return 2^bits evenly spaced levels from -1 to 1."""
    last = 2**bits - 1
    return tuple((2 * j - last) / last for j in range(last + 1))


def rotated_widths(n: int, block: int) -> list[int]:
    """Return the lengths of the rotated blocks of n elements: `block` and, for the rest, a power of two from 8 on."""
    rest = n % block
    return [block] * (n // block) + ([max(8, 1 << (rest - 1).bit_length())] if rest else [])


@composite(one_graph=True)
def rotate(ops: ArrayOps, x: Array, block: int, key: Key, back: bool = False) -> Array:
    """Return the rotated blocks of x, filled up with zeros to `rotated_widths`; `back` applies the inverse.

    A block x, with zeros up to a power of two d, becomes H D' H D x / d, which is a rotation: D and D' are random
    signs, H is the Hadamard transform without a factor. With one transform, a large element would leave its pattern.
    """
    parts = [ops.zeros(0, ops.dtype(x))]
    for first, rows, width in parts_of(ops.length(x), block):
        turn = rotated_back if back else rotated
        parts.append(turn(ops, _filled(ops, x, first, rows * width), first, width, key))
    return ops.concat(parts)


@rotate.kernel()
def _(ops: Native, x: Array, block: int, key: Key, back: bool = False) -> Array | None:
    dtype = ops.floating(x)
    if dtype is None:
        return None
    integers, n = [block, int(back), *ops.key_integers(key)], sum(rotated_widths(ops.length(x), block))
    return ops.run("rotate", [x], integers, outputs=[dtype], lengths=[n])[0]


@composite(one_graph=True)
def rotated_encode(
    ops: ArrayOps,
    x: Array,
    levels: Array,
    block: int,
    fit: bool,
    stochastic: bool,
    key: Key,
    salt: int | None = None,
    transforms: int = 2,
    out: Array | None = None,
) -> tuple[Array, Array]:
    """Return packed codes of the rotated blocks and a scale for each.

    Each block x becomes y, of d elements: by `rotate` or, with one of the `transforms`, H D x, whose length is sqrt(d)
    |x|. The signs are those of the rank `salt` if one is given. y is rounded to the levels q times its reach r, to the
    nearest or, if `stochastic`, to one of the two neighbours with mean y. r is |y| / sqrt(d) if `fit`, and the largest
    |y| otherwise. The scales, for `rotated_sum`, are r / d or, if `fit`, |x|^2 / <y, q>, and with two transforms 1 / d
    of it. The scale of a block with an element that counts as infinite is NaN.
    """
    count, turn = ops.length(levels), key if salt is None else key._replace(rank=salt)
    codes, scales = [], []
    for first, rows, width in parts_of(ops.length(x), block):
        part = _filled(ops, x, first, rows * width)
        y = ops.reshape(rotated(ops, part, first, width, turn, transforms), (rows, width))
        norm = ops.norm(ops.reshape(part, (rows, width)), axis=1)
        reach = norm if fit else ops.max(ops.abs(y), axis=1)
        if fit and transforms == 2:
            reach = reach * ops.cast(1 / math.sqrt(width), ops.dtype(x))
        share: Array = 0.5
        if stochastic:
            noise = ops.uniform(first + rows * width, key)[first:]
            share = 1.0 - ops.reshape(ops.cast(noise, ops.dtype(x)), (rows, width))
        code = ops.reshape(indices_of_levels(ops, y, levels, ops.reshape(reach, (rows, 1)), share), (-1,))
        codes.append(code)
        if fit:
            product = ops.sum(y * ops.reshape(ops.gather(levels, ops.cast(code, "int32")), (rows, width)), axis=1)
            safe = ops.where(product > 0, product, 1.0)
            scale = ops.where(product > 0, norm * (norm / safe), 0.0)
        else:
            scale = reach
        if transforms == 2 or not fit:
            scale = scale / width
        largest = ops.max(ops.abs(ops.reshape(part, (rows, width))), axis=1)
        scales.append(ops.where(largest <= MAX_MAGNITUDE[ops.dtype(x)], scale, float("nan")))
    if not codes:
        return ops.zeros(0, "uint8"), ops.zeros(0, ops.dtype(x))
    return ops.pack(ops.concat(codes), (count - 1).bit_length()), ops.concat(scales)


@rotated_encode.kernel()
def _(
    ops: Native,
    x: Array,
    levels: Array,
    block: int,
    fit: bool,
    stochastic: bool,
    key: Key,
    salt: int | None = None,
    transforms: int = 2,
    out: Array | None = None,
) -> tuple[Array, Array] | None:
    dtype = ops.floating(x)
    if dtype is None:
        return None
    widths = rotated_widths(ops.length(x), block)
    bits = bits_for(ops.length(levels))
    integers = [block, transforms, int(fit), int(stochastic), *ops.key_integers(key)]
    codes, scales = ops.run(
        "rotated_encode" if salt is None else "shared_rotated_encode",
        [x, levels],
        integers if salt is None else [*integers, salt],
        outputs=["uint8", dtype],
        lengths=[packed_size(sum(widths), bits), len(widths)],
        out=out,
    )
    return codes, scales


@composite(one_graph=True)
def rotated_sum(
    ops: ArrayOps,
    codes: Sequence[Array],
    scales: Sequence[Array],
    salts: Sequence[Array],
    levels: Array,
    block: int,
    n: int,
    key: Key,
    onto: Array | None = None,
    transforms: int = 2,
    out: Array | None = None,
) -> Array:
    """Return the sum of scale D H D' H q over the results of `rotated_encode`, added in the order of the ranks.

    With one of the `transforms`, it is that of scale D H q. A salt is the rank of the key that the signs were drawn
    from. `onto` is an array that the sum starts from and consumes; without it the first payload starts the sum.
    """
    for data, scale, salt in zip(codes, scales, salts, strict=True):
        own = Key(key.seed, key.step, ops.bit_and(ops.cast(salt, "int64"), MASK)[0])
        back = _back(ops, _rounded(ops, data, levels, n, block), n, block, own, transforms)
        onto = plus(ops, onto, _times(ops, back, scale, n, block)[:n])
    return onto


@rotated_sum.kernel()
def _(
    ops: Native,
    codes: Sequence[Array],
    scales: Sequence[Array],
    salts: Sequence[Array],
    levels: Array,
    block: int,
    n: int,
    key: Key,
    onto: Array | None = None,
    transforms: int = 2,
    out: Array | None = None,
) -> Array | None:
    inputs, integers = [*codes, *scales, *salts, levels], [len(codes), block, transforms, n, *ops.key_integers(key)]
    return ops.total("rotated_sum", inputs, integers, n, ops.dtype(scales[0]), onto, out=out)


@composite(one_graph=True)
def shared_rotated_sum(
    ops: ArrayOps,
    codes: Sequence[Array],
    scales: Sequence[Array],
    levels: Array,
    block: int,
    n: int,
    key: Key,
    onto: Array | None = None,
    transforms: int = 2,
    out: Array | None = None,
) -> Array:
    """Return D H D' H of the sum of scale q over the results of `rotated_encode`, whose signs are all those of the key.

    With one of the `transforms`, it is D H of the sum. They are added in the order of the ranks, the result to `onto`,
    which is consumed.
    """
    total: Array | None = None
    for data, scale in zip(codes, scales, strict=True):
        total = plus(ops, total, _times(ops, _rounded(ops, data, levels, n, block), scale, n, block))
    return plus(ops, onto, _back(ops, total, n, block, key, transforms)[:n])


@shared_rotated_sum.kernel()
def _(
    ops: Native,
    codes: Sequence[Array],
    scales: Sequence[Array],
    levels: Array,
    block: int,
    n: int,
    key: Key,
    onto: Array | None = None,
    transforms: int = 2,
    out: Array | None = None,
) -> Array | None:
    inputs, integers = [*codes, *scales, levels], [len(codes), block, transforms, n, *ops.key_integers(key)]
    return ops.total("shared_rotated_sum", inputs, integers, n, ops.dtype(scales[0]), onto, out=out)


def _rounded(ops: ArrayOps, codes: Array, levels: Array, n: int, block: int) -> Array:
    """Return q, the levels of the packed codes of n rotated elements."""
    coded = ops.unpack(codes, bits_for(ops.length(levels)), sum(rotated_widths(n, block)))
    return ops.gather(levels, ops.cast(coded, "int32"))


def _times(ops: ArrayOps, x: Array, scales: Array, n: int, block: int) -> Array:
    """Return the rotated blocks of n elements, each times its scale."""
    values, done = [x[:0]], 0
    for first, rows, width in parts_of(n, block):
        part = ops.reshape(x[first : first + rows * width], (rows, width))
        values.append(ops.reshape(part * ops.reshape(scales[done : done + rows], (rows, 1)), (-1,)))
        done += rows
    return ops.concat(values)


def _back(ops: ArrayOps, q: Array, n: int, block: int, key: Key, transforms: int) -> Array:
    """Return D H D' H q of the rotated blocks of n elements, or D H q with one of the transforms."""
    values = [q[:0]]
    for first, rows, width in parts_of(n, block):
        turned = hadamard(ops, q[first : first + rows * width], width)
        if transforms == 2:
            turned = hadamard(ops, _signed(ops, turned, first, key, _SECOND), width)
        values.append(_signed(ops, turned, first, key, _FIRST))
    return ops.concat(values)


def hadamard(ops: ArrayOps, x: Array, width: int) -> Array:
    """Return the Hadamard transform, without a factor, of every `width` elements; the width is a power of two.

    Its stages go from neighbours to the farthest elements, so that all implementations round alike.
    """
    n, distance = ops.length(x), 1
    while distance < width:
        pairs = ops.reshape(x, (n // (2 * distance), 2, distance))
        a, b = pairs[:, 0], pairs[:, 1]
        x = ops.reshape(ops.stack([a + b, a - b], axis=1), (n,))
        distance *= 2
    return x


def _filled(ops: ArrayOps, x: Array, first: int, n: int) -> Array:
    """Return n elements from `first` on, with zeros beyond the end of x."""
    part = x[first : first + n]
    missing = n - ops.length(part)
    return ops.concat([part, ops.zeros(missing, ops.dtype(x))]) if missing else part


def rotated(ops: ArrayOps, x: Array, first: int, width: int, key: Key, transforms: int = 2) -> Array:
    """Return rotated blocks of `width` elements, the first of which is element `first` for the signs.

    After one of the `transforms`, a block is sqrt(width) times as long.
    """
    y = hadamard(ops, _signed(ops, x, first, key, _FIRST), width)
    if transforms == 1:
        return y
    return hadamard(ops, _signed(ops, y, first, key, _SECOND) * (1 / width), width)


def rotated_back(ops: ArrayOps, x: Array, first: int, width: int, key: Key) -> Array:
    """Return the inverse of `rotated`."""
    y = _signed(ops, hadamard(ops, x, width), first, key, _SECOND) * (1 / width)
    return _signed(ops, hadamard(ops, y, width), first, key, _FIRST)


def first_of_blocks(ops: ArrayOps, y: Array, block: int, kept: Sequence[int]) -> Array:
    """Return the first elements of every block of rotated elements: so many of each."""
    whole = ops.length(y) // block
    first = ops.reshape(ops.reshape(y[: whole * block], (whole, block))[:, : kept[0]], (-1,)) if whole else y[:0]
    return ops.concat([first, y[whole * block :][: kept[-1]]]) if whole < len(kept) else first


def padded(ops: ArrayOps, x: Array, rows: int, width: int, to: int) -> Array:
    """Return rows of `width` elements with zeros after each, up to `to` elements."""
    dtype = ops.dtype(x)
    if to % width == 0:
        # Transposing takes ten times as long.
        empty = ops.reshape(ops.zeros(rows * width, dtype), (rows, width))
        return ops.reshape(ops.stack([ops.reshape(x, (rows, width)), *[empty] * (to // width - 1)], axis=1), (-1,))
    columns = ops.reshape(ops.transpose(ops.reshape(x, (rows, width))), (-1,))
    filled = ops.reshape(ops.concat([columns, ops.zeros(rows * (to - width), dtype)]), (to, rows))
    return ops.reshape(ops.transpose(filled), (-1,))


def _signed(ops: ArrayOps, x: Array, first: int, key: Key, stream: int) -> Array:
    """Return x with random signs, for elements from `first` on: bit i % 32 of word i // 32 negates element i."""
    n = ops.length(x)
    words = ops.words(-(-(first + n) // 32), key, stream)[first // 32 :]
    bits = ops.bit_and(ops.shift_right(ops.reshape(words, (-1, 1)), ops.arange(32, "int64")), 1)
    return ops.where(ops.reshape(bits, (-1,))[:n] == 1, -x, x)


def parts_of(n: int, block: int) -> list[tuple[int, int, int]]:
    """Return first element, number of rows and their width of the whole blocks and of the rest, where there are any."""
    widths, whole = rotated_widths(n, block), n // block
    parts = [(0, whole, block)] if whole else []
    return [*parts, (whole * block, 1, widths[-1])] if n % block else parts
