"""The table of bytes over the number of ranks, from docs/results/moved_bytes.json."""

from __future__ import annotations

import json

from measurements import RESULTS
from registry import Block, kind, row


@kind("moved-bytes")
def moved_bytes(block: Block) -> list[str]:
    """Return a row per method and communicator. Broadcasts share that of allgather: they send the same buffers."""
    found = json.loads((RESULTS / "moved_bytes.json").read_text(encoding="utf-8"))
    by_broadcasts = {line["method"]: line["bytes"] for line in found if line["communicator"] == "broadcast"}
    gathered = {line["method"]: line["bytes"] for line in found if line["communicator"] == "allgather"}
    sizes = list(found[0]["bytes"])
    lines = [row("method", "communicator", *(f"{size} ranks" for size in sizes)), row(*["---"] * (2 + len(sizes)))]
    for line in found:
        name, cells = "`, `".join(line["communicator"].split(", ")), []
        if by_broadcasts.get(line["method"]) == gathered.get(line["method"]):
            if line["communicator"] == "broadcast":
                continue
            name = name.replace("allgather", "allgather`, `broadcast")
        for size, sent in line["bytes"].items():
            text = " + ".join(f"{part:.3g}" for part in sent or ())
            cells.append(f"**{text}**" if int(size) in line["auto"] else text)
        lines.append(row(f"`{line['method']}`", f"`{name}`", *cells))
    return lines
