"""The logger of grace."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logging import Logger


def logger() -> Logger:
    """Return the logger `grace`."""
    # Imported here, because logging installs a hook in every process that imports it.
    import logging

    return logging.getLogger("grace")
