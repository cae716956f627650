"""Composites of the dense quantizers: for every coding the encoder and the sum over all ranks' payloads.

A sum takes lists over the ranks and adds in their order. `onto` is an array that the sum starts from and consumes;
without it the first payload starts the sum. A scale is an array of one element unless there is one per bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from grace.core.ops import ternary
from grace.core.ops.helpers import Helpers
from grace.core.values.errors import PayloadError
from grace.core.values.spec import Array, Key

# Bits of the exponent and of the mantissa, and the integer dtype of the same width.
_FORMAT = {"float32": (8, 23, "int32"), "float64": (11, 52, "int64")}
# Random numbers are multiples of 2^-24.
_RANDOM_BITS = 24
_CLIPPED = 127


class Codings(Helpers):
    """Codings of bits, levels in buckets, powers of two, tables, ternary digits and numbers of several widths."""

    # --- bits ---------------------------------------------------------------------------------------------------

    def binarize(self, x: Array, threshold: float, strict: Array | bool = False) -> Array:
        """Return one packed bit per element: x >= threshold, or x > threshold if the 0-d condition `strict` holds."""
        if isinstance(strict, bool):
            above = x > threshold if strict else x >= threshold
        else:
            above = self.bit_or(x > threshold, self.bit_and(x >= threshold, ~strict))
        return self.pack(self.cast(above, "uint8"), 1)

    def binarize_means(self, x: Array, threshold: float, columns: int = 1) -> tuple[Array, Array]:
        """Return the bits of `binarize` and the means of the elements with bit 0 and bit 1, in x's dtype.

        x is a matrix with that many columns, each with means of its own: first all of bit 0, then all of bit 1. The
        mean of no elements is 0.
        """
        count, high, low = self._sides(x, threshold, columns)
        rest, dtype = self.cast(self.length(x) // columns, "float64") - count, self.dtype(x)
        sums = (self.cast(self.cast(side, dtype), "float64") for side in (low, high))
        means = [s / self.where(m > 0, m, 1.0) for s, m in zip(sums, (rest, count), strict=True)]
        return self.binarize(x, threshold), self.reshape(self.cast(self.stack(means, axis=0), dtype), (-1,))

    def sign_mean(self, x: Array, strict: Array | bool = False) -> tuple[Array, Array]:
        """Return the packed bits of x >= 0, or x > 0, and the mean magnitude (x's dtype, (1,)); 0 for an empty array.

        See `binarize`.
        """
        _, high, low = self._sides(x, 0)
        n, dtype = self.cast(self.length(x), "float64"), self.dtype(x)
        mean = self.cast(high - low, dtype) / self.cast(self.where(n > 0, n, 1.0), dtype)
        return self.binarize(x, 0, strict), self.reshape(mean, (1,))

    def _sides(self, x: Array, threshold: float, columns: int = 1) -> tuple[Array, Array, Array]:
        """Return in float64 the number of elements with bit 1, their sum, and the sum of the others.

        They are 0-d for one column, else arrays over the columns.
        """
        high, wide = x >= threshold, self.cast(x, "float64")
        sides = self.cast(high, "float64"), self.where(high, wide, 0.0), self.where(high, 0.0, wide)
        count, above, below = (
            self.sum(side) if columns == 1 else self.sum(self.reshape(side, (-1, columns)), axis=0) for side in sides
        )
        return count, above, below

    def binary_sum(
        self,
        bits: Sequence[Array],
        levels: Sequence[Array],
        n: int,
        onto: Array | None = None,
        negate: bool = False,
        columns: int = 1,
    ) -> Array:
        """Return the sum over ranks of the levels that the bits stand for.

        Each rank has n bits, of a matrix with that many columns, and the levels of its columns: first all of bit 0,
        then all of bit 1. `negate` subtracts instead of adding.
        """
        for data, level in zip(bits, levels, strict=True):
            signed = self.reshape(-level if negate else level, (2, columns))
            above = self.reshape(self.unpack(data, 1, n) > 0, (-1, columns))
            onto = self._plus(onto, self.reshape(self.where(above, signed[1], signed[0]), (-1,)))
        return onto

    def sign_sum(
        self, bits: Sequence[Array], scales: Sequence[Array], n: int, onto: Array | None = None, negate: bool = False
    ) -> Array:
        """Return the result of `binary_sum` for levels of minus and plus a rank's scale."""
        return self.binary_sum(bits, [self.concat([-scale, scale]) for scale in scales], n, onto, negate)

    def majority(self, bits: Sequence[Array], n: int, dtype: str) -> Array:
        """Return 1 where more than half of the ranks set the bit, -1 where fewer did, 0 on a tie."""
        votes = self.unpack(bits[0], 1, n)
        for data in bits[1:]:
            votes = votes + self.unpack(data, 1, n)
        return self.clip(self.cast(2 * votes - len(bits), dtype), -1, 1)

    # --- levels in buckets of `width` consecutive elements --------------------------------------------------------

    def bucket_norms(self, x: Array, width: int, kind: Literal["l2", "max"]) -> Array:
        """Return the Euclidean norm or largest magnitude of every bucket; zeros fill the last one."""
        rows = self._rows(x, width)
        return self.norm(rows, axis=1) if kind == "l2" else self.max(self.abs(rows), axis=1)

    def quantize_packed(
        self,
        x: Array,
        scales: Array,
        width: int,
        levels: int,
        bits: int,
        key: Key,
        limit: Array | None = None,
    ) -> Array:
        """Return levels + l, packed, with l from `quantize` of x and the scale of its bucket.

        With `limit`, of one element, x is first clipped to [-limit, limit].
        """
        n = self.length(x)
        if limit is not None:
            limit = self.reshape(limit, ())
            x = self.clip(x, -limit, limit)
        codes = self.quantize(self._rows(x, width), self.reshape(scales, (-1, 1)), levels, key)
        return self.pack(self.reshape(codes, (-1,))[:n] + levels, bits)

    def dequantize_sum(
        self,
        codes: Sequence[Array],
        scales: Sequence[Array],
        width: int,
        levels: int,
        bits: int,
        n: int,
        onto: Array | None = None,
    ) -> Array:
        """Return the sum of l scale / levels over the results of `quantize_packed`."""
        for data, scale in zip(codes, scales, strict=True):
            rows = self._rows(self.unpack(data, bits, n) - levels, width)
            values = self.dequantize(rows, self.reshape(scale, (-1, 1)), levels, self.dtype(scale))
            onto = self._plus(onto, self.reshape(values, (-1,))[:n])
        return onto

    def _rows(self, x: Array, width: int) -> Array:
        """Return x as a matrix of buckets, padded with zeros."""
        n = self.length(x)
        rows = -(-n // width)
        missing = rows * width - n
        return self.reshape(self.concat([x, self.zeros(missing, self.dtype(x))]) if missing else x, (rows, width))

    # --- powers of two --------------------------------------------------------------------------------------------

    def natural_encode(self, x: Array, key: Key, clipped: bool) -> tuple[Array, Array]:
        """Return the packed signs and exponents of natural compression, and the base (int32, (1,)).

        A code has 9 bits, 12 for float64; with `clipped` 8 bits, with exponents above the base, which is else 0.
        """
        dtype = self.dtype(x)
        exponent, mantissa, integer = _FORMAT[dtype]
        word = self.from_bytes(self.to_bytes(x), integer)
        negative = word < 0
        word = self.bit_and(word, (1 << exponent + mantissa) - 1)
        u = self.uniform(self.length(x), key)
        code, bits, base = self._rounded(word, u, dtype), 1 + exponent, self.zeros(1, "int32")
        if clipped:
            # Code 1 stands for the exponent base + 1, the value `low`.
            low = self.max(code) - _CLIPPED
            low = self.where(low > 0, low, 0)
            inverse = self.shift_left((1 << exponent) - 3 - low, mantissa)
            share = self.abs(x) * self.from_bytes(self.to_bytes(self.reshape(inverse, (1,))), dtype)
            # The sum is rounded to the nearest step of u, so a share of 2^-30 is not always drawn if u is 0.
            up = self.cast(u, dtype) + share >= 1
            code = self.where(self.shift_right(word, mantissa) > low, code - low, self.cast(up, integer))
            bits, base = 8, self.reshape(self.cast(low, "int32"), (1,))
        sign = self.shift_left(self.cast(negative, "int64"), bits - 1)
        return self.pack(self.cast(code, "int64") + sign, bits), base

    def _rounded(self, word: Array, u: Array, dtype: str) -> Array:
        """Return the rounded exponents, as they stand in the bits of a float, from the bits of magnitudes."""
        exponent, mantissa, integer = _FORMAT[dtype]
        if mantissa < _RANDOM_BITS:
            noise = self.cast(u * 2.0**mantissa, integer)
        else:
            # In the middle of its step, so that probabilities are rounded to the nearest multiple.
            shift = mantissa - _RANDOM_BITS
            noise = self.shift_left(self.cast(u * 2.0**_RANDOM_BITS, integer), shift) + (1 << shift - 1)
        return self.clip(self.shift_right(word + noise, mantissa), 0, (1 << exponent) - 2)

    def natural_sum(
        self,
        codes: Sequence[Array],
        bases: Sequence[Array],
        n: int,
        dtype: str,
        clipped: bool,
        onto: Array | None = None,
        negate: bool = False,
    ) -> Array:
        """Return the sum of the powers of two from `natural_encode`; `negate` subtracts instead of adding."""
        exponent, mantissa, integer = _FORMAT[dtype]
        bits = 8 if clipped else 1 + exponent
        for data, base in zip(codes, bases, strict=True):
            word = self.unpack(data, bits, n)
            code = self.bit_and(word, (1 << bits - 1) - 1)
            if clipped:
                code = self.where(code > 0, code + self.cast(base, "int64"), code)
            magnitude = self.from_bytes(self.to_bytes(self.shift_left(self.cast(code, integer), mantissa)), dtype)
            flipped = self.shift_right(word, bits - 1) == (0 if negate else 1)
            onto = self._plus(onto, self.where(flipped, -magnitude, magnitude))
        return onto

    # --- tables of 128 magnitudes ---------------------------------------------------------------------------------

    def table_encode(self, x: Array, scale: Array, table: Array) -> Array:
        """Return the index (uint8) of the table entry nearest |x| / scale, the larger of two; + 128 if x < 0.

        The table ascends.
        """
        share = self.abs(x) / self.where(scale > 0, scale, 1.0)
        index = self.search_sorted((table[:-1] + table[1:]) * 0.5, share)
        return self.cast(index + self.cast(x < 0, "int32") * 128, "uint8")

    def table_sum(
        self, codes: Sequence[Array], scales: Sequence[Array], table: Array, onto: Array | None = None
    ) -> Array:
        """Return the sum of +-entry * scale over the results of `table_encode`."""
        for data, scale in zip(codes, scales, strict=True):
            code = self.cast(data, "int32")
            magnitude = self.gather(table, self.bit_and(code, 127)) * scale
            onto = self._plus(onto, self.where(code > 127, -magnitude, magnitude))
        return onto

    # --- ternary digits -------------------------------------------------------------------------------------------

    def ternary_encode(self, x: Array, scale: Array) -> Array:
        """Return 1 where x >= scale / 2, -1 where x <= -scale / 2, else 0 (also if both hold), in the bytes of 3LC.

        Plus 1 they are digits, five per byte (`grace.core.ops.ternary`); the runs make the length depend on the data.
        """
        # Compare rather than divide: this is exact, and for a scale of 0 both sides hold, which gives 0.
        half = scale * self.cast(0.5, self.dtype(x))
        digits = self.cast(x >= half, "int64") - self.cast(x <= -half, "int64") + 1
        return ternary.encode_runs(self, ternary.to_bytes(self, digits))

    def ternary_sum(self, codes: Sequence[Array], scales: Sequence[Array], n: int, onto: Array | None = None) -> Array:
        """Return the sum of digit * scale. Raises PayloadError for codes that are not those of n digits."""
        for data, scale in zip(codes, scales, strict=True):
            digits = ternary.from_bytes(self, ternary.decode_runs(self, data, ternary.coded_size(n)), n)
            onto = self._plus(onto, self.cast(digits - 1, self.dtype(scale)) * scale)
        return onto

    # --- numbers of 0, 8, 16 bits or all --------------------------------------------------------------------------

    def precision_encode(self, x: Array, bound: float, m: int, h: int) -> tuple[Array, Array, Array, Array]:
        """Encode numbers in 0, 8, 16 or all bits, in the format of the method `inceptionn`.

        Nothing is sent of |x| < bound. Numbers up to 2^-m become steps of 2^-(m+7) (int8), up to 2^-h steps of
        2^-(h+15) (int16); others stay as they are. Returns the full numbers, the words, the bytes, and packed tags of 2
        bits per element: 3, 2, 1 for these, 0 for nothing.
        """
        # Not by `cast`: PyTorch turns a Python number into float32 first.
        size, least = self.abs(x), self.full(1, bound, self.dtype(x))
        tags = 1 + self.cast(size >= 2.0**-m, "int32") + self.cast(size >= 2.0**-h, "int32")
        tags = self.where(size < least, 0, tags)
        byte, word, full = (self.gather(x, self.nonzero(tags == tag)) for tag in (1, 2, 3))
        words, bytes_ = self.cast(word * 2.0 ** (h + 15), "int16"), self.cast(byte * 2.0 ** (m + 7), "int8")
        return full, words, bytes_, self.pack(tags, 2)

    def precision_sum(
        self,
        payloads: Sequence[tuple[Array, Array, Array, Array]],
        m: int,
        h: int,
        n: int,
        dtype: str,
        onto: Array | None = None,
        negate: bool = False,
    ) -> Array:
        """Return the sum of the numbers of `precision_encode`; `negate` subtracts instead of adding.

        Raises PayloadError if the counts do not match the tags.
        """
        total = self.zeros(n, dtype) if onto is None else onto
        sign = -1.0 if negate else 1.0
        for full, words, bytes_, packed in payloads:
            tags = self.unpack(packed, 2, n)
            small = self.cast(bytes_, dtype) * (sign * 2.0 ** -(m + 7))
            middle = self.cast(words, dtype) * (sign * 2.0 ** -(h + 15))
            for tag, values in enumerate((small, middle, -full if negate else full), 1):
                places = self.nonzero(tags == tag)
                error = PayloadError(
                    f"inceptionn: expected as many numbers as tags {tag}, received another count; "
                    "the payload is damaged."
                )
                places = self.require(self.length(places) == self.length(values), error, places)
                total = self.scatter_add_(total, places, values)
        return total

    def _plus(self, onto: Array | None, values: Array) -> Array:
        return values if onto is None else self.add_(onto, values)
