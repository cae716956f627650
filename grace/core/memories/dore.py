"""Memories of DORE: the rank's, and that of the owner of a mean, which feeds back what it drops."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.config.registry import About, memories
from grace.core.errors import ConfigError
from grace.core.memories.diana import check_alpha, check_mean
from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import Compensated, Memory
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Payload, State, TensorSpec


@memories.register("dore", About(tests=[{"alpha": 0.5}]))
@dataclass(frozen=True)
class Dore(Memory):
    r"""Residuals compressed in both directions: differences from a reference to the owners, and error feedback back.

    Formula: x_i = g_i - h_i, \quad \text{send } C(x_i), \quad h_i \leftarrow h_i + \alpha C(x_i)

    At the owner: q = h + \mathrm{mean}_i\, C(x_i) + \eta e, \quad \text{send } C'(q), \quad e \leftarrow q - C'(q),
    \quad h \leftarrow h + \alpha\, \mathrm{mean}_i\, C(x_i)

    alpha is `alpha`, eta is `eta`, and C' is the option `second` of two_shot, the only communicator with owners. h_i, h
    and e start at zero, so h is the mean of all h_i, and q that of all gradients as they were decoded, plus the error.
    The optimizer receives C'(q).

    In the paper, the owner compresses what changes the model, -gamma q, keeps -gamma e, and every rank adds beta
    C'(-gamma q) to its weights. That is the step of SGD with the learning rate beta gamma, if C'(a q) = a C'(q). So
    beta is a factor of the learning rate. Two things differ: the error keeps the units of the gradient if the learning
    rate changes, and there is no proximal step.

    What C drops is not fed back, so it should be unbiased, and alpha at most 1 / (1 + omega) with E|C(x) - x|^2 <=
    omega |x|^2. The memory takes two buffers of the gradient's size, and two of a shard's at its owner. The second
    buffer of a rank is empty except after a change of the plan: then it holds what owners have not sent, for one step.

    Reference: Liu et al., "A double residual compression algorithm for efficient distributed learning", AISTATS 2020,
    Algorithms 1 and 2.
    """

    alpha: float = 0.1
    eta: float = 1.0

    feeds_back = False
    across_ranks = "joint"

    def __post_init__(self) -> None:
        check_alpha("dore", self.alpha)
        _check_eta("dore", self.eta)

    @property
    def at_owner(self) -> Memory:
        return DoreMean(self.alpha, self.eta)

    def check(self, compressor: Compressor) -> None:
        check_mean("dore", compressor)

    def init(self, spec: TensorSpec, ops: ArrayOps) -> State:
        # Not called a shift: diana's must not go on as this one, without its mean.
        return {name: ops.zeros(spec.numel, spec.work_dtype) for name in ("reference", "residual")}

    def compensate(self, grad: Array, state: State, at: Site) -> Compensated:
        ops = at.ops
        x, finite = ops.finite_sum(ops.weighted_sum(grad, 1, state["reference"], -1), 1, state["residual"], 1)
        return Compensated(x, {"reference": state["reference"]}, finite)

    def update(self, x_: Array, payload: Payload, compressor: Compressor, state: State, at: Site) -> State:
        sent = compressor.decompress(payload, at)
        return {
            "reference": at.ops.weighted_sum(state["reference"], 1, sent, self.alpha),
            "residual": at.ops.zeros(at.spec.numel, at.spec.work_dtype),
        }


@memories.register("dore_mean", About(tests=[{"alpha": 0.5, "eta": 0.5}]))
@dataclass(frozen=True)
class DoreMean(Memory):
    r"""The owner's part of DORE: the mean of the references, and the error of what it sends back.

    Formula: q = h + m + \eta e, \quad \text{send } C'(q), \quad e \leftarrow q - C'(q), \quad h \leftarrow h + \alpha m

    m is the mean of what the ranks have sent. two_shot gives this memory to the owners of shards if the ranks have the
    memory `dore`; a configuration does not name it.

    Reference: as for `dore`.
    """

    alpha: float = 0.1
    eta: float = 1.0

    across_ranks = "joint"

    def __post_init__(self) -> None:
        check_alpha("dore_mean", self.alpha)
        _check_eta("dore_mean", self.eta)

    def check(self, compressor: Compressor) -> None:
        check_mean("dore_mean", compressor)

    def init(self, spec: TensorSpec, ops: ArrayOps) -> State:
        return {name: ops.zeros(spec.numel, spec.work_dtype) for name in ("reference", "residual")}

    def compensate(self, grad: Array, state: State, at: Site) -> Compensated:
        ops, reference = at.ops, state["reference"]
        x, finite = ops.finite_sum(ops.weighted_sum(grad, 1, reference, 1), 1, state["residual"], self.eta)
        return Compensated(x, {"reference": ops.weighted_sum(reference, 1, grad, self.alpha)}, finite)

    def update(self, x_: Array, payload: Payload, compressor: Compressor, state: State, at: Site) -> State:
        return {**state, "residual": compressor.residual_(x_, payload, at)}


def _check_eta(name: str, eta: float) -> None:
    if not 0 <= eta <= 1:
        raise ConfigError(f"memory {name}: eta must lie in [0, 1], or the residual grows; received {eta!r}.")
