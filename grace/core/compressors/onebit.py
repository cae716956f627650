"""1-bit SGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grace.core.codecs.lowrank import matrix_shape
from grace.core.codecs.signs import binarize_means, binary_sum, sum_columns
from grace.core.codecs.sums import FEEDBACK, Feedback
from grace.core.config.registry import About, compressors
from grace.core.methods.compressor import Compressor
from grace.core.methods.fusions import compress_sum
from grace.core.methods.site import Site
from grace.core.ops.base import packed_size
from grace.core.spec import Array, Field, Payload, State, TensorSpec

# Fewest rows of a matrix whose columns have means of their own: two float32 means take as many bytes as 64 bits.
MIN_ROWS = 64


@compressors.register(
    "onebit",
    # Format 2 has a pair of means for each column.
    About(
        family="quantization",
        adam=False,
        tests=[{"threshold": 0.5}, {"threshold": -0.5}, {"columns": False}],
        payload_format=2,
    ),
)
@dataclass(frozen=True)
class OneBit(Compressor):
    r"""1-bit SGD: one bit per element, decoded to the mean of its side in its column; needs error feedback.

    Formula: C(x)_{ij} = \begin{cases} \mu_{1j} & x_{ij} \ge \tau \\ \mu_{0j} & x_{ij} < \tau \end{cases}

    tau is `threshold`; mu_1j and mu_0j are the means of the elements of column j on each side, sent along. A tensor of
    more axes is the matrix that powersgd makes of it. Vectors have one pair of means, and so have matrices of fewer
    than 64 rows, whose means would take more bytes than their bits; `columns=False` sends one pair for every tensor.
    Each decoded column is the projection of x on two-valued columns, so the error never exceeds |x|. With threshold 0,
    delta >= 1/r if a pair stands for r elements.

    Error: 0.36 |x|^2 for normal x; 0.36 |x|^2 with `columns=false`.

    Cost: three passes for the two means, and bit packing; no random numbers, no sorting.

    When: as efsignsgd, if columns and their sides differ in size. Use error feedback. Not where a few elements of a
    column are large.

    Reference: Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed
    training of speech DNNs", Interspeech 2014.
    """

    threshold: float = 0.0
    columns: bool = True

    default_memory = "residual"
    linear_in = ("means",)

    @property
    def absolute(self) -> bool:
        return self.threshold != 0

    @property
    def flat(self) -> bool:
        return not self.columns

    def contraction(self, spec: TensorSpec) -> float | None:
        return self._pairs(spec) / max(1, spec.numel) if self.threshold == 0 else 0.0

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        means = Field("means", spec.work_dtype, 2 * self._pairs(spec))
        return means, Field("bits", "uint8", packed_size(spec.numel, 1))

    def compress(self, x: Array, at: Site) -> Payload:
        # The mean of an empty side is 0 and is never decoded.
        bits, means = binarize_means(at.ops, x, self.threshold, self._pairs(at.spec))
        return {"means": means, "bits": bits}

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        bits, means = ([payload[name] for payload in payloads] for name in ("bits", "means"))
        return binary_sum(at.ops, bits, means, at.spec.numel, columns=self._pairs(at.spec), out=at.out)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        bits, means, columns = payload["bits"], payload["means"], self._pairs(at.spec)
        return binary_sum(at.ops, [bits], [means], at.spec.numel, onto=x, negate=True, columns=columns)

    def _pairs(self, spec: TensorSpec) -> int:
        """Return the number of pairs of means: one for each column, or one."""
        rows, columns = matrix_shape(spec) if self.columns and spec.ndim > 1 else (0, 0)
        return max(1, columns) if rows >= MIN_ROWS else 1


@compress_sum.of(OneBit, FEEDBACK)
def _(compressor: OneBit, memory: Feedback, grad: Array, state: State, at: Site) -> tuple[Array, Payload, Array] | None:
    terms = memory.terms(grad, state, at)
    if terms is None:
        return None
    x, bits, means, finite = sum_columns(at.ops, *terms, compressor.threshold, compressor._pairs(at.spec), at.out)
    return x, {"means": means, "bits": bits}, finite
