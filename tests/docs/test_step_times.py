"""The tables of step times: their rows were measured with today's defaults."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from grace.bench.step.models import MLP
from grace.core.config.config import make_config
from grace.core.config.registry import compressors
from grace.core.plan.plan import make_plan
from grace.core.spec import Ranks, TensorSpec
from tests.support.launch import ROOT

# TCP, and the messages by which Horovod agrees on tensors.
OVERHEAD, MESSAGES_MB = 1.03, 0.1


def rows():
    """Return what each method with a fixed number of bytes sent on 2 ranks, by table."""
    for path in sorted((ROOT / "docs/results").glob("step_*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        for row in data["rows"]:
            if "mb" in data["columns"] and path.stem != "step_fsdp" and row["method"] in compressors:
                yield pytest.param(row["method"], row["mb"], id=f"{path.stem}-{row['method']}")


@pytest.mark.parametrize(("name", "measured"), list(rows()))
def test_bytes_are_those_of_the_default_options(name, measured):
    specs = [
        spec
        for layer, (inputs, outputs) in enumerate(pairwise(MLP))
        for spec in (TensorSpec(f"{layer}.weight", (outputs, inputs)), TensorSpec(f"{layer}.bias", (outputs,)))
    ]
    buckets = make_plan(specs, make_config({"compressor": name, **compressors.required(name)}), ranks=Ranks(2)).buckets
    if all(bucket.route.fixed for bucket in buckets):
        sent = sum(bucket.nbytes for bucket in buckets) / 1e6
        assert sent <= measured <= OVERHEAD * sent + MESSAGES_MB
