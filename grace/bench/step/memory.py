"""`grace bench step --memory`: the most that a rank holds at once under each method, in processes of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grace.bench.step.methods import Method
from grace.bench.step.network import Network
from grace.bench.step.ranks import Ranks
from grace.bench.step.run import WARM_UP, Setting
from grace.bench.step.table import BYTES, line, place
from grace.bench.table import digits, scaled

HEAD = ("peak", "/ gradients", "exchange", "/ gradients")
WIDTHS = (9, 11, 9, 11)


@dataclass(frozen=True)
class Weight:
    """What the largest rank held at most above what it held before the model was made, and the model's gradients."""

    method: Method
    setting: Setting
    peak_bytes: int
    gradient_bytes: int

    def to_dict(self, compute: Weight) -> dict[str, Any]:
        """JSON-able and complete; the exchange's bytes are those beyond a step without exchange."""
        setting, exchange = self.setting, self.peak_bytes - compute.peak_bytes
        return {
            "method": self.method.name,
            "options": setting.options_of(self.method),
            "framework": setting.framework,
            "link": setting.link,
            "latency": setting.latency,
            "ranks": setting.ranks,
            "model": setting.model,
            "gradient_bytes": self.gradient_bytes,
            "peak_bytes": self.peak_bytes,
            "peak_over_gradients": self.peak_bytes / self.gradient_bytes,
            "exchange_bytes": exchange,
            "exchange_over_gradients": exchange / self.gradient_bytes,
        }


def weigh(setting: Setting, methods: list[Method], progress: Callable[[str], None]) -> list[Weight]:
    """Weights in the order of the methods, each in processes of its own.

    `progress(text)` hears of what comes next. Raises GraceError where the test bed or a rank fails.
    """
    weights = []
    with Network(setting.ranks, setting.link, setting.latency) as network:
        for method in methods:
            progress(method.name)
            with Ranks(network, setting.framework, setting.model, method.family, keep_pages=False) as ranks:
                visits = ranks.visit(method.name, setting.options_of(method), WARM_UP, setting.steps)
            peak = max(visit["peak_bytes"] for visit in visits)
            weights.append(Weight(method, setting, peak, visits[0]["gradient_bytes"]))
    return weights


def lines(weights: Sequence[Weight]) -> list[str]:
    """Title, head and a line per method; the first weight is the step without exchange."""
    compute = weights[0]
    first = max(len(name) for name in ("method", *(weight.method.name for weight in weights)))
    title = f"{place(compute.setting)}; gradients of {scaled(compute.gradient_bytes, BYTES)}"
    rows = [line(first, weight.method.name, _cells(weight.to_dict(compute)), WIDTHS) for weight in weights]
    return [title, line(first, "method", HEAD, WIDTHS), *rows]


def _cells(found: dict[str, Any]) -> list[str]:
    # What differs by less than the kernel counts may come out below zero.
    sign = "-" if found["exchange_bytes"] < 0 else ""
    return [
        scaled(found["peak_bytes"], BYTES),
        digits(found["peak_over_gradients"]),
        sign + scaled(abs(found["exchange_bytes"]), BYTES),
        f"{found['exchange_over_gradients']:.3g}",
    ]
