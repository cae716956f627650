"""A scenario about the times of a step, with PyTorch: what one rank does, and what it reports."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import horovod.torch as hvd

from tests.adapters.torch.model import make_net, train, wrap
from tests.support.cases import EVERYTHING


def timeline() -> dict[str, Any]:
    """GRACE_TIMELINE, a timeline by hand, and a path that rank 1 cannot write."""
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
            results[name] = json.loads(Path(f"{folder}/{name}.rank{hvd.rank()}.json").read_text())
        path = f"{folder}/nowhere/trace.json" if hvd.rank() == 1 else ""
        with mock.patch.dict(os.environ, GRACE_TIMELINE=path):
            try:
                wrap(make_net(), config)
            except Exception as error:
                results["refused"] = f"{type(error).__name__}: {error}"
    return results
