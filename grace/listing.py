"""The output of `grace compressors`: the methods with their flags, sizes and options, as text or Markdown."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from typing import Any

from grace.core.compressor import Compressor
from grace.core.registry import Registry, communicators, compressors, fields_of, memories
from grace.core.spec import ITEMSIZE, TensorSpec
from grace.core.wire import payload_bytes
from grace.machine import FRAMEWORKS, installed

# Bits per element are computed for EXAMPLE. If they depend on the data, they are measured on the smaller MEASURED.
EXAMPLE = TensorSpec("example", (1024, 1024))
MEASURED, STEPS, DEVIATION = TensorSpec("measured", (256, 256)), 100, 0.01

FLAGS = {
    "summable": "an allreduce can add the payloads",
    "unbiased": "the expectation over the random keys is the gradient itself",
    "fixed-size": "the size of the payload does not depend on the data",
    "sparsifies": "some coordinates are sent exactly, the others are not sent",
}
HEAD = ["name", "memory", "communicator", *FLAGS, "error feedback", "bits per element", "frameworks"]
REFERENCE = re.compile(r'((?:[A-Z][\w-]+(?:, | and )?)+(?: et al\.)?), "[^"]+", ([^";]*?20\d\d)')


def _rows(*, page: bool) -> list[list[str]]:
    """Return one row per method, sorted by name.

    With `page`, measure the bits that depend on the data, which takes seconds, and list frameworks that are not
    installed too.
    """
    rows = []
    # Every method runs on every framework, because it uses only grace's array operations.
    runs_on = ", ".join(["numpy", *(name for name in FRAMEWORKS if page or installed(name))])
    for name in compressors:
        if required(compressors.get(name)):
            rows.append([name, *["depends on options"] * (len(HEAD) - 1)])
            continue
        c = compressors.make(name)
        words = ["yes" if flag else "no" for flag in (c.summable, c.unbiased, c.fixed_size, c.sparsifies)]
        parts = [c.default_memory, c.default_communicator]
        rows.append([name, *parts, *words, _feedback(c), _bits(name, c, measure=page), runs_on])
    return rows


def _feedback(compressor: Compressor) -> str:
    """Return the advice on error feedback for a method."""
    if compressor.harmed_by_feedback:
        return "harms"
    if compressor.contraction(EXAMPLE) == 1:
        return "not needed"
    return "optional" if compressor.default_memory == "none" else "recommended"


def _bits(name: str, compressor: Compressor, *, measure: bool) -> str:
    """Return the bits that one rank sends per element of the example: proposal and payload, without bucket header."""
    fields = [*compressor.agreement(EXAMPLE), *compressor.wire(EXAMPLE)]
    fixed = payload_bytes(fields)
    if fixed is not None:
        return f"{8 * fixed / EXAMPLE.numel:.3g}"
    open_ended = [f for f in fields if f.wire and isinstance(f.length, str)]
    each = 8 * sum(ITEMSIZE[f.dtype] for f in open_ended)
    # Different lengths cannot be added, and a length is only a number of kept elements if the method selects.
    kept = [f"{each} per kept element"] if compressor.selects and len({f.length for f in open_ended}) == 1 else []
    return "; ".join(kept + ([f"about {_measured(name):.2g}"] if measure else [] if kept else ["data-dependent"]))


def _measured(name: str) -> float:
    """Measure the bits per element that one rank sends with the default memory; return the mean over the steps."""
    # Local imports, because `grace doctor` must run without NumPy.
    import numpy as np

    from grace.core.simulate import Simulation

    simulation = Simulation(1, [MEASURED], {"compressor": name})
    generator, sent = np.random.default_rng(0), 0
    for _ in range(STEPS):
        gradient = generator.standard_normal(MEASURED.shape).astype(np.float32) * np.float32(DEVIATION)
        simulation.step([{MEASURED.name: gradient}])
        sent += simulation.engines[0].stats()["tensors"][MEASURED.name]["wire_bytes"]
    return 8 * sent / STEPS / MEASURED.numel


def required(cls: type) -> list[str]:
    """Return the options that have no default. Only methods from outside grace have such options."""
    missing = dataclasses.MISSING
    return [f.name for f in dataclasses.fields(cls) if f.default is missing and f.default_factory is missing]


def _options(cls: type) -> list[str]:
    """Return the options as a configuration spells them: `name = default`."""
    if needed := required(cls):
        return [f"{name} (required)" if name in needed else name for name in fields_of(cls)]
    return [f"{f.name} = {json.dumps(f.default)}" for f in dataclasses.fields(cls) if f.init]


def _documentation(cls: type) -> str:
    return inspect.cleandoc(cls.__doc__ or "")


def _summary(cls: type) -> str:
    """Return the first sentence of the docstring, on one line."""
    text = " ".join(_documentation(cls).split())
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]


def _said(cls: type) -> dict[str, str]:
    """Return the sections `Cost` and `When` of a method's docstring, and its publications as `Reference`."""
    text = " ".join(_documentation(cls).split())
    found = list(REFERENCE.finditer(text))
    said = {"Cost": "-", "When": "-", "Reference": "; ".join(", ".join(match.groups()) for match in found) or "-"}
    for part in re.split(r" (?=Cost: |When: )", text)[1:]:
        topic, _, what = part.partition(": ")
        cited = REFERENCE.search(what)
        # The text ends before the sentence that contains the citation.
        said[topic] = (re.sub(r"[^.]*$", "", what[: cited.start()]) if cited else what).strip()
    return said


