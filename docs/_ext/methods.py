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

from grace.core.exchange.simulation import Simulation
from grace.core.exchange.wire import payload_bytes
from grace.core.methods.capabilities import proposed_fields
from grace.core.methods.compressor import Compressor
from grace.core.values.errors import ConfigError
from grace.core.values.registry import Registry, compressors, fields_of
from grace.core.values.spec import TensorSpec
from grace.listing import EXAMPLE, FAMILIES, feedback, sent_fields

FOLDER = Path(__file__).parents[1] / "methods"
# Bytes that depend on the data are the mean of so many steps on a matrix of normal values.
SAMPLE, STEPS, DEVIATION = TensorSpec("sample", (256, 256)), 100, 0.01
# A step of these takes a quarter of a second.
FEWER_STEPS = {"atomo": 4}
RANKS = (2, 4, 8, 16)
BIAS = {
    "harms": "error feedback harms it",
    "optional": "error feedback is optional",
    "recommended": "use error feedback",
    "not needed": "exact",
}


class Sent(NamedTuple):
    """Bytes per element that a rank hands to each collective; `exact` unless they depend on the data."""

    collectives: dict[str, float]
    exact: bool

    @property
    def total(self) -> float:
        return sum(self.collectives.values())

    def received(self, ranks: int) -> float:
        """Return the bytes per element that a rank receives, with a ring for allreduce and for allgather."""
        shares = {"allreduce": 2 * (ranks - 1) / ranks, "allgather": ranks - 1, "broadcast": ranks - 1}
        return sum(bytes_ * shares[collective] for collective, bytes_ in self.collectives.items())


def sent(name: str, ranks: int = 2) -> Sent:
    """Return what one of some ranks sends of a float32 matrix of 1,024 x 1,024 elements, with default options.

    If the bytes depend on the data, return about what it sends.
    """
    compressor = compressors.make(name)
    proposed = proposed_fields(compressor, EXAMPLE)
    payload = payload_bytes(sent_fields(compressor, ranks=ranks)[len(proposed) :])
    if payload is not None:
        proposals = payload_bytes(proposed) or 0
        collectives = {compressor.default_communicator: payload / EXAMPLE.numel}
        if proposals:
            collectives["allreduce"] = collectives.get("allreduce", 0) + proposals / EXAMPLE.numel
        return Sent(collectives, exact=True)
    totals: dict[str, float] = {}
    simulation = Simulation(1, [SAMPLE], {"compressor": name})
    steps = FEWER_STEPS.get(name, STEPS)
    for gradient in figures.normal(SAMPLE.shape, DEVIATION, steps):
        simulation.step([{SAMPLE.name: gradient}])
        for collective, count in simulation.stats()["collectives"].items():
            totals[collective] = totals.get(collective, 0) + count / steps / SAMPLE.numel
    return Sent({collective: total for collective, total in totals.items() if total}, exact=False)


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
    return " + ".join(f"{about}{value:.3g} by {collective}" for collective, value in sent.collectives.items())


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
        "communicator": f"`{compressor.default_communicator}` by default"
        + ("" if compressor.summable else "; `allreduce` is not possible"),
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
        "`bytes` is what one rank sends per element of a float32 gradient with default options. It is computed for a "
        f"matrix of {EXAMPLE.shape[0]:,} x {EXAMPLE.shape[1]:,} elements on 2 ranks. "
        f"With *about*, it is the mean of {STEPS} steps "
        f"({', '.join(f'`{name}`: {steps}' for name, steps in FEWER_STEPS.items())}) on {SAMPLE.shape[0]} x "
        f"{SAMPLE.shape[1]} normal values with standard deviation {DEVIATION}. The columns after it are the bytes per "
        "element that one rank receives among 2, 4, 8 and 16 ranks. With allgather they grow with the number of "
        "ranks. With allreduce they do not: a ring sends 2 (n - 1) / n times the payload.",
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
            # Sums of integers take more bits on more ranks.
            among = [(sent(name, n) if size.exact else size).received(n) for n in RANKS]
            about = "" if size.exact else "about "
            lines.append(
                row(
                    f"[{name}]({family.page}.md#{name})",
                    compressor.default_memory,
                    compressor.default_communicator,
                    f"{about}{size.total:.3g}",
                    *(f"{received:.3g}" for received in among),
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
