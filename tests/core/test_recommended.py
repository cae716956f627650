"""Recommendations of grace, beside the measurements that they rest on, and the warning of poor pairs."""

from __future__ import annotations

import importlib
import sys
import warnings

import pytest

import grace
from grace.core.config.config import make_config
from grace.core.config.recommended import (
    SGD,
    STARTS,
    Optimizer,
    trains_badly_with_adam,
    warn_of_pairs,
)
from grace.core.errors import GraceWarning
from grace.core.wire.layout import payload_bytes
from grace.listing import EXAMPLE, sent_fields
from tests.support.launch import ROOT

PLAIN_SGD = Optimizer("SGD", 0.0, False)
ADAMW = Optimizer("AdamW", 0.9, True)


# In percent of the quality of uncompressed training: what trains badly under Adam is below the second number in some
# task, and what trains well is nowhere below the first. Between them, seeds decide.
WELL, BADLY = 80, 90


@pytest.fixture(scope="module")
def pages():
    """A function: a module that writes parts of pages, by its name."""
    pytest.importorskip("torch", reason="the tasks are PyTorch's")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "scripts" / "pages"), *sys.path])
        yield importlib.import_module


@pytest.fixture(scope="module")
def least(pages):
    """A function: the lowest relative quality of a method on the tasks of the study with Adam, None if it has none."""
    return lambda method: pages("study_tables").least(method, "Adam")


def test_the_poor_methods_are_those_that_were_measured_to_be_poor(least):
    for name in grace.compressors:
        adam, found = grace.compressors.about(name).adam, least(name)
        assert (adam is None) == (found is None), name
        if adam is not None:
            assert found >= WELL if adam else found <= BADLY, name


def test_what_grace_recommends_can_be_used_and_is_not_warned_of(least):
    for start in STARTS:
        config = make_config(start.config)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if start.optimizer != SGD:
                assert least(start.config["compressor"]) >= WELL
                warn_of_pairs(config, ADAMW)
            warn_of_pairs(config, PLAIN_SGD)
        # The bytes that a row promises, by the size of the payload.
        share = start.bytes.partition("/")[2].split(" ")[0]
        sent = payload_bytes(sent_fields(config.stages[0][1].method.compressor)) / EXAMPLE.nbytes
        assert sent <= 1.03 / float(share or 1), start


def test_what_grace_recommends_for_a_link_follows_the_rule_of_the_report(pages):
    """The best in the study, and of those the fastest with codecs as measured, for the model of that measurement."""
    best = importlib.import_module("grace.report.advice").best
    chart, of_methods = pages("break_even"), pages("methods")
    rows, elements = pages("measurements").rows_of("codec"), pages("measurements").load("codec")["elements"]
    measured = {name for name, row in rows.items() if {"torch", "small_torch"} <= row.keys()}
    cases = importlib.import_module("grace.report.comparison").cases(pages("study_tables").runs())
    found = {}
    for gbit in (1, 10):

        def seconds(of_method, gbit=gbit):
            name = of_method[0].method
            received = of_methods.received(name, 4) * elements
            return chart.codec_seconds(name, 4, elements) + 8 * received / (1e9 * gbit)

        found[f"about {gbit} Gbit/s"] = best([case for case in cases if case.method in measured], seconds).method
    assert found == {s.network: s.config["compressor"] for s in STARTS if s.network.startswith("about")}


@pytest.mark.parametrize("compressor", ["dgc", "signum"])
def test_momentum_twice_is_told(compressor):
    rules = [{"match": "embedding*", "compressor": compressor}]
    schedule = [{"step": 10, "compressor": compressor}]
    for given in (
        {"compressor": compressor},
        {"compressor": "none", "rules": rules},
        {"compressor": "none", "schedule": schedule},
    ):
        config = make_config(given)
        with pytest.warns(GraceWarning, match=r"the optimizer has momentum 0.5, and so has .*momentum=0.9") as told:
            warn_of_pairs(config, PLAIN_SGD._replace(momentum=0.5))
        assert len(told) == 1
        warn_of_pairs(config, PLAIN_SGD)
    warn_of_pairs(make_config({"compressor": compressor, "momentum": 0.0}), PLAIN_SGD._replace(momentum=0.5))
    warn_of_pairs(make_config({"compressor": "topk"}), PLAIN_SGD._replace(momentum=0.5))


@pytest.mark.parametrize(
    "given",
    [
        {"compressor": "topk"},
        {"compressor": "TopK".lower(), "compress_ratio": 0.05},
        {"compressor": "efsignsgd"},
        {"compressor": "qsgd", "rules": [{"match": "*", "compressor": "randomk", "memory": "none"}]},
        {"compressor": "none", "schedule": [{"step": 9, "compressor": "onebit"}]},
    ],
)
def test_a_method_that_trains_badly_under_adam_is_told_once(given):
    config = make_config(given)
    with pytest.warns(GraceWarning, match=r"AdamW trains badly with gradients from .*'qsgd', 'blockwise'") as told:
        warn_of_pairs(config, ADAMW)
    assert len(told) == 1
    # Nothing is told with SGD, nor of what was told before a change.
    warn_of_pairs(config, PLAIN_SGD)
    warn_of_pairs(config, ADAMW, before=config)


@pytest.mark.parametrize(
    "given",
    [
        {"compressor": "qsgd"},
        # 1-bit Adam exchanges momentum.
        {"compressor": "efsignsgd", "memory": "shared_momentum", "momentum": 0.9, "communicator": "two_shot"},
    ],
)
def test_good_pairs_are_not_warned_of(given):
    warn_of_pairs(make_config(given), ADAMW._replace(momentum=0.0))


def test_nothing_is_known_of_methods_from_outside(monkeypatch):
    class Mine(grace.compressors.get("topk")):
        """A method of one's own."""

    monkeypatch.setattr(grace.compressors, "_classes", {**grace.compressors._classes})
    grace.register_compressor("mine")(Mine)
    assert trains_badly_with_adam(grace.compressors.make("topk"))
    assert not trains_badly_with_adam(Mine())


@pytest.mark.parametrize(
    ("name", "bases", "adaptive"),
    [
        ("SGD", (), False),
        ("LambdaSGD", (), False),
        ("AdamW8bit", (), True),
        ("FusedLAMB", (), True),
        ("Lans", (), True),
        ("RMSprop", (), True),
        ("DistributedAdam", (), True),
        ("Mine", (type("Adafactor", (), {}),), True),
    ],
)
def test_optimizers_of_adams_kind_are_known_by_their_classes(name, bases, adaptive):
    assert Optimizer.of(type(name, bases, {}), 0.0).adaptive is adaptive
