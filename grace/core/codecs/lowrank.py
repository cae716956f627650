"""Shared parts of methods that treat a gradient as a matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from grace.core.errors import ConfigError
from grace.core.memories.powersgd import PowerSGDMemory
from grace.core.methods.capabilities import Learning, Negotiating
from grace.core.methods.compressor import Compressor
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Field, Key, Payload, State, TensorSpec


def matrix_shape(spec: TensorSpec) -> tuple[int, int]:
    """Return rows and columns of a tensor of two or more axes as a matrix, split where their sum is smallest."""
    return _split(spec.shape)


# Every step asks for the shape of every tensor several times.
@cache
def _split(shape: tuple[int, ...]) -> tuple[int, int]:
    splits = ((math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape)))
    return min(splits, key=sum)


def unfit_matrix(name: str, spec: TensorSpec, rank: float) -> str | None:
    """Return the reason why a tensor cannot shrink to `rank` rows and columns; None if it can."""
    if spec.ndim < 2:
        return f"{name} needs a matrix, the tensor has {spec.ndim} dimension{'s' * (spec.ndim != 1)}"
    rows, columns = matrix_shape(spec)
    if (rows + columns) * rank >= spec.numel:
        return f"rank {rank} factors of a {rows} x {columns} matrix are no smaller than the matrix"
    return None


@dataclass(frozen=True)
class TwoFactors(Compressor, Negotiating, Learning):
    """Base of methods that send a matrix as P Q^T: P is negotiated, then Q, linear in the matrix, travels.

    They define `propose` and `compress`. The summed Q starts the next step.
    """

    compress_rank: int = 4

    title: ClassVar[str]
    summable = True
    flat = False
    multiplies = True
    linear_in = ("q",)
    default_memory = "powersgd"

    def __post_init__(self) -> None:
        if self.compress_rank < 1:
            raise ConfigError(f"{self.title}: compress_rank must be at least 1, received {self.compress_rank!r}.")

    def contraction(self, spec: TensorSpec) -> float | None:
        return 0.0

    def unfit(self, spec: TensorSpec) -> str | None:
        return unfit_matrix(self.title, spec, self.compress_rank)

    def init(self, spec: TensorSpec, ops: ArrayOps, key_seed: int) -> State:
        return {"q": self._random(spec, ops, Key(key_seed, 0))}

    def _random(self, spec: TensorSpec, ops: ArrayOps, key: Key) -> Array:
        columns, r = matrix_shape(spec)[1], self.compress_rank
        return ops.reshape(ops.cast(ops.uniform(columns * r, key), spec.work_dtype) - 0.5, (columns, r))

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        rows, columns = matrix_shape(spec)
        r = self.compress_rank
        return Field("q", spec.work_dtype, columns * r), Field("p", spec.work_dtype, rows * r, wire=False)

    def proposed(self, spec: TensorSpec) -> tuple[Field, ...]:
        return (Field("p", spec.work_dtype, matrix_shape(spec)[0] * self.compress_rank),)

    def decompress(self, payload: Payload, at: Site) -> Array:
        return at.ops.flat_product(payload["p"], payload["q"], self.compress_rank, at.out)

    def sum_q(self, payloads: Sequence[Payload]) -> Array:
        """Return the sum of Q over the ranks."""
        q = payloads[0]["q"]
        for payload in payloads[1:]:
            q = q + payload["q"]
        return q

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        return at.ops.flat_product(payloads[0]["p"], self.sum_q(payloads), self.compress_rank, at.out)

    def learn(self, payloads: Sequence[Payload], at: Site) -> State:
        return {"q": at.ops.reshape(self.sum_q(payloads), (-1, self.compress_rank))}


def merge_product(
    compressor: TwoFactors, memory: PowerSGDMemory, payloads: Sequence[Payload], state_: State, at: Site
) -> tuple[Array, State]:
    """Return the merged gradient, and the state with it subtracted from the residual; consumes state_."""
    p, q = payloads[0]["p"], compressor.sum_q(payloads)
    rest, merged = at.ops.sub_product_(state_["residual"], p, q, compressor.compress_rank, at.out)
    return merged, {"residual": rest}
