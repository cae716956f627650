"""What `grace compressors` prints: the methods with their flags, bytes and options, as text or as a page."""

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

# What bits are computed for; where they depend on the data, they are measured on a smaller one.
EXAMPLE = TensorSpec("example", (1024, 1024))
MEASURED, STEPS, DEVIATION = TensorSpec("measured", (256, 256)), 100, 0.01

FLAGS = {
    "summable": "payloads can be added on the way, so allreduce can carry them",
    "unbiased": "the mean over the random keys is the gradient itself",
    "fixed-size": "the bytes do not depend on the data",
    "sparsifies": "some coordinates travel exactly, the others not at all",
}
HEAD = ["name", "memory", "communicator", *FLAGS, "error feedback", "bits per element", "frameworks"]
REFERENCE = re.compile(r'((?:[A-Z][\w-]+(?:, | and )?)+(?: et al\.)?), "[^"]+", ([^";]*?20\d\d)')


def _rows(*, page: bool) -> list[list[str]]:
    """One row per method, in the order of the names.

    On the page, bits are measured where they must be, which takes seconds, and frameworks are listed that are not here.
    """
    rows = []
    # Every method is written in array operations alone.
    runs_on = ", ".join(["numpy", *(name for name in FRAMEWORKS if page or installed(name))])
    for name in compressors:
        if required(compressors.get(name)):
            rows.append([name, *["by options"] * (len(HEAD) - 1)])
            continue
        c = compressors.make(name)
        words = ["yes" if flag else "no" for flag in (c.summable, c.unbiased, c.fixed_size, c.sparsifies)]
        parts = [c.default_memory, c.default_communicator]
        rows.append([name, *parts, *words, _feedback(c), _bits(name, c, measure=page), runs_on])
    return rows


def _feedback(compressor: Compressor) -> str:
    """Whether a method wants error feedback."""
    if compressor.harmed_by_feedback:
        return "harms"
    if compressor.contraction(EXAMPLE) == 1:
        return "not needed"
    return "optional" if compressor.default_memory == "none" else "recommended"


def _bits(name: str, compressor: Compressor, *, measure: bool) -> str:
    """Bits on the wire per element of the example, without bucket header: payload, and what is settled before it."""
    fields = [*compressor.agreement(EXAMPLE), *compressor.wire(EXAMPLE)]
    fixed = payload_bytes(fields)
    if fixed is not None:
        return f"{8 * fixed / EXAMPLE.numel:.3g}"
    open_ended = [f for f in fields if f.wire and isinstance(f.length, str)]
    each = 8 * sum(ITEMSIZE[f.dtype] for f in open_ended)
    # Several lengths cannot be added up, and one need not be that of kept elements.
    kept = [f"{each} per kept one"] if compressor.selects and len({f.length for f in open_ended}) == 1 else []
    return "; ".join(kept + ([f"about {_measured(name):.2g}"] if measure else [] if kept else ["by the data"]))


def _measured(name: str) -> float:
    """Bits per element sent by one rank with the default memory, on average over its steps."""
    # Here, because the doctor must also run where NumPy is missing.
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
    """Options without a default; only parts from outside have any."""
    missing = dataclasses.MISSING
    return [f.name for f in dataclasses.fields(cls) if f.default is missing and f.default_factory is missing]


def _options(cls: type) -> list[str]:
    """The fields as they are written in a configuration: `name = default`."""
    if needed := required(cls):
        return [f"{name} (required)" if name in needed else name for name in fields_of(cls)]
    return [f"{f.name} = {json.dumps(f.default)}" for f in dataclasses.fields(cls) if f.init]


def _documentation(cls: type) -> str:
    return inspect.cleandoc(cls.__doc__ or "")


def _summary(cls: type) -> str:
    """The first sentence of the docstring, on one line."""
    text = " ".join(_documentation(cls).split())
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]


def _said(cls: type) -> dict[str, str]:
    """What the docstring of a method says of its cost, its use, and its publications in short."""
    text = " ".join(_documentation(cls).split())
    found = list(REFERENCE.finditer(text))
    said = {"Cost": "-", "When": "-", "Reference": "; ".join(", ".join(match.groups()) for match in found) or "-"}
    for part in re.split(r" (?=Cost: |When: )", text)[1:]:
        topic, _, what = part.partition(": ")
        cited = REFERENCE.search(what)
        # Up to the sentence that cites.
        said[topic] = (re.sub(r"[^.]*$", "", what[: cited.start()]) if cited else what).strip()
    return said


def _registries() -> dict[str, Registry[Any]]:
    return {"Compressors": compressors, "Memories": memories, "Communicators": communicators}


def as_text() -> str:
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
    lines = [
        "# Methods",
        "",
        "<!-- Written by `grace compressors --markdown`; do not edit. -->",
        "",
        "`memory` and `communicator` are the defaults. Bits per element are what one rank sends with the default",
        "options, without the header of its bucket: of a float32 gradient of "
        f"{EXAMPLE.shape[0]} x {EXAMPLE.shape[1]} elements or, where they depend",
        f"on the data, *about* so many: the mean of {STEPS} steps with the default memory on "
        f"{MEASURED.shape[0]} x {MEASURED.shape[1]} elements, drawn",
        f"anew in every step from a normal distribution with standard deviation {DEVIATION}. Networks differ.",
        "Kept ones are the elements that travel. The flags:",
        "",
        *(f"- {flag}: {meaning}." for flag, meaning in FLAGS.items()),
        "- error feedback: it harms votes, and methods whose errors cancel by themselves.",
        "",
        *_markdown_table([HEAD, *([_link(name), *cells] for name, *cells in _rows(page=True))]),
        "",
        "The same methods, by what they do, what that costs, and when to use them:",
        "",
        *_markdown_table([["name", "formula", "cost", "when", "reference"], *map(_description, compressors)]),
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
