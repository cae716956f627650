"""Errors and warnings that grace raises on purpose; each says what is wrong, expected, received and to be done."""

from __future__ import annotations

from grace.core.errors import (
    ConfigError,
    GraceError,
    GraceWarning,
    IncompatibleError,
    MismatchError,
    PayloadError,
    StateError,
    StepError,
    WaitError,
)

__all__ = [
    "ConfigError",
    "GraceError",
    "GraceWarning",
    "IncompatibleError",
    "MismatchError",
    "PayloadError",
    "StateError",
    "StepError",
    "WaitError",
]

# Tracebacks, warning filters and pickles name the classes as users do.
for _name in __all__:
    globals()[_name].__module__ = __name__
