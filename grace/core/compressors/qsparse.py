"""Compressor of Qsparse-local-SGD."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from grace.core.codecs.quantized import QuantizedSparsifier
from grace.core.compressors.efsignsgd import EFSignSGD
from grace.core.compressors.qsgd import QSGD
from grace.core.compressors.randomk import RandomK
from grace.core.compressors.topk import TopK, check_ratio
from grace.core.config.registry import About, Setting, compressors
from grace.core.methods.compressor import Compressor, Sparsifier
from grace.core.methods.site import Site
from grace.core.spec import Array, Payload, TensorSpec

_SPARSIFIERS: dict[str, type[TopK | RandomK]] = {"topk": TopK, "randomk": RandomK}


@compressors.register(
    "qsparse",
    About(
        family="hybrid",
        adam=False,
        tests=[
            {"compress_ratio": 0.3, "quantizer": "sign"},
            {"compress_ratio": 0.3, "sparsifier": "randomk", "quantum_num": 2},
        ],
        digits=Setting(options={"compress_ratio": 0.01}),
    ),
)
@dataclass(frozen=True)
class QSparse(QuantizedSparsifier):
    r"""Qsparse: top-k or random-k, its values quantized by QSGD and scaled to a contraction.

    Formula: C(x) = \frac{Q(S(x))}{1 + \beta}, \quad \beta = \min(k / s^2, \sqrt{k} / s)

    S keeps k values. Q is QSGD with s = quantum_num levels and one norm for all k values; beta bounds its variance, and
    delta = k / (d (1 + beta)). Without the scaling, beta > 1 would let the error exceed |x|. With `quantizer = "sign"`,
    C(x) = (|S(x)|_1 / k) sign(S(x)), which needs no scaling; delta >= 1/d. A value takes ceil(log2(2 s + 1)) bits, or 1
    bit with "sign", and an int32 index (none with randomk, which draws the indices from the shared key). The compressor
    does not contain the local steps between two exchanges.

    Error: 0.92 |x|^2 for normal x; 0.92 |x|^2 with `quantizer="sign"`.

    Cost: the selection (topk: one pass and a partial sort; randomk: O(k)); with QSGD one random number per kept value.

    When: half of topk's bytes or less. It has the guarantees of error feedback. A beta far above 1 makes every step
    small and the residual old: let quantum_num grow as sqrt(k).

    Reference: Basu et al., "Qsparse-local-SGD: distributed SGD with quantization, sparsification, and local
    computations", NeurIPS 2019, Lemmas 1 and 3.
    """

    compress_ratio: float = 0.01
    sparsifier: Literal["topk", "randomk"] = "topk"
    quantizer: Literal["qsgd", "sign"] = "qsgd"
    quantum_num: int = 127

    def __post_init__(self) -> None:
        check_ratio("qsparse", self.compress_ratio)
        _ = self.pair  # QSGD checks the number of levels

    @cached_property
    def pair(self) -> tuple[Sparsifier, Compressor]:
        quantizer = EFSignSGD() if self.quantizer == "sign" else QSGD(self.quantum_num, bucket_size=0, norm="l2")
        return _SPARSIFIERS[self.sparsifier](self.compress_ratio), quantizer

    def _beta(self, k: int) -> float:
        return min(k / self.quantum_num**2, math.sqrt(k) / self.quantum_num) if self.quantizer == "qsgd" else 0.0

    def values_contraction(self, values: TensorSpec) -> float | None:
        # E|Q|^2 <= (1 + beta) |S|^2 and E Q = S, so E|S - Q / (1 + beta)|^2 <= (1 - 1 / (1 + beta)) |S|^2.
        return 1 / (1 + self._beta(values.numel)) if self.quantizer == "qsgd" else super().values_contraction(values)

    def values(self, payload: Payload, at: Site) -> Array:
        values = super().values(payload, at)
        if self.quantizer == "sign":
            return values
        return values / at.ops.full(1, 1 + self._beta(self.values_spec(at.spec).numel), at.spec.work_dtype)
