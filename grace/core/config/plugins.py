"""Components and backends of other distributions, which announce them by entry points."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from grace.core.errors import ConfigError

_GROUPS = ("grace.compressors", "grace.memories", "grace.communicators", "grace.backends")


def load(entry: EntryPoint) -> Any:
    """Return the class that an entry point names. Raises ConfigError, whatever the import raises."""
    try:
        found = entry.load()
    except Exception as error:
        raise _broken(entry, f"{type(error).__name__}: {error}") from error
    if not isinstance(found, type):
        raise _broken(entry, f"expected a class, received {found!r}")
    return found


def _broken(entry: EntryPoint, why: str) -> ConfigError:
    owner = distribution(entry)
    return ConfigError(
        f"the entry point '{entry.name} = {entry.value}' of {owner}, in the group {entry.group}, cannot be loaded: "
        f"{why}. Install what {owner} needs, update it, or uninstall it. `grace doctor` shows all entry points."
    )


def distribution(entry: EntryPoint) -> str:
    """Return the name and the version of the distribution that announces an entry point."""
    return "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def states() -> Iterator[tuple[str, str, str]]:
    """Yield name and group, distribution, and fault ("": none) of every entry point of other distributions."""
    for group in _GROUPS:
        for entry in entry_points(group=group):
            if entry.value.startswith("grace."):
                continue
            fault = ""
            try:
                load(entry)
            except ConfigError as error:
                fault = str(error)
            yield f"{entry.name} ({group})", distribution(entry), fault
