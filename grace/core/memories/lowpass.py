"""Memory of ScaleCom, ECQ-SGD and LoCo: error feedback through a low-pass filter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grace.core.config.registry import About, memories
from grace.core.errors import ConfigError
from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import Compensated, Memory
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Payload, State, TensorSpec


@memories.register(
    "lowpass", About(tests=[{"beta": 0.5}, {"beta": 0.5, "decay": 0.9, "reset_every": 2}, {"residual_dtype": "int8"}])
)
@dataclass(frozen=True)
class LowPass(Memory):
    r"""Error feedback through a low-pass filter, for ScaleCom, ECQ-SGD and LoCo.

    Formula: x = m + g, \quad \text{send } C(x), \quad m \leftarrow (\lambda - \beta) m + \beta (x - C(x))

    lambda is `decay`. With 1, the update is m + beta (g - C(x)), so the sum of all gradients minus that of all that was
    sent is m / beta. Nothing is lost: m is beta times what a rank owes, and each step adds only this share of the debt
    to the gradient. With `beta` = 1 it is the memory `residual`. A smaller beta smooths the residuals, so that those of
    the ranks grow more alike and one rank can choose for all. The price is delay: if |x - C(x)|^2 <= (1 - delta) |x|^2
    and |g| <= G, then the debt is at most s G / (beta (1 - s)) with s = sqrt(1 - delta), 1 / beta times that of plain
    error feedback.

    A smaller `decay` forgets: h = m / beta is the sum of all errors g - C(x), each multiplied by the decay in every
    later step, as in ECQ-SGD, whose compensation factor alpha is beta. With `reset_every` m becomes zero after every so
    many steps, as in LoCo, whatever is still owed. The memory takes one buffer of the gradient's size; `residual_dtype`
    is that of the memory `residual`.

    Reference: Chen et al., "ScaleCom: scalable sparsified gradient compression for communication-efficient distributed
    training", NeurIPS 2020, Algorithm 1; Wu et al., "Error compensated quantized SGD and its applications to
    large-scale distributed optimization", ICML 2018; Xie et al., "LoCo: low-bit communication adaptor for large-scale
    model training", 2024.
    """

    beta: float = 0.1
    decay: float = 1.0
    reset_every: int | None = None
    residual_dtype: Literal["bfloat16", "int8"] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.beta <= 1:
            raise ConfigError(f"memory lowpass: beta must lie in (0, 1], received {self.beta!r}.")
        if not 0 <= self.decay <= 1:
            raise ConfigError(
                f"memory lowpass: decay must lie in [0, 1], or the residual grows; received {self.decay!r}."
            )
        if self.reset_every is not None and self.reset_every < 1:
            raise ConfigError(
                f"memory lowpass: reset_every (in steps) must be at least 1 or null, received {self.reset_every!r}."
            )

    @property
    def residual_scale(self) -> float:
        return self.beta

    def init(self, spec: TensorSpec, ops: ArrayOps) -> State:
        return {"residual": ops.zeros(spec.numel, spec.work_dtype)}

    def compensate(self, grad: Array, state: State, at: Site) -> Compensated:
        x, finite = at.ops.finite_sum(state["residual"], 1, grad, 1)
        return Compensated(x, {"residual": state["residual"]}, finite)

    def update(self, x_: Array, payload: Payload, compressor: Compressor, state: State, at: Site) -> State:
        ops, left = at.ops, compressor.residual_(x_, payload, at)
        residual = ops.weighted_sum(state["residual"], self.decay - self.beta, left, self.beta)
        if self.reset_every is None:
            return {"residual": residual}
        due = ops.full(1, (at.key.step + 1) % self.reset_every, "int64")[0] == 0
        zeros = ops.zeros(at.spec.numel, at.spec.work_dtype)
        return {"residual": ops.choose(due, lambda: zeros, lambda: residual)}
