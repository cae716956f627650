"""One page per family of methods, written from the registry into docs/methods when the site is built.

Formula, cost, use and publication come from the docstrings; bytes, flags, options and figures from the classes.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import typing
from pathlib import Path
from typing import Any, NamedTuple

import figures
import measurements
from sphinx.application import Sphinx

from grace.core.methods.compressor import Compressor
from grace.core.values.config import make_config
from grace.core.values.errors import ConfigError
from grace.core.values.plan import make_plan
from grace.core.values.registry import Registry, communicators, compressors, fields_of
from grace.core.values.spec import Ranks
from grace.core.values.unit import Unit
from grace.listing import EXAMPLE, FAMILIES, communicator, feedback, taken

FOLDER = Path(__file__).parents[1] / "methods"
# The bytes that depend on the data, by method.
SOURCE = "bytes_by_data"
RANKS = (2, 4, 8, 16)
BIAS = {
    "harms": "error feedback harms it",
    "optional": "error feedback is optional",
    "recommended": "use error feedback",
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
    config = make_config(compressor=name, default_rules=False)
    return make_plan([EXAMPLE], config, ranks=Ranks(ranks)).units


def received_of(unit: Unit, ranks: int) -> float:
    """Return the bytes of a unit that a rank receives on average, with a ring for allreduce and for allgather."""
    ring = 2 * (ranks - 1) / ranks
    proposals = ring * unit.negotiated_bytes
    payload = unit.wire_bytes - unit.negotiated_bytes
    if unit.onward:
        # All payloads go to the owner of the shard, and that of the mean comes back to all.
        return proposals + (ranks - 1) / ranks * (payload + unit.onward.wire_bytes)
    return proposals + payload * (ring if unit.communicator.sums else ranks - 1)


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


def markdown(text: str) -> str:
    """Return plain text as Markdown; what stands in backticks stays code."""
    parts = re.split(r"(`[^`\n]+`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([\\*_<>$\[\]#|{}~^])", r"\\\1", p) for p in parts)


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def accepted(registry: Registry[Any], name: str, option: str, hint: Any) -> str:
    """Return the values that an option accepts: the choices, or what the error says about a value out of range."""
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{json.dumps(choice)}`" for choice in typing.get_args(hint))
    if hint is bool:
        return "`true`, `false`"
    if hint is Compressor:
        return "the name of a compressor, or a table with `name` and options"
    try:
        registry.make({"name": name, option: -1})
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
    defaults = {f.name: json.dumps(f.default) for f in dataclasses.fields(cls) if f.init}
    lines = [row("option", "default", "accepts"), row("---", "---", "---")]
    return lines + [row(f"`{o}`", f"`{defaults[o]}`", accepted(registry, name, o, hint)) for o, hint in hints.items()]


def bytes_text(sent: Sent) -> str:
    about = "" if sent.exact else "about "
    parts = (f"{about}{value:.3g} by {collective}" for collective, value in sent.collectives.items())
    return f"{' + '.join(parts)} on 2 ranks"


def communicator_text(compressor: Compressor) -> str:
    """Return what `auto` takes, in full."""
    two, more = (taken(compressor, ranks) for ranks in (2, 3))
    text = f"`auto`: `{two}`" + ("" if two == more else f" on 2 ranks, `{more}` from 3")
    return text if compressor.summable else f"{text}; `allreduce` is not possible"


def cost_text(name: str) -> str:
    """Return a sentence with the measured cost of a method, or an empty string."""
    for source in ("codec", "codec_others"):
        measured = measurements.rows_of(source).get(name)
        if measured:
            found = [
                f"{measured[key]:,} ({framework})"
                for key, framework in (("numpy", "NumPy"), ("torch", "PyTorch"), ("tensorflow", "TensorFlow"))
                if key in measured
            ]
            return f" Measured, in copies of the gradient: {', '.join(found)}; see [the conditions](../speed.md)."
    return ""


def section(name: str, sent: Sent) -> list[str]:
    """Return the lines of the section of a method."""
    compressor = compressors.make(name)
    text = text_of(type(compressor))
    bias = "unbiased" if compressor.unbiased else "biased"
    if name == "none":
        bias = "exact"
    else:
        bias += f"; {BIAS[feedback(compressor)]}"
    facts = {
        "bytes per element": f"{bytes_text(sent)}; uncompressed: 4",
        "communicator": communicator_text(compressor),
        "memory": f"`{compressor.default_memory}` by default",
        "bias": bias,
    }
    lines = [f"(method-{name})=", f"## {name}", "", markdown(text.summary), ""]
    if formula := text.labels.get("Formula"):
        lines += ["$$", formula, "$$", ""]
    lines += [
        ":::::{grid} 1 1 2 2",
        ":gutter: 2",
        "",
        "::::{grid-item}",
        ":columns: 12 12 7 7",
        *(row(fact, value) for fact, value in (("property", "value"), ("---", "---"), *facts.items())),
        "::::",
        "",
        "::::{grid-item}",
        ":columns: 12 12 5 5",
        f"```{{figure}} figures/{name}.png",
        f":alt: Elements before and after {name}",
        "",
        markdown(figures.caption(name)),
        "```",
        "::::",
        ":::::",
        "",
        markdown(text.body),
        "",
        *options(compressors, name),
        "",
    ]
    said = {
        "Error": markdown(text.labels.get("Error", "")),
        "Cost": markdown(text.labels.get("Cost", "")) + cost_text(name),
        "When": markdown(text.labels.get("When", "")),
        "Reference": markdown(text.labels.get("Reference", "")),
    }
    for label, what in said.items():
        if what:
            lines += [f"**{label}.** {what[0].upper()}{what[1:]}", ""]
    return lines


def page(family: Any, all_sent: dict[str, Sent]) -> str:
    """Return the page of a family."""
    lines = [f"# {family.title}", "", f"Use these methods if {family.use}.", ""]
    for name in family.methods:
        lines += section(name, all_sent[name])
    return "\n".join(lines)


def index(all_sent: dict[str, Sent]) -> str:
    """Return the page that compares all methods."""
    lines = [
        "# Methods",
        "",
        f"All {len(all_sent)} methods by family. Each name links to the formula, the options and the measured cost. "
        f"The figures there show the elements of a made gradient before and after the method: a {figures.SHAPE[0]} x "
        f"{figures.SHAPE[1]} matrix of rank {figures.RANK} with noise, with standard deviation {figures.DEVIATION}.",
        "",
        "```{toctree}",
        ":hidden:",
        "",
        *(family.page for family in FAMILIES),
        "```",
        "",
        "`bytes` is what one of 2 ranks sends per element of a float32 gradient with default options. The columns "
        "after it are the bytes per element that one rank receives among 2, 4, 8 and 16 ranks. They are computed for a "
        f"matrix of {EXAMPLE.shape[0]:,} x {EXAMPLE.shape[1]:,} elements. With *about*, the row depends on the data "
        f"and is measured: {measurements.load(SOURCE)['what']}.",
        "",
        "Among n ranks, `allreduce` and `two_shot` bring 2 (n - 1) / n payloads to a rank, and `allgather` n - 1. "
        "[Communicators](../communicators_and_memories.md#communicators) says how `auto` chooses. "
        "[Bytes over the number of ranks](../moved_bytes.md) compares what it could choose.",
        "",
        "The pages state the error |x - C(x)|^2 of each method for a matrix x of 256 x 1,024 normal values. If the "
        "elements differ more in size, sparsifiers have smaller errors, and methods with one scale for all elements "
        "larger ones.",
        "",
    ]
    head = ["method", "memory", "communicator", "bytes", *(f"{n} ranks" for n in RANKS), "bias", "error feedback"]
    for family in FAMILIES:
        lines += [
            f"## {family.title}",
            "",
            f"Use these methods if {family.use}. [Details]({family.page}.md)",
            "",
        ]
        lines += [row(*head), row("---", "---", "---", *["---:"] * 5, "---", "---")]
        for name in family.methods:
            compressor, size = compressors.make(name), all_sent[name]
            about = "" if size.exact else "about "
            lines.append(
                row(
                    f"[{name}]({family.page}.md#{name})",
                    compressor.default_memory,
                    communicator(compressor),
                    f"{about}{size.total:.3g}",
                    *(f"{received(name, n):.3g}" for n in RANKS),
                    "unbiased" if compressor.unbiased else "biased",
                    feedback(compressor),
                )
            )
        lines.append("")
    return "\n".join(lines)


def write(path: Path, text: str) -> None:
    """Write a page unless it is the same already, so that Sphinx does not read it again."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def generate(app: Sphinx) -> None:
    """Write all pages and figures, and remove those of methods that are gone."""
    (FOLDER / "figures").mkdir(parents=True, exist_ok=True)
    all_sent = {name: sent(name) for family in FAMILIES for name in family.methods}
    pages = {f"{family.page}.md": page(family, all_sent) for family in FAMILIES} | {"index.md": index(all_sent)}
    for path in FOLDER.glob("*.md"):
        if path.name not in pages:
            path.unlink()
    for file, text in pages.items():
        write(FOLDER / file, text)
    for name in all_sent:
        figures.elements(name, FOLDER / "figures" / f"{name}.png")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", generate)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
