"""The table and the figures of docs/results/outer.json, from made-up runs."""

from __future__ import annotations

import importlib

import pytest

from tests.support.launch import ROOT

pytest.importorskip("matplotlib")
ORIGIN = {"command": "c", "commit": "0", "machine": "a machine", "date": "2026-01-01", "versions": "PyTorch 2"}


def made(method, loss, *, seed=0, steps=600, lr=0.1, nbytes=1000.0, utilisation=0.5):
    curve = [[steps // 2, loss, steps * nbytes // 2], [steps, loss, steps * nbytes]]
    row = {"method": method, "steps": steps, "seed": seed, "lr": lr, "loss": loss, "bytes": nbytes}
    return {**row, "dense_bytes": 1000, "utilisation": utilisation, "curve": curve, "origin": "1"}


@pytest.fixture
def outer_runs(monkeypatch):
    """Return the module with runs of its own."""
    monkeypatch.syspath_prepend(ROOT / "scripts" / "pages")
    module = importlib.import_module("outer_runs")
    rare = {"nbytes": 10.0, "utilisation": 1.0}
    rows = [made("synchronous", 2.0), made("synchronous", 3.0, seed=1), made("synchronous", 1.0, steps=6000)]
    # That of seed 1 has diverged.
    rows += [made("DiLoCo", 2.2, **rare), made("DiLoCo", None, seed=1, **rare), made("synchronous", 2.5, lr=0.2)]
    data = {"what": "loss", "compute": 0.5, "link": 1e8, "origins": {"1": ORIGIN}, "rows": rows}
    monkeypatch.setattr(module, "load", lambda name: data)
    return module


def test_a_run_is_compared_with_the_best_synchronous_one_of_its_seed(outer_runs):
    registry = importlib.import_module("registry")
    head, align, *lines = registry.kinds["outer-runs"](registry.Block([], ROOT / "docs" / "guide.md", ""))
    assert head.count("|") == align.count("|") == 10
    longer = "1.000 (one seed) | 0.0 (one seed)"
    assert lines[:3] == [
        f"| `synchronous` | 0.1 | 1,000 | 1.0 | 50.0 | 2.500 (2.000 to 3.000) | 0.0 (0.0 to 0.0) | {longer} |",
        "| `DiLoCo` | 0.1 | 10 | 100 | 100.0 | 2.200 (one seed) | 10.0 (one seed) |  |  |",
        "| `synchronous` | 0.2 | 1,000 | 1.0 | 50.0 | 2.500 (one seed) | 25.0 (one seed) |  |  |",
    ]
    assert lines[-1].startswith("loss. a machine; PyTorch 2. 2026-01-01. Data, commits and commands: [outer.json](")


def test_time_has_what_the_exchange_takes_in_proportion_to_its_bytes(outer_runs):
    run = outer_runs.runs("synchronous", 600)[0]
    assert outer_runs.seconds(run, 600, 600_000) == pytest.approx(600)
    assert outer_runs.seconds(run, 300, 150_000) == pytest.approx(150 + 75)
    assert outer_runs.seconds(outer_runs.runs("DiLoCo", 600)[0], 600, 6000) == pytest.approx(300)


def test_a_figure_has_the_methods_with_the_most_runs(outer_runs):
    drawn = outer_runs.draw("time").decode()
    assert "600 steps on 4 ranks" in drawn
    assert "DiLoCo" in drawn
    assert "local SGD" not in drawn
