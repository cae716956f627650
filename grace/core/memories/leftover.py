"""Memory that sends the residual of an earlier method once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grace.core.config.registry import About, memories
from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import Compensated, Memory, Need, keeps_nothing
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Payload, State, TensorSpec


@memories.register("leftover", About(tests=[{"then": "momentum"}, {"then": "svrg"}, {"then": "diana"}]))
@dataclass(frozen=True)
class Leftover(Memory):
    r"""Residual of an earlier method: added to one gradient, then dropped. Another memory does everything else.

    Formula: g' = e + g, \quad e \leftarrow 0

    `then` is the memory that gets g' in place of the gradient. grace uses this memory after a change to a method whose
    own memory holds no residual, if the method before had error feedback. The memory takes one buffer of the gradient's
    size beside those of `then`.
    """

    # `__post_init__` replaces the name, which the list of options shows.
    then: Memory = "none"  # type: ignore[assignment]

    feeds_back = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "then", memories.make(self.then))

    @property
    def across_ranks(self) -> Literal["apart", "joint"]:
        # A residual is not equal on all ranks. So a rank cannot load the whole state of another one.
        return "apart" if self.then.across_ranks == "apart" else "joint"

    @property
    def at_owner(self) -> Memory | None:
        return self.then.at_owner

    @property
    def additive(self) -> tuple[str, ...]:
        return ("residual", *self.then.additive)

    @property
    def gain(self) -> float:
        return self.then.gain

    @property
    def needs(self) -> tuple[Need, ...]:
        return self.then.needs

    def check(self, compressor: Compressor) -> None:
        self.then.check(compressor)

    def init(self, spec: TensorSpec, ops: ArrayOps) -> State:
        return {"residual": ops.zeros(spec.numel, spec.work_dtype), **self.then.init(spec, ops)}

    def compensate(self, grad: Array, state: State, at: Site) -> Compensated:
        total, finite = at.ops.finite_sum(state["residual"], 1, grad, 1)
        x, rest, compensated = self.then.compensate(total, _without_residual(state), at)
        return Compensated(x, rest, finite if keeps_nothing(self.then) else compensated)

    def update(self, x_: Array, payload: Payload, compressor: Compressor, state: State, at: Site) -> State:
        rest = self.then.update(x_, payload, compressor, state, at)
        return {"residual": at.ops.zeros(at.spec.numel, at.spec.work_dtype), **rest}

    def finish(self, merged: Array, state: State, at: Site) -> tuple[Array, State]:
        merged, rest = self.then.finish(merged, _without_residual(state), at)
        return merged, {"residual": state["residual"], **rest}


def _without_residual(state: State) -> State:
    return {key: value for key, value in state.items() if key != "residual"}
