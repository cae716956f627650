"""ACP-SGD: alternating low-rank compression, one factor per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grace.core.codecs.lowrank import matrix_shape, unfit_matrix
from grace.core.compressors.powersgd import orthogonalize
from grace.core.config.registry import About, Setting, compressors
from grace.core.errors import ConfigError, PayloadError
from grace.core.memories.powersgd import PowerSGDMemory
from grace.core.methods.capabilities import Learning
from grace.core.methods.compressor import Compressor
from grace.core.methods.fusions import merge_finish
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Field, Key, Payload, State, TensorSpec


@compressors.register(
    "acpsgd",
    About(family="low_rank", adam=True, tests=[{"compress_rank": 1}], digits=Setting(options={"compress_rank": 2})),
)
@dataclass(frozen=True)
class ACPSGD(Compressor, Learning):
    r"""ACP-SGD: the two halves of PowerSGD's step in turn, one low-rank factor and one allreduce per step.

    Formula: P_i = M_i Q, \; C(M_i) = P_i Q^\top; \quad \text{next step:}\; Q_i = M_i^\top P, \; C(M_i) = P Q_i^\top

    Q holds the orthonormal columns of the sum of all Q_i of the step before, P likewise; the first Q is random. So C is
    an orthogonal projection of the gradient matrix M_i to rank r = compress_rank, and payloads can be added. A rank
    sends rows * r values in even and columns * r values in odd steps, half of powersgd's, and nothing is negotiated.
    The matrix is that of powersgd. A column of zeros is redrawn from the shared key. Vectors, and matrices that would
    not shrink, stay dense.

    Error: 1 |x|^2 for normal x.

    Cost: two products of M and r columns, and Gram-Schmidt, run twice, on one factor; random numbers for the first Q
    only; no sorting. State: P and Q.

    When: as `powersgd`, with one collective a step instead of two. It pays where a second one costs more than a
    basis that is one step old. Use error feedback.

    Reference: Zhang et al., "Evaluation and optimization of gradient compression for distributed deep learning", ICDCS
    2023.
    """

    compress_rank: int = 4

    summable = True
    flat = False
    multiplies = True
    linear_in = ("factor",)
    default_memory = "powersgd"

    def __post_init__(self) -> None:
        if self.compress_rank < 1:
            raise ConfigError(f"acpsgd: compress_rank must be at least 1, received {self.compress_rank!r}.")

    def contraction(self, spec: TensorSpec) -> float | None:
        return 0.0

    def unfit(self, spec: TensorSpec) -> str | None:
        return unfit_matrix("acpsgd", spec, self.compress_rank)

    def init(self, spec: TensorSpec, ops: ArrayOps, key_seed: int) -> State:
        rows, columns = matrix_shape(spec)
        q = orthogonalize(ops, self._random(columns, spec, ops, Key(key_seed, 0)))
        # `odd` counts the steps of this state modulo 2; the step number would also count steps that were lost.
        p = ops.reshape(ops.zeros(rows * self.compress_rank, spec.work_dtype), (rows, self.compress_rank))
        return {"p": p, "q": q, "odd": ops.zeros(1, "int64")}

    def _random(self, n: int, spec: TensorSpec, ops: ArrayOps, key: Key) -> Array:
        r = self.compress_rank
        return ops.reshape(ops.cast(ops.uniform(n * r, key), spec.work_dtype) - 0.5, (n, r))

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return (Field("factor", spec.work_dtype, "of the side"),)

    def compress(self, x: Array, at: Site) -> Payload:
        ops, m = at.ops, at.ops.reshape(x, matrix_shape(at.spec))
        factor = ops.choose(
            at.state["odd"][0] == 0,
            lambda: ops.reshape(ops.matmul(m, at.state["q"]), (-1,)),
            lambda: ops.reshape(ops.matmul(m, at.state["p"], transpose_a=True), (-1,)),
        )
        return {"factor": factor}

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        p, q = self.factors(payloads, at)
        return at.ops.flat_product(p, q, self.compress_rank, at.out)

    def factors(self, payloads: Sequence[Payload], at: Site) -> list[Array]:
        """Return the flat factors of the merged gradient."""
        ops, total = at.ops, self._sum(payloads, at)
        p, q = (ops.reshape(at.state[side], (-1,)) for side in ("p", "q"))
        factors: list[Array] = ops.choose(at.state["odd"][0] == 0, lambda: [total, q], lambda: [p, total])
        return factors

    def _sum(self, payloads: Sequence[Payload], at: Site) -> Array:
        """Return the sum of the factors. Raises PayloadError for one of another length."""
        factors = [payload["factor"] for payload in payloads]
        for length in map(at.ops.length, factors):
            # Not in a graph, whose optimizer takes the length in one phase for that in the other.
            if isinstance(length, int):
                expected = matrix_shape(at.spec)[int(at.state["odd"][0])] * self.compress_rank
                if length != expected:
                    raise PayloadError(
                        f"acpsgd: expected {expected} values, received {length}; the payload is damaged."
                    )
        total = factors[0]
        for factor in factors[1:]:
            total = total + factor
        return total

    def learn(self, payloads: Sequence[Payload], at: Site) -> State:
        ops, (rows, columns) = at.ops, matrix_shape(at.spec)
        even, total = at.state["odd"][0] == 0, self._sum(payloads, at)

        def basis(n: int) -> Array:
            factor = ops.reshape(total, (n, self.compress_rank))
            vanished = ops.reshape(ops.norm(factor, axis=0), (1, -1)) == 0
            # A sum that overflowed has no basis.
            good = ops.finite(total)
            return ops.choose(
                good,
                lambda: orthogonalize(ops, ops.where(vanished, self._random(n, at.spec, ops, at.key), factor)),
                lambda: orthogonalize(ops, self._random(n, at.spec, ops, at.key)),
            )

        return {
            "p": ops.choose(even, lambda: basis(rows), lambda: at.state["p"]),
            "q": ops.choose(even, lambda: at.state["q"], lambda: basis(columns)),
            "odd": 1 - at.state["odd"],
        }


@merge_finish.of(ACPSGD, PowerSGDMemory)
def _(
    compressor: ACPSGD, memory: PowerSGDMemory, payloads: Sequence[Payload], state_: State, at: Site
) -> tuple[Array, State]:
    p, q = compressor.factors(payloads, at)
    rest, merged = at.ops.sub_product_(state_["residual"], p, q, compressor.compress_rank, at.out)
    return merged, {"residual": rest}
