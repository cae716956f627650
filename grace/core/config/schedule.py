"""Warm-up of compress_ratio: it falls to its final value over the first steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grace.core.errors import ConfigError
from grace.core.methods.capabilities import ratio_of
from grace.core.methods.compressor import Compressor


def ladder(compress_ratio: float, steps: int) -> list[tuple[int, float]]:
    """Return the stages of DGC's warm-up as (first step, ratio): 1/4, 1/16, ... and then compress_ratio.

    The stages before compress_ratio have equal parts of `steps`. For 0.001 the ratios are 25 %, 6.25 %, 1.56 %, 0.39 %,
    0.1 %, as in Lin et al., "Deep gradient compression", ICLR 2018. Raises ConfigError if there are more stages than
    steps, or none because compress_ratio is 1/4 or more.
    """
    rungs: list[float] = []
    while (rung := 0.25 ** (len(rungs) + 1)) > compress_ratio * (1 + 1e-9):
        rungs.append(rung)
    if not len(rungs) <= steps:
        raise ConfigError(
            f"warmup_steps: the warm-up to compress_ratio {compress_ratio} has {len(rungs)} stages; "
            f"expected at least {len(rungs)} steps, received {steps}."
        )
    if not rungs:
        raise ConfigError(
            f"warmup_steps: the warm-up starts at 0.25, so expected compress_ratio below 0.25, received "
            f"{compress_ratio}. Leave warmup_steps out."
        )
    return [(i * steps // len(rungs), rung) for i, rung in enumerate(rungs)] + [(steps, compress_ratio)]


def warmed_ratio(compressor: Compressor) -> float:
    """Return the compressor's compress_ratio. Raises ConfigError if it has none."""
    ratio = ratio_of(compressor)
    if ratio is None:
        raise ConfigError(
            f"warmup_steps: a warm-up lowers compress_ratio, and {compressor} has no such option; "
            "write a schedule of its options instead."
        )
    return float(ratio)


def as_changes(value: Any) -> dict[str, Any]:
    """Return the result of a schedule function as options: a mapping, a number for compress_ratio, None for none.

    Raises ConfigError for anything else.
    """
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    try:
        return {"compress_ratio": float(value)}
    except (TypeError, ValueError):
        raise ConfigError(
            "schedule function: expected a mapping of options, a number (the compress_ratio) or None, "
            f"received {value!r} of type {type(value).__name__}."
        ) from None
