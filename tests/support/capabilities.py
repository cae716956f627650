"""Compressors that have lost a capability."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from grace.core.methods.compressor import Compressor


def replacing(compressor: Compressor, name: str) -> Any:
    """Return an equal compressor of a subclass that replaces the method `name` alone, by one that does the same."""
    cls = type(compressor)

    def method(self: Any, *args: Any) -> Any:
        return getattr(cls, name)(self, *args)

    made = dataclass(frozen=True)(type(f"Plain{cls.__name__}", (cls,), {name: method}))
    return made(**{f.name: getattr(compressor, f.name) for f in fields(compressor)})
