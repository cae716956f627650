"""The places to start, by optimizer and network."""

from __future__ import annotations

import methods
from registry import Block, kind, row

from grace.core.config.recommended import STARTS


@kind("recommended")
def recommended(block: Block) -> list[str]:
    """Return the table of the places to start."""
    lines = [row("optimizer", "network", "compressor", "bytes", "training"), row(*["---"] * 5)]
    for start in STARTS:
        options = [f"`{key}={value!r}`" for key, value in start.config.items() if key != "compressor"]
        method = ", ".join([methods.link(start.config["compressor"], block), *options])
        lines.append(row(start.optimizer, start.network, method, start.bytes, start.trains))
    return lines
