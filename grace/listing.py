"""The methods by family, and the output of `grace compressors`: their flags, sizes and options."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from grace.bench.variants import Variant
from grace.core.config.config import Method
from grace.core.config.recommended import ANY, STARTS, Start, optimizers_for, starts
from grace.core.config.registry import Registry, communicators, compressors, memories
from grace.core.errors import ConfigError, fold, nearest
from grace.core.methods.capabilities import proposed_fields, selects
from grace.core.methods.compressor import Compressor, fixed_size, sparsifies
from grace.core.observe.table import align
from grace.core.plan.unit import Assignment
from grace.core.spec import ITEMSIZE, Field, Ranks, TensorSpec
from grace.core.wire.lanes import in_lanes
from grace.core.wire.layout import payload_bytes
from grace.machine import FRAMEWORKS, installed


class Family(NamedTuple):
    """Methods that belong together; `use` completes the sentence "Use these methods if"."""

    title: str
    use: str

    @property
    def page(self) -> str:
        """Name of the page of the site that describes the methods."""
        return self.title.lower().replace(" ", "_")

    @property
    def methods(self) -> list[str]:
        """Names of the methods, those to look at first before those of the literature."""
        found = [name for name in compressors if compressors.about(name).family == self.page]
        return sorted(found, key=of_literature)


def of_literature(name: str) -> bool:
    """Return whether a method is one of the literature, and not one to look at first: the folder says so."""
    return ".contrib." in compressors.get(name).__module__


# README and the site group the built-in methods by family, in this order.
FAMILIES = (
    Family("Quantization", "every coordinate must arrive, with fewer bits"),
    Family("Sparsification", "a quarter of the bytes is still too much; with SGD, `topk` is the usual first choice"),
    Family("Hybrid", "you want fewer bytes than a sparsifier sends"),
    Family("Low rank", "matrices are large and ranks are many"),
    Family("Other", "you need a reference, or half the bytes without tuning"),
)

# Bits per element are computed for this tensor.
EXAMPLE = TensorSpec("example", (1024, 1024))

# Columns of the list. The other facts of a method are in its description.
HEAD = ("name", "optimizer", "bits", "memory", "communicator", "unbiased")
# Columns of the overview.
ADVICE = ("name", "with", "use it for, or if")
WIDTH = 80
# Letters of an advice, beside which a name of 13 letters has room.
LINE = 57
MARK = "* "
BY_OPTIONS = "depends on options"
OUTSIDE = "From outside of grace"
LEGEND = (
    "* start here. Optimizer: with which the method trains well, ? if unknown. Bits: sent per element of a matrix of "
    "1024 x 1024, or per kept element. Communicator: on two ranks, and on more if it is another. "
    "`grace compressors NAME` shows the options and more."
)
OVERVIEW = (
    "* start here. With: the optimizer with which the method trains well, ? if unknown. `grace compressors --all` also "
    "lists the methods of the literature, sizes, memories and communicators, and `grace compressors NAME` shows the "
    "options and more."
)


def feedback(compressor: Compressor) -> str:
    """Return the advice on error feedback for a method."""
    if compressor.harmed_by_feedback:
        return "harms"
    if compressor.contraction(EXAMPLE) == 1:
        return "not needed"
    if "memory" in compressors.required(compressors.name_of(compressor)):
        return "depends on the model"
    return "optional" if compressor.default_memory == "none" else "recommended"


def taken(compressor: Compressor, ranks: int) -> str:
    """Return the name of the communicator that `auto` takes for a method with its default memory."""
    auto = communicators.make("auto")
    item = Assignment(EXAMPLE, Method(compressor, memories.make(compressor.default_memory), auto))
    return communicators.name_of(auto.resolve(item, Ranks(ranks))[0])


def communicator(compressor: Compressor) -> str:
    """Return what `auto` takes, in short."""
    two, more = (taken(compressor, ranks) for ranks in (2, 3))
    return two if two == more else f"{two}, {more} from 3 ranks"


def sent_fields(compressor: Compressor, spec: TensorSpec = EXAMPLE) -> list[Field]:
    """Return what one of two ranks sends of a tensor: proposal and payload, as they travel."""
    payload = compressor.wire(spec)
    if communicators.get(taken(compressor, 2)).adds:
        payload = in_lanes(payload, 2)
    return [*proposed_fields(compressor, spec), *payload]


def _bits(compressor: Compressor) -> str:
    """Return the bits that one of two ranks sends per element of the example, without bucket header."""
    fields = sent_fields(compressor)
    fixed = payload_bytes(fields)
    if fixed is not None:
        return f"{8 * fixed / EXAMPLE.numel:.3g}"
    open_ended = [f for f in fields if f.wire and isinstance(f.length, str)]
    each = 8 * sum(ITEMSIZE[f.dtype] for f in open_ended)
    # Different lengths cannot be added, and a length is only a number of kept elements if the method selects.
    if selects(compressor) and len({f.length for f in open_ended}) == 1:
        return f"{each} x kept"
    return "by data"


def required(cls: type) -> list[str]:
    """Return the options that have no default."""
    missing = dataclasses.MISSING
    return [f.name for f in dataclasses.fields(cls) if f.default is missing and f.default_factory is missing]


def _options(cls: type) -> list[str]:
    """Return the options as a configuration spells them: `name = default`."""
    needed = required(cls)
    return [
        f"{f.name} (required)" if f.name in needed else f"{f.name} = {json.dumps(f.default)}"
        for f in dataclasses.fields(cls)
        if f.init
    ]


def _by_options(name: str) -> bool:
    """Return whether a compressor needs options of which no example is known, as one from outside grace may."""
    return not set(required(compressors.get(name))) <= set(compressors.required(name))


def memory_of(name: str) -> str:
    """Return the name of the memory that a compressor has unless the user names one, or that it must be named."""
    return "to be named" if "memory" in compressors.required(name) else compressors.example(name).default_memory


def _documentation(cls: type) -> str:
    return inspect.cleandoc(cls.__doc__ or "")


def _summary(cls: type) -> str:
    """Return the first sentence of the docstring, on one line."""
    text = " ".join(_documentation(cls).split())
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]


def _registries() -> dict[str, Registry[Any]]:
    return {"compressor": compressors, "memory": memories, "communicator": communicators}


def overview() -> str:
    """Return where to start, and the methods to look at first with a line of advice each."""
    lines = _beginning()
    for family in FAMILIES:
        names = [name for name in family.methods if not of_literature(name)]
        lines += ["", *_heading(family), *_marked(names, [ADVICE, *map(_advice, names)])]
    if outside := _outside():
        lines += ["", OUTSIDE, *_marked(outside, [ADVICE, *map(_advice, outside)])]
    return "\n".join([*lines, "", *_wrapped(OVERVIEW)])


def one_family(name: str) -> str:
    """Return the table of a family, whose name may differ in case, hyphens and underscores.

    Raises ConfigError if there is none of that name.
    """
    family = _family(name)
    return "\n".join([*_heading(family), *_table(family.methods), "", *_wrapped(LEGEND)])


def everything() -> str:
    """Return where to start, and the tables of all families, memories and communicators."""
    lines = _beginning()
    for family in FAMILIES:
        lines += ["", *_heading(family), *_table(family.methods)]
    if outside := _outside():
        lines += ["", OUTSIDE, *_table(outside)]
    for kind, title in (("memory", "Memories"), ("communicator", "Communicators")):
        lines += ["", title]
        for name in _registries()[kind]:
            lines += _wrapped(f"{name}: {_summary(_registries()[kind].get(name))}", "  ", "      ")
    return "\n".join([*lines, "", *_wrapped(LEGEND)])


def _beginning() -> list[str]:
    lines = ["Start with"]
    for start in STARTS:
        optimizer = "any optimizer" if start.optimizer == ANY else start.optimizer
        lines += _wrapped(f"{_label(start):<10} {optimizer}, network: {start.network}", "  ", " " * 13)
        lines += _wrapped(f"bytes: {start.bytes}; trains {start.trains}", " " * 13, " " * 13)
    return lines


def _outside() -> list[str]:
    return [name for name in compressors if _family_of(name) is None]


def describe(name: str) -> str:
    """Return the description of all components of a name: what they are, flags and options.

    Raises ConfigError if there is none.
    """
    texts = []
    for kind, registry in _registries().items():
        if name in registry:
            found = registry.registered_name(name)
            lines = _wrapped(f"{found} ({kind}): {_summary(registry.get(found))}")
            facts = _facts(found) if kind == "compressor" else {}
            for topic, fact in {**facts, "options": _options(registry.get(found)) or ["none"]}.items():
                # No line ends within a fact.
                text = ", ".join(fact).replace(" = ", "\xa0=\xa0").replace(": ", ":\xa0")
                lines += _wrapped(text, f"  {topic:<18}", " " * 20)
            texts.append("\n".join(lines).replace("\xa0", " "))
    if not texts:
        raise ConfigError(f"unknown method '{name}'.{nearest(name, names())} `grace compressors` lists all.")
    return "\n\n".join(texts)


def names() -> list[str]:
    """Return the names of all components."""
    return sorted({name for registry in _registries().values() for name in registry})


def _family(name: str) -> Family:
    """Return the family of this name."""
    for family in FAMILIES:
        if fold(family.title) == fold(name):
            return family
    raise ConfigError(f"--family: unknown family '{name}'.{nearest(name, [family.page for family in FAMILIES])}")


def _family_of(compressor: str) -> Family | None:
    """Return the family of a built-in compressor."""
    page = compressors.about(compressor).family
    return next((family for family in FAMILIES if family.page == page), None)


def _heading(family: Family) -> list[str]:
    return _wrapped(f"{family.title}: use it if {family.use}.")


def _table(names: Sequence[str]) -> list[str]:
    """Return the table of these compressors."""
    return _marked(names, [HEAD, *map(_row, names)])


def _marked(names: Sequence[str], rows: list[Sequence[str]]) -> list[str]:
    """Return the lines of a table. Methods to start with are marked."""
    lines = align(rows)
    return [f"{MARK if starts(name) else '  '}{line}" for name, line in zip(["", *names], lines, strict=True)]


def _advice(name: str) -> list[str]:
    """Return the cells of a compressor in the overview: the docstring says when to use it, or what it is."""
    cls = compressors.get(name)
    when = re.search(r"^When: (.+?)(?:[.;]\s|\.?\Z)", _documentation(cls), re.MULTILINE | re.DOTALL)
    said = textwrap.shorten(when[1] if when else _summary(cls).rstrip("."), LINE, placeholder=" ...")
    return [name, optimizers_for(name), said]


def _row(name: str) -> list[str]:
    """Return the cells of a compressor in the list."""
    if _by_options(name):
        return [name, BY_OPTIONS, *[""] * (len(HEAD) - 2)]
    c = compressors.example(name)
    travels = ", ".join(dict.fromkeys(taken(c, ranks) for ranks in (2, 3)))
    return [name, optimizers_for(name), _bits(c), memory_of(name), travels, _yes(c.unbiased)]


def _facts(name: str) -> dict[str, list[str]]:
    """Return what the description of a compressor says of it, by topic."""
    family = _family_of(name)
    title = "from outside of grace" if family is None else family.title + ", literature" * of_literature(name)
    if _by_options(name):
        return {"family": [title], "flags and bits": [BY_OPTIONS]}
    c = compressors.example(name)
    flags = {"summable": c.summable, "unbiased": c.unbiased, "fixed-size": fixed_size(c), "sparsifies": sparsifies(c)}
    begin = [f"{'any optimizer' if s.optimizer == ANY else s.optimizer}; network {s.network}" for s in starts(name)]
    return {
        "family": [title],
        "optimizer": [optimizers_for(name)],
        **({"start with it": begin} if begin else {}),
        "bits per element": [_bits(c)],
        "memory": [f"{memory_of(name)}; error feedback: {feedback(c)}"],
        "communicator": [communicator(c)],
        "flags": [f"{flag}: {_yes(value)}" for flag, value in flags.items()],
        # Every method runs on every framework, because it uses only grace's array operations.
        "frameworks": ["numpy", *(framework for framework in FRAMEWORKS if installed(framework))],
    }


def _label(start: Start) -> str:
    options = {key: value for key, value in start.config.items() if key != "compressor"}
    return Variant(start.config["compressor"], options).label


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def _wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
