"""GradZip: low-rank approximation by one step of alternating ridge regression."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grace.core.codecs.lowrank import TwoFactors, matrix_shape, merge_product
from grace.core.config.registry import About, Setting, compressors
from grace.core.errors import ConfigError
from grace.core.memories.powersgd import PowerSGDMemory
from grace.core.methods.fusions import merge_finish
from grace.core.methods.site import Proposal, Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Payload


@compressors.register(
    "gradzip",
    About(
        family="low_rank",
        adam=True,
        tests=[{"compress_rank": 1, "regularization": 1.0}, {"compress_rank": 9, "regularization": 0.001}],
        digits=Setting(options={"compress_rank": 2}),
    ),
)
@dataclass(frozen=True)
class GradZip(TwoFactors):
    r"""GradZip: two low-rank factors, fitted by alternating ridge regression.

    Formula: P = \sum_i M_i A(Q), \; Q_i = M_i^\top A(P), C(M_i) = P Q_i^\top, \; A(F) = F (F^\top F + \lambda I)^{-1}

    M is the gradient as a matrix, split into rows and columns as in `powersgd`; the paper's R is Q^T. The rank r is
    `compress_rank`, lambda is `regularization`. Each half step minimizes `|M - P Q^T|^2 + lambda (|P|^2 + |Q|^2)` in
    one factor. The other factor is first scaled so that the mean square of its columns is 1. This makes lambda a pure
    number, relative to the mean square of a column, whatever the scale of the gradient. Repeated steps on one matrix
    lead to its r largest singular values s_j less a threshold, s'_j = s_j - lambda mean(s'), and to 0 below it.
    There are two allreduces per bucket: P is negotiated, then Q travels; (rows + columns) * r values in all. The summed
    Q starts the next step. Contraction with delta = 0: |M - C(M)|^2 <= |M|^2 - lambda |Q|^2, because Q = 0 would give
    |M|^2.

    Error: 0.98 |x|^2 for normal x.

    Cost: three products of M and r columns (two to send, one to decode), and the singular values of both factors; (F^T
    F + lambda I)^-1 is computed from them, without the loss of digits of a direct inverse.

    When: as `powersgd`, if too high a rank should not fit noise; nothing is orthogonalized. Use error feedback: without
    it everything sent is too small, by the factor 1 / (1 + lambda) for r = 1.

    Reference: Cho et al., "GradZip: gradient compression using alternating matrix factorization for large-scale deep
    learning", NeurIPS workshop 2019.
    """

    regularization: float = 0.01

    title = "gradzip"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.regularization < math.inf:
            raise ConfigError(
                "gradzip: regularization (relative to the mean square of a factor's columns) must be positive, "
                f"received {self.regularization!r}."
            )

    def propose(self, x: Array, at: Site) -> Proposal:
        ops = at.ops
        q = at.state["q"]
        q = self._renewed(q, ops.reshape(ops.max(ops.abs(q), axis=0), (1, -1)) == 0, at)
        _, p = self._half_step(ops.reshape(x, matrix_shape(at.spec)), q, ops)
        return Proposal(ops.reshape(p, (-1,)), "sum")

    def _renewed(self, q: Array, vanished: Array, at: Site) -> Array:
        """Return q with the columns that vanished redrawn from the shared key; a column of zeros would stay zero."""
        ops = at.ops
        return ops.choose(
            ops.any(vanished), lambda: ops.where(vanished, self._random(at.spec, ops, at.key), q), lambda: q
        )

    def compress(self, x: Array, at: Site) -> Payload:
        ops = at.ops
        rows, columns = matrix_shape(at.spec)
        p = ops.reshape(at.negotiated, (rows, self.compress_rank))
        p, q = self._half_step(ops.reshape(x, (rows, columns)), p, ops, transposed=True)
        return {"q": ops.reshape(q, (-1,)), "p": ops.reshape(p, (-1,))}

    def _half_step(self, m: Array, fixed: Array, ops: ArrayOps, transposed: bool = False) -> tuple[Array, Array]:
        """Return the fixed factor F, scaled, and the new factor M F (F^T F + l I)^-1 (with M^T if `transposed`)."""
        r, dtype = self.compress_rank, ops.dtype(m)
        largest = ops.max(ops.abs(fixed))
        # Divide by the largest element first: squares of factors as large as M may leave the range of a float.
        fixed = fixed / ops.where(largest > 0, largest, 1.0)
        size = ops.norm(fixed)
        fixed = fixed * (ops.cast(math.sqrt(r), dtype) / ops.where(size > 0, size, 1.0))
        # Use singular values: computing F^T F would double the digits that small ones lose.
        u, s, v = ops.svd(ops.cast(fixed, "float64"))
        ridge = ops.matmul(u * ops.reshape(s / (s * s + self.regularization), (1, r)), v, transpose_b=True)
        return fixed, ops.matmul(m, ops.cast(ridge, dtype), transpose_a=transposed)


merge_finish.of(GradZip, PowerSGDMemory)(merge_product)
