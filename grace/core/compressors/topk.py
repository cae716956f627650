"""Top-k sparsification."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.codecs.sums import FEEDBACK, Feedback, sum_top
from grace.core.config.registry import About, Setting, compressors
from grace.core.errors import ConfigError
from grace.core.methods.compressor import Sparsifier, keep_count
from grace.core.methods.fusions import compress_sum
from grace.core.methods.site import Site
from grace.core.spec import Array, Field, Payload, State, TensorSpec


def check_ratio(name: str, ratio: float) -> None:
    """Raise ConfigError unless 0 < ratio <= 1."""
    if not 0 < ratio <= 1:
        raise ConfigError(
            f"{name}: compress_ratio must be the share of elements to keep, in (0, 1]; received {ratio!r}."
        )


def advice_on_ratio(ratio: float) -> str | None:
    """Return the advice of methods that choose elements at random."""
    if ratio >= 0.05:
        return None
    return (
        f"training stalled or diverged at the usual learning rate with ratios of 1 %; raise compress_ratio ({ratio:g})"
    )


@compressors.register(
    "topk",
    About(
        family="sparsification",
        adam=False,
        tests=[{"compress_ratio": 0.1}, {"compress_ratio": 1.0}],
        errors=[{"compress_ratio": ratio} for ratio in (0.01, 0.1)],
        advised=[{"compress_ratio": 0.1}, {}],
        digits=Setting(options={"compress_ratio": 0.01}),
    ),
)
@dataclass(frozen=True)
class TopK(Sparsifier):
    r"""Top-k sparsifier: the k elements of largest magnitude; needs error feedback.

    Formula: C(x)_i = x_i \, 1_{i \in K}, \quad K = \text{the indices of the $k$ largest}\; |x_i|

    `k = max(1, int(compress_ratio * d))`; among equal magnitudes the lower index is kept. The payload has the values in
    the working dtype and int32 indices: 8 bytes per kept element (12 for float64 gradients). Contraction with delta =
    k/d.

    Error: 0.91 |x|^2 for normal x; 0.56 |x|^2 with `compress_ratio=0.1`.

    Cost: a partial sort of the magnitudes, three passes and a sort of k indices; no random numbers, no state.

    When: slow networks and few ranks; with SGD, the usual first choice of a sparsifier. Use error feedback. The bytes
    grow with the ranks. On large tensors the selection takes time; dgc estimates the threshold instead.

    Reference: Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017; Stich et al.,
    "Sparsified SGD with memory", NeurIPS 2018.
    """

    compress_ratio: float = 0.01

    def __post_init__(self) -> None:
        check_ratio("topk", self.compress_ratio)

    def contraction(self, spec: TensorSpec) -> float | None:
        return keep_count(self.compress_ratio, spec.numel) / max(1, spec.numel)

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        k = keep_count(self.compress_ratio, spec.numel)
        return Field("values", spec.work_dtype, k), Field("indices", "int32", k, below=spec.numel)

    def compress(self, x: Array, at: Site) -> Payload:
        values, indices = at.ops.sparsify(x, keep_count(self.compress_ratio, at.spec.numel))
        return {"values": values, "indices": indices}


@compress_sum.of(TopK, FEEDBACK)
def _(compressor: TopK, memory: Feedback, grad: Array, state: State, at: Site) -> tuple[Array, Payload, Array] | None:
    terms = memory.terms(grad, state, at)
    if terms is None:
        return None
    k = keep_count(compressor.compress_ratio, at.spec.numel)
    x, finite, values, indices = sum_top(at.ops, *terms, k, at.out)
    return x, {"values": values, "indices": indices}, finite
