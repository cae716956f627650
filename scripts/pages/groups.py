"""Tables that group the methods: by their default memory, and by their training loss under Adam."""

from __future__ import annotations

import measurements
from registry import Block, kind, row

from grace.core.config.registry import compressors, memories

LOSSES = {"up to 1.5 times": 1.5, "1.5 to 2 times": 2.0, "more": float("inf")}


@kind("memory-defaults")
def memory_defaults(block: Block) -> list[str]:
    """Return which memory is the default of which methods."""
    methods: dict[str, list[str]] = {name: [] for name in memories}
    for name, compressor in compressors.ready():
        methods[compressor.default_memory].append(f"`{name}`")
    lines = [row("memory", "default of"), row("---", "---")]
    return lines + [row(f"`{memory}`", ", ".join(names)) for memory, names in methods.items() if names]


@kind("adam-groups")
def adam_groups(block: Block) -> list[str]:
    """Return the methods by their training loss under AdamW, relative to that of `none`."""
    losses = {name: measured["loss"] for name, measured in measurements.rows_of("adamw").items()}
    dense, least = losses.pop("none"), 0.0
    lines = [row("loss, relative to that of `none`", "methods"), row("---", "---")]
    for title, most in LOSSES.items():
        names = [name for name, loss in losses.items() if least <= loss / dense < most]
        # A row with other options is "NAME, OPTION".
        shown = (f"`{method}`{more}" for method, more in (name.partition(",")[::2] for name in names))
        lines.append(row(title, ", ".join(cell.replace("` ", "` with ") for cell in shown)))
        least = most
    return lines
