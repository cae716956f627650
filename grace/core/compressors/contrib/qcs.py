"""Quantized compressive sampling: fewer random mixtures of the elements, dithered and rounded to integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from grace.core.codecs.levels import bucket_norms, dequantize_sum, rows_of
from grace.core.codecs.rotation import LONGEST, SHORTEST, first_of_blocks, padded, rotate, rotated_widths
from grace.core.compressors.topk import check_ratio
from grace.core.config.registry import About, compressors
from grace.core.errors import ConfigError
from grace.core.methods.compressor import Compressor, keep_count
from grace.core.methods.site import Site
from grace.core.ops.base import packed_size
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Field, Payload, TensorSpec

_LEAST_BITS, _MOST_BITS = 2, 8


@compressors.register(
    "qcs",
    About(
        family="quantization",
        adam=True,
        tests=[{"compress_ratio": 0.3, "bits": 2, "block_size": 128, "unbiased": True}],
        errors=[{}, {"bits": 2}, {"compress_ratio": 1.0}, {"unbiased": True}],
    ),
)
@dataclass(frozen=True)
class QCS(Compressor):
    r"""Quantized compressive sampling: random mixtures of the elements of a block, dithered, rounded, and transposed.

    Formula: C(x) = g \Delta \, A^T (\lfloor A x / \Delta + u \rfloor + 1/2 - u)

    A has the first m = max(1, int(compress_ratio N)) rows of a random rotation of N = `block_size` elements (random
    signs and a Hadamard transform, twice), so A A^T = 1. u is the dither, uniform from 0 to 1, which the receivers
    subtract: the error of rounding is uniform with variance Delta^2 / 12, whatever x is. A and u follow from the shared
    key and change in each step; they are equal on all ranks, so equal gradients have equal errors. Delta = max_i |(A
    x)_i| / (2^(b - 1) - 1), so that the integers have b = `bits` bits, from 2 to 8. By default, g = s^2 / (s^2 +
    Delta^2 / 12) with s^2 = |A x|^2 / m. This g has the least mean squared error of all linear decoders if the errors
    of the measurements are independent. The result is biased, so it needs error feedback. With `unbiased=true`, g = N /
    m, with an error of about (N / m - 1) |x|^2. A block sends one float of the working dtype. The last block is filled
    with zeros to a power of two.
    `fedqcs` measures sparsified gradients in this way, and finds them again with another decoder.

    Error: 0.51 |x|^2 for normal x; 0.76 |x|^2 with `bits=2`; 1 |x|^2 with `unbiased=true`. It is the same for all x.

    Cost: one rotation and one random number per measurement to encode, and the same once for all ranks to decode.

    When: error feedback with 1 or 2 bits per element, and an error that is the same for all x. For more bits take
    `blockwise`. Without a memory take `eden`.

    Reference: Abdi and Fekri, "Quantized compressive sampling of stochastic gradients for efficient communication in
    distributed deep learning", AAAI 2020.
    """

    compress_ratio: float = 0.5
    bits: int = 4
    block_size: int = 4096
    unbiased: bool = False

    linear_in = ("scales",)

    def __post_init__(self) -> None:
        check_ratio("qcs", self.compress_ratio)
        if not _LEAST_BITS <= self.bits <= _MOST_BITS:
            raise ConfigError(f"qcs: bits must be a number from {_LEAST_BITS} to {_MOST_BITS}, received {self.bits!r}.")
        if not SHORTEST <= self.block_size <= LONGEST or self.block_size & (self.block_size - 1):
            raise ConfigError(
                f"qcs: block_size must be a power of two from {SHORTEST} to {LONGEST}, received {self.block_size!r}."
            )

    @property
    def default_memory(self) -> str:
        return "none" if self.unbiased else "residual"

    @property
    def _steps(self) -> int:
        """Largest integer before the dither."""
        return (1 << self.bits - 1) - 1

    def _measured(self, n: int) -> list[int]:
        """Return the number of measurements of each block."""
        return [keep_count(self.compress_ratio, width) for width in rotated_widths(n, self.block_size)]

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        measured = self._measured(spec.numel)
        codes = packed_size(sum(measured), self.bits)
        return Field("scales", spec.work_dtype, len(measured)), Field("codes", "uint8", codes)

    def compress(self, x: Array, at: Site) -> Payload:
        ops, dtype, measured = at.ops, at.spec.work_dtype, self._measured(at.spec.numel)
        if not measured:
            return {"scales": ops.zeros(0, dtype), "codes": ops.zeros(0, "uint8")}
        width, count = measured[0], sum(measured)
        y = first_of_blocks(ops, rotate(ops, x, self.block_size, at.key), self.block_size, measured)
        steps = bucket_norms(ops, y, width, "max") / ops.cast(self._steps, dtype)
        safe = ops.reshape(ops.where(steps > 0, steps, 1.0), (-1, 1))
        rounded = ops.floor(rows_of(ops, y, width) / safe + rows_of(ops, self._dither(at), width))
        # A dither just below 1 may round the largest measurement up once more.
        codes = ops.cast(ops.clip(rounded, -self._steps, self._steps), "int64") + self._steps
        codes = ops.pack(ops.reshape(codes, (-1,))[:count], self.bits)
        return {"scales": steps * self._gain(ops, y, steps, at), "codes": codes}

    def _dither(self, at: Site) -> Array:
        return at.ops.cast(at.ops.uniform(sum(self._measured(at.spec.numel)), at.key), at.spec.work_dtype)

    def _gain(self, ops: ArrayOps, y: Array, steps: Array, at: Site) -> Array:
        """Return g of every block."""
        measured, dtype = self._measured(at.spec.numel), at.spec.work_dtype
        if self.unbiased:
            widths = rotated_widths(at.spec.numel, self.block_size)
            numbers = [width / m for width, m in zip(widths, measured, strict=True)]
        else:
            numbers = [math.sqrt(m / 12) for m in measured]
        # The last block may differ from the others, which are equal.
        factors = ops.concat([ops.full(len(numbers) - 1, numbers[0], dtype), ops.full(1, numbers[-1], dtype)])
        if self.unbiased:
            return factors
        norms = bucket_norms(ops, y, measured[0], "l2")
        noise = steps / ops.where(norms > 0, norms, 1.0) * factors
        return 1.0 / (noise * noise + 1.0)

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        # All ranks share the mixtures and the dither, so one rotation decodes the sum of their measurements.
        ops, n, measured = at.ops, at.spec.numel, self._measured(at.spec.numel)
        if not measured:
            return ops.zeros(0, at.spec.work_dtype)
        width, count = measured[0], sum(measured)
        scales = [payload["scales"] for payload in payloads]
        # The shared part of all ranks, once: the middle of a step, without the dither.
        together = ops.reshape(sum(scales[1:], scales[0]), (-1, 1))
        shared = ops.reshape(rows_of(ops, 0.5 - self._dither(at), width) * together, (-1,))[:count]
        total = dequantize_sum(
            ops,
            [payload["codes"] for payload in payloads],
            [scale * float(self._steps) for scale in scales],
            width,
            self._steps,
            self.bits,
            count,
            onto=shared,
        )
        whole = _spread(ops, total, self.block_size, measured, rotated_widths(n, self.block_size))
        return rotate(ops, whole, self.block_size, at.key, back=True)[:n]


def _spread(ops: ArrayOps, y: Array, block: int, measured: list[int], widths: list[int]) -> Array:
    """Return the blocks that begin with measurements, with zeros after them."""
    whole, width = widths.count(block), measured[0]
    parts = [padded(ops, y[: whole * width], whole, width, block)] if whole else []
    if whole < len(widths):
        parts.append(padded(ops, y[whole * width :], 1, measured[-1], widths[-1]))
    return ops.concat(parts)
