"""Threshold-v sparsification."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.codecs.sums import FEEDBACK, Feedback, sum_select
from grace.core.config.registry import About, Need, Setting, compressors
from grace.core.errors import ConfigError
from grace.core.methods.compressor import Sparsifier
from grace.core.methods.fusions import compress_sum
from grace.core.methods.site import Site
from grace.core.spec import Array, Field, Payload, State, TensorSpec

A_MAGNITUDE = Need(
    0.01,
    "expected a magnitude in units of the gradient, received none. No default suits all models: in the study, "
    "'threshold' with 0.01 sent from 0.1 to 11 % of the bytes (docs/accuracy.md, docs/adam.md). Write threshold = ..., "
    "for instance a quantile of your gradients' magnitudes, or take 'topk', which sends a share.",
)


@compressors.register(
    "threshold",
    About(
        family="sparsification",
        adam=False,
        tests=[{"threshold": 0.0}, {"threshold": 0.5, "capacity": 0.1}, {"threshold": 1e9}],
        errors=[{"threshold": 0.01}],
        digits=Setting(options={"threshold": 0.01}),
        needs={"threshold": A_MAGNITUDE},
    ),
)
@dataclass(frozen=True)
class Threshold(Sparsifier):
    r"""Threshold sparsifier: every element above a fixed magnitude.

    Formula: C(x)_i = x_i \, 1_{|x_i| > v}

    v is `threshold`, in the units of the gradient. It has no default: what suits one model sends nothing or everything
    of another, so 0.01 in the tables is an example. |x - C(x)|^2 is at most d v^2. The size of the payload depends on
    the data and may be zero. `capacity` bounds a burst: at most that share of the elements travels, the largest first,
    and the rest stays in the residual.

    Error: 2.6e-07 |x|^2 for normal x with `threshold=0.01`; 0.2 |x|^2 with `threshold=1.0`.

    Cost: one pass of comparisons; with `capacity` a partial sort of the elements that passed; no random numbers.

    When: the scale of the gradients is known and steady. Otherwise it sends all or nothing: topk has a fixed size, and
    hardthreshold finds its threshold by itself.

    Reference: Dutta et al., "On the discrepancy between the theoretical analysis and practical implementations of
    compressed communication", AAAI 2020.
    """

    threshold: float
    capacity: float | None = None

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise ConfigError(f"threshold: threshold must be at least 0, received {self.threshold!r}.")
        if self.capacity is not None and not 0 < self.capacity <= 1:
            raise ConfigError(
                f"threshold: capacity must be a share of the elements in (0, 1], received {self.capacity!r}."
            )

    @property
    def absolute(self) -> bool:
        return True

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return Field("values", spec.work_dtype, "kept"), Field("indices", "int32", "kept", below=spec.numel)

    def compress(self, x: Array, at: Site) -> Payload:
        return self.within_capacity(*at.ops.select(x, self.threshold, strict=True), at)

    def within_capacity(self, values: Array, indices: Array, at: Site) -> Payload:
        """Return the payload of what passed, the largest of it if it is more than the capacity."""
        ops = at.ops
        if self.capacity is not None:
            most = max(1, int(self.capacity * at.spec.numel))
            values, best = ops.sparsify(values, ops.min_size(ops.length(values), most))
            indices = ops.gather(indices, best)
        return {"values": values, "indices": indices}


@compress_sum.of(Threshold, FEEDBACK)
def _(
    compressor: Threshold, memory: Feedback, grad: Array, state: State, at: Site
) -> tuple[Array, Payload, Array] | None:
    terms = memory.terms(grad, state, at)
    if terms is None:
        return None
    x, finite, values, indices = sum_select(at.ops, *terms, compressor.threshold, strict=True, out=at.out)
    return x, compressor.within_capacity(values, indices, at), finite
