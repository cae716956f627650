"""Keras without scikit-learn."""

from __future__ import annotations

import contextlib
import sys


def load() -> None:
    """Import Keras, if it is there, before another import of it or of TensorFlow.

    Keras imports scikit-learn if it is there, and with it pandas, which takes more than a second.
    """
    if "sklearn" in sys.modules or "keras" in sys.modules:
        return
    sys.modules["sklearn"] = None  # type: ignore[assignment]
    try:
        with contextlib.suppress(ImportError):
            import keras  # noqa: F401
    finally:
        del sys.modules["sklearn"]
