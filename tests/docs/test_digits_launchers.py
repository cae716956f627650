"""The table of the digits example over Horovod, DDP and FSDP2 has every method, and FSDP2 where it can carry it."""

from __future__ import annotations

import importlib.util
import json
import sys

from grace.core.communicators.reduce_scatter import ReduceScatter
from grace.core.config.config import make_config
from grace.core.config.registry import compressors
from tests.support.launch import ROOT


def test_every_method_was_trained_wherever_it_can_be(monkeypatch):
    spec = importlib.util.spec_from_file_location("digits", ROOT / "examples/digits.py")
    digits = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "digits", digits)
    spec.loader.exec_module(digits)
    rows = json.loads((ROOT / "docs/results/digits_launchers.json").read_text())["rows"]
    assert [row["method"] for row in rows] == sorted(compressors)
    scatter = ReduceScatter()
    for row in rows:
        setting = digits.SETTINGS.get(row["method"], digits.Setting())
        method = make_config({"compressor": row["method"], **setting.options}).method
        refused = scatter.obstacle(method.compressor) or scatter.memory_obstacle(method.memory)
        assert ("fsdp" in row) == (not refused), row["method"]
        # The weights are the same, bit for bit.
        assert row["ddp"] == row["horovod"], row["method"]
