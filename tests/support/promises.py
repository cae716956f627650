"""Promises of the exchange of every adapter. An adapter runs `kept` on each of its ranks, or once for all of them."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import grace
from grace.core.errors import ConfigError, GraceWarning, StateError
from tests.support.records import stderr_without_logging

TENSORS = {"w": (40, 30), "v": (30, 20)}
TOPK = {"compressor": "topk", "compress_ratio": 0.1, "default_rules": False}


class Run(NamedTuple):
    """An exchange, and a function that takes a step with the gradients of that number and returns the merged ones."""

    exchange: Any
    step: Callable[[int], bytes]


Make = Callable[[dict[str, Any]], Run]


def gradients(number: int, rank: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((number, rank))
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in TENSORS.items()}


def joined(merged: dict[str, Any]) -> bytes:
    return b"".join(np.asarray(merged[name]).tobytes() for name in TENSORS)


def kept(make: Make) -> dict[str, str]:
    """Return the error of each promise, empty if it is kept. `make` returns the run of a configuration.

    The ranks compare replicas before every second step.
    """
    return {promise.__name__: _error(promise, lambda c: make({"check_replicas": 2, **c})) for promise in PROMISES}


def _error(promise: Callable[[Make], None], make: Make) -> str:
    try:
        promise(make)
    except (Exception, pytest.fail.Exception) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def plan_and_report(make: Make) -> None:
    exchange = make(TOPK).exchange
    assert {item.spec.name for item in exchange.plan.assignments} == set(TENSORS)
    assert all(word in exchange.report() for word in ("topk", *TENSORS))


def statistics(make: Make) -> None:
    """In full, and as numbers for loggers."""
    for norms in (False, True):
        run = make(TOPK)
        run.exchange.track_norms = norms
        assert run.exchange.track_norms is norms
        run.step(0)
        found, stats = run.exchange.scalars(), run.exchange.stats()
        assert stats["step"] == 1
        assert 0 < stats["wire_bytes"] < stats["dense_bytes"]
        assert all((tensor["relative_error"] is not None) is norms for tensor in stats["tensors"].values())
        assert all(type(value) is float for value in found.values())
        assert found["grace/wire_bytes"] == stats["wire_bytes"]
        assert found["grace/dense_bytes"] == stats["dense_bytes"]
        assert found["grace/ratio"] == stats["wire_bytes"] / stats["dense_bytes"]
        assert ("grace/relative_error" in found) is norms
        timed = all(bucket["merge"] is not None for bucket in stats["buckets"].values())
        assert ("grace/merge_seconds" in found) is timed


def one_line(make: Make) -> None:
    """Rank 0 says once what is sent, and once more after a change. A simulation sends nothing."""
    with stderr_without_logging() as written:
        run = make(TOPK)
        run.step(0)
        run.step(1)
        run.exchange.change(compress_ratio=0.3)
        run.step(2)
    lines, exchange = written.getvalue().splitlines(), run.exchange
    if exchange.rank or isinstance(exchange, grace.Simulation):
        assert lines == []
        return
    first, later = lines
    for line in lines:
        assert "topk compresses 2 of 2 tensors, and each of 2 ranks sends " in line
        assert line.endswith(f" {exchange.called}.report() lists them.")
    assert "from step 2, " in later
    assert "from" not in first
    # 120 + 60 of 1,800 elements, then 360 + 180, of 4 bytes each and with an index.
    assert " 1.5 KB per step instead of 7.2 KB (20.2 %)" in first
    assert " 4.3 KB per step instead of 7.2 KB (60.2 %)" in later


def change(make: Make) -> None:
    run = make(TOPK)
    run.step(0)
    before = run.exchange.stats()["wire_bytes"]
    for ratio in (0.3, 0.2):
        run.exchange.change(compress_ratio=ratio)
        assert run.exchange.config.method.compressor.compress_ratio == ratio
    with pytest.raises(ConfigError, match="compress_rate"):
        run.exchange.change(compress_rate=0.5)
    assert run.exchange.config.method.compressor.compress_ratio == 0.2
    run.step(1)
    assert run.exchange.stats()["wire_bytes"] > 1.5 * before
    with pytest.raises(ConfigError, match="schedule"):
        make({**TOPK, "schedule": [{"step": 5, "compress_ratio": 0.5}]}).exchange.change(compress_ratio=0.2)


def replicas(make: Make) -> None:
    run = make({"compressor": "powersgd", "default_rules": False})
    run.step(0)
    run.exchange.check_replicas()


def timeline(make: Make) -> None:
    run = make(TOPK)
    with tempfile.TemporaryDirectory() as folder:
        run.exchange.start_timeline(Path(folder) / "trace.json")
        run.step(0)
        run.exchange.stop_timeline()
        run.step(1)
        traces = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    assert traces
    for trace in traces:
        assert {event["args"]["step"] for event in trace if event["ph"] == "X"} == {0}


def saved_state(make: Make) -> None:
    """A run refuses damaged states and goes on as if it had not seen them; another resumes it, a third cannot.

    One test of three promises, because TensorFlow traces a graph for every run.
    """
    first, second, third = (make(TOPK) for _ in range(3))
    first.step(0)
    saved = first.exchange.state_dict()
    for wrong in ({}, None, {**first.exchange.state_dict(), "version": 2, "ranks": [{"version": 2}]}):
        with pytest.raises(StateError):
            first.exchange.load_state_dict(wrong)
    expected = [first.step(1), first.step(2)]
    # `second` has seen no damaged state.
    assert second.exchange.load_state_dict(saved) is True
    assert [second.step(1), second.step(2)] == expected
    other = {"ranks": [{**one, "rank": 7} for one in saved["ranks"]]} if "ranks" in saved else {**saved, "rank": 7}
    with pytest.warns(GraceWarning, match="residuals start from zero"):
        assert third.exchange.load_state_dict(other) is False
    assert third.step(1) == make(TOPK).step(1) != expected[0]
    assert third.exchange.stats()["step"] == 2


def states_of_all_ranks(make: Make) -> None:
    """Lists in any order, made of one rank's states: their mean is what it has."""
    first, second, third = (make({**TOPK, "communicator": "allgather"}) for _ in range(3))
    first.step(0)
    saved = first.exchange.state_dict()
    one, size = (saved["ranks"][0], len(saved["ranks"])) if "ranks" in saved else (saved, saved["size"])

    def of(count: int) -> list[dict[str, Any]]:
        return [{**one, "rank": rank, "size": count} for rank in reversed(range(count))]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert second.exchange.load_state_dict(saved["ranks"] if "ranks" in saved else of(size)) is True
        for count in (size + 2, 1 if size > 1 else 3):
            assert third.exchange.load_state_dict(of(count)) is False
    for loaded in (second, third):
        state = loaded.exchange.state_dict()
        mine = state["ranks"][0] if "ranks" in state else state
        assert mine["step"] == 1
        assert shown_states(mine["tensors"]) == shown_states(one["tensors"])
    with pytest.raises(StateError, match="each once, received ranks"):
        third.exchange.load_state_dict(of(3)[1:])
    assert second.step(1) == first.step(1)


def shown_states(tensors: Any) -> Any:
    """Return nested states with the bytes of their arrays in place of these."""
    if isinstance(tensors, dict):
        return {key: shown_states(value) for key, value in tensors.items()}
    return tensors if isinstance(tensors, str | list) else np.asarray(tensors).tobytes()


def joint_state_of_another_rank(make: Make) -> None:
    config = {"compressor": "qsgd", "memory": "diana", "communicator": "allgather", "default_rules": False}
    first, second = make(config), make(config)
    first.step(0)
    saved = first.exchange.state_dict()
    other = {"ranks": [{**one, "rank": 7} for one in saved["ranks"]]} if "ranks" in saved else {**saved, "rank": 7}
    with pytest.raises(StateError, match="no rank can start from zero alone"):
        second.exchange.load_state_dict(other)
    assert second.step(0) == make(config).step(0)


PROMISES = (
    plan_and_report,
    statistics,
    one_line,
    change,
    replicas,
    timeline,
    saved_state,
    states_of_all_ranks,
    joint_state_of_another_rank,
)
