"""GradZip: low-rank approximation by one step of alternating ridge regression."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grace.core.errors import ConfigError
from grace.core.lowrank import TwoFactors, matrix_shape
from grace.core.ops.composites import ArrayOps
from grace.core.registry import compressors
from grace.core.spec import Array, Payload, Proposal, Site


@compressors.register("gradzip")
@dataclass(frozen=True)
class GradZip(TwoFactors):
    """P = sum_i M_i Q (Q^T Q + l I)^-1, Q = M_i^T P (P^T P + l I)^-1, l = regularization; C(M_i) = P Q^T.

    M is the gradient as a matrix, split into rows and columns as for `powersgd`; the paper's R is Q^T. Both are half a
    step of least |M - P Q^T|^2 + l (|P|^2 + |Q|^2). The factor that stands still is first scaled to columns of mean
    square 1, which makes l a pure number: relative to the mean square of a column, whatever the size of the gradient.
    Steps on one matrix lead to its r largest singular values s_j less a threshold, s'_j = s_j - l mean(s'), and to 0
    below it. r = compress_rank. Two allreduces per bucket: P is agreed on, Q travels; (rows + columns) * r values. The
    summed Q is the next start. Contraction with delta = 0: |M - C(M)|^2 <= |M|^2 - l |Q|^2, as Q = 0 would give |M|^2.
    Cost: three products of M and r columns (two to send, one to decode), and singular values of both factors, from
    which (F^T F + l I)^-1 comes without the loss of digits that an inverse has.
    When: as `powersgd`, where a rank chosen too high should not chase noise; it orthogonalizes nothing. Without error
    feedback all that is sent is too small, by the factor 1 / (1 + l) for r = 1.
    Cho et al., "GradZip: gradient compression using alternating matrix factorization for large-scale deep learning",
    NeurIPS workshop 2019.
    """

    regularization: float = 0.01

    title = "gradzip"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.regularization < math.inf:
            raise ConfigError(
                "gradzip: regularization is relative to the mean square of a factor's columns and must be positive, "
                f"received {self.regularization!r}."
            )

    def agree(self, x: Array, at: Site) -> Proposal | None:
        ops = at.ops
        q = at.state["q"]
        q = self.renewed(q, ops.reshape(ops.max(ops.abs(q), axis=0), (1, -1)) == 0, at)
        _, p = self._half_step(ops.reshape(x, matrix_shape(at.spec)), q, ops)
        return Proposal(ops.reshape(p, (-1,)), "sum")

    def compress(self, x: Array, at: Site) -> Payload:
        ops = at.ops
        rows, columns = matrix_shape(at.spec)
        p = ops.reshape(at.agreed, (rows, self.compress_rank))
        p, q = self._half_step(ops.reshape(x, (rows, columns)), p, ops, transposed=True)
        return {"q": ops.reshape(q, (-1,)), "p": ops.reshape(p, (-1,))}

    def _half_step(self, m: Array, fixed: Array, ops: ArrayOps, transposed: bool = False) -> tuple[Array, Array]:
        """The fixed factor F, scaled, and the other one M F (F^T F + l I)^-1, or with M^T in the place of M."""
        r, dtype = self.compress_rank, ops.dtype(m)
        largest = ops.max(ops.abs(fixed))
        # By the largest element first: squares of factors of the order of M need not fit into a float.
        fixed = fixed / ops.where(largest > 0, largest, 1.0)
        size = ops.norm(fixed)
        fixed = fixed * (ops.cast(math.sqrt(r), dtype) / ops.where(size > 0, size, 1.0))
        # By singular values, because squares of F would double the digits that small ones lose.
        u, s, v = ops.svd(ops.cast(fixed, "float64"))
        ridge = ops.matmul(u * ops.reshape(s / (s * s + self.regularization), (1, r)), v, transpose_b=True)
        return fixed, ops.matmul(m, ops.cast(ridge, dtype), transpose_a=transposed)
