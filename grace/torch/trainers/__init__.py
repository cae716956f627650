"""Ready callbacks that compress the gradients of trainers: one module per trainer, imported at its first use."""

from __future__ import annotations

import importlib
from types import ModuleType

# The modules, and the packages that they need.
_NEEDED = {
    "accelerate": "accelerate",
    "composer": "composer",
    "lightning": "lightning",
    "transformers": "transformers",
}


def __getattr__(name: str) -> ModuleType:
    """Import the module of a trainer at its first use. Raises AttributeError if the import fails."""
    if name not in _NEEDED:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'; it has {', '.join(_NEEDED)}")
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:
        raise AttributeError(
            f"{__name__}.{name} cannot be imported: {error}. It needs the package {_NEEDED[name]}: install it"
        ) from error
