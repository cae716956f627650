"""Memory of Byz-EF21: the gradients of all ranks as they are known, and their median or trimmed mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from grace.core.codecs.middle import middle
from grace.core.config.registry import About, memories
from grace.core.errors import ConfigError, IncompatibleError
from grace.core.memories.diana import check_mean
from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import Compensated, Memory, Merging
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Payload, State, TensorSpec


@memories.register("byz_ef21", About(tests=[{"ranks": 1}]))
@dataclass(frozen=True)
class ByzEF21(Memory, Merging):
    r"""Gradients of all ranks as they are known: compresses what each lacks, and takes the middle of all.

    Formula: x_i = g_i - h_i, \quad \text{send } C(x_i), \quad h_i \leftarrow h_i + C(x_i), \quad
    \bar g = \mathrm{median}_i\, h_i

    A rank that sends anything cannot move the median far, coordinate by coordinate. With `trim`, it is the mean without
    the `trim` largest and the `trim` smallest values. Sparsifiers such as topk serve it, because the gradients that
    were rebuilt have a value everywhere. C should be a contraction, as for `ef21`. All payloads must come to all ranks,
    so it is for allgather and broadcast. The memory takes a buffer of the gradient's size for each rank, and sorts as
    many values per element. It is equal on all ranks. `ranks` is their number, which the plan sets.

    Reference: Rammal, Gruntkowska, Fedin, Gorbunov and Richtarik, "Communication compression for Byzantine robust
    learning: new efficient algorithms and improved rates", AISTATS 2024, with the median or the trimmed mean of Yin et
    al., ICML 2018, as the aggregation rule.
    """

    trim: int | None = None
    ranks: int = 0

    feeds_back = False
    across_ranks = "equal"

    def __post_init__(self) -> None:
        if self.trim is not None and self.trim < 1:
            raise ConfigError(
                "memory byz_ef21: trim is how many of the largest and of the smallest values are left out, at least 1; "
                f"received {self.trim!r}. Leave it out for the median."
            )

    def for_ranks(self, size: int) -> Memory:
        if self.trim is not None and 2 * self.trim >= size:
            raise IncompatibleError(
                f"memory byz_ef21: trim = {self.trim} leaves out {2 * self.trim} of {size} values; it needs fewer than "
                "half of the ranks. Take a smaller trim, or leave it out for the median."
            )
        return dataclasses.replace(self, ranks=size)

    def check(self, compressor: Compressor) -> None:
        check_mean("byz_ef21", compressor)

    def init(self, spec: TensorSpec, ops: ArrayOps) -> State:
        return {"shifts": ops.zeros(max(1, self.ranks) * spec.numel, spec.work_dtype)}

    def compensate(self, grad: Array, state: State, at: Site) -> Compensated:
        x, finite = at.ops.finite_sum(grad, 1, _row(state, at.rank, at), -1)
        return Compensated(x, state, finite)

    def update(self, x_: Array, payload: Payload, compressor: Compressor, state: State, at: Site) -> State:
        return state

    def merge(self, payloads: Sequence[Payload], compressor: Compressor, state: State, at: Site) -> tuple[Array, State]:
        ops = at.ops
        rows = [
            ops.weighted_sum(_row(state, rank, at), 1, compressor.decompress(payload, at), 1)
            for rank, payload in enumerate(payloads)
        ]
        return middle(ops, rows, self.trim), {"shifts": ops.concat(rows)}


def _row(state: State, rank: int, at: Site) -> Array:
    """Return what is known of the gradient of a rank."""
    return state["shifts"][rank * at.spec.numel : (rank + 1) * at.spec.numel]
