"""The configurations that advice compares, and the risk of each to the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grace.bench.variants import Variant
from grace.core.communicators.auto import error_of_normal
from grace.core.config.config import Config, change_config, make_config
from grace.core.config.recommended import SGD as FOR_SGD
from grace.core.config.recommended import STARTS, Optimizer, optimizers_for, starts
from grace.core.config.registry import compressors

#: The label of no compression.
NONE = "none"
#: The grades of risk, from nothing to much.
RISKS = ("none", "low", "medium", "high")
#: The highest grade of what advice recommends.
LOW = RISKS.index("low")
# Methods that only round to 16 bits.
_ROUNDED = ("fp16", "bf16")
# Methods that compress shards, which nodes may exchange.
_BY_NODES = ("qsgd", "blockwise")
# Beyond this error |x - C(x)|^2 / |x|^2 the study's evidence, of smaller ones, says little.
_LARGE = 0.1
# The period of "more local steps".
LOCAL_STEPS = 8


class Risk(NamedTuple):
    """The risk of a configuration: its place in `RISKS`, and the reason."""

    grade: int
    reason: str

    def __str__(self) -> str:
        return f"{RISKS[self.grade]}: {self.reason}"


def changes(nodes: bool = False) -> dict[str, dict[str, Any]]:
    """Return what each candidate changes in a configuration, by label, from the gentlest method to the strongest.

    These are the recommended methods and those that were registered with settings to compare, each with these settings,
    or with its defaults. With `nodes`, the recommended quantizers also travel by hierarchical.
    """
    recommended = [NONE, _ROUNDED[0], *(start.config["compressor"] for start in STARTS)]
    found = {}
    for name in dict.fromkeys([*recommended, *(name for name in compressors if compressors.about(name).advised)]):
        for options in compressors.about(name).advised or ({},):
            variant = Variant(name, options)
            found[variant.label] = variant.config()
            if nodes and variant.label in _BY_NODES:
                found[f"{name} by nodes"] = {**found[name], "communicator": "hierarchical"}
    return found


def candidates(config: Config, nodes: bool = False) -> dict[str, Config]:
    """Return the configurations to compare, by label, as changes of the user's; without what it cannot become."""
    return {label: change_config(config, change) for label, change in changes(nodes).items()}


def risk_of(change: Mapping[str, Any], error: float | None, optimizers: Sequence[Optimizer]) -> Risk:
    """Return the risk of a candidate for these optimizers, from what it changes in a configuration.

    `error` is |x - C(x)|^2 / |x|^2 on some gradients.
    """
    name = change["compressor"]
    if name == NONE:
        return Risk(0, "trains exactly as before")
    if name in _ROUNDED:
        if error is not None and error > _LARGE:
            return Risk(3, f"loses {100 * error:.3g} % of the gradients' energy: they are too small for {name}")
        return Risk(0, "rounds to 16 bits")
    adaptive = [optimizer.name for optimizer in optimizers if optimizer.adaptive]
    if adaptive and optimizers_for(name) == FOR_SGD:
        return Risk(3, f"known to train badly with {adaptive[0]}, see docs/adam.md")
    known = starts(name)
    if not known:
        return Risk(2, "not among the recommendations; compare the accuracy")
    if any("check" in start.trains for start in known):
        return Risk(2, known[0].trains)
    mine, studied = (make_config(given).method.compressor for given in (change, known[0].config))
    if mine != studied and error_of_normal(mine) > error_of_normal(studied):
        return Risk(2, "loses more than the recommended setting; compare the accuracy")
    if error is not None and error > _LARGE:
        return Risk(2, f"loses {100 * error:.3g} % of the gradients' energy, more than in the study")
    return Risk(1, known[0].trains if mine == studied else "loses less than the recommended setting")
