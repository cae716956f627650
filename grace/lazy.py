"""Submodules that are imported at their first use, so that a package does not import what a run never needs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType


def importer(package: str, needed: Mapping[str, str]) -> Callable[[str], ModuleType]:
    """Return the `__getattr__` of a package: it imports a submodule at its first use.

    `needed` maps the submodules to the packages that they need. `dir()` leaves out what is not loaded: help and
    debuggers read everything that it names. The function raises AttributeError if the import fails, so that `hasattr`
    is False.
    """

    def find(name: str) -> ModuleType:
        if name not in needed:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        try:
            return importlib.import_module(f"{package}.{name}")
        except ImportError as error:
            raise AttributeError(
                f"{package}.{name} cannot be imported: {error}. It needs {needed[name]}: install what is missing "
                "(docs/install.md)."
            ) from error

    return find
