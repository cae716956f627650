"""The methods of the study: labels, configurations, and what of a run's settings they change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from grace.bench.variants import Variant, parse_variants
from grace.core.config.config import Config, make_config
from grace.core.config.recommended import STARTS
from grace.core.errors import IncompatibleError

DENSE = "none"
# What a user gets by changing one word: the gain over them counts, and not that over 32 bits.
SIXTEEN_BIT = ("bf16", "fp16")
# Every table has them.
BASELINES = (DENSE, *SIXTEEN_BIT)
RECOMMENDED = tuple(dict.fromkeys(start.config["compressor"] for start in STARTS))
# Compressors that GRACE compared (Table I), with their default options here.
TABLE_1 = (
    "eightbit", "onebit", "signsgd", "signum", "qsgd", "natural", "terngrad", "efsignsgd", "inceptionn",
    "randomk", "topk", "threshold", "dgc", "adaptive", "sketchml", "powersgd",
)  # fmt: skip
# Beside them: the other compressors of 4 and 8 bits, and the threshold of a run instead of a step.
OTHERS = ("eden", "blockwise", "uniform", "hardthreshold")
# Settings that decide a default: how much of a gradient to keep, a second compression, which `auto` avoids for topk,
# and the form of feedback.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "topk 10 %": {"compressor": "topk", "compress_ratio": 0.1},
    "topk two_shot": {"compressor": "topk", "communicator": "two_shot"},
    "topk EF21": {"compressor": "topk", "memory": "diana", "alpha": 1.0, "communicator": "allgather"},
    "topk 10 % EF21": {
        "compressor": "topk", "compress_ratio": 0.1, "memory": "diana", "alpha": 1.0, "communicator": "allgather",
    },
}  # fmt: skip

# A threshold that is fixed, as in the paper on hard thresholds, and with which a run sends what top-k sends.
EQUAL = "hardthreshold, equal bytes"


class Method(NamedTuple):
    """A method of the study; a label that is the name of a compressor stands for its default options.

    Of an option without a default, it stands for what all tables take.
    """

    label: str
    config: Mapping[str, Any]
    #: The label of the same method with the default memory, if this one has error feedback on in place of off, or off.
    switched: str = ""
    #: The label of the method whose bytes this one sends: runs with seed 0 choose its threshold for that.
    equal: str = ""

    @property
    def made(self) -> Config:
        """The configuration with all defaults."""
        return make_config(self.config)

    @property
    def votes(self) -> bool:
        """True if the ranks vote: a vote has no size, so the learning rate of gradients does not suit it."""
        return not self.made.method.compressor.averages

    @property
    def accelerates(self) -> bool:
        """True if the memory has momentum, so that the optimizer must have none."""
        return "no_momentum" in self.made.method.memory.needs


def methods() -> dict[str, Method]:
    """Return the methods of the study by label, uncompressed training first."""
    names = (*BASELINES, *RECOMMENDED, *TABLE_1, *OTHERS)
    plain = [Method(name, Variant(name).config()) for name in dict.fromkeys(names)]
    settings = [Method(label, config) for label, config in SETTINGS.items()]
    switched = [other for method in plain if method.label not in BASELINES for other in _switched(method)]
    equal = Method(EQUAL, {"compressor": "hardthreshold"}, equal="topk")
    return {method.label: method for method in (*plain, *settings, *switched, equal)}


def chosen(given: Sequence[str] | None) -> list[Method]:
    """Return the baselines and the methods of the study that `--methods` names, or all; the first is uncompressed.

    A name that is no label is a compressor, with options as `grace bench` takes them. Raises ConfigError if there is
    none of that name, or if the options do not fit.
    """
    known = methods()
    if given is None:
        return list(known.values())
    found = {label: known[label] for label in BASELINES}
    for text in given:
        if text in known:
            found[text] = known[text]
        else:
            found |= {v.label: known.get(v.label, Method(v.label, v.config())) for v in parse_variants([text])}
    return list(found.values())


def _switched(method: Method) -> Iterator[Method]:
    """Yield the method with error feedback off if it is on by default, and on if it is off, if both make sense."""
    # A vote has no error to keep: its size is not that of a gradient.
    if method.votes:
        return
    word, other = ("no feedback", "none") if method.made.method.memory.feeds_back else ("feedback", "residual")
    changed = Method(f"{method.label}, {word}", {**method.config, "memory": other}, method.label)
    try:
        _ = changed.made
    except IncompatibleError:
        return
    yield changed
