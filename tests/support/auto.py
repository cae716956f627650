"""The compressor "auto", told what to choose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from grace.advice import probe
from grace.advice.candidates import Risk


@contextmanager
def preferring(label: str) -> Iterator[None]:
    """Let "auto" take one method with its defaults, whatever it measures. It measures no others."""
    safe = [{"compressor": name} for name in ("none", label)]
    with (
        mock.patch("grace.advice.advise.risk_of", lambda change, *_: Risk(3 * (change not in safe), "a test")),
        mock.patch("grace.advice.advise.best_of", return_value=label),
        mock.patch("grace.advice.auto.best_of", return_value=label),
        mock.patch("grace.advice.auto.gains", return_value=True),
        mock.patch.object(probe, "SECONDS", 0.005),
    ):
        yield
