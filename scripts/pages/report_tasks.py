"""The tables of the study's tasks, and of the models of the GRACE paper's Table II."""

from __future__ import annotations

import math

from registry import Block, kind, row

from grace.report.task import MODULES, find_task


@kind("tasks")
def tasks(block: Block) -> list[str]:
    """Return a row per task, with what a run without compression has."""
    header = ("task", "network", "parameters", "optimizer", "learning rate", "batch per rank", "steps", "metric")
    lines = [row(*header), row(*["---"] * len(header))]
    for name in MODULES:
        task = find_task(name)
        training = task.start(0, 2, steps=task.steps, lr=task.lr, momentum=task.momentum)
        parameters = sum(math.prod(shape) for shape in training.shapes.values())
        steps = f"{task.steps}, quick {task.quick_steps}" if task.quick_steps < task.steps else f"{task.steps}"
        sizes = (f"{parameters:,}", training.optimizer.name, f"{task.lr:g}", f"{task.batch}", steps)
        lines.append(row(f"`{name}`", task.title, *sizes, task.metric))
    return lines


@kind("table-ii")
def table_ii(block: Block) -> list[str]:
    """Return a row per model, with its counts and those of the paper where they differ."""
    from grace.report.models import TABLE_II

    header = ("task", "model", "data", "parameters", "gradient vectors")
    lines = [row(*header), row(*["---"] * len(header))]
    for line in TABLE_II:
        pairs = zip(line.counts(), (line.parameters, line.vectors), strict=True)
        counts = (f"{ours:,}" if ours == theirs else f"{ours:,} (paper: {theirs:,})" for ours, theirs in pairs)
        lines.append(row(line.task, line.name, line.data, *counts))
    return lines
