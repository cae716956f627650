"""Memory of EF-SignSGD: error feedback in units of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from grace.core.config.registry import About, memories
from grace.core.errors import ConfigError
from grace.core.methods.compressor import Compressor
from grace.core.methods.fusions import overwrites
from grace.core.methods.memory import Compensated, Memory
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Payload, State, TensorSpec


@memories.register("efsignsgd", About(tests=[{"lr": 0.5}]))
@overwrites("residual")
@dataclass(frozen=True)
class EFSignMemory(Memory):
    r"""Error feedback in units of the weights, for EF-SignSGD.

    Formula: x = e + \gamma g, \; \text{send } C(x), \; e \leftarrow x - C(x), \; \bar g = \mathrm{mean}(C(x)) / \gamma

    gamma is `lr` (GRACE: beta = 1, gamma = initial learning rate). The merged gradient is divided by it, because the
    optimizer multiplies by the learning rate itself. So gamma cancels for every method with C(a x) = a C(x), efsignsgd
    among them: any value gives the same training, up to rounding. It matters only for absolute thresholds.

    Reference: Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019,
    Algorithm 1.
    """

    lr: float = 0.1

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ConfigError(
                f"memory efsignsgd: lr (the initial learning rate) must be positive, received {self.lr!r}."
            )

    @property
    def residual_scale(self) -> float:
        return self.lr

    @cached_property
    def gain(self) -> float:
        return 1.0 / self.lr

    def init(self, spec: TensorSpec, ops: ArrayOps) -> State:
        return {"residual": ops.zeros(spec.numel, spec.work_dtype)}

    def terms(self, grad: Array, state: State, at: Site) -> tuple[Array, float, Array, float]:
        """Return e, 1, g, gamma of the sum to compress."""
        return state["residual"], 1.0, grad, self.lr

    def compensate(self, grad: Array, state: State, at: Site) -> Compensated:
        x, finite = at.ops.finite_sum(*self.terms(grad, state, at), at.out)
        return Compensated(x, {}, finite)

    def update(self, x_: Array, payload: Payload, compressor: Compressor, state: State, at: Site) -> State:
        return {"residual": compressor.residual_(x_, payload, at)}
