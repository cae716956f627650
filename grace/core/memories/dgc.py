"""Memory of Deep Gradient Compression: momentum correction, factor masking and local clipping."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from grace.core.config.registry import About, memories
from grace.core.errors import ConfigError, IncompatibleError
from grace.core.methods.capabilities import Selecting, selects
from grace.core.methods.compressor import Compressor
from grace.core.methods.fusions import overwrites
from grace.core.methods.memory import Compensated, Memory, Need, check_clipping, clip, needs_of
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.ops.table import composite
from grace.core.spec import Array, Payload, State, TensorSpec

if TYPE_CHECKING:
    from grace.core.ops.native import Native


@memories.register(
    "dgc",
    About(
        tests=[
            {"momentum": 0.5, "gradient_clipping": 1.0},
            {"momentum": 0.5, "gradient_clipping": 1.0, "clipping_norm": "all"},
            {"momentum_masking": False},
        ]
    ),
)
@overwrites("momentum", "residual")
@dataclass(frozen=True)
class DGCMemory(Memory):
    r"""Momentum correction: error feedback on the momentum instead of the gradient, with masking.

    Formula: u \leftarrow m u + g, \; v \leftarrow v + u, \; \text{send } C(v), \; u_i = v_i = 0 \text{ where sent}

    m is `momentum`. `momentum_masking=False` resets only v and keeps u. Set the optimizer's own momentum to 0. With
    `gradient_clipping` each rank first limits the norm of its gradient of this tensor to gradient_clipping /
    sqrt(number of ranks). With `clipping_norm = "all"` it limits that of all its tensors with this setting together, as
    the paper does; then nothing is sent before the last gradient is ready. It serves every method that selects
    coordinates. The momentum does not amplify weight decay that the optimizer adds after the exchange: divide it by (1
    - m). Masking moves the optimum that weight decay leads to.

    Reference: Lin et al., "Deep gradient compression", ICLR 2018, Algorithms 1 and 4.
    """

    momentum: float = 0.9
    gradient_clipping: float | None = None
    momentum_masking: bool = True
    clipping_norm: Literal["tensor", "all"] = "tensor"

    additive = ("momentum", "residual")

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"memory dgc: momentum must lie in [0, 1), received {self.momentum!r}.")
        check_clipping("dgc", self.gradient_clipping)
        if self.clipping_norm == "all" and self.gradient_clipping is None:
            raise ConfigError(
                'memory dgc: clipping_norm = "all" says whose norm is limited; set gradient_clipping to its bound.'
            )

    def check(self, compressor: Compressor) -> None:
        if not selects(compressor):
            raise IncompatibleError(
                f"memory 'dgc' resets the coordinates that were sent, but {compressor} is no sparsifier. "
                "Valid memories: none, residual."
            )

    @cached_property
    def needs(self) -> tuple[Need, ...]:
        over_all = self.clipping_norm == "all"
        clips = self.gradient_clipping is not None and not over_all
        return needs_of({"norm": over_all, "tensor": clips, "no_momentum": self.momentum})

    def init(self, spec: TensorSpec, ops: ArrayOps) -> State:
        return {name: ops.zeros(spec.numel, spec.work_dtype) for name in ("momentum", "residual")}

    def compensate(self, grad: Array, state: State, at: Site) -> Compensated:
        ops, grad = at.ops, clip(grad, self.gradient_clipping, at, at.norm)
        momentum, x, finite = momentum_sum(ops, state["momentum"], self.momentum, grad, state["residual"], at.out)
        return Compensated(x, {"momentum": momentum}, finite)

    def update(self, x_: Array, payload: Payload, compressor: Compressor, state: State, at: Site) -> State:
        momentum = state["momentum"]
        if self.momentum_masking:
            assert isinstance(compressor, Selecting)
            momentum = compressor.erase_(momentum, payload, at)
        return {"momentum": momentum, "residual": compressor.residual_(x_, payload, at)}


@composite()
def momentum_sum(
    ops: ArrayOps, u: Array, m: float, g: Array, v: Array, out: tuple[Array, Array] | None = None
) -> tuple[Array, Array, Array]:
    """Return m u + g, its sum with v, and whether that sum is finite.

    Kernels may write the first two to `out`, which may be u and v.
    """
    momentum = ops.weighted_sum(u, m, g, 1)
    return momentum, *ops.finite_sum(v, 1, momentum, 1)


@momentum_sum.kernel()
def _(
    ops: Native, u: Array, m: float, g: Array, v: Array, out: tuple[Array, Array] | None = None
) -> tuple[Array, Array, Array] | None:
    dtype = ops.floating(u)
    if dtype is None or ops.floating(g) != dtype or ops.floating(v) != dtype:
        return None
    n = ops.length(u)
    outputs, lengths = [dtype, dtype, "bool"], [n, n, 1]
    momentum, x, good = ops.run("momentum_sum", [u, g, v], (), [m], outputs=outputs, lengths=lengths, out=out)
    return momentum, x, good
