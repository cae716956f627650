"""Every error that grace raises on purpose; each says what, expected, received and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GraceError(Exception):
    """Base class of all errors raised by grace."""


class ConfigError(GraceError, ValueError):
    """A configuration that cannot be understood: unknown key, wrong type, value out of range."""


class IncompatibleError(GraceError, ValueError):
    """Parts that are valid alone but cannot work together, found when they are put together."""


class PayloadError(GraceError, ValueError):
    """A compressor returned a payload that is not what its ``wire`` announced."""


class StepError(GraceError, RuntimeError):
    """A step of training driven in the wrong order: a gradient twice, missing, or of another shape."""


class StateError(GraceError, ValueError):
    """A checkpoint that does not fit the optimizer it is loaded into."""


class MismatchError(GraceError, RuntimeError):
    """Ranks that were started with different configurations or different parameters."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """The tail of an error message: the closest valid name, if one is close, and the list of all of them."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return f"{hint} Valid names: {', '.join(names)}."
