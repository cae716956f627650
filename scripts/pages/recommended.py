"""The places to start, by optimizer and network."""

from __future__ import annotations

import methods
from registry import Block, kind, row

from grace.core.config.recommended import STARTS


@kind("recommended")
def recommended(block: Block) -> list[str]:
    """Return the table of the places to start."""
    lines = [row("optimizer", "network", "compressor", "bytes left, and training"), row(*["---"] * 4)]
    for start in STARTS:
        options = [f"`{key}={value!r}`" for key, value in start.config.items() if key != "compressor"]
        method = ", ".join([methods.link(start.config["compressor"], block), *options])
        lines.append(row(start.optimizer, start.network, method, f"{start.bytes}; {start.trains}"))
    return lines
