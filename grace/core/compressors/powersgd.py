"""PowerSGD: low-rank approximation by one step of power iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from grace.core.codecs.lowrank import TwoFactors, matrix_shape, merge_product
from grace.core.config.registry import About, Setting, compressors
from grace.core.memories.powersgd import PowerSGDMemory
from grace.core.methods.fusions import merge_finish, propose_sum
from grace.core.methods.site import Proposal, Site
from grace.core.ops.composites import ArrayOps
from grace.core.ops.table import composite
from grace.core.spec import Array, Payload, State

if TYPE_CHECKING:
    from grace.core.ops.native import Native


@compressors.register(
    "powersgd",
    About(
        family="low_rank",
        adam=False,
        tests=[{"compress_rank": 1}, {"compress_rank": 9}],
        errors=[{"compress_rank": rank} for rank in (4, 32)],
        advised=[{"compress_rank": 32}, {}],
        digits=Setting(options={"compress_rank": 2}),
    ),
)
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

    When: large matrices and many ranks. Allreduce carries the payload. Use error feedback. Not for tensors without a
    few leading directions, nor for clusters of different kinds of machines.

    Reference: Vogels et al., "PowerSGD: practical low-rank gradient compression for distributed optimization", NeurIPS
    2019, Algorithm 1.
    """

    title = "powersgd"

    def propose(self, x: Array, at: Site) -> Proposal:
        ops, shape = at.ops, matrix_shape(at.spec)
        p, whole = power_product(ops, x, at.state["q"], shape)
        return Proposal(ops.choose(whole, lambda: p, lambda: self._renewed_product(x, at)), "sum")

    def _renewed_product(self, x: Array, at: Site) -> Array:
        """Return the product with a Q whose columns of zeros are drawn again."""
        q, lengths = unit_columns(at.ops, at.state["q"])
        q = at.ops.where(lengths == 0, self._random(at.spec, at.ops, at.key), q)
        return at.ops.reshape(at.ops.matmul(at.ops.reshape(x, matrix_shape(at.spec)), q), (-1,))

    def compress(self, x: Array, at: Site) -> Payload:
        p, q = project(at.ops, x, at.negotiated, matrix_shape(at.spec))
        return {"q": q, "p": p}


def unit_columns(ops: ArrayOps, q: Array) -> tuple[Array, Array]:
    """Return Q with columns of length 1, or of zeros, and their lengths before, as a row."""
    lengths = ops.reshape(ops.norm(q, axis=0), (1, -1))
    return q / ops.where(lengths == 0, 1.0, lengths), lengths


@composite()
def power_product(ops: ArrayOps, x: Array, q: Array, shape: tuple[int, int]) -> tuple[Array, Array]:
    """Return M Q, flat, with Q's columns divided by their lengths, and whether none is zero; x is M, flat.

    Q is as large as M, and M Q as its square, which float32 can hold only from 1e-19 to 1e19.
    """
    units, lengths = unit_columns(ops, q)
    product = ops.matmul(ops.reshape(x, shape), units)
    return ops.reshape(product, (-1,)), ops.bit_not(ops.any(lengths == 0))


@power_product.kernel()
def _(ops: Native, x: Array, q: Array, shape: tuple[int, int]) -> tuple[Array, Array] | None:
    (n, m), r = shape, int(q.shape[1])
    dtype = ops.thin(x, q, r)
    if dtype is None:
        return None
    product, whole = ops.run("power_product", [x, q], [n, m, r], outputs=[dtype, "bool"], lengths=[n * r, 1])
    return product, whole


@composite()
def sum_power_product(
    ops: ArrayOps, x: Array, y: Array, q: Array, shape: tuple[int, int], out: Array | None = None
) -> tuple[Array, Array, Array]:
    """Return x + y, what `power_product` returns of it, and whether also all of the sum is finite.

    If not, the product may be anything.
    """
    total, finite = ops.finite_sum(x, 1, y, 1, out)
    product, good = ops.choose(
        finite,
        lambda: list(power_product(ops, total, q, shape)),
        lambda: [ops.zeros(shape[0] * int(q.shape[1]), ops.dtype(total)), finite],
    )
    return total, product, good


@sum_power_product.kernel()
def _(
    ops: Native, x: Array, y: Array, q: Array, shape: tuple[int, int], out: Array | None = None
) -> tuple[Array, Array, Array] | None:
    (n, m), r = shape, int(q.shape[1])
    dtype = ops.thin(x, q, r)
    if dtype is None or ops.floating(y) != dtype:
        return None
    outputs, lengths = [dtype, dtype, "bool"], [n * m, n * r, 1]
    total, product, good = ops.run("sum_power_product", [x, y, q], [n, m, r], outputs=outputs, lengths=lengths, out=out)
    return total, product, good


@composite()
def project(ops: ArrayOps, x: Array, p: Array, shape: tuple[int, int]) -> tuple[Array, Array]:
    """Return an orthonormal basis P' of the columns of P, and M^T P'; x is M, and all of them are flat."""
    basis = orthogonalize(ops, ops.reshape(p, (shape[0], -1)))
    product = ops.matmul(ops.reshape(x, shape), basis, transpose_a=True)
    return ops.reshape(basis, (-1,)), ops.reshape(product, (-1,))


@project.kernel()
def _(ops: Native, x: Array, p: Array, shape: tuple[int, int]) -> tuple[Array, Array] | None:
    n, m = shape
    r = ops.length(p) // n
    dtype = ops.thin(x, p, r)
    if dtype is None:
        return None
    basis, product = ops.run("project", [x, p], [n, m, r], outputs=[dtype] * 2, lengths=[n * r, m * r])
    return basis, product


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


@orthogonalize.kernel()
def _(ops: Native, a: Array) -> Array | None:
    rows, columns = (int(side) for side in a.shape)
    flat = ops.reshape(a, (-1,))
    dtype = ops.floating(flat)
    if dtype is None:
        return None
    found = ops.run("orthogonalize", [flat], [rows, columns], outputs=[dtype], lengths=[rows * columns])[0]
    return ops.reshape(found, (rows, columns))


merge_finish.of(PowerSGD, PowerSGDMemory)(merge_product)


@propose_sum.of(PowerSGD, PowerSGDMemory)
def _(
    compressor: PowerSGD, memory: PowerSGDMemory, grad: Array, state: State, at: Site
) -> tuple[Array, Proposal, Array] | None:
    ops, shape = at.ops, matrix_shape(at.spec)
    if ops.products != "kernels":
        return None
    x, p, good = sum_power_product(ops, state["residual"], grad, at.state["q"], shape, at.out)
    p, finite = ops.choose(good, lambda: [p, good], lambda: [compressor._renewed_product(x, at), ops.finite(x)])
    return x, Proposal(p, "sum"), finite
