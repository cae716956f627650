"""EF-SignSGD: scaled signs with error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grace.core.codecs.signs import sign_mean, sign_sum, sum_sign_mean
from grace.core.codecs.sums import FEEDBACK, Feedback
from grace.core.config.registry import About, compressors
from grace.core.methods.compressor import Compressor
from grace.core.methods.fusions import compress_sum, merge_scaled
from grace.core.methods.site import Site
from grace.core.ops.base import packed_size
from grace.core.spec import Array, Field, Payload, State, TensorSpec


@compressors.register("efsignsgd", About(family="quantization", adam=False))
@dataclass(frozen=True)
class EFSignSGD(Compressor):
    r"""EF-SignSGD: one sign bit per element, scaled by the mean magnitude of the tensor; needs error feedback.

    Formula: C(x) = \frac{\|x\|_1}{d} \, \mathrm{sign}(x)

    An exact zero counts as positive. Contraction with delta = |x|_1^2 / (d |x|^2) >= 1/d.

    Error: 0.36 |x|^2 for normal x.

    Cost: one pass for the mean magnitude and the signs, with error feedback the one that adds the residual; no random
    numbers, no sorting.

    When: one bit per element at the usual learning rate. Not where a few elements of a tensor are large: delta is small
    there, and topk carries them better.

    Reference: Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019.
    """

    default_memory = "efsignsgd"
    linear_in = ("scale",)

    def contraction(self, spec: TensorSpec) -> float | None:
        return 1.0 / max(1, spec.numel)

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return Field("scale", spec.work_dtype, 1), Field("signs", "uint8", packed_size(spec.numel, 1))

    def compress(self, x: Array, at: Site) -> Payload:
        signs, scale = sign_mean(at.ops, x)
        return {"scale": scale, "signs": signs}

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        signs, scales = ([payload[name] for payload in payloads] for name in ("signs", "scale"))
        return sign_sum(at.ops, signs, scales, at.spec.numel, out=at.out)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        return sign_sum(at.ops, [payload["signs"]], [payload["scale"]], at.spec.numel, onto=x, negate=True)


@compress_sum.of(EFSignSGD, FEEDBACK)
def _(
    compressor: EFSignSGD, memory: Feedback, grad: Array, state: State, at: Site
) -> tuple[Array, Payload, Array] | None:
    terms = memory.terms(grad, state, at)
    if terms is None:
        return None
    x, signs, scale, finite = sum_sign_mean(at.ops, *terms, at.out)
    return x, {"scale": scale, "signs": signs}, finite


@merge_scaled.of(EFSignSGD)
def _(compressor: EFSignSGD, payloads: Sequence[Payload], factor: float, at: Site) -> Array:
    signs, scales = ([payload[name] for payload in payloads] for name in ("signs", "scale"))
    return sign_sum(at.ops, signs, scales, at.spec.numel, factor=factor, out=at.out)
