"""The cells of the study and of its short form, and the estimate of their time."""

from __future__ import annotations

import dataclasses

import pytest

from grace.core.errors import ConfigError
from grace.report.methods import DENSE, RECOMMENDED, SIXTEEN_BIT, methods
from grace.report.runner import TimeLeft
from grace.report.study import QUICK, RANKS, SEEDS, USUAL_RANKS, cells, expected_seconds
from grace.report.task import MODULES, find_task, tasks

# 15 minutes on two cores are 1,800 seconds. The estimates are of uncompressed runs, and codecs take a tenth more.
QUICK_SECONDS = 1650


def of(found, **wanted):
    return [cell for cell in found if all(cell.key[key] == value for key, value in wanted.items())]


def test_the_study_has_all_methods_seeds_and_ranks():
    found = cells(["mf"], quick=False)
    for label, method in methods().items():
        ranks = (USUAL_RANKS,) if method.switched or method.equal else RANKS
        assert {(cell.ranks, cell.seed) for cell in of(found, method=label)} == {(r, s) for r in ranks for s in SEEDS}
    assert len({cell.file for cell in found}) == len(found)


def test_the_short_study_ends_in_time_and_has_a_noise_floor_and_16_bits_everywhere():
    pytest.importorskip("torch")
    found = cells(MODULES, quick=True)
    assert sum(map(expected_seconds, found)) <= QUICK_SECONDS
    for name in MODULES:
        for label in RECOMMENDED:
            assert {cell.seed for cell in of(found, task=name, method=label)} == set(SEEDS)
        assert {*SIXTEEN_BIT, *QUICK} <= {cell.method.label for cell in of(found, task=name)}
        assert {cell.ranks for cell in of(found, task=name)} == {USUAL_RANKS}
    assert methods().keys() >= set(QUICK)
    assert len(of(found, task="mf")) == len(methods()) * len(SEEDS)


def test_what_is_named_is_trained():
    found = cells(["mf"], quick=True, methods=["topk"], seeds=[5, 6], ranks=[3])
    assert [str(cell) for cell in found] == [
        *(f"mf, {DENSE}, 3 ranks, seed {seed}" for seed in (5, 6)),
        *(f"mf, {label}, 3 ranks, seed {seed}" for seed in (5, 6) for label in (*SIXTEEN_BIT, "topk")),
    ]


def test_a_study_begins_with_uncompressed_training_and_takes_one_seed_after_the_other():
    found = [(cell.method.label == DENSE, cell.seed) for cell in cells(["mf"], quick=False)]
    assert found == sorted(found, key=lambda pair: (not pair[0], pair[1]))


def test_names_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match="--tasks: there is no task 'mff'"):
        cells(["mff"], quick=True)
    with pytest.raises(ConfigError, match="unknown compressor 'topkk'"):
        cells(["mf"], quick=True, methods=["topkk"])


def test_data_that_a_task_lacks_are_refused(tmp_path):
    pytest.importorskip("torch")
    with pytest.raises(ConfigError, match=r"--data: task 'mf' has its own data only; .* resnet \(CIFAR-10\), lstm"):
        cells(["mf"], quick=True, data=tmp_path)
    with pytest.raises(ConfigError, match=r"--data: task 'lstm' takes Penn Treebank\. .*has no ptb\.train\.txt"):
        cells(["lstm"], quick=True, data=tmp_path)
    for name in ("ptb.train.txt", "ptb.valid.txt"):
        (tmp_path / name).write_text("a b")
    assert {cell.data for cell in cells(["lstm"], quick=True, data=tmp_path)} == {tmp_path}


def test_the_time_left_follows_what_cells_have_taken():
    found = cells(["mf"], quick=True, methods=["topk"], seeds=[0], ranks=[2, 4, 8])
    expected = [expected_seconds(cell) for cell in found]
    left = TimeLeft(found, jobs=2)
    assert left.seconds() == pytest.approx(sum(expected) / 2)
    left.finish(found[0], {"error": "none"})
    assert left.seconds() == pytest.approx(sum(expected[1:]) / 2)
    left.finish(found[1], {"seconds": 3 * expected[1]})
    assert left.seconds() == pytest.approx(3 * sum(expected[2:]) / 2)
    left.learn(found[0], {"seconds": 5 * expected[0]})
    factor = (5 * expected[0] + 3 * expected[1]) / sum(expected[:2])
    assert left.seconds() == pytest.approx(factor * sum(expected[2:]) / 2)
    for cell in found[2:]:
        left.finish(cell, {"seconds": 1})
    assert left.seconds() == pytest.approx(0)


def test_a_task_without_results_borrows_the_speed_of_others(monkeypatch):
    (cell, *_) = cells(["mf"], quick=True, methods=["none"])
    monkeypatch.setitem(tasks, "other", find_task("mf"))
    monkeypatch.setitem(MODULES, "other", "factorization")
    left = TimeLeft([dataclasses.replace(cell, task="other")], jobs=1)
    left.learn(cell, {"seconds": 7 * expected_seconds(cell)})
    assert left.seconds() == pytest.approx(7 * expected_seconds(cell))
