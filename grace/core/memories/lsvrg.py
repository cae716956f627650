"""Memory of full SVRG: takes the noise of the batches out of a rank's gradient before another memory gets it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from grace.core.config.registry import About, memories
from grace.core.errors import ConfigError
from grace.core.memories.marina import check_period, difference
from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import Compensated, Memory, Merging, Need, keeps_nothing, needs_of
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Payload, State, TensorSpec

_OWN = ("full_gradient", "known")


@memories.register("lsvrg", About(tests=[{"then": "residual"}, {"then": "diana"}, {"exact": True}]))
@dataclass(frozen=True)
class LSVRG(Memory):
    r"""Variance reduction on each rank: takes the noise of the batches out of the gradient, before another memory.

    Formula: g_i' = g_i(w) - g_i(w') + \mu_i

    Full round: g_i' = g_i, \quad \mu_i \leftarrow g_i, \quad w' \leftarrow w

    `then` is the memory that gets g' in place of the gradient. g_i(w) and g_i(w') are gradients of the same batch at
    the weights of now and of the last full round, so a step computes twice. Step 0 is a full round, and each later step
    is one with probability 1 / `period`, which the ranks draw from the shared seed. In it, a rank passes the gradient
    mu_i of all its data. So the paper's probability 1 / m is a `period` of m batches. The closer w and w' are to an
    optimum, the less noise g' has, and the shifts of `diana` or the errors of `residual` can come to rest.

    With `exact`, full rounds send gradients as they are, and mu is their mean over all ranks, so that g' itself comes
    to rest at zero, and an unbiased C needs no memory behind. `then` must be "none".

    The memory takes one buffer of the gradient's size beside those of `then`. If it starts again in the middle of a
    run, g' = g up to the next full round.

    L-SVRG draws after a step whether its weights become w'; here the step itself already uses their full gradient. This
    is the order of SVRG, which starts an epoch at w'.

    Reference: Johnson and Zhang, "Accelerating stochastic gradient descent using predictive variance reduction", NIPS
    2013; Kovalev, Horvath and Richtarik, "Don't jump through hoops and remove those loops", ALT 2020; with `qsgd`
    and `exact` QSVRG (Alistarh et al., "QSGD", NIPS 2017), with `diana` VR-DIANA (Horvath et al.,
    "Stochastic distributed learning with gradient quantization and variance reduction", 2019), with `residual` EC-LSVRG
    (Gorbunov et al., "Linearly converging error compensated SGD", NeurIPS 2020).
    """

    # `__post_init__` replaces the name, which the list of options shows.
    then: Memory = "none"  # type: ignore[assignment]
    period: int = 100
    exact: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "then", memories.make(self.then))
        check_period("lsvrg", self.period)
        if {"reference", "norm"} & set(self.then.needs) or isinstance(self.then, Merging):
            raise ConfigError(
                f"memory lsvrg: {self.then} needs a second gradient itself, the norm of the gradients that were "
                "passed, or the payloads of all ranks; expected another memory as then, such as none, residual or "
                "diana."
            )

        if self.exact and not keeps_nothing(self.then):
            raise ConfigError(
                f"memory lsvrg: exact = true takes the mean of full gradients, to which {self.then} would add what it "
                "keeps; expected then = 'none' beside it."
            )

    @property
    def feeds_back(self) -> bool | Literal["mean"]:
        return self.then.feeds_back

    @property
    def across_ranks(self) -> Literal["apart", "equal", "joint"]:
        if self.exact:
            return "equal"
        # A full gradient is not equal on all ranks. So a rank cannot load the whole state of another one.
        return "apart" if self.then.across_ranks == "apart" else "joint"

    @property
    def at_owner(self) -> Memory | None:
        return self.then.at_owner

    @property
    def residual_scale(self) -> float:
        return self.then.residual_scale

    @property
    def residual_dtype(self) -> Literal["bfloat16", "int8"] | None:
        return self.then.residual_dtype

    @property
    def additive(self) -> tuple[str, ...]:
        return self.then.additive

    @property
    def gain(self) -> float:
        return self.then.gain

    @cached_property
    def needs(self) -> tuple[Need, ...]:
        own = needs_of({"reference": True, "full": self.exact, "mean": self.exact})
        return own + self.then.needs

    @property
    def pace(self) -> float:
        return self.then.pace

    def check(self, compressor: Compressor) -> None:
        self.then.check(compressor)

    def init(self, spec: TensorSpec, ops: ArrayOps) -> State:
        own = {"full_gradient": ops.zeros(spec.numel, spec.work_dtype), "known": ops.zeros(1, spec.work_dtype)}
        return {**own, **self.then.init(spec, ops)}

    def compensate(self, grad: Array, state: State, at: Site) -> Compensated:
        ops, own, rest = at.ops, *_split_state(state)
        less_noise = difference(grad, at.reference, own["known"], at)
        if at.reference is None:
            # A copy, because the memory behind may pass on the array that it gets, and `update` consumes it.
            full = own["full_gradient"] if self.exact else ops.copy(grad)
            own = {"full_gradient": full, "known": ops.full(1, 1, at.spec.work_dtype)}
        else:
            # Zeros as long as it is unknown, unless the units have changed since.
            less_noise = ops.weighted_sum(less_noise, 1, own["full_gradient"] * own["known"][0], 1)
        x, rest, finite = self.then.compensate(less_noise, rest, at)
        return Compensated(x, {**rest, **own}, finite)

    def update(self, x_: Array, payload: Payload, compressor: Compressor, state: State, at: Site) -> State:
        own, rest = _split_state(state)
        return {**own, **self.then.update(x_, payload, compressor, rest, at)}

    def finish(self, merged: Array, state: State, at: Site) -> tuple[Array, State]:
        own, rest = _split_state(state)
        merged, rest = self.then.finish(merged, rest, at)
        if self.exact and at.reference is None:
            # A copy, because the optimizer may change the gradient that it receives.
            own = {**own, "full_gradient": at.ops.copy(merged)}
        return merged, {**own, **rest}


def _split_state(state: State) -> tuple[State, State]:
    """Return the state of this memory, and that of the one behind it."""
    return {key: state[key] for key in _OWN}, {key: x for key, x in state.items() if key not in _OWN}
