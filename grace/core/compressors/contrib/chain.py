"""Chain: a sparsifier whose values are quantized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from grace.core.codecs.quantized import QuantizedSparsifier
from grace.core.config.registry import About, Setting, compressors
from grace.core.errors import ConfigError
from grace.core.methods.capabilities import Stateful, Tuning, proposed_fields, selects
from grace.core.methods.compressor import Compressor, Sparsifier, fixed_size, sparsifies
from grace.core.spec import TensorSpec


@compressors.register(
    "chain",
    About(
        family="hybrid",
        adam=False,
        tests=[
            {"sparsifier": {"name": "randomk", "compress_ratio": 0.3}, "quantizer": "terngrad"},
            {"sparsifier": {"name": "topk", "compress_ratio": 0.3}, "quantizer": "efsignsgd"},
            {"sparsifier": {"name": "topk", "compress_ratio": 1.0}, "quantizer": "none"},
            {"sparsifier": {"name": "threshold", "threshold": 0.5}, "quantizer": "qsgd"},
        ],
        digits=Setting(options={"sparsifier": "topk", "quantizer": {"name": "qsgd", "quantum_num": 15}}),
    ),
)
@dataclass(frozen=True)
class Chain(QuantizedSparsifier):
    """Chain of two methods: a sparsifier whose values pass through a quantizer.

    Formula: C(x) = Q(S(x))

    `sparsifier` (S) and `quantizer` (Q) are each a name, a table {"name": ..., options}, or a ready compressor. The
    quantizer sees the k kept values as a tensor of shape (k,). The indices travel as the sparsifier sends them (randomk
    sends none). The errors add up: E|x - C(x)|^2 = E|x - S(x)|^2 + E|S(x) - Q(S(x))|^2. If Q is a contraction, so is C,
    with delta = delta_S delta_Q. S must have no proposals; Q must have no state and no proposals, and must not be a
    vote. If the number of values depends on the data, as with `threshold` or `dgc`, Q must not need it before the step:
    qsgd, nuqsgd and blockwise with buckets, fp16, bf16 and none do not.

    Error: 0.91 |x|^2 for normal x.

    Cost: the sparsifier on d elements and the quantizer on k.

    When: the values are a large part of what a sparsifier sends: half of topk's bytes, all of randomk's. Not where the
    indices already dominate.

    Reference: Basu et al., "Qsparse-local-SGD", NeurIPS 2019, without the scaling of that method.
    """

    # `__post_init__` replaces names by compressors. The defaults are names because users write names, and the list of
    # options shows the defaults.
    sparsifier: Compressor = "topk"  # type: ignore[assignment]
    quantizer: Compressor = "qsgd"  # type: ignore[assignment]

    def __post_init__(self) -> None:
        make_parts(self, sparsifier=cannot_sparsify, quantizer=_no_quantizer)
        if not fixed_size(self.sparsifier) and not self.quantizer.of_any_length:
            names = [compressors.name_of(inner) for inner in (self.sparsifier, self.quantizer)]
            fit = [name for name in _valid_names(_no_quantizer) if compressors.example(name).of_any_length]
            raise ConfigError(
                f"chain: the number of values that '{names[0]}' keeps depends on the data, and '{names[1]}' must know "
                f"it before; received {self.quantizer}. Quantizers that need not: {', '.join(fit)}."
            )

    @property
    def absolute(self) -> bool:
        return self.sparsifier.absolute or self.quantizer.absolute

    @property
    def pair(self) -> tuple[Sparsifier, Compressor]:
        assert isinstance(self.sparsifier, Sparsifier)
        return self.sparsifier, self.quantizer


def make_parts(whole: Compressor, **reasons: Callable[[Compressor], str | None]) -> None:
    """Replace the named parts of a method, which may be names or tables, by compressors.

    Raises ConfigError if the function of a part gives a reason why it does not fit.
    """
    for kind, why_not in reasons.items():
        inner = compressors.make(getattr(whole, kind))
        object.__setattr__(whole, kind, inner)
        if reason := why_not(inner):
            raise ConfigError(
                f"{compressors.name_of(whole)}: '{compressors.name_of(inner)}' cannot be its {kind}: {reason}; "
                f"received {inner}. Valid {kind}s: {', '.join(_valid_names(why_not))}."
            )


def cannot_sparsify(inner: Compressor) -> str | None:
    """Return the reason why this is no sparsifier whose values can be sent in another way; None if it is one."""
    if not sparsifies(inner):
        return "it does not send exact values at indices"
    if isinstance(inner, Tuning):
        return "it tunes a value across all tensors"
    return exchanges_before(inner)


def _no_quantizer(inner: Compressor) -> str | None:
    if selects(inner):
        return "it drops some of the kept values"
    if not inner.averages:
        return "it votes, and the kept indices differ between ranks"
    if isinstance(inner, Stateful):
        return "it keeps a state per element, and the kept elements change in every step"
    return exchanges_before(inner)


def exchanges_before(inner: Compressor) -> str | None:
    """Return the reason why this method cannot compress a part of a tensor; None if it can."""
    values = TensorSpec("values", (64,))
    if unfit := inner.unfit(values):
        return unfit
    return "its ranks exchange a proposal before they compress" if proposed_fields(inner, values) else None


def _valid_names(why_not: Callable[[Compressor], str | None]) -> list[str]:
    """Return the names of the compressors that fit with default options; skip those that have required ones."""
    names = []
    for name in compressors:
        try:
            if why_not(compressors.example(name)) is None:
                names.append(name)
        except ConfigError:
            continue
    return names
