"""Messages of rank 0 about an exchange that starts or changes: the warnings of its plans, and a line on its bytes."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from grace.core.config.outer import OuterSteps
from grace.core.config.registry import compressors
from grace.core.observe.log import logger
from grace.core.plan.plan import Plan


def warn(texts: Iterable[str], warned: set[str]) -> None:
    """Log the warnings that are not among those `warned`, and add them to these."""
    for text in texts:
        if text not in warned:
            warned.add(text)
            logger().warning("%s", text)


def announce(
    stages: Sequence[tuple[int, Plan]],
    ranks: int,
    report: str,
    step: int | None = None,
    outer: OuterSteps | None = None,
) -> None:
    """Say in one line what a rank sends from now on; `report` is the call that lists it.

    `stages` are the plans of a schedule, each with its first step, and `step` is the next step of a run that goes on.
    With outer steps, both count syncs, and the line says when the ranks sync. The line goes to the logger `grace` with
    the level INFO. If nothing has set up logging, it goes to stderr, as warnings do. The report is logged with the
    level DEBUG.
    """
    import logging

    number = max(i for i, (first, plan) in enumerate(stages) if first <= (step or 0) and not (i and plan.cycle))
    plan = stages[number][1]
    counted = "step" if outer is None else "sync"
    began = "" if step is None else f"from {counted} {step}, "
    last = number + 1 == len(stages) or plan.cycle
    ends = "" if last else f"until {counted} {stages[number + 1][0]}, "
    schedule = "" if outer is None else f" Outer steps: {outer}."
    period = counted if outer is None or outer.count == 1 else "period"
    say(f"grace: {began}{ends}{summary(plan, ranks, period)}{schedule} {report} lists them.")
    log = logger()
    if log.hasHandlers() and log.isEnabledFor(logging.DEBUG):
        log.debug("%s", plan.report())


def say(text: str) -> None:
    """Log a line with the level INFO; if nothing has set up logging, it goes to stderr, as warnings do."""
    import logging

    log = logger()
    if log.hasHandlers():
        log.info("%s", text)
    elif log.level <= logging.INFO > log.manager.disable and logging.root.level <= logging.WARNING:
        # Python's last resort shows warnings only.
        record = log.makeRecord(log.name, logging.INFO, __file__, 0, "%s", (text,), None)
        if logging.lastResort is not None and log.filter(record):
            logging.lastResort.handle(record)


def tell_need(seconds: float, utilisation: float, needed: float) -> None:
    """Say in one line what share of the time syncs leave to inner steps, and the link that leaves 95 %.

    `seconds` are those from one sync to the next, and `needed` the bits per second of that link.
    """
    size, unit = needed, "bit/s"
    for larger in ("kbit/s", "Mbit/s", "Gbit/s"):
        if size >= 999.5:
            size, unit = size / 1000, larger
    say(
        f"grace: the ranks sync every {seconds:.3g} s, and inner steps take {100 * utilisation:.1f} % of the time. For "
        f"95 %, a link must carry {size:.3g} {unit}."
    )


def summary(plan: Plan, ranks: int, period: str = "step") -> str:
    """Return in a sentence which methods compress how many tensors, and what a rank sends per step, or other period."""
    numbers: collections.Counter[str] = collections.Counter()
    for item in plan.assignments:
        numbers[compressors.name_of(item.compressor)] += item.spec.numel
    elements = {name: n for name, n in numbers.most_common() if name != "none"}
    count = sum(compressors.name_of(item.compressor) in elements for item in plan.assignments)
    who = f"each of {ranks} ranks sends" if ranks > 1 else "a single rank sends"
    every = f"{len(plan.assignments):,} tensors"
    sent, dense = plan.wire_bytes, plan.dense_bytes
    if not count:
        return f"none of {every} is compressed, and {who} {in_units(sent)} per {period}."
    *others, last = elements
    names = f"{', '.join(others)} and {last} compress" if others else f"{last} compresses"
    more = "" if plan.fixed else " and what the gradients select"
    share = f" ({100 * sent / dense:.3g} %)" if plan.fixed and dense else ""
    return (
        f"{names} {count:,} of {every}, and {who} {in_units(sent)}{more} per {period} instead of "
        f"{in_units(dense)}{share}."
    )


def in_units(nbytes: int) -> str:
    """Return a number of bytes in B, KB (1,000 bytes), MB or GB."""
    size, unit = float(nbytes), "B"
    for larger in ("KB", "MB", "GB"):
        if size >= 999.95:
            size, unit = size / 1000, larger
    return f"{nbytes} B" if unit == "B" else f"{size:,.1f} {unit}"
