"""Every method with its default options ends near uncompressed training, on the quick task of `grace report`.

The distances are those of docs/results/quality.json, which `python benchmarks/quality.py` writes. If a change is meant
to move them, write the file again.
"""

from __future__ import annotations

import importlib
import json

import pytest

from grace.core.config.registry import compressors
from grace.listing import of_literature
from grace.report.methods import DENSE
from tests.support.launch import ROOT

FOUND = json.loads((ROOT / "docs/results/quality.json").read_text(encoding="utf-8"))
DISTANCES = {row["method"]: row["distance"] for row in FOUND["rows"]}


@pytest.fixture(scope="module")
def quality():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("quality")


@pytest.fixture(scope="module")
def dense(quality):
    return quality.measure_loss(DENSE, 0)


def test_the_file_has_every_method_that_needs_no_options():
    assert {name for name, _ in compressors.ready()} == DISTANCES.keys()
    assert DISTANCES[DENSE] == pytest.approx(FOUND["noise"], abs=1e-5)


# Golden bytes tell whether what a method sends has changed. So those of the literature train with --all.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * of_literature(name)) for name in DISTANCES]
)
def test_a_method_ends_as_near_to_uncompressed_training_as_it_did(quality, dense, name):
    loss = quality.measure_loss(name, 0)
    if DISTANCES[name] is None:
        assert loss is None, f"{name} diverged when the file was written; write it again"
    else:
        assert loss is not None
        assert loss - dense <= DISTANCES[name]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("topk", {"communicator": "two_shot"}),
        ("topk", {"memory": "none"}),
        ("powersgd", {"memory": "none"}),
        ("qsgd", {"quantum_num": 1}),
    ],
)
def test_a_worse_default_would_be_noticed(quality, dense, name, options):
    loss = quality.measure_loss(name, 0, **options)
    assert loss is None or loss - dense > DISTANCES[name]


def test_topk_is_nearer_than_signs():
    assert DISTANCES["topk"] < min(DISTANCES[name] for name in ("efsignsgd", "signsgd", "terngrad"))
