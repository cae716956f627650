"""Memory of variance-based sparsification: the residual and its variance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from grace.core.config.registry import About, memories
from grace.core.errors import ConfigError, IncompatibleError
from grace.core.methods.capabilities import Selecting, selects
from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import Compensated, Memory
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.ops.table import composite
from grace.core.spec import Array, Payload, State, TensorSpec

if TYPE_CHECKING:
    from grace.core.ops.native import Native

# Squares of float32 gradients of 2^64 and above are infinite, and their sum would stay infinite.
LARGEST = {"float32": 2.0**63, "float64": 2.0**511}


@memories.register("variance", About(tests=[{"decay": 0.5}]))
@dataclass(frozen=True)
class VarianceMemory(Memory):
    r"""Residual and its variance, for variance-based sparsification.

    Formula: r \leftarrow r + g, \quad v \leftarrow v + g^2, \quad \text{send } C(r)

    Where r was sent, r and v become 0; elsewhere v is multiplied by `decay`. The compressor reads v from
    `at.memory["variance"]`. The paper adds up the squares of the gradients of single samples, each divided by the batch
    size. A wrapper of an optimizer does not know them, so the gradient of a rank's batch counts as one sample. Right
    after a reset r^2 = v, so alpha should be above 1. As in the paper, r becomes zero where it was sent, even where the
    compressor rounded it: the rounding error is not fed back. The memory takes two buffers of the gradient's size.

    Reference: Tsuzuku, Imachi and Akiba, "Variance-based gradient compression for efficient distributed deep learning",
    ICLR 2018 workshop.
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ConfigError(f"memory variance: decay must lie in [0, 1], received {self.decay!r}.")

    def check(self, compressor: Compressor) -> None:
        if not selects(compressor):
            raise IncompatibleError(
                f"memory 'variance' resets the coordinates that were sent, but {compressor} is no sparsifier. "
                "Valid memories: none, residual."
            )

    def init(self, spec: TensorSpec, ops: ArrayOps) -> State:
        return {name: ops.zeros(spec.numel, spec.work_dtype) for name in ("residual", "variance")}

    def compensate(self, grad: Array, state: State, at: Site) -> Compensated:
        residual, finite = at.ops.finite_sum(state["residual"], 1, grad, 1)
        variance = square_sum(at.ops, grad, state["variance"], LARGEST[at.spec.work_dtype])
        return Compensated(residual, {"variance": variance}, finite)

    def update(self, x_: Array, payload: Payload, compressor: Compressor, state: State, at: Site) -> State:
        assert isinstance(compressor, Selecting)
        variance = compressor.fade_(state["variance"], payload, at, self.decay)
        return {"residual": compressor.erase_(x_, payload, at), "variance": variance}


@composite(one_graph=True)
def square_sum(ops: ArrayOps, x: Array, onto: Array, largest: float) -> Array:
    """Return onto + x^2 as a new array, with |x| at most `largest` and the sum in [0, 2 largest^2]."""
    bounded = ops.clip(x, -largest, largest)
    return ops.clip(ops.add_(bounded * bounded, onto), 0.0, 2 * largest * largest)


@square_sum.kernel()
def _(ops: Native, x: Array, onto: Array, largest: float) -> Array | None:
    dtype = ops.floating(x)
    if dtype is None:
        return None
    return ops.run("square_sum", [x, onto], (), [largest], outputs=[dtype], lengths=[ops.length(x)])[0]
