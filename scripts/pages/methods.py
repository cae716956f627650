"""The pages of methods, one per family, from the registry: docs/methods.

Formula, cost, use and publication come from the docstrings; bytes, flags, options and figures from the classes.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import typing
from typing import Any, NamedTuple

import measurements
import method_figures
from registry import Block, kind, markdown, row, wrapped

from grace.core.config.config import make_config
from grace.core.config.recommended import ADAM, SGD, optimizers_for, starts
from grace.core.config.registry import Registry, communicators, compressors, fields_of
from grace.core.errors import ConfigError
from grace.core.methods.compressor import Compressor
from grace.core.plan.plan import make_plan
from grace.core.plan.unit import Unit
from grace.core.spec import Ranks
from grace.listing import (
    EXAMPLE,
    FAMILIES,
    Family,
    communicator,
    feedback,
    memory_of,
    of_literature,
    required,
    taken,
)

# The bytes that depend on the data, by method.
SOURCE = "bytes_by_data"
RANKS = (2, 4, 8, 16)
BIAS = {
    "harms": "error feedback harms it",
    "optional": "error feedback is optional",
    "recommended": "use error feedback",
    "depends on the model": "it depends on the model whether error feedback helps",
    "not needed": "exact",
}


class Sent(NamedTuple):
    """Bytes per element that one of two ranks hands to each collective; `exact` unless they depend on the data."""

    collectives: dict[str, float]
    exact: bool

    @property
    def total(self) -> float:
        return sum(self.collectives.values())


def sent(name: str) -> Sent:
    """Return what one of two ranks sends of a float32 matrix of 1,024 x 1,024 elements, with default options.

    If the bytes depend on the data, return what it sent of a smaller one.
    """
    (unit,) = units(name, 2)
    collective = communicators.name_of(unit.communicator)
    if name in measured():
        return Sent({collective: received(name, 2)}, exact=False)
    collectives = {collective: (unit.wire_bytes - unit.negotiated_bytes) / EXAMPLE.numel}
    if unit.negotiated_bytes:
        collectives["allreduce"] = collectives.get("allreduce", 0) + unit.negotiated_bytes / EXAMPLE.numel
    return Sent(collectives, exact=True)


def received(name: str, ranks: int) -> float:
    """Return the bytes per element of the same matrix that one of some ranks receives on average."""
    if name in measured():
        return measured()[name][str(ranks)]
    return sum(received_of(unit, ranks) for unit in units(name, ranks)) / EXAMPLE.numel


def measured() -> dict[str, dict[str, Any]]:
    """Return the bytes of the methods whose bytes depend on the data."""
    return measurements.rows_of(SOURCE)


def units(name: str, ranks: int) -> list[Unit]:
    """Return the units as which some ranks exchange the example by `auto`."""
    config = make_config({"compressor": name, **compressors.required(name), "default_rules": False})
    return make_plan([EXAMPLE], config, ranks=Ranks(ranks)).units


def received_of(unit: Unit, ranks: int) -> float:
    """Return the bytes of a unit that a rank receives on average, with a ring for allreduce and for allgather."""
    ring = 2 * (ranks - 1) / ranks
    proposals = ring * unit.negotiated_bytes
    payload = unit.wire_bytes - unit.negotiated_bytes
    if unit.onward:
        # All payloads go to the owner of the shard, and that of the mean comes back to all.
        return proposals + (ranks - 1) / ranks * (payload + unit.onward.wire_bytes)
    return proposals + payload * (ring if unit.communicator.adds else ranks - 1)


class Text(NamedTuple):
    """A docstring, taken apart."""

    summary: str
    body: str
    labels: dict[str, str]


def text_of(cls: type) -> Text:
    """Return the parts of the docstring of a method: a paragraph that begins with a label is what it names."""
    labels: dict[str, str] = {}
    paragraphs = []
    # A label may also begin in the middle of a paragraph.
    for paragraph in re.split(r"\n\n|\n(?=(?:Cost|When): )", inspect.cleandoc(cls.__doc__ or "")):
        label, _, rest = paragraph.partition(": ")
        if label in ("Formula", "Error", "Cost", "When", "Reference"):
            labels[label] = " ".join(rest.split())
        else:
            paragraphs.append(paragraph)
    return Text(" ".join(paragraphs[0].split()), "\n\n".join(paragraphs[1:]), labels)


def accepted(registry: Registry[Any], name: str, option: str, hint: Any) -> str:
    """Return the values that an option accepts: the choices, or what the error says about a value out of range."""
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{json.dumps(choice)}`" for choice in typing.get_args(hint))
    if hint is bool:
        return "`true`, `false`"
    if hint is Compressor:
        return "the name of a compressor, or a table with `name` and options"
    try:
        registry.example(name, **{option: -1})
    except ConfigError as error:
        if said := re.search(r": (.*?)[;,] received", str(error)):
            return markdown(re.sub(rf"^{option} must (be |lie )?", "", said[1]))
    return "any number"


def options(registry: Registry[Any], name: str) -> list[str]:
    """Return the lines of a table of the options of a part, or none."""
    cls = registry.get(name)
    hints = fields_of(cls)
    if not hints:
        return []
    needed = required(cls)
    defaults = {f.name: f"`{json.dumps(f.default)}`" for f in dataclasses.fields(cls) if f.name not in needed}
    lines = [row("option", "default", "accepts"), row("---", "---", "---")]
    return lines + [
        row(f"`{o}`", defaults.get(o, "required"), accepted(registry, name, o, hint)) for o, hint in hints.items()
    ]


def bytes_text(sent: Sent) -> str:
    about = "" if sent.exact else "about "
    parts = (f"{about}{value:.3g} by {collective}" for collective, value in sent.collectives.items())
    return f"{' + '.join(parts)} on 2 ranks"


def communicator_text(compressor: Compressor) -> str:
    """Return what `auto` takes, in full."""
    two, more = (taken(compressor, ranks) for ranks in (2, 3))
    text = f"`auto`: `{two}`" + ("" if two == more else f" on 2 ranks, `{more}` from 3")
    return text if compressor.summable else f"{text}; `allreduce` is not possible"


def memory_text(name: str) -> str:
    """Return which memory is the default, or that there is none."""
    return "must be named" if "memory" in compressors.required(name) else f"`{memory_of(name)}` by default"


def optimizers(name: str) -> dict[str, str]:
    """Return which optimizers a method is for, and where it is the place to start."""
    said = optimizers_for(name)
    if said == SGD:
        said += f"; trains badly with {ADAM}"
    where = [f"{start.optimizer} (network: {start.network})" for start in starts(name)]
    return {"optimizer": said} | ({"start with it": "; ".join(where)} if where else {})


def cost_text(name: str, block: Block) -> str:
    """Return a sentence with the measured cost of a method, or an empty string."""
    for source in ("codec", "codec_others"):
        measured = measurements.rows_of(source).get(name)
        if measured:
            found = [
                f"{measured[key]:,} ({framework})"
                for key, framework in (("numpy", "NumPy"), ("torch", "PyTorch"), ("tensorflow", "TensorFlow"))
                if key in measured
            ]
            conditions = f"[the conditions]({block.link('docs/speed.md')})"
            return f" Measured, in copies of the gradient: {', '.join(found)}; see {conditions}."
    return ""


def link(name: str, block: Block) -> str:
    """Return a link to the section of a method."""
    (family,) = (family for family in FAMILIES if name in family.methods)
    return f"[{name}]({block.link(f'docs/methods/{family.page}.md')}#{name})"


def section(name: str, block: Block) -> list[str]:
    """Return the lines of the section of a method."""
    compressor = compressors.example(name)
    text = text_of(type(compressor))
    bias = "unbiased" if compressor.unbiased else "biased"
    if name == "none":
        bias = "exact"
    else:
        bias += f"; {BIAS[feedback(compressor)]}"
    facts = {
        "bytes per element": f"{bytes_text(sent(name))}; uncompressed: 4",
        "communicator": communicator_text(compressor),
        "memory": memory_text(name),
        "bias": bias,
        **optimizers(name),
    }
    lines = [f"## {name}", "", *wrapped(markdown(text.summary)), ""]
    if formula := text.labels.get("Formula"):
        lines += ["```math", *wrapped(formula), "```", ""]
    lines += [
        *(row(fact, value) for fact, value in (("property", "value"), ("---", "---"), *facts.items())),
        "",
        f"![Elements before and after {name}]({block.link(f'docs/methods/figures/{name}.png')})",
        "",
        markdown(method_figures.caption(name)),
        "",
    ]
    for paragraph in text.body.split("\n\n") if text.body else []:
        is_list = paragraph.startswith("- ")
        lines += [*(markdown(paragraph).split("\n") if is_list else wrapped(markdown(paragraph))), ""]
    if table := options(compressors, name):
        lines += [*table, ""]
    said = {
        "Error": markdown(text.labels.get("Error", "")),
        "Cost": markdown(text.labels.get("Cost", "")) + cost_text(name, block),
        "When": markdown(text.labels.get("When", "")),
        "Reference": markdown(text.labels.get("Reference", "")),
    }
    for label, what in said.items():
        if what:
            lines += [*wrapped(f"**{label}.** {what[0].upper()}{what[1:]}"), ""]
    return lines


def family_of(block: Block) -> Family:
    """Return the family that is the argument of a block."""
    (page,) = block.arguments
    return next(family for family in FAMILIES if family.page == page)


@kind("family")
def family_page(block: Block) -> list[str]:
    """Return the sections of the methods of a family."""
    family = family_of(block)
    lines = [f"Use these methods if {family.use}.", ""]
    for name in family.methods:
        lines += section(name, block)
    return lines[:-1]


@kind("family-table")
def family_table(block: Block) -> list[str]:
    """Return the table that compares the methods of a family."""
    family = family_of(block)
    lines = [
        *wrapped(f"Use these methods if {family.use}. [Details]({block.link(f'docs/methods/{family.page}.md')})"),
        "",
        row(
            "method",
            "memory",
            "communicator",
            "bytes",
            *(f"{n} ranks" for n in RANKS),
            "bias",
            "error feedback",
            "tier",
        ),
        row("---", "---", "---", *["---:"] * 5, "---", "---", "---"),
    ]
    for name in family.methods:
        compressor, size = compressors.example(name), sent(name)
        about = "" if size.exact else "about "
        lines.append(
            row(
                link(name, block),
                memory_of(name),
                communicator(compressor),
                f"{about}{size.total:.3g}",
                *(f"{received(name, n):.3g}" for n in RANKS),
                "unbiased" if compressor.unbiased else "biased",
                feedback(compressor),
                "literature" if of_literature(name) else "first",
            )
        )
    return lines


@kind("bytes-by-data")
def bytes_by_data(block: Block) -> list[str]:
    """Return a sentence on the bytes that depend on the data."""
    said = measurements.load(SOURCE)["what"]
    return wrapped(f"With *about*, the row depends on the data and is measured: {said}.")
