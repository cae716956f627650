"""Rank 0 says in one line what an exchange sends, seen without a set-up of logging; every usual way silences it."""

from __future__ import annotations

import logging

import pytest

import grace
from grace.core.config.config import make_config
from grace.core.config.registry import compressors
from grace.core.observe.announcement import announce, in_units, summary
from grace.core.plan.plan import make_plans
from grace.core.spec import Ranks, TensorSpec
from tests.support.records import stderr_without_logging

SPECS = [TensorSpec("a", (300, 200)), TensorSpec("b", (40, 30)), TensorSpec("bias", (200,))]
QSGD = {"compressor": "qsgd", "communicator": "allgather"}


def stages(config, ranks=3, specs=SPECS):
    return make_plans(specs, make_config(config), ranks=Ranks(ranks))


def said(config, step=None, **options):
    with stderr_without_logging() as written:
        outer = make_config(config).outer
        announce(stages(config, **options), options.get("ranks", 3), "exchange.report()", step, outer)
    return written.getvalue()


@pytest.fixture
def ours():
    logger = logging.getLogger("grace")
    yield logger
    logger.setLevel(logging.NOTSET)
    logging.disable(logging.NOTSET)


def test_the_line_is_seen_without_any_set_up():
    assert said(QSGD) == (
        "grace: qsgd compresses 2 of 3 tensors, and each of 3 ranks sends 62.5 KB per step instead of 245.6 KB "
        "(25.4 %). exchange.report() lists them.\n"
    )


@pytest.mark.parametrize("name", list(compressors))
def test_every_method_is_told_in_one_line_with_the_bytes_of_its_plan(name):
    config = {"compressor": name, **compressors.required(name), "default_rules": False}
    (_, plan), *_ = stages(config)
    line = said(config)
    assert line.count("\n") == 1
    assert line == f"grace: {summary(plan, 3)} exchange.report() lists them.\n" or "until step" in line
    count = sum(compressors.name_of(item.compressor) == name for item in plan.assignments)
    expected = "none of 3 tensors is compressed" if name == "none" else f"{name} compresses {count} of 3 tensors"
    assert expected in line
    assert f"{in_units(plan.wire_bytes)}{'' if plan.fixed else ' and what the gradients select'} per step" in line
    total = f"{plan.dense_bytes:,} bytes dense, {plan.wire_bytes:,} on the wire per rank and step"
    assert f"{total}{'' if plan.fixed else ' plus what the data select'}" in plan.report()
    assert name == "none" or f"instead of {in_units(plan.dense_bytes)}" in line


@pytest.mark.parametrize(
    ("config", "step", "expected"),
    [
        (
            {"compressor": "none"},
            None,
            "none of 3 tensors is compressed, and each of 3 ranks sends 245.6 KB per step. ",
        ),
        (QSGD, 7, "grace: from step 7, qsgd compresses 2 of 3 tensors, "),
        (
            {**QSGD, "rules": [{"match": "b", "compressor": "topk"}]},
            None,
            "grace: qsgd and topk compress 2 of 3 tensors, ",
        ),
        (
            {**QSGD, "outer": "diloco"},
            4,
            "grace: from sync 4, qsgd compresses 2 of 3 tensors, and each of 3 ranks sends 62.5 KB per sync "
            "instead of 245.6 KB (25.4 %). Outer steps: every 500 steps; SGD(",
        ),
        ({**QSGD, "outer": "streaming_diloco"}, None, " sends 62.5 KB per period instead of 245.6 KB (25.4 %). "),
        (
            {"compressor": "threshold", "threshold": 1.0},
            None,
            " sends 816 B and what the gradients select per step instead of 245.6 KB. ",
        ),
    ],
)
def test_lines(config, step, expected):
    assert expected in said(config, step)


def test_a_schedule_says_when_the_line_ends():
    config = {**QSGD, "schedule": [{"step": 10, "compressor": "none"}, {"step": 25, "compressor": "topk"}]}
    assert said(config).startswith("grace: until step 10, qsgd compresses 2 of 3 tensors")
    assert said(config, 10).startswith("grace: from step 10, until step 25, none of 3 tensors is compressed")
    assert said(config, 30).startswith("grace: from step 30, topk compresses 2 of 3 tensors")


def test_a_single_rank_and_no_tensor():
    assert "a single rank sends 62.5 KB per step" in said(QSGD, ranks=1)
    assert "none of 0 tensors is compressed" in said(QSGD, specs=[])


@pytest.mark.parametrize(
    "silence",
    [
        lambda ours: ours.setLevel("WARNING"),
        lambda ours: logging.getLogger().setLevel("ERROR"),
        lambda ours: logging.disable(logging.INFO),
        lambda ours: ours.addHandler(logging.NullHandler()),
        lambda ours: ours.addFilter(lambda record: False),
    ],
    ids=["level of grace", "level of root", "disabled", "a handler that writes nothing", "filter"],
)
def test_the_line_can_be_silenced(silence, ours, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(ours, "filters", [])
    with stderr_without_logging() as written:
        announce(stages(QSGD), 3, "exchange.report()")
        silence(ours)
        announce(stages(QSGD), 3, "exchange.report()")
    root.setLevel(logging.WARNING)
    assert written.getvalue().count("\n") == 1


@pytest.mark.parametrize(("level", "lines"), [("WARNING", 0), ("INFO", 1), ("DEBUG", 2)])
def test_a_set_up_of_logging_decides(level, lines, caplog, capsys):
    (_, plan), *_ = stages(QSGD)
    with caplog.at_level(level, logger="grace"):
        announce(stages(QSGD), 3, "exchange.report()")
    assert capsys.readouterr().err == ""
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert found == [("INFO", said(QSGD).rstrip()), ("DEBUG", plan.report())][:lines]


def test_warnings_are_told_once_also_those_of_later_stages_and_changes(caplog):
    config = {**QSGD, "schedule": [{"step": 5, "compressor": "topk", "memory": "none"}]}
    simulation = grace.Simulation(2, SPECS, config)
    assert [record.getMessage()[:20] for record in caplog.records] == ["TopK(compress_ratio="]
    caplog.clear()
    simulation = grace.Simulation(2, SPECS, QSGD)
    assert not caplog.records
    for _ in range(2):
        simulation.change(compressor="topk", memory="none")
        simulation.change(compressor="qsgd", memory="none")
    (record,) = caplog.records
    assert "lost for good" in record.getMessage()


def test_sizes_have_units():
    expected = {0: "0 B", 999: "999 B", 1000: "1.0 KB", 999_949: "999.9 KB", 999_950: "1.0 MB", 10**9: "1.0 GB"}
    assert {size: in_units(size) for size in expected} == expected
    assert in_units(12_345_678_901_234) == "12,345.7 GB"
