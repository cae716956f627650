"""The recommendations of grace: where to start by optimizer and network, and the warning of pairs that train badly.

README, docs/choose.md, the pages of the methods and `grace compressors` are made from `STARTS` and from what methods
are registered with; tests compare both with the study in docs/results/study.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from grace.core.config.config import Config
from grace.core.config.registry import compressors
from grace.core.errors import GraceWarning
from grace.core.methods.compressor import Compressor

ADAM, SGD, ANY = "Adam, AdamW", "SGD", "any"


class Start(NamedTuple):
    """A place to start: a configuration for an optimizer and a network, the bytes that remain, and how it trains."""

    optimizer: str
    network: str
    config: Mapping[str, Any]
    bytes: str
    trains: str


STARTS = (
    Start(ANY, "above 10 Gbit/s", {"compressor": "none"}, "all", "exactly as before; compression would not pay"),
    Start(ANY, "about 10 Gbit/s", {"compressor": "qsgd"}, "1/4", "like uncompressed gradients (8 bits)"),
    Start(ANY, "about 1 Gbit/s", {"compressor": "blockwise"}, "1/7", "like uncompressed gradients (4 bits)"),
    Start(ADAM, "slower", {"compressor": "terngrad"}, "1/16 per rank", "5 to 15 % behind on small tasks; check it"),
    Start(SGD, "slower", {"compressor": "topk"}, "1/50 per rank", "close behind on few ranks; check it"),
)

# Folders of grace itself and of installed packages, whose code calls grace on behalf of a user's line.
_NOT_OF_USERS = (f"{Path(__file__).parents[2]}/", "site-packages", "dist-packages")

# Names of optimizers that divide by the root of a mean square, in PyTorch, Keras and other packages.
_ADAPTIVE = re.compile(r"ada(m|grad|delta|factor|belief)|rmsprop|novograd|lamb(?!da)|lans$", re.IGNORECASE)


class Optimizer(NamedTuple):
    """An optimizer as the recommendations see it: its name, its momentum, and whether it is of Adam's kind."""

    name: str
    momentum: float
    adaptive: bool

    @classmethod
    def of(cls, kind: type, momentum: float) -> Optimizer:
        """Describe an optimizer of a class; `momentum` is its largest one, Adam's first beta included."""
        name = next((k.__name__ for k in kind.__mro__ if _ADAPTIVE.search(k.__name__)), kind.__name__)
        return cls(name, momentum, bool(_ADAPTIVE.search(name)))


def optimizers_for(compressor: str) -> str:
    """Return the optimizers that a method is for with its default options: `ANY`, `SGD`, or "?" if it is unknown."""
    adam = compressors.about(compressor).adam
    return "?" if adam is None else ANY if adam else SGD


def starts(compressor: str) -> tuple[Start, ...]:
    """Return the rows of `STARTS` with a method."""
    return tuple(start for start in STARTS if start.config["compressor"] == compressor)


def trains_badly_with_adam(compressor: Compressor) -> bool:
    """Return whether a method is known to train badly under Adam."""
    return compressors.about(compressors.name_of(compressor)).adam is False


def warn_of_pairs(config: Config, optimizer: Optimizer, before: Config | None = None) -> None:
    """Issue a GraceWarning for each method of a configuration that is known to train badly with an optimizer.

    A warning that holds for the configuration `before`, too, is not repeated.
    """
    known = () if before is None else _poor_pairs(before, optimizer)
    for text in _poor_pairs(config, optimizer):
        if text not in known:
            warnings.warn(text, GraceWarning, stacklevel=_users_level())


def _users_level() -> int:
    """Return the stack level of the caller's first caller outside of grace and installed packages, for a warning."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and any(folder in frame.f_code.co_filename for folder in _NOT_OF_USERS):
        frame, level = frame.f_back, level + 1
    return level


def _poor_pairs(config: Config, optimizer: Optimizer) -> tuple[str, ...]:
    methods = [stage.method for _, stage in config.stages] + [rule.method for rule in config.rules]
    texts = []
    for method in methods:
        if "no_momentum" in method.memory.needs:
            if optimizer.momentum > 0:
                texts.append(
                    f"the optimizer has momentum {optimizer.momentum:g}, and so has {method.memory}: gradients are "
                    "accelerated twice. Set the momentum of the optimizer to 0."
                )
        elif optimizer.adaptive and trains_badly_with_adam(method.compressor):
            found = [start.config["compressor"] for start in STARTS if start.optimizer != SGD]
            names = [name for name in found if name != "none"]
            texts.append(
                f"{optimizer.name} trains badly with gradients from {method.compressor}: start with "
                f"{', '.join(map(repr, names[:-1]))} or {names[-1]!r}. docs/adam.md has the measurements."
            )
    return tuple(dict.fromkeys(texts))
