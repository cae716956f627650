"""PowerSGD: low-rank approximation by one step of power iteration."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.lowrank import TwoFactors, matrix_shape
from grace.core.registry import compressors
from grace.core.spec import Array, Payload, Proposal, Site


@compressors.register("powersgd")
@dataclass(frozen=True)
class PowerSGD(TwoFactors):
    """P = orth(sum_i M_i Q), Q = M_i^T P; C(M_i) = P Q^T, an orthogonal projection of M_i to rank r.

    M is the gradient as a matrix: its axes split where rows + columns are fewest, which is after the first one for
    PyTorch's convolutions and before the last one for Keras'. Two allreduces per bucket: P is agreed on, Q travels as
    the payload; (rows + columns) * r values in all. The summed Q is the next step's start (warm start); a column that
    vanished is drawn anew from the shared key. r = compress_rank. Vectors and matrices that would not shrink stay
    dense.
    Cost: three products of M and r columns (two to send, one to decode), and Gram-Schmidt, done twice, of P on every
    rank; random numbers for the first Q only; no sorting. State: Q.
    When: large matrices and many ranks, because allreduce carries it; needs error feedback. Not for tensors without a
    few leading directions, nor where ranks are machines of different kinds.
    Vogels et al., "PowerSGD: practical low-rank gradient compression for distributed optimization", NeurIPS 2019,
    Algorithm 1.
    """

    title = "powersgd"

    def agree(self, x: Array, at: Site) -> Proposal | None:
        ops = at.ops
        q = at.state["q"]
        length = ops.reshape(ops.norm(q, axis=0), (1, -1))
        vanished = length == 0
        # Q is of the order of M, and M Q of its square, which float32 holds from 1e-19 to 1e19 only.
        q = self.renewed(q / ops.where(vanished, 1.0, length), vanished, at)
        p = ops.matmul(ops.reshape(x, matrix_shape(at.spec)), q)
        return Proposal(ops.reshape(p, (-1,)), "sum")

    def compress(self, x: Array, at: Site) -> Payload:
        ops = at.ops
        rows, columns = matrix_shape(at.spec)
        p = ops.orthogonalize(ops.reshape(at.agreed, (rows, self.compress_rank)))
        q = ops.matmul(ops.reshape(x, (rows, columns)), p, transpose_a=True)
        return {"q": ops.reshape(q, (-1,)), "p": ops.reshape(p, (-1,))}