def _registries() -> dict[str, Registry[Any]]:
    return {"Compressors": compressors, "Memories": memories, "Communicators": communicators}


def as_text() -> str:
    """Return the list of methods as text for a terminal."""
    lines = [_aligned([HEAD, *_rows(page=False)])]
    for title, registry in _registries().items():
        lines += ["", title]
        for name in registry:
            cls = registry.get(name)
            lines.append(f"  {name}: {_summary(cls)}")
            if options := _options(cls):
                lines.append(f"      {', '.join(options)}")
    return "\n".join(lines)


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def as_markdown() -> str:
    """Return the list of methods as the Markdown page docs/compressors.md."""
    lines = [
        "# Methods",
        "",
        "<!-- Written by `grace compressors --markdown`; do not edit. -->",
        "",
        "The columns `memory` and `communicator` show the defaults. `bits per element` is what one rank sends for a",
        f"float32 gradient of {EXAMPLE.shape[0]} x {EXAMPLE.shape[1]} elements with the default options, without the "
        "header of the bucket.",
        f"A number after *about* depends on the data: it is the mean of {STEPS} steps with the default memory on a "
        "gradient of",
        f"{MEASURED.shape[0]} x {MEASURED.shape[1]} elements, drawn in every step from a normal distribution with "
        f"standard deviation {DEVIATION}.",
        "Real gradients give other numbers. A kept element is one that is sent. The flags:",
        "",
        *(f"- {flag}: {meaning}." for flag, meaning in FLAGS.items()),
        "- error feedback: whether the method needs a memory of what it did not send. *harms* marks sign votes, and "
        "methods whose errors average out without it.",
        "",
        *_markdown_table([HEAD, *([_link(name), *cells] for name, *cells in _rows(page=True))]),
        "",
        "What each method computes, what it costs, and when to use it:",
        "",
        *_markdown_table([["name", "summary", "cost", "when", "reference"], *map(_description, compressors)]),
    ]
    for title, registry in _registries().items():
        lines += ["", f"## {title}"]
        for name in registry:
            cls = registry.get(name)
            options = ", ".join(f"`{option}`" for option in _options(cls)) or "none"
            lines += ["", f"### {name}", "", f"Options: {options}", "", "```text", _documentation(cls), "```"]
    return "\n".join(lines)


def _description(name: str) -> list[str]:
    cls = compressors.get(name)
    return [_link(name), _summary(cls), *_said(cls).values()]


def _link(name: str) -> str:
    return f"[{name}](#{name})"


def _markdown_table(rows: list[list[str]]) -> list[str]:
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])
    return [f"| {' | '.join(row)} |" for row in escaped]
