"""Messages that grace logs in a scenario."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock


class Records(logging.Handler):
    """The warnings of grace meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:
            self.texts.append(record.getMessage())

    def __enter__(self) -> Records:
        logging.getLogger("grace").addHandler(self)
        return self

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("grace").removeHandler(self)


@contextlib.contextmanager
def stderr_without_logging() -> Iterator[io.StringIO]:
    """Provide what is written to stderr meanwhile, in a process that seems not to have set up logging."""
    root, ours = logging.getLogger(), logging.getLogger("grace")
    with (
        mock.patch.object(root, "handlers", []),
        mock.patch.object(ours, "handlers", []),
        contextlib.redirect_stderr(io.StringIO()) as written,
    ):
        yield written
