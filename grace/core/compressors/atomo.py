"""ATOMO: unbiased sparsification of singular triples or of entries with the least variance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from grace.core.codecs.lowrank import matrix_shape, unfit_matrix
from grace.core.compressors.topk import check_ratio
from grace.core.config.registry import About, Setting, compressors
from grace.core.errors import ConfigError, PayloadError
from grace.core.methods.compressor import Compressor, beyond_int32
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Field, Payload, TensorSpec

_EPS = {"float32": 2.0**-23, "float64": 2.0**-52}


@compressors.register(
    "atomo",
    About(
        family="low_rank",
        adam=False,
        tests=[{"compress_rank": 9.5}, {"mode": "entry"}, {"mode": "entry", "compress_ratio": 1.0}],
        digits=Setting(options={"compress_rank": 3}),
    ),
)
@dataclass(frozen=True)
class Atomo(Compressor):
    r"""ATOMO: a random choice of singular triples or entries; unbiased, the least variance for its budget.

    Formula: C(x) = \sum_{a \in A} \frac{\lambda_a}{p_a} a, \quad P(a \in A) = p_a = \min(1, |\lambda_a| / t)

    The gradient is a sum of atoms, x = sum_a lambda_a a, and t is chosen so that `sum_a p_a` equals the budget s. This
    t gives the least variance, `sum_a lambda_a^2 (1 / p_a - 1)`. Atoms above t are always sent as they are; an atom
    below t that is drawn is sent with the weight t. The method is unbiased, and exact where s is at least the number of
    atoms that are not zero.
    With `mode="spectral"` the atoms are the singular triples of the gradient as a matrix (split as in `powersgd`), the
    budget is s = compress_rank, and each atom takes rows + columns values. Vectors, and matrices that would not shrink,
    stay dense.
    With `mode="entry"` the atoms are the entries, the budget is s = max(1, compress_ratio * d), and each atom takes a
    value and an int32 index. s = |x|_1 / |x|_q then gives TernGrad for q = inf and QSGD with one level for q = 2.

    Error: 180 |x|^2 for normal x.

    Cost: one random number per atom and a few passes to find t; "spectral" also a full singular value decomposition in
    float64, about rows * columns * min(rows, columns) operations.

    When: small matrices that need an unbiased low-rank method. On slow networks, with "spectral"; otherwise `powersgd`,
    which needs no decomposition. Use no error feedback: it would only add to the variance.

    Reference: Wang et al., "ATOMO: communication-efficient learning via atomic sparsification", NeurIPS 2018.
    """

    mode: Literal["entry", "spectral"] = "spectral"
    compress_rank: float = 3.0
    compress_ratio: float = 0.1

    unbiased = True

    def __post_init__(self) -> None:
        if not self.compress_rank > 0:
            raise ConfigError(f"atomo: compress_rank must be a positive number, received {self.compress_rank!r}.")
        check_ratio("atomo", self.compress_ratio)

    @property
    def flat(self) -> bool:
        return self.mode == "entry"

    @property
    def multiplies(self) -> bool:
        return self.mode == "spectral"

    def unfit(self, spec: TensorSpec) -> str | None:
        if self.mode == "spectral":
            return unfit_matrix("atomo", spec, self.compress_rank)
        return beyond_int32(spec)

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        if self.mode == "entry":
            return Field("values", spec.work_dtype, "kept"), Field("indices", "int32", "kept", below=spec.numel)
        return Field("left", spec.work_dtype, "rows x kept"), Field("right", spec.work_dtype, "columns x kept")

    def compress(self, x: Array, at: Site) -> Payload:
        ops = at.ops
        largest = ops.max(ops.abs(x))
        # Squares in the decomposition, and sums of magnitudes, must not overflow.
        scaled = x / ops.where(largest > 0, largest, 1.0)
        if self.mode == "entry":
            t = _threshold(ops.abs(scaled), max(1.0, self.compress_ratio * at.spec.numel), ops)
            kept = _drawn(ops.abs(scaled), t, at)
            atoms = ops.gather(scaled, kept)
            drawn = ops.where(atoms < 0, -t * largest, t * largest)
            return {"values": ops.where(ops.abs(atoms) > t, ops.gather(x, kept), drawn), "indices": kept}
        rows, columns = matrix_shape(at.spec)
        # In float64: for close singular values, float32 vectors would differ too much between frameworks.
        wide = ops.svd(ops.cast(ops.reshape(scaled, (rows, columns)), "float64"))
        u, s, v = (ops.cast(array, at.spec.work_dtype) for array in wide)
        # A singular value within the rounding error of zero is no atom.
        s = ops.where(s > s[0] * (max(rows, columns) * _EPS[at.spec.work_dtype]), s, 0.0)
        t = _threshold(s, self.compress_rank, ops)
        kept = _drawn(s, t, at)
        weights = ops.gather(ops.where(s > t, s, t), kept) * largest
        left = ops.gather(ops.transpose(u), kept) * ops.reshape(weights, (-1, 1))
        return {"left": ops.reshape(left, (-1,)), "right": ops.reshape(ops.gather(ops.transpose(v), kept), (-1,))}

    def decompress(self, payload: Payload, at: Site) -> Array:
        ops = at.ops
        if self.mode == "entry":
            return ops.desparsify(payload["values"], payload["indices"], at.spec.numel, at.out)
        return self._product([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        if self.mode == "entry":
            return super().merge(payloads, at)
        return self._product(payloads, at)

    def _product(self, payloads: Sequence[Payload], at: Site) -> Array:
        """Return the sum of all triples of the payloads by one matrix product."""
        ops, (rows, columns) = at.ops, matrix_shape(at.spec)
        error = PayloadError(
            f"atomo: expected as many left vectors of {rows} elements as right ones of {columns}, "
            "received other numbers; the payload is damaged."
        )
        lefts, rights = [], []
        for payload in payloads:
            left, right = payload["left"], payload["right"]
            kept = ops.length(left) // rows
            fits = ops.bit_and(ops.length(left) == kept * rows, ops.length(right) == kept * columns)
            lefts.append(ops.require(fits, error, left))
            rights.append(ops.require(fits, error, right))
        left, right = ops.reshape(ops.concat(lefts), (-1, rows)), ops.reshape(ops.concat(rights), (-1, columns))
        return ops.reshape(ops.matmul(left, right, transpose_a=True), (-1,))


def _threshold(magnitudes: Array, budget: float, ops: ArrayOps) -> Array:
    """Return t with sum_a min(1, m_a / t) = budget; 0 if the budget is enough for all atoms."""
    dtype = ops.dtype(magnitudes)
    if budget >= ops.length(magnitudes):
        return ops.zeros(1, dtype)[0]

    def respent(t: Array) -> Array:
        # Spend what the atoms above t leave of the budget on the others.
        above = magnitudes > t
        left = ops.cast(budget - ops.cast(ops.sum(ops.cast(above, "int64")), "float64"), dtype)
        rest = ops.sum(ops.where(above, 0.0, magnitudes))
        return ops.where(left > 0, rest / ops.where(left > 0, left, 1.0), 0.0)

    # The number of atoms above t only grows and stays below the budget, which bounds the number of rounds.
    start = ops.sum(magnitudes) / ops.cast(budget, dtype)
    rounds = ops.while_loop(
        lambda pair: pair[1] < pair[0],
        lambda pair: ops.stack([pair[1], respent(pair[1])], axis=0),
        ops.stack([start, respent(start)], axis=0),
    )
    return rounds[1]


def _drawn(magnitudes: Array, t: Array, at: Site) -> Array:
    """Return the indices of the atoms to send, each drawn with probability min(1, m / t), never an atom of 0."""
    ops = at.ops
    u = ops.cast(ops.uniform(ops.length(magnitudes), at.private_key), ops.dtype(magnitudes))
    return ops.nonzero(u * t < magnitudes)
