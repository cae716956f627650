"""The table of launchers of the digits example: all methods of the first tier, and FSDP2 where it carries them."""

from __future__ import annotations

import json

from grace.core.communicators.reduce_scatter import ReduceScatter
from grace.core.config.config import make_config
from grace.core.config.registry import compressors
from grace.listing import of_literature
from tests.support.launch import ROOT


def test_every_method_was_trained_wherever_it_can_be():
    rows = json.loads((ROOT / "docs/results/digits_launchers.json").read_text())["rows"]
    first = {name for name in compressors if not of_literature(name)}
    assert first <= {row["method"] for row in rows} <= set(compressors)
    scatter = ReduceScatter()
    for row in rows:
        setting = compressors.about(row["method"]).digits
        method = make_config({"compressor": row["method"], **setting.options}).method
        refused = scatter.obstacle(method.compressor) or scatter.memory_obstacle(method.memory)
        assert ("fsdp" in row) == (not refused), row["method"]
        # The weights are the same, bit for bit.
        assert row["ddp"] == row["horovod"], row["method"]
