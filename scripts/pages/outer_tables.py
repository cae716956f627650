"""Tables of outer steps: the outer optimizers with their options, and the presets."""

from __future__ import annotations

import dataclasses
import json

from registry import Block, kind, markdown, row

from grace.core.config.outer import PRESETS
from grace.core.config.registry import outer_optimizers


@kind("outer-optimizers")
def optimizers(block: Block) -> list[str]:
    """Return each outer optimizer, what it is, and its options with their defaults."""
    lines = [row("optimizer", "what it is", "options"), row("---", "---", "---")]
    for name in outer_optimizers:
        cls = outer_optimizers.get(name)
        options = ", ".join(
            f"`{f.name} = {f.default!r}`".replace("= False", "= false") for f in dataclasses.fields(cls)
        )
        what = (cls.__doc__ or "").partition("\n")[0]
        lines.append(row(f"`{name}`", markdown(what), options or "none"))
    return lines


@kind("outer-presets")
def presets(block: Block) -> list[str]:
    """Return what each preset stands for."""
    lines = [row("preset", "stands for"), row("---", "---")]
    for name, options in PRESETS.items():
        shown = ", ".join(f"{key} = {json.dumps(x)}" for key, x in options.items())
        lines.append(row(f"`{name}`", f"`{shown}`"))
    return lines
