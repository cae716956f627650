"""The tables of `grace bench step`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from grace.bench.step.network import limit_kind
from grace.bench.step.run import Result, Setting
from grace.bench.table import SECONDS, format_digits, format_scaled
from grace.core.observe.table import align
from grace.machine import processor

HEAD = ("median", "p10", "p90", "sent/step", "reported", "x DDP", "upper bound")
BYTES = ((1e-9, "GB"), (1e-6, "MB"), (1e-3, "KB"), (1.0, "B"))


def lines(results: Sequence[Result]) -> list[str]:
    """Return the title, the headings and one line per method.

    The first result must be the step without exchange, the second the baseline that all are compared with.
    """
    compute, reference = results[0], results[1]
    rows = ([result.method.label, *cells(result, compute, reference)] for result in results)
    setting = compute.setting
    title = f"{describe_run(setting)}; {setting.rounds} rounds of {setting.steps} steps"
    return [title, *figures(["method", *head(reference)], *rows)]


def head(reference: Result) -> list[str]:
    """Return the headings of the columns."""
    name = {"horovod": "Horovod", "ddp": "DDP", "fsdp": "FSDP2", "fsdp-zero2": "FSDP2"}[reference.method.name]
    return [text.replace("DDP", name) for text in HEAD]


def describe_run(setting: Setting) -> str:
    """Return a description of the run: model, framework, ranks, processor, link and options."""
    delay = f" with {setting.latency} additional delay" if setting.latency else ""
    pacing = " by pacing" if limit_kind(setting.link) == "pacing" else ""
    options = "".join(f"; {key}={json.dumps(value)}" for key, value in setting.options.items())
    return (
        f"{setting.model} in {setting.framework}; {_describe_ranks(setting)} on {processor()}; "
        f"link {setting.link}{pacing}{delay}{options}"
    )


def cells(result: Result, compute: Result, reference: Result) -> list[str]:
    """Return the cells of a line, in the order of `head`."""
    found = result.to_dict(compute, reference)
    sent, reported = found["wire_bytes"], found["reported_bytes"]
    low, high = result.spread
    # A rank of several on a node reports what it sends within the node, too, and the link carries the bytes of all.
    comparable = reported is not None and sent and result.setting.local_size == 1
    return [
        *(format_scaled(value, SECONDS) for value in (result.median, low, high)),
        "-" if sent is None else format_scaled(sent, BYTES),
        f"{reported / sent:.1%}" if comparable else "-",
        format_digits(reference.median / result.median),
        format_digits(found["speedup_bound"]),
    ]


def figures(*rows: Sequence[str]) -> list[str]:
    """Return a line per row: a name, and figures aligned to the right."""
    return align(rows, right=range(1, len(rows[0])))


def _describe_ranks(setting: Setting) -> str:
    nodes = setting.ranks // setting.local_size
    return f"{setting.ranks} ranks" + (f" on {nodes} nodes" if setting.local_size > 1 else "")
