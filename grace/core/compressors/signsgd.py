"""SignSGD with majority vote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grace.core.compressor import Compressor
from grace.core.ops.base import packed_size
from grace.core.registry import compressors
from grace.core.spec import Array, Field, Payload, Site, TensorSpec


@compressors.register("signsgd")
@dataclass(frozen=True)
class SignSGD(Compressor):
    """C(x_i) = -1 if x_i < 0, else +1, in one bit; ranks vote: g = sign(sum_i sign(x_i)), 0 on a tie.

    The step is the bare sign, so the learning rate must be retuned (smaller); a gradient of exact zeros counts as
    positive. No error feedback: it harms this method.
    Cost: one comparing pass and packing of bits; one pass per rank to count the votes; no random numbers, no state.
    When: one bit, and votes that outliers of one rank cannot turn; best with an odd number of ranks or many, since of 2
    every disagreement is a tie. Not with the usual learning rate: then take efsignsgd.
    Bernstein et al., "signSGD with majority vote is communication efficient and fault tolerant", ICLR 2019.
    """

    averages = False
    checks = True

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return (Field("signs", "uint8", packed_size(spec.numel, 1)),)

    def compress(self, x: Array, at: Site) -> Payload:
        return {"signs": at.ops.binarize(x, 0)}

    def compress_checked(self, x: Array, at: Site) -> tuple[Payload, Array]:
        # The mean magnitude costs nothing beside reading x, and is not finite if an element is not.
        signs, mean = at.ops.sign_mean(x)
        finite = at.ops.finite(mean)
        # Nor if so many are large.
        finite = at.ops.choose(finite, lambda: finite, lambda: at.ops.finite(x))
        return {"signs": signs}, finite

    def decompress(self, payload: Payload, at: Site) -> Array:
        return at.ops.majority([payload["signs"]], at.spec.numel, at.spec.work_dtype)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        return at.ops.majority([payload["signs"] for payload in payloads], at.spec.numel, at.spec.work_dtype)
