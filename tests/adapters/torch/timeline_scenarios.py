"""A scenario about the times of a step in PyTorch, run by each rank."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from tests.adapters.torch.launched import my_rank
from tests.adapters.torch.model import make_net, train, wrap
from tests.support.cases import EVERYTHING


def timeline() -> dict[str, Any]:
    """Write timelines by GRACE_TIMELINE and by a call, and try a path that rank 1 cannot write."""
    config = {"compressor": "powersgd", "bucket_bytes": 4096, **EVERYTHING}
    model = make_net()
    with tempfile.TemporaryDirectory() as folder:
        with mock.patch.dict(os.environ, GRACE_TIMELINE=f"{folder}/told.json"):
            optimizer = wrap(model, config)
        train(model, optimizer, 1)
        results: dict[str, Any] = {"stats": optimizer.grace.stats()}
        optimizer.grace.start_timeline(f"{folder}/by hand.json")
        train(model, optimizer, 1, start=1)
        optimizer.grace.stop_timeline()
        train(model, optimizer, 1, start=2)
        for name in ("told", "by hand"):
            results[name] = json.loads(Path(f"{folder}/{name}.rank{my_rank()}.json").read_text())
        path = f"{folder}/nowhere/trace.json" if my_rank() == 1 else ""
        with mock.patch.dict(os.environ, GRACE_TIMELINE=path):
            try:
                wrap(make_net(), config)
            except Exception as error:
                results["refused"] = f"{type(error).__name__}: {error}"
    return results
