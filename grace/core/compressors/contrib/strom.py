"""Strom's threshold with one bit per value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grace.core.codecs.sums import FEEDBACK, Feedback, sum_select
from grace.core.compressors.threshold import A_MAGNITUDE
from grace.core.config.registry import About, Setting, compressors
from grace.core.errors import ConfigError
from grace.core.methods.capabilities import Selecting
from grace.core.methods.compressor import Compressor, beyond_int32
from grace.core.methods.fusions import compress_sum
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Field, Payload, State, TensorSpec


@compressors.register(
    "strom",
    About(
        family="hybrid",
        adam=False,
        tests=[{"threshold": 0.5}],
        errors=[{"threshold": 0.01}],
        digits=Setting(options={"threshold": 0.02}),
        needs={"threshold": A_MAGNITUDE},
    ),
)
@dataclass(frozen=True)
class Strom(Compressor, Selecting):
    r"""Strom's threshold: plus or minus tau for every element beyond it, one word of 32 bits each.

    Formula: C(x)_i = \tau \, \mathrm{sign}(x_i) \, 1_{|x_i| > \tau}

    tau is `threshold`, in the units of the gradient. It has no default: what suits one model sends nothing or
    everything of another, so 0.01 in the tables is an example. A word is i, or -1 - i for a negative element: one bit
    for the sign and 31 for the index. The part of an element beyond tau stays in the residual, so a large element
    travels in several steps. The number of words depends on the data and may be 0. The error never exceeds |x|.

    Error: 0.98 |x|^2 for normal x with `threshold=0.01`; 0.35 |x|^2 with `threshold=1.0`.

    Cost: one pass of comparisons; nothing is sorted, no random numbers.

    When: half of threshold's bytes, if the scale of the gradients is known and steady. If tau is too small, many words
    travel and the residual grows. If tau is too large, nothing travels.

    Reference: Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015.
    """

    threshold: float

    default_memory = "residual"

    def __post_init__(self) -> None:
        if not self.threshold > 0:
            raise ConfigError(f"strom: threshold must be positive, received {self.threshold!r}.")

    @property
    def absolute(self) -> bool:
        return True

    @property
    def joins(self) -> bool:
        return True

    def contraction(self, spec: TensorSpec) -> float | None:
        return 0.0

    def unfit(self, spec: TensorSpec) -> str | None:
        return beyond_int32(spec)

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return (Field("words", "int32", "sent"),)

    def compress(self, x: Array, at: Site) -> Payload:
        return {"words": words_of(at.ops, *at.ops.select(x, self.threshold, strict=True))}

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def _read(self, payload: Payload, at: Site, tau: float) -> tuple[Array, Array]:
        """Return the values and indices of the words."""
        ops, words = at.ops, payload["words"]
        level = ops.full(ops.length(words), tau, at.spec.work_dtype)
        return ops.where(words < 0, -level, level), ops.where(words < 0, -1 - words, words)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        values, indices = zip(*(self._read(payload, at, self.threshold) for payload in payloads), strict=True)
        return at.ops.sparse_sum(values, indices, at.spec.numel, out=at.out)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        values, indices = self._read(payload, at, -self.threshold)
        return at.ops.sparse_sum([values], [indices], at.spec.numel, onto=x)

    def erase_(self, x: Array, payload: Payload, at: Site) -> Array:
        return at.ops.put_(x, self._read(payload, at, 1.0)[1], 0.0)


def words_of(ops: ArrayOps, values: Array, indices: Array) -> Array:
    """Return the words of selected elements."""
    return ops.where(values < 0, -1 - indices, indices)


@compress_sum.of(Strom, FEEDBACK)
def _(compressor: Strom, memory: Feedback, grad: Array, state: State, at: Site) -> tuple[Array, Payload, Array] | None:
    terms = memory.terms(grad, state, at)
    if terms is None:
        return None
    x, finite, values, indices = sum_select(at.ops, *terms, compressor.threshold, strict=True, out=at.out)
    return x, {"words": words_of(at.ops, values, indices)}, finite
