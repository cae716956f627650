"""PowerSGD: low-rank approximation by one step of power iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from grace.core.codecs.lowrank import TwoFactors, matrix_shape
from grace.core.ops.composites import ArrayOps
from grace.core.ops.table import composite
from grace.core.values.registry import compressors
from grace.core.values.spec import Array, Payload, Proposal, Site

if TYPE_CHECKING:
    from grace.core.ops.native import Native


@compressors.register("powersgd")
@dataclass(frozen=True)
class PowerSGD(TwoFactors):
    r"""PowerSGD: two low-rank factors from one step of power iteration; needs error feedback.

    Formula: P = \mathrm{orth}\bigl(\textstyle\sum_i M_i Q\bigr), \quad Q_i = M_i^\top P, \quad C(M_i) = P Q_i^\top

    C is an orthogonal projection of the gradient matrix M_i to rank r = compress_rank. The tensor becomes a matrix by
    splitting its axes where rows + columns is smallest: after the first axis for a PyTorch convolution, before the last
    one for Keras. There are two allreduces per bucket: P is negotiated, then Q travels as the payload; (rows + columns)
    * r values in all. The summed Q starts the next step (warm start). A column of zeros is redrawn from the shared key.
    Vectors, and matrices that would not shrink, stay dense.

    Error: 0.98 |x|^2 for normal x.

    Cost: three products of M and r columns (two to send, one to decode), and Gram-Schmidt, run twice, on P on every
    rank; random numbers for the first Q only; no sorting. State: Q.

    When: large matrices and many ranks, because allreduce carries the payload. Use error feedback. Not for tensors
    without a few leading directions, nor for clusters of different kinds of machines.

    Reference: Vogels et al., "PowerSGD: practical low-rank gradient compression for distributed optimization", NeurIPS
    2019, Algorithm 1.
    """

    title = "powersgd"

    def propose(self, x: Array, at: Site) -> Proposal:
        ops = at.ops
        q = at.state["q"]
        length = ops.reshape(ops.norm(q, axis=0), (1, -1))
        vanished = length == 0
        # Q is as large as M, and M Q as its square, which float32 can hold only from 1e-19 to 1e19.
        q = self.renewed(q / ops.where(vanished, 1.0, length), vanished, at)
        p = ops.matmul(ops.reshape(x, matrix_shape(at.spec)), q)
        return Proposal(ops.reshape(p, (-1,)), "sum")

    def compress(self, x: Array, at: Site) -> Payload:
        ops = at.ops
        rows, columns = matrix_shape(at.spec)
        p = orthogonalize(ops, ops.reshape(at.negotiated, (rows, self.compress_rank)))
        q = ops.matmul(ops.reshape(x, (rows, columns)), p, transpose_a=True)
        return {"q": ops.reshape(q, (-1,)), "p": ops.reshape(p, (-1,))}


@composite(one_graph=True)
def orthogonalize(ops: ArrayOps, a: Array) -> Array:
    """Return orthonormal columns with the span of a's, by Gram-Schmidt run twice; dependent columns become zero."""
    columns: list[Array] = []
    for j in range(int(a.shape[1])):
        # Products of a column of denormals would lose their few bits.
        largest = ops.max(ops.abs(a[:, j]))
        column = original = a[:, j] / ops.where(largest > 0, largest, 1.0)
        for _ in range(2):
            for other in columns:
                column = column - other * ops.sum(other * column)
        length = ops.norm(column)
        # The rest of a dependent column is rounding noise; normalizing it would invent a direction.
        independent = length > 1e-6 * ops.norm(original)
        column = ops.where(independent, column / ops.where(independent, length, 1.0), 0.0)
        columns.append(column)
    return ops.stack(columns, axis=1)


@orthogonalize.kernel(orthogonalize="a T; rows, columns -> T[rows columns]")
def _(ops: Native, a: Array) -> Array | None:
    rows, columns = (int(side) for side in a.shape)
    flat = ops.reshape(a, (-1,))
    dtype = ops.floating(flat)
    if dtype is None:
        return None
    found = ops.run("orthogonalize", [flat], [rows, columns], outputs=[dtype], lengths=[rows * columns])[0]
    return ops.reshape(found, (rows, columns))
