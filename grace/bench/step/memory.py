"""The command `grace bench step --memory`: the peak memory of a rank, for each method in new processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grace.bench.step.methods import Method
from grace.bench.step.network import Network
from grace.bench.step.ranks import Ranks
from grace.bench.step.run import WARM_UP, Setting
from grace.bench.step.table import BYTES, describe_run, figures
from grace.bench.table import format_digits, format_scaled

HEAD = ("peak", "/ gradients", "exchange", "/ gradients")


@dataclass(frozen=True)
class Weight:
    """The memory of one method, in bytes.

    `peak_bytes` is the peak of the largest rank minus what it held before it made the model. `gradient_bytes` is the
    size of the model's gradients.
    """

    method: Method
    setting: Setting
    peak_bytes: int
    gradient_bytes: int

    def to_dict(self, compute: Weight) -> dict[str, Any]:
        """Return the settings and figures as an object for JSON.

        `exchange_bytes` is the peak minus the peak of a step without exchange.
        """
        setting, exchange = self.setting, self.peak_bytes - compute.peak_bytes
        return {
            "method": self.method.name,
            "launcher": self.method.launcher if self.method.compresses else None,
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


def measure_memory(setting: Setting, methods: list[Method], progress: Callable[[str], None]) -> list[Weight]:
    """Measure the peak memory of each method, in the given order, in new processes.

    Calls `progress(text)` before each method. Raises GraceError if the network cannot be made or a rank fails.
    """
    weights = []
    with Network(setting.ranks, setting.link, setting.latency, setting.local_size) as network:
        for method in methods:
            progress(method.label)
            place = (network, setting.framework, setting.model, method.library)
            with Ranks(*place, modules=setting.modules, keep_pages=False) as ranks:
                visits = ranks.visit(method, setting.options_of(method), WARM_UP, setting.steps)
            peak = max(visit["peak_bytes"] for visit in visits)
            weights.append(Weight(method, setting, peak, visits[0]["gradient_bytes"]))
    return weights


def lines(weights: Sequence[Weight]) -> list[str]:
    """Return the title, the headings and one line per method. The first weight must be the step without exchange."""
    compute = weights[0]
    title = f"{describe_run(compute.setting)}; gradients of {format_scaled(compute.gradient_bytes, BYTES)}"
    rows = ([weight.method.label, *_cells(weight.to_dict(compute))] for weight in weights)
    return [title, *figures(["method", *HEAD], *rows)]


def _cells(found: dict[str, Any]) -> list[str]:
    # The difference may be negative, because the kernel's count is not exact.
    sign = "-" if found["exchange_bytes"] < 0 else ""
    return [
        format_scaled(found["peak_bytes"], BYTES),
        format_digits(found["peak_over_gradients"]),
        sign + format_scaled(abs(found["exchange_bytes"]), BYTES),
        f"{found['exchange_over_gradients']:.3g}",
    ]
