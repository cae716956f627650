"""Memory of DIANA: compresses the difference from a shift that each rank learns."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.config.registry import About, memories
from grace.core.errors import ConfigError, IncompatibleError
from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import Compensated, Memory
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Payload, State, TensorSpec


@memories.register("diana", About(tests=[{"alpha": 1.0}]))
@dataclass(frozen=True)
class Diana(Memory):
    r"""Shift that each rank learns: compresses the difference of the gradient from it.

    Formula: x_i = g_i - h_i, \quad \text{send } C(x_i), \quad h_i \leftarrow h_i + \alpha C(x_i), \quad
    \bar g = h + \mathrm{mean}_i\, C(x_i), \quad h \leftarrow h + \alpha\, \mathrm{mean}_i\, C(x_i)

    alpha is `alpha`. Every rank keeps its own shift h_i and the mean h of all shifts, which all start at zero. Where
    the gradients of the ranks come to rest, each at a value of its own, the shifts learn these values, and the
    compressor's error vanishes with the differences. With C unbiased the mean keeps its expectation, and alpha should
    be at most 1 / (1 + omega) with E|C(x) - x|^2 <= omega |x|^2. With `alpha` = 1 and a contraction, such as topk, this
    is EF21. What the compressor drops is not fed back. The memory takes two buffers of the gradient's size.

    Reference: Mishchenko et al., "Distributed learning with compressed gradient differences", 2019, Algorithm 1;
    Richtarik, Sokolov and Fatkhullin, "EF21: a new, simpler, theoretically better, and practically faster error
    feedback", NeurIPS 2021.
    """

    alpha: float = 0.1

    feeds_back = False
    finishes = True
    across_ranks = "joint"

    def __post_init__(self) -> None:
        check_alpha("diana", self.alpha)

    def check(self, compressor: Compressor) -> None:
        check_mean("diana", compressor)

    def init(self, spec: TensorSpec, ops: ArrayOps) -> State:
        return {name: ops.zeros(spec.numel, spec.work_dtype) for name in ("shift", "mean_shift")}

    def compensate(self, grad: Array, state: State, at: Site) -> Compensated:
        x, finite = at.ops.finite_sum(grad, 1, state["shift"], -1)
        return Compensated(x, state, finite)

    def update(self, x_: Array, payload: Payload, compressor: Compressor, state: State, at: Site) -> State:
        sent = compressor.decompress(payload, at)
        return {**state, "shift": at.ops.weighted_sum(state["shift"], 1, sent, self.alpha)}

    def finish(self, merged: Array, state: State, at: Site) -> tuple[Array, State]:
        ops, mean = at.ops, state["mean_shift"]
        new = ops.weighted_sum(mean, 1, merged, self.alpha)
        return ops.weighted_sum(merged, 1, mean, 1), {**state, "mean_shift": new}


def check_alpha(name: str, alpha: float) -> None:
    """Raise ConfigError unless the step of the shifts lies in (0, 1]."""
    if not 0 < alpha <= 1:
        raise ConfigError(f"memory {name}: alpha must lie in (0, 1], received {alpha!r}.")


def check_mean(name: str, compressor: Compressor) -> None:
    """Raise IncompatibleError if the ranks vote: the shifts follow the mean of what they send."""
    if not compressor.averages:
        raise IncompatibleError(
            f"memory '{name}' needs the mean of the payloads, but {compressor} gives a vote. "
            "Valid memories: none, momentum."
        )
