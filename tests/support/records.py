"""The warnings that grace logs in a scenario."""

from __future__ import annotations

import logging
from typing import Any


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
