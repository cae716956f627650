"""A folder with a module for every name that a Python may import. Each of them leaves a note when it is imported."""

from __future__ import annotations

import sys
from importlib.metadata import packages_distributions
from pathlib import Path

NOTE = "imported from here"


def poison(folder: Path) -> Path:
    """Fill the folder and return it."""
    code = f"open({str(folder / NOTE)!r}, 'a').write(__name__ + ' ')\nraise ImportError('the poisoned ' + __name__)\n"
    for name in {"grace", *sys.stdlib_module_names, *packages_distributions()}:
        if name.isidentifier() and name != "__future__":
            (folder / f"{name}.py").write_text(code)
    return folder


def imported(folder: Path) -> str:
    """Return the names that were imported from the folder."""
    note = folder / NOTE
    return note.read_text() if note.exists() else ""
