"""The runs of benchmarks/outer.py in docs/results/outer.json: their table, and figures over bytes and over time."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from measurements import load
from registry import WIDTH, Block, figure, kind, row, svg, wrapped

Run = dict[str, Any]
PLAIN = "synchronous"
# With a curve in the figures.
COLORS = {
    PLAIN: "0.4",
    "local SGD": "#66a182",
    "DiLoCo": "#0a7d91",
    "SparseLoCo": "#d1495b",
    "1-bit Adam": "#b07d00",
}
FIGURES = {"bytes": "docs/figures/outer_bytes.svg", "time": "docs/figures/outer_time.svg"}


def runs(method: str, steps: int, lr: float | None = None) -> dict[int, Run]:
    """Return the runs of a method with a number of steps by their seeds, without those that have diverged.

    Without `lr`, they are those with the learning rate that gives each seed the lowest loss.
    """
    found = [run for run in _all(method) if run["steps"] == steps and run["loss"] is not None]
    found = [run for run in found if lr in (None, run["lr"])]
    return {run["seed"]: run for run in sorted(found, key=lambda run: -run["loss"])}


def lengths() -> list[int]:
    """Return the numbers of steps of which there are runs."""
    return sorted({run["steps"] for run in load("outer")["rows"]})


def behind(method: str, steps: int, lr: float | None = None, other: str = PLAIN) -> list[float]:
    """Return by how many percent the loss of a method is above the lowest of another, for each seed that both have."""
    theirs = runs(other, steps)
    found = runs(method, steps, lr).items()
    return [100 * (run["loss"] / theirs[seed]["loss"] - 1) for seed, run in found if seed in theirs]


def fewer(method: str) -> float:
    """Return how many times fewer bytes than synchronous training a method sends per step."""
    return statistics.fmean(run["dense_bytes"] / run["bytes"] for run in _all(method))


def used(method: str) -> float:
    """Return the share of the time that inner steps take, in percent."""
    return 100 * statistics.fmean(run["utilisation"] for run in _all(method))


def _all(method: str) -> list[Run]:
    return [run for run in load("outer")["rows"] if run["method"] == method]


def seconds(run: Run, step: int, sent: float) -> float:
    """Return the time at which a step has ended, and `sent` bytes have left a rank."""
    compute = load("outer")["compute"]
    waited = run["steps"] * compute * (1 / run["utilisation"] - 1)
    return step * compute + waited * sent / run["curve"][-1][2]


def loss_at(method: str, steps: int, moment: float) -> float:
    """Return the loss of a method with seed 0 some seconds after its start, interpolated in its curve."""
    run = runs(method, steps)[0]
    times = [seconds(run, step, sent) for step, _, sent in run["curve"]]
    return float(np.interp(moment, times, [loss for _, loss, _ in run["curve"]]))


def spread(values: list[float], form: str) -> str:
    """Return the mean of a value per seed, with the lowest and the highest."""
    if not values:
        return ""
    ends = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else " (one seed)"
    return f"{statistics.fmean(values):{form}}{ends}"


@kind("outer-runs")
def table(block: Block) -> list[str]:
    """Return a row per method and learning rate: bytes, utilisation, and the losses after each number of steps."""
    data = load("outer")
    heads = [text for steps in lengths() for text in (f"loss after {steps:,} steps", f"above the best `{PLAIN}`, %")]
    link = f"{data['link'] / 1e6:g} Mbit/s"
    lines = [row("method", "learning rate", "bytes per step", "times fewer", f"utilisation at {link}, %", *heads)]
    lines.append(row("---", *["---:"] * (4 + len(heads))))
    for method, lr in dict.fromkeys((run["method"], run["lr"]) for run in data["rows"]):
        sent = statistics.fmean(run["bytes"] for run in _all(method))
        cells = [f"`{method}`", f"{lr:g}", f"{sent:,.0f}", f"{fewer(method):,.{0 if fewer(method) > 99 else 1}f}"]
        cells.append(f"{used(method):.1f}")
        for steps in lengths():
            cells.append(spread([run["loss"] for run in runs(method, steps, lr).values()], ".3f"))
            cells.append(spread(behind(method, steps, lr), ".1f"))
        lines.append(row(*cells))
    return [*lines, "", *origin(block)]


def origin(block: Block) -> list[str]:
    """Return the lines that say where the runs come from."""
    data = load("outer")
    known = list(data["origins"].values())
    machines, versions = (" and ".join(dict.fromkeys(x[key] for x in known)) for key in ("machine", "versions"))
    days = sorted({x["date"] for x in known})
    link = f"[outer.json]({block.link('docs/results/outer.json')})"
    return wrapped(
        f"{data['what']}. {machines}; {versions}. {' to '.join(dict.fromkeys((days[0], days[-1])))}. Data, commits and "
        f"commands: {link}"
    )


def draw(over: str) -> bytes:
    """Draw the loss over the bytes or the time until then, of the longest runs that most methods have."""
    data = load("outer")
    known = {steps: [method for method in COLORS if 0 in runs(method, steps)] for steps in lengths()}
    steps = max(known, key=lambda steps: (len(known[steps]), steps))
    drawn = Figure(figsize=(WIDTH, 3.6), layout="constrained")
    axes = drawn.add_subplot()
    for method in known[steps]:
        run = runs(method, steps)[0]
        if over == "bytes":
            places = [sent for _, _, sent in run["curve"]]
        else:
            places = [seconds(run, step, sent) for step, _, sent in run["curve"]]
        losses = [loss for _, loss, _ in run["curve"]]
        axes.plot(places, losses, "o-", color=COLORS[method], ms=2.5, linewidth=1.2, label=method)
    axes.set_title(f"{steps:,} steps on 4 ranks, seed 0", loc="left", fontsize=9)
    axes.set_xlabel("bytes that leave a rank" if over == "bytes" else f"seconds at {data['link'] / 1e6:g} Mbit/s")
    axes.set(xscale="log", ylabel="validation loss")
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    drawn.legend(loc="outside lower center", ncols=3, frameon=False)
    return svg(drawn)


for _over, _path in FIGURES.items():
    figure(_path)(partial(draw, _over))
