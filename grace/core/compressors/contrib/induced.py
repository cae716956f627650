"""Induced: a sparsifier, and an unbiased method for what it drops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from grace.core.compressors.contrib.chain import cannot_sparsify, exchanges_before, make_parts
from grace.core.config.registry import About, compressors
from grace.core.methods.capabilities import Stateful
from grace.core.methods.compressor import Compressor
from grace.core.methods.site import Site
from grace.core.spec import Array, Field, Key, Payload, TensorSpec

_PREFIX = "rest/"


@compressors.register(
    "induced",
    About(
        family="hybrid",
        adam=True,
        tests=[
            {
                "sparsifier": {"name": "topk", "compress_ratio": 0.3},
                "quantizer": {"name": "randomk", "compress_ratio": 0.3, "scaled": True},
            },
            {"sparsifier": {"name": "threshold", "threshold": 0.5}, "quantizer": "natural"},
        ],
    ),
)
@dataclass(frozen=True)
class Induced(Compressor):
    r"""Induced compressor: a sparsifier, and an unbiased method for what it drops; unbiased without a memory.

    Formula: C(x) = S(x) + Q(x - S(x))

    `sparsifier` (S) and `quantizer` (Q) are each a name, a table {"name": ..., options}, or a ready compressor. Both
    payloads travel, so nothing is kept. Q must be unbiased. Neither may have a state or proposals. Q may be a
    sparsifier that scales its values, such as `randomk` with `scaled`. If E|y - Q(y)|^2 <= omega |y|^2 and S has a
    delta, then E|x - C(x)|^2 <= omega (1 - delta) |x|^2.

    Error: 0.000065 |x|^2 for normal x.

    Cost: that of both methods.

    When: error feedback is not possible, for instance because ranks come and go, and a few elements are large: they
    arrive exactly, and the error of Q is that of the others. Not to save bytes: both methods send theirs.

    Reference: Horvath and Richtarik, "A better alternative to error feedback for communication-efficient distributed
    learning", ICLR 2021.
    """

    # `__post_init__` replaces names by compressors. The defaults are names because users write names, and the list of
    # options shows the defaults.
    sparsifier: Compressor = "topk"  # type: ignore[assignment]
    quantizer: Compressor = "qsgd"  # type: ignore[assignment]

    unbiased = True

    def __post_init__(self) -> None:
        make_parts(self, sparsifier=_no_sparsifier, quantizer=_no_quantizer)

    @property
    def absolute(self) -> bool:
        return self.sparsifier.absolute or self.quantizer.absolute

    @property
    def flat(self) -> bool:
        return self.sparsifier.flat and self.quantizer.flat

    @property
    def joins(self) -> bool:
        # The largest elements of all tensors would leave those with small gradients to Q, with its larger error.
        return self.sparsifier.absolute and self.sparsifier.joins and self.quantizer.joins

    @property
    def multiplies(self) -> bool:
        return self.quantizer.multiplies

    @cached_property
    def linear_in(self) -> tuple[str, ...]:
        kept, rest = self.sparsifier.linear_in, self.quantizer.linear_in
        return (*kept, *(_PREFIX + name for name in rest)) if kept and rest else ()

    def unfit(self, spec: TensorSpec) -> str | None:
        return self.sparsifier.unfit(spec) or self.quantizer.unfit(spec)

    def check_ranks(self, size: int) -> None:
        for inner in (self.sparsifier, self.quantizer):
            inner.check_ranks(size)

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        rest = (
            f._replace(name=_PREFIX + f.name, length=_PREFIX + f.length if isinstance(f.length, str) else f.length)
            for f in self.quantizer.wire(spec)
        )
        return (*self.sparsifier.wire(spec), *rest)

    def compress(self, x: Array, at: Site) -> Payload:
        at = at._replace(out=None)
        kept = self.sparsifier.compress(x, at)
        rest = self.sparsifier.residual_(at.ops.copy(x), kept, at)
        sent = self.quantizer.compress(rest, _rest_of(at))
        return {**kept, **{_PREFIX + name: array for name, array in sent.items()}}

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        at = at._replace(out=None)
        rests = [{k.removeprefix(_PREFIX): v for k, v in p.items() if k.startswith(_PREFIX)} for p in payloads]
        total = self.quantizer.merge(rests, _rest_of(at))
        values, indices = [p["values"] for p in payloads], [p["indices"] for p in payloads]
        return at.ops.sparse_sum(values, indices, at.spec.numel, onto=total)


def _rest_of(at: Site) -> Site:
    """Return the site of the quantizer, with random numbers of its own."""
    return at._replace(key=Key(Key.derive(at.key.seed, "rest"), at.key.step, at.key.rank), state={}, memory={})


def _no_sparsifier(inner: Compressor) -> str | None:
    if isinstance(inner, Stateful):
        return "it keeps a state"
    return cannot_sparsify(inner)


def _no_quantizer(inner: Compressor) -> str | None:
    if not inner.unbiased:
        return "it is not unbiased"
    if isinstance(inner, Stateful):
        return "it keeps a state"
    return exchanges_before(inner)
