"""ScaleCom: one rank chooses the coordinates that all ranks send."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.compressors.topk import check_ratio
from grace.core.config.registry import About, Setting, compressors
from grace.core.methods.capabilities import Negotiating
from grace.core.methods.compressor import Sparsifier, keep_count
from grace.core.methods.site import Proposal, Site
from grace.core.spec import Array, Field, Payload, TensorSpec


@compressors.register(
    "scalecom",
    About(
        family="sparsification",
        adam=False,
        tests=[{"compress_ratio": 0.1}],
        # The filter delays what is sent; its default suits the larger learning rates of many ranks.
        digits=Setting(options={"compress_ratio": 0.01, "beta": 0.5}),
    ),
)
@dataclass(frozen=True)
class ScaleCom(Sparsifier, Negotiating):
    r"""ScaleCom's cyclic local top-k: all ranks send the coordinates that one rank chose, and the ranks take turns.

    Formula: C(x)_i = x_i \, 1_{i \in K}, \quad K = \text{the indices of the $k$ largest}\; |x_i| \;\text{of the leader}

    In step t, rank t mod N sends the indices of its `k = max(1, int(compress_ratio * d))` largest elements to all
    ranks, as int32. All ranks send their values at these indices, and an allreduce adds them: 8 bytes per kept element
    (12 for float64 gradients), for any number of ranks. On the leader C is top-k; on the others it may keep small
    elements only, so it is a contraction with delta = 0.

    Error: 0.91 |x|^2 for normal x; 0.56 |x|^2 with `compress_ratio=0.1`.

    Cost: a partial sort of the magnitudes, by all ranks although one sorts for all, and a gather; no random numbers.

    When: many ranks whose residuals are alike. Allreduce adds the values, so the bytes hardly grow with the ranks;
    those of topk do. The memory `lowpass` makes the residuals more alike. With few ranks take topk, which sends what is
    large on each of them.

    Reference: Chen et al., "ScaleCom: scalable sparsified gradient compression for communication-efficient distributed
    training", NeurIPS 2020, Algorithm 1.
    """

    compress_ratio: float = 0.01

    summable = True
    default_memory = "lowpass"

    def __post_init__(self) -> None:
        check_ratio("scalecom", self.compress_ratio)

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        k = keep_count(self.compress_ratio, spec.numel)
        return Field("values", spec.work_dtype, k), Field("indices", "int32", k, wire=False)

    def proposed(self, spec: TensorSpec) -> tuple[Field, ...]:
        return (Field("indices", "int32", keep_count(self.compress_ratio, spec.numel)),)

    def propose(self, x: Array, at: Site) -> Proposal:
        return Proposal(at.ops.top_indices(x, keep_count(self.compress_ratio, at.spec.numel)), "leader")

    def compress(self, x: Array, at: Site) -> Payload:
        return {"values": at.ops.gather(x, at.negotiated), "indices": at.negotiated}
