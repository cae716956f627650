"""Ready callbacks that compress the gradients of trainers: one module per trainer, imported at its first use."""

from __future__ import annotations

from grace.lazy import importer

__getattr__ = importer(__name__, {name: name for name in ("accelerate", "composer", "lightning", "transformers")})
