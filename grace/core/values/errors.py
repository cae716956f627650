"""Errors that grace raises on purpose; each says what, expected, received and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GraceError(Exception):
    """Base class of all errors raised by grace."""


class GraceWarning(UserWarning):
    """Settings or a checkpoint that can be used, but probably not as intended."""


class ConfigError(GraceError, ValueError):
    """Invalid configuration: an unknown key, a wrong type, a value out of range."""


class IncompatibleError(GraceError, ValueError):
    """Components that are valid alone but cannot work together; raised when they are combined."""


class PayloadError(GraceError, ValueError):
    """Payload that differs from what the compressor's `wire` announced, or that is damaged."""


class StepError(GraceError, RuntimeError):
    """Wrong order of calls in a training step: a gradient twice, missing, or of another shape."""


class StateError(GraceError, ValueError):
    """Checkpoint that does not fit the optimizer it is loaded into."""


class MismatchError(GraceError, RuntimeError):
    """Ranks that were started with different configurations or different parameters."""


class WaitError(GraceError, TimeoutError):
    """Rank that has waited for the others longer than the configuration's `timeout`."""


def nearest(name: object, valid: Iterable[str]) -> str:
    """Return the end of an error message: the closest valid name, if there is one, and all valid names."""
    names = sorted(valid)
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return f"{hint} Valid names: {', '.join(names)}."
