"""The file of the study: what it keeps of results, what is taken from it, and that the study goes on from it."""

from __future__ import annotations

import importlib
import itertools
import json
import sys

import pytest

from grace.core.config.registry import compressors
from grace.report.cell import Cell, read, train, write
from grace.report.methods import BASELINES, methods
from tests.support.launch import ROOT

ORIGIN = {"version": "1", "commit": "abc", "machine": "m", "system": "s", "versions": {"numpy": "2"}}
SMALL = ("--tasks", "mf", "--methods", "qsgd", "qsgd:quantum_num=7", "--ranks", "2", "--seeds", "0")


@pytest.fixture(scope="module")
def study():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
        yield importlib.import_module("study")


@pytest.fixture(scope="module")
def trained():
    """Results of two methods and two seeds."""
    command = "grace report --output /a/folder --tasks mf"
    made = [Cell("mf", methods()[name], 2, seed, 150) for name in ("none", "topk 10 %") for seed in (0, 1)]
    return [{**train(cell), **ORIGIN, "command": command, "date": "2026-01-01 00:00"} for cell in made]


@pytest.fixture
def file(study, trained, tmp_path):
    path = tmp_path / "study" / "mf.json"
    path.parent.mkdir()
    study.tables.save(path, study.pack_task(trained))
    return path


def test_a_file_has_all_of_a_result_but_late_digits_and_folders(study, trained, file):
    found = study.load_results(json.loads(file.read_text(encoding="utf-8")))
    assert len(file.read_text(encoding="utf-8").splitlines()) < 30
    assert "/a/folder" not in file.read_text(encoding="utf-8")
    for new, old in zip(found, trained, strict=True):
        assert new.keys() == old.keys()
        assert new["command"] == "grace report --tasks mf"
        assert {**new, "command": 0} == {**study._round(old), "command": 0}
        assert new["loss"] == pytest.approx(old["loss"], rel=1e-4)
        assert study.is_current(new)


def test_grace_report_takes_up_what_a_file_has(study, trained, file, tmp_path):
    study.unpack(file.parent, tmp_path / "folder")
    for found in trained:
        cell = Cell("mf", methods()[found["cell"]["method"]], 2, found["cell"]["seed"], 150)
        assert read(cell, tmp_path / "folder" / "cells")["loss"] == pytest.approx(found["loss"], rel=1e-4)
    study.pack(tmp_path / "folder", tmp_path / "again")
    again = tmp_path / "again" / "mf.json"
    assert again.read_text(encoding="utf-8") == file.read_text(encoding="utf-8")


def test_a_result_in_the_folder_is_newer(study, trained, file, tmp_path):
    cell = Cell("mf", methods()["none"], 2, 0, 150)
    (tmp_path / "cells").mkdir()
    write({**trained[0], "loss": 7.0}, tmp_path / "cells" / cell.file)
    study.unpack(file.parent, tmp_path)
    assert read(cell, tmp_path / "cells")["loss"] == 7.0


@pytest.mark.parametrize("text", ["", "[]", '{"cell": {"task": "mf"}}', '{"cell": {"ta'])
def test_a_damaged_result_in_the_folder_costs_no_other(study, trained, file, tmp_path, text, capsys):
    cell = Cell("mf", methods()["none"], 2, 0, 150)
    study.unpack(file.parent, tmp_path)
    (tmp_path / "cells" / cell.file).write_text(text, encoding="utf-8")
    study.pack(tmp_path, tmp_path / "less")
    assert len(json.loads((tmp_path / "less" / "mf.json").read_text(encoding="utf-8"))["cells"]) == len(trained) - 1
    assert f"{cell.file} is damaged" in capsys.readouterr().err
    study.unpack(file.parent, tmp_path)
    assert read(cell, tmp_path / "cells")["loss"] == pytest.approx(trained[0]["loss"], rel=1e-4)


def test_results_of_other_defaults_are_left_out(study, trained, file, tmp_path):
    text = file.read_text(encoding="utf-8")
    assert '"compress_ratio": 0.1' in text
    file.write_text(text.replace('"compress_ratio": 0.1', '"compress_ratio": 0.2'), encoding="utf-8")
    current = [study.is_current(found) for found in study.load_results(json.loads(file.read_text(encoding="utf-8")))]
    assert current == [True, True, False, False]
    study.unpack(file.parent, tmp_path / "folder")
    assert len(list((tmp_path / "folder/cells").iterdir())) == 2


def test_an_option_that_is_new_in_grace_has_its_default_in_old_results(study, trained, file):
    data = json.loads(file.read_text(encoding="utf-8"))
    del data["configs"]["topk 10 %"]["checksum"]
    assert all(map(study.is_current, study.load_results(data)))


@pytest.mark.parametrize("config", [{"compressor": {"name": "gone"}}, {"compressor": {"name": "topk", "gone": 1}}])
def test_what_grace_no_longer_has_is_left_out(study, trained, file, config):
    data = json.loads(file.read_text(encoding="utf-8"))
    data["configs"]["topk 10 %"] = config
    assert [study.is_current(found) for found in study.load_results(data)] == [True, True, False, False]


def test_errors_and_unknown_methods_are_not_kept(study, trained, tmp_path):
    (tmp_path / "cells").mkdir()
    cell = Cell("mf", methods()["none"], 2, 0, 150)
    write({"cell": cell.key, "setting": cell.setting(), "error": "it failed"}, tmp_path / "cells" / cell.file)
    unknown = {**trained[1], "cell": {**trained[1]["cell"], "method": "gone"}}
    write(unknown, tmp_path / "cells" / "gone.json")
    study.pack(tmp_path, tmp_path / "study")
    assert study.load(tmp_path / "study") == []


def test_the_study_has_every_method_on_four_ranks(study):
    usual = [part for part in study.list_parts() if part[part.index("--ranks") + 1] == "4"]
    names = [part[part.index("--methods") + 1 :] if "--methods" in part else tuple(methods()) for part in usual]
    labels = {*itertools.chain(*names)}
    assert labels >= {*methods(), *(name for name, _ in compressors.ready())}


@pytest.mark.processes
def test_the_study_trains_what_is_missing(study, tmp_path, capfd):
    path = tmp_path / "study"
    assert study.main(path, tmp_path / "here", [SMALL], jobs=2) == 0
    assert capfd.readouterr().out.startswith("5 cells, 0 of them done")
    labels = {cell["method"] for cell in json.loads((path / "mf.json").read_text(encoding="utf-8"))["cells"]}
    assert labels == {*BASELINES, "qsgd", "qsgd:quantum_num=7"}
    first = (path / "mf.json").read_text(encoding="utf-8")
    more = (*SMALL, "1")
    assert study.main(path, tmp_path / "elsewhere", [more]) == 0
    assert capfd.readouterr().out.startswith("10 cells, 5 of them done")
    lines = (path / "mf.json").read_text(encoding="utf-8").replace("},\n", "}\n").splitlines()
    assert {*first.replace("},\n", "}\n").splitlines()} <= {*lines}
