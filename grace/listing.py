"""The methods by family, and the output of `grace compressors`: their flags, sizes and options."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from typing import Any, NamedTuple

from grace.core.methods.capabilities import proposed_fields, selects
from grace.core.methods.compressor import Compressor, sparsifies
from grace.core.values.config import Method
from grace.core.values.registry import Registry, communicators, compressors, fields_of, memories
from grace.core.values.spec import ITEMSIZE, Field, Ranks, TensorSpec
from grace.core.values.unit import Assignment
from grace.core.wire.lanes import in_lanes
from grace.core.wire.layout import payload_bytes
from grace.machine import FRAMEWORKS, installed


class Family(NamedTuple):
    """Methods that belong together; `use` completes the sentence "Use these methods if"."""

    title: str
    use: str
    methods: tuple[str, ...]

    @property
    def page(self) -> str:
        """Name of the page of the site that describes the methods."""
        return self.title.lower().replace(" ", "_")


# Every built-in method belongs to one family. README and the site group the methods by them, in this order.
FAMILIES = (
    Family(
        "Quantization",
        "every coordinate must arrive, with fewer bits",
        (
            "qsgd",
            "nuqsgd",
            "alq",
            "blockwise",
            "mucsc",
            "vqsgd",
            "uveqfed",
            "terngrad",
            "natural",
            "lpc",
            "eightbit",
            "inceptionn",
            "signsgd",
            "signum",
            "efsignsgd",
            "onebit",
            "uniform",
            "eden",
            "rotated",
            "kashin",
            "qcs",
        ),
    ),
    Family(
        "Sparsification",
        "a quarter of the bytes is still too much; `topk` is the usual first choice",
        (
            "topk",
            "randomk",
            "threshold",
            "hardthreshold",
            "dgc",
            "wangni",
            "dme",
            "sketchedsgd",
            "scalecom",
            "rtopk",
            "sidco",
            "gaussiank",
            "mstopk",
            "redsync",
            "dct",
            "sdagc",
            "homomorphic",
        ),
    ),
    Family(
        "Hybrid",
        "you want fewer bytes than a sparsifier sends",
        (
            "adaptive",
            "adacomp",
            "sbc",
            "strom",
            "variance",
            "3lc",
            "qsparse",
            "m22",
            "sketchml",
            "hgc",
            "deepreduce",
            "fedqcs",
            "chain",
        ),
    ),
    Family(
        "Low rank",
        "matrices are large and ranks are many",
        ("powersgd", "acpsgd", "gradzip", "gradiveq", "atomo", "truncatedsvd"),
    ),
    Family(
        "Other",
        "you need a reference, or half the bytes without tuning",
        ("none", "fp16", "bf16"),
    ),
)

# Bits per element are computed for this tensor.
EXAMPLE = TensorSpec("example", (1024, 1024))

HEAD = [
    "name",
    "memory",
    "communicator",
    "summable",
    "unbiased",
    "fixed-size",
    "sparsifies",
    "error feedback",
    "bits per element",
    "frameworks",
]


def _rows() -> list[list[str]]:
    """Return one row per method, sorted by name."""
    rows = []
    # Every method runs on every framework, because it uses only grace's array operations.
    runs_on = ", ".join(["numpy", *(name for name in FRAMEWORKS if installed(name))])
    for name in compressors:
        if required(compressors.get(name)):
            rows.append([name, *["depends on options"] * (len(HEAD) - 1)])
            continue
        c = compressors.make(name)
        words = ["yes" if flag else "no" for flag in (c.summable, c.unbiased, c.fixed_size, sparsifies(c))]
        components = [c.default_memory, communicator(c)]
        rows.append([name, *components, *words, feedback(c), _bits(c), runs_on])
    return rows


def feedback(compressor: Compressor) -> str:
    """Return the advice on error feedback for a method."""
    if compressor.harmed_by_feedback:
        return "harms"
    if compressor.contraction(EXAMPLE) == 1:
        return "not needed"
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
    if communicators.get(taken(compressor, 2)).sums:
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
        return f"{each} per kept element"
    return "data-dependent"


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


def _registries() -> dict[str, Registry[Any]]:
    return {"Compressors": compressors, "Memories": memories, "Communicators": communicators}


def as_text() -> str:
    """Return the list of methods as text for a terminal."""
    lines = [_aligned([HEAD, *_rows()])]
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
