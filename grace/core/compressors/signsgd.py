"""SignSGD with majority vote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grace.core.codecs.signs import binarize, binarize_finite, majority
from grace.core.config.registry import About, Setting, compressors
from grace.core.methods.compressor import Compressor
from grace.core.methods.fusions import compress_checked
from grace.core.methods.site import Site
from grace.core.ops.base import packed_size
from grace.core.ops.random import MASK, mix
from grace.core.spec import Array, Field, Payload, TensorSpec


@compressors.register(
    "signsgd",
    About(
        family="quantization",
        adam=False,
        # Every coordinate moves by lr in each step, for gradients of any size.
        digits=Setting(lr=0.0005),
    ),
)
@dataclass(frozen=True)
class SignSGD(Compressor):
    r"""SignSGD: one sign bit per element; the ranks take a majority vote.

    Formula: C(x)_i = \mathrm{sign}(x_i), \quad g_i = \mathrm{sign}\bigl(\textstyle\sum_r \mathrm{sign}(x_{r,i})\bigr)

    A tie of the votes gives 0. An exact zero has no sign: every other rank counts it as positive, the rest as negative,
    and after each step they swap. So where all gradients are zero (a row of an embedding that no rank has used), an
    even number of ranks has a tie, and with an odd number the weight moves by one learning rate and back. For each pair
    of steps, the key draws which ranks begin, so zeros in every second step alone do not add up either. The step is the
    bare sign, so retune the learning rate (smaller). Use no error feedback: it harms this method.

    Error: 0.41 |x|^2 for normal x.

    Cost: one pass of comparisons and bit packing; one pass per rank to count the votes; no random numbers, no state.

    When: one-bit votes that outliers on one rank cannot change. Best with many ranks or an odd number of them: between
    2 ranks every disagreement is a tie. To keep the usual learning rate, take efsignsgd.

    Reference: Bernstein et al., "signSGD with majority vote is communication efficient and fault tolerant", ICLR 2019.
    """

    averages = False
    joins = True
    advice = "every element of a step is the learning rate or 0; take a much smaller learning rate than without grace"

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return (Field("signs", "uint8", packed_size(spec.numel, 1)),)

    def compress(self, x: Array, at: Site) -> Payload:
        return {"signs": binarize(at.ops, x, 0, _turn(at))}

    def decompress(self, payload: Payload, at: Site) -> Array:
        return majority(at.ops, [payload["signs"]], at.spec.numel, at.spec.work_dtype, at.out)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        return majority(at.ops, [payload["signs"] for payload in payloads], at.spec.numel, at.spec.work_dtype, at.out)


def _turn(at: Site) -> Array | bool:
    """Return whether an exact zero counts as negative on this rank in this step.

    The signs of two neighbouring ranks cancel, and those of the two steps of a pair.
    """
    first = mix(at.ops, at.key.step // 2, at.key.seed & MASK)
    return (first + at.key.step + at.rank) % 2 == 1


@compress_checked.of(SignSGD)
def compress_finite(compressor: SignSGD, x: Array, at: Site) -> tuple[Payload, Array]:
    """Return the payload of x, and whether x is finite."""
    signs, finite = binarize_finite(at.ops, x, _turn(at))
    return {"signs": signs}, finite
