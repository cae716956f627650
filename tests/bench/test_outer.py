"""benchmarks/outer.py trains what its file lacks, and its outer steps are the published recursions."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from tests.support.launch import ROOT

pytest.importorskip("torch")


@pytest.fixture
def outer(monkeypatch):
    """Return the benchmark with a small model in place of the large one."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GRACE_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location("benchmark_of_outer_steps", ROOT / "benchmarks" / "outer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    class Small(module.Million):
        batch, length, layers = 1, 16, 1

        def text(self):
            text = module.characters(self.length + 1)
            return text._replace(unseen=text.unseen[:20])

    monkeypatch.setattr(module, "Million", Small)
    # What asks git starts a process.
    monkeypatch.setattr(module, "commit", lambda: "a commit")
    return module


def test_a_file_gets_the_runs_that_it_lacks(outer, monkeypatch, tmp_path, capsys):
    path = tmp_path / "outer.json"

    def ran(*arguments):
        monkeypatch.setattr(sys, "argv", ["outer.py", str(path), "--steps", "30", "--rates", "0.004", *arguments])
        outer.main()
        return capsys.readouterr().out.count("\n"), json.loads(path.read_text())

    taken, first = ran("--seeds", "0", "--methods", "synchronous", "DiLoCo")
    assert taken == 2
    taken, found = ran("--seeds", "0", "1", "--methods", "synchronous", "DiLoCo")
    assert taken == 2
    rows = {(row["method"], row["seed"]): row for row in found["rows"]}
    assert len(rows) == len(found["rows"]) == 4
    assert all(row in found["rows"] for row in first["rows"])
    assert found["what"].endswith("seeds 0, 1")
    for row in found["rows"]:
        assert found["origins"][row["origin"]]["command"].startswith("python benchmarks/outer.py")
        assert row["loss"] == row["curve"][-1][1]
    dense, diloco = (rows[method, 0] for method in ("synchronous", "DiLoCo"))
    assert dense["bytes"] == dense["dense_bytes"] == pytest.approx(30 * diloco["bytes"], rel=1e-3)
    assert dense["curve"][-1][2] == pytest.approx(30 * 1.5 * dense["dense_bytes"])


def test_one_bit_adam_sends_a_bit_per_element_after_its_warm_up(outer):
    row, dense = (outer.train(method, 0, 30, outer.Million()) for method in ("1-bit Adam", "synchronous"))
    assert row["curve"][1][1:] == pytest.approx(dense["curve"][1][1:], rel=1e-3), "the warm-up is Adam's"
    sent = row["curve"][-1][2] - row["curve"][1][2]
    assert sent < 0.8 * dense["curve"][-1][2] / 15
    assert row["loss"] < row["curve"][1][1]


def test_utilisation(outer, monkeypatch):
    monkeypatch.setattr(outer, "COMPUTE", 0.5)
    assert outer.compute_utilisation("synchronous", outer.LINK / 16) == 0.5
    # Three fragments of five steps each, of 30: half of the computation covers the exchange.
    assert outer.compute_utilisation("streaming DiLoCo", outer.LINK / 32) == 1
    assert outer.compute_utilisation("streaming DiLoCo", outer.LINK / 16) == pytest.approx(0.5 / 0.75)


def test_outer_steps_are_the_published_recursions(outer, monkeypatch):
    # Imported where the benchmarks can be.
    import outer_reference as reference

    def whole(anchor):
        return reference.SparseLoCo(anchor, chunk=max(a.numel() for a in anchor), bins=0)

    # Ten syncs, so that what stays in the errors counts.
    steps, every, lr = 60, 6, reference.LR
    monkeypatch.setattr(reference, "EVERY", every)
    for method, make, error in (("DiLoCo", reference.DiLoCo, 1e-4), ("SparseLoCo, float values", whole, 1e-3)):
        config = outer.METHODS[method]
        # The norms that limit a rank are those of chunks here, and of tensors there.
        config = {**config, "granularity": "layer", "outer": {**config["outer"], "every": every}}
        monkeypatch.setitem(outer.METHODS, method, config)
        found = outer.train(method, 0, steps, outer.Million(), lr)["loss"]
        assert found == pytest.approx(reference.train(make, 0, steps, outer.Million()), rel=error), method
