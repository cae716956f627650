"""Costs of codecs that were measured on this machine before, in a file that all processes share."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grace.core.config.config import Config
from grace.machine import installed, processor

#: The environment variable with the folder of all that grace keeps; see also scripts/setup.sh.
VARIABLE = "GRACE_CACHE"


class Kept:
    """Figures by configuration and number of ranks, each with the time of its measurement.

    They count for the machine and the code that have made them: `facts` names both, in the file and in its name. A
    file of others, or one with anything else than finite figures of at least 0, counts as empty. Files are replaced as
    a whole, so that several processes may write. Of two that write at once, one may lose what it has added, which is
    then measured again.
    """

    def __init__(self, folder: Path, facts: dict[str, Any], figures: int) -> None:
        machine = hashlib.sha256(json.dumps([facts["processor"], facts["cores"]]).encode()).hexdigest()
        self.path = folder / f"codecs-{machine[:12]}.json"
        #: Why the last figures could not be kept; empty if they were.
        self.fault = ""
        self._facts, self._figures = facts, figures
        self._found = self._read()

    def get(self, config: Config, ranks: int) -> tuple[list[float], float] | None:
        """Return figures and the time of their measurement, in seconds since the epoch; None if there are none."""
        if (found := self._found.get(_key(config, ranks))) is None:
            return None
        *figures, at = found
        return figures, at

    def put(self, config: Config, ranks: int, figures: list[float]) -> None:
        """Keep figures that were measured now, unless code of the user has a part in them, which may change."""
        if not _of_grace(config):
            return
        # Of another process, what this one has not read yet.
        self._found = {**self._read(), **self._found, _key(config, ranks): [*figures, time.time()]}
        text = json.dumps({"facts": self._facts, "codecs": self._found}, indent=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, part = tempfile.mkstemp(prefix=f"{self.path.name}.", dir=self.path.parent)
            try:
                with open(descriptor, "w", encoding="utf-8") as file:
                    file.write(f"{text}\n")
                os.replace(part, self.path)
            except BaseException:
                os.unlink(part)
                raise
        except OSError as error:
            self.fault = error.strerror or str(error)

    def _read(self) -> dict[str, list[float]]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            valid = found["facts"] == self._facts and all(map(self._holds, found["codecs"].values()))
            return dict(found["codecs"]) if valid else {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}

    def _holds(self, entry: Any) -> bool:
        """Return whether an entry has all figures and a time that has passed."""
        numbers = isinstance(entry, list) and all(type(x) in (int, float) and 0 <= x < math.inf for x in entry)
        return numbers and len(entry) == self._figures + 1 and entry[-1] <= time.time()


def kept_here(figures: int, **more: Any) -> Kept:
    """Return what is kept on this machine in the user's cache folder; `more` are facts on which the figures depend."""
    # Here, because this module imports NumPy.
    from grace.core.ops.native import describe

    facts = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "kernels": describe(),
        "python": platform.python_version(),
        "numpy": installed("numpy"),
        "code": _code(),
        **more,
    }
    return Kept(_folder(), facts, figures)


def ago(seconds: float) -> str:
    """Return how long ago a moment was, in words."""
    for unit, length in (("day", 86_400), ("hour", 3_600)):
        if count := int(seconds // length):
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "less than an hour ago"


def _folder() -> Path:
    if folder := os.environ.get(VARIABLE):
        return Path(folder)
    home = os.path.expanduser("~")
    # In a container, the user may have no home.
    usual = tempfile.gettempdir() if home == "~" else os.path.join(home, ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or usual) / "grace"


@functools.cache
def _code() -> str:
    """Return the digest of the code that is measured: the methods, their steps, the measurement, and the kernels."""
    from grace.core.ops.native import module

    root = Path(__file__).parent.parent
    files = sorted([*root.glob("core/**/*.py"), *root.glob("advice/cost.py")])
    if module is not None:
        files.append(Path(module.__file__))
    found = hashlib.sha256()
    for file in files:
        found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()


def _key(config: Config, ranks: int) -> str:
    return f"{ranks} ranks: {json.dumps(config.to_dict(), sort_keys=True)}"


def _of_grace(component: Any) -> bool:
    """Return whether a configuration and all its components are classes of grace."""
    return all(type(each).__module__.split(".")[0] == "grace" for each in _parts(component))


def _parts(component: Any) -> Iterator[Any]:
    """Yield a dataclass, and those within it."""
    if dataclasses.is_dataclass(component):
        yield component
        for field in dataclasses.fields(component):
            yield from _parts(getattr(component, field.name))
    elif isinstance(component, tuple):
        for each in component:
            yield from _parts(each)
