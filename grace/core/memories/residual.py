"""Error feedback: what was not sent is added to the next gradient."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from grace.core.config.registry import About, memories
from grace.core.errors import ConfigError
from grace.core.methods.compressor import Compressor
from grace.core.methods.fusions import overwrites
from grace.core.methods.memory import Compensated, Memory, Need, check_clipping, clip, fallen_by, needs_of
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Payload, State, TensorSpec


@memories.register(
    "residual",
    About(
        tests=[
            {"beta": 0.9, "gamma": 0.5},
            {"lr_correction": True, "gradient_clipping": 1.0},
            {"lr_correction": True, "momentum": 0.5},
            {"residual_dtype": "bfloat16"},
            {"residual_dtype": "int8"},
        ]
    ),
)
@overwrites("residual")
@dataclass(frozen=True)
class Residual(Memory):
    r"""Error feedback: what was not sent is added to the next gradient.

    Formula: x = \beta e + \gamma g, \quad \text{send } C(x), \quad e \leftarrow x - C(x)

    With `lr_correction` the residual is first scaled by (last learning rate / this one), as if it were kept in units of
    the weights: a gradient held back at one learning rate is applied at that rate, however late. With
    `gradient_clipping` the norm of g is first limited to gradient_clipping / sqrt(number of ranks), tensor by tensor.
    With `momentum` mu, Nesterov's momentum of the rank's own gradients takes the place of g: n = mu n + g, and mu n + g
    joins the residual. Set the optimizer's own momentum to 0. The memory takes one buffer of the gradient's size
    (float32 for half-precision gradients), and with `momentum` two.

    With `residual_dtype` e is rounded after each step, so that it takes less memory between steps; x and C(x) stay in
    float32. "bfloat16" takes half of it, and loses of an element at most 2^-9 |e| per step. "int8" takes 27 %: 8 bits,
    and the largest magnitude m of each 64 elements. It rounds to a multiple of m / 127 above or below at random, so
    that the expected value is e: what is lost adds up to noise, not to a bias. Residuals of float64 gradients stay as
    they are, because their range is larger.

    Reference: GRACE, equation 4; Stich et al., "Sparsified SGD with memory", NeurIPS 2018; for the learning rates
    Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019, Algorithm 1; for the momentum Zheng et al.,
    "Communication-efficient distributed blockwise momentum SGD with error-feedback", NeurIPS 2019, Algorithm 3.
    """

    beta: float = 1.0
    gamma: float = 1.0
    lr_correction: bool = False
    gradient_clipping: float | None = None
    momentum: float = 0.0
    residual_dtype: Literal["bfloat16", "int8"] | None = None

    additive = ("momentum", "residual")

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ConfigError(
                f"memory residual: beta must lie in [0, 1], or the residual grows; received {self.beta!r}."
            )
        if not self.gamma > 0:
            raise ConfigError(f"memory residual: gamma must be positive, received {self.gamma!r}.")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"memory residual: momentum must lie in [0, 1), received {self.momentum!r}.")
        check_clipping("residual", self.gradient_clipping)

    @cached_property
    def needs(self) -> tuple[Need, ...]:
        clips = self.gradient_clipping is not None
        return needs_of({"lr": self.lr_correction, "tensor": clips, "no_momentum": self.momentum})

    def init(self, spec: TensorSpec, ops: ArrayOps) -> State:
        state = {"residual": ops.zeros(spec.numel, spec.work_dtype)}
        if self.momentum:
            state["momentum"] = ops.zeros(spec.numel, spec.work_dtype)
        return {**state, "lr": ops.zeros(1, "float64")} if self.lr_correction else state

    def terms(self, grad: Array, state: State, at: Site) -> tuple[Array, float, Array, float] | None:
        """Return e, beta, g, gamma of the sum to compress; None if more than a sum is to be done."""
        if self.lr_correction or self.momentum:
            return None
        return state["residual"], self.beta, clip(grad, self.gradient_clipping, at), self.gamma

    def compensate(self, grad: Array, state: State, at: Site) -> Compensated:
        ops, dtype, rest = at.ops, at.spec.work_dtype, {}
        residual, grad = state["residual"], clip(grad, self.gradient_clipping, at)
        if self.lr_correction:
            factor, rest["lr"] = fallen_by(state["lr"], at)
            residual = residual * ops.cast(factor, dtype)
        if self.momentum:
            rest["momentum"] = ops.weighted_sum(state["momentum"], self.momentum, grad, 1)
            grad = ops.weighted_sum(rest["momentum"], self.momentum, grad, 1)
        x, finite = ops.finite_sum(residual, self.beta, grad, self.gamma, at.out)
        return Compensated(x, rest, finite)

    def update(self, x_: Array, payload: Payload, compressor: Compressor, state: State, at: Site) -> State:
        return {**state, "residual": compressor.residual_(x_, payload, at)}
