"""The figures that `grace what-if` keeps: when they count, and what several processes may do at once."""

import dataclasses
import json
import os
import platform
import threading
import time

import pytest

from grace import make_config
from grace.advice import cost, kept
from grace.cli import main
from grace.core.compressors.qsgd import QSGD

FACTS = {"processor": "one", "cores": 2, "code": "abc"}
QSGD_8 = make_config({"compressor": "qsgd"})
COMMAND = ["what-if", "--params", "3M", "--compute", "50ms", "--compressors", "qsgd", "--ranks", "2"]
# none is not measured.
CODECS = ("fp16", "qsgd")


@dataclasses.dataclass(frozen=True)
class Own(QSGD):
    """A compressor of a user."""


@pytest.fixture
def measured(monkeypatch):
    """Return the list of the configurations that are measured, each with the seconds and bytes of another one."""
    found = []

    def steps(codecs, config, ranks, numel, repetitions):
        found.append(config.method.compressor)
        return [1e-5 + 1e-9 * numel] * 2, 1.0, 0.01

    monkeypatch.setattr(cost.Codecs, "_steps", steps)
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the folder in which the command keeps its measurements."""
    monkeypatch.setenv("GRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def said(capsys):
    """Return what the command says of the times of codecs: in the table, and at the end."""
    assert main(COMMAND) == 0
    lines = capsys.readouterr().out.splitlines()
    return next(line for line in lines if line.startswith("Times of codecs")), lines[-1]


def test_a_second_call_measures_nothing_and_says_when_it_was_measured(measured, folder, capsys):
    table, end = said(capsys)
    assert "one core of this CPU, measured now; with GPUs" in table
    (path,) = folder.iterdir()
    assert end.endswith(f"kept in {path}; delete it to measure again")
    assert len(measured) == 2 * len(CODECS)
    for age, words in ((0, "less than an hour ago"), (7200, "2 hours ago"), (3 * 86_400, "3 days ago")):
        content = json.loads(path.read_text())
        assert len(content["codecs"]) == len(CODECS)
        for entry in content["codecs"].values():
            entry[-1] = time.time() - age
        path.write_text(json.dumps(content))
        assert f"one core of this CPU, measured {words};" in said(capsys)[0]
    assert len(measured) == 2 * len(CODECS)
    # Of a codec that is not there, the others are older.
    del content["codecs"][next(iter(content["codecs"]))]
    path.write_text(json.dumps(content))
    assert "1 of 2 measured now, and the others up to 3 days ago;" in said(capsys)[0]
    assert len(measured) == 2 * len(CODECS) + 2
    path.unlink()
    assert "measured now;" in said(capsys)[0]


def entry(value):
    """Return the damage that puts another entry in place of the first one."""
    return lambda content: content["codecs"].update({next(iter(content["codecs"])): value})


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content["facts"].update(processor="another machine"),
        lambda content: content["facts"].update(code="another version"),
        lambda content: content.pop("facts"),
        lambda content: content.update(codecs=[]),
        lambda content: content.update(codecs=["text"]),
        entry([1e-5, 1e-9, 1e-5, 1e-9, 1.0, float("nan"), 1.0]),
        entry([1e-5, 1e-9, 1e-5, 1e-9, 1.0, -0.01, 1.0]),
        entry([1e-5, 1e-9, 1e-5, 1e-9, "1.0", 0.01, 1.0]),
        entry([1e-5, 1e-9, 1e-5, 1e-9, 1.0, 0.01]),
        # Measured in the future: the clock was wrong.
        entry([1e-5, 1e-9, 1e-5, 1e-9, 1.0, 0.01, 1e12]),
        entry(None),
        "",
        "[",
        "[" * 100_000,
        "[]",
        "null",
        b"\xff\xfe",
    ],
)
def test_a_damaged_file_or_one_of_others_is_not_trusted_and_replaced(damage, measured, folder, capsys):
    said(capsys)
    (path,) = folder.iterdir()
    if callable(damage):
        content = json.loads(path.read_text())
        damage(content)
        path.write_text(json.dumps(content))
    else:
        path.write_bytes(damage.encode() if isinstance(damage, str) else damage)
    measured.clear()
    assert "measured now;" in said(capsys)[0]
    assert len(measured) == 2 * len(CODECS)
    measured.clear()
    assert "measured less than an hour ago;" in said(capsys)[0]
    assert not measured


@pytest.mark.parametrize("fact", list(FACTS))
def test_what_was_measured_by_another_machine_or_version_does_not_count(fact, tmp_path):
    kept.Kept(tmp_path, FACTS, 1).put(QSGD_8, 2, [1.0])
    assert kept.Kept(tmp_path, FACTS, 1).get(QSGD_8, 2)[0] == [1.0]
    assert kept.Kept(tmp_path, FACTS, 1).get(QSGD_8, 3) is None
    assert kept.Kept(tmp_path, FACTS, 1).get(make_config({"compressor": "qsgd", "quantum_num": 7}), 2) is None
    assert kept.Kept(tmp_path, {**FACTS, fact: "other"}, 1).get(QSGD_8, 2) is None


def test_the_facts_are_those_of_the_machine_and_of_the_code(folder, monkeypatch):
    here = kept.kept_here(1, native=True)
    here.put(QSGD_8, 2, [1.0])
    assert kept.kept_here(1, native=True).get(QSGD_8, 2)
    monkeypatch.setattr(platform, "python_version", lambda: "3.99")
    assert kept.kept_here(1, native=True).get(QSGD_8, 2) is None
    assert here._facts["cores"] == os.cpu_count()
    assert here._facts["native"] is True
    assert len(here._facts["code"]) == 64
    assert here.path.parent == folder


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"GRACE_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/grace"),
        ({"HOME": "/c"}, "/c/.cache/grace"),
    ],
)
def test_the_folder_is_that_of_the_users_caches(variables, expected, monkeypatch):
    for name in ("GRACE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(kept._folder()) == expected


def test_processes_that_write_at_once_leave_a_whole_file(tmp_path):
    ended, seen = threading.Event(), []

    def write(number):
        for count in range(20):
            kept.Kept(tmp_path, FACTS, 1).put(QSGD_8, 100 * number + count, [float(number)])

    def read():
        while not ended.is_set():
            for path in tmp_path.glob("*.json"):
                seen.append(json.loads(path.read_text()))

    reader, *writers = [threading.Thread(target=read), *(threading.Thread(target=write, args=(n,)) for n in range(4))]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    ended.set()
    reader.join()
    assert seen
    assert all(content["facts"] == FACTS for content in seen)
    # Whoever wrote last has kept its own, and no part of a file is left.
    (path,) = tmp_path.iterdir()
    assert len(json.loads(path.read_text())["codecs"]) >= 20


def test_a_folder_that_cannot_be_written_is_named_and_stops_nothing(measured, folder, capsys):
    folder.write_text("a file")
    table, end = said(capsys)
    assert "measured now;" in table
    assert f"times of codecs are kept nowhere ({folder}/codecs-" in end
    assert "File exists" in end or "Not a directory" in end


def test_methods_of_a_user_are_not_kept(tmp_path):
    own = dataclasses.replace(QSGD_8, method=dataclasses.replace(QSGD_8.method, compressor=Own()))
    found = kept.Kept(tmp_path, FACTS, 1)
    found.put(own, 2, [1.0])
    rules = make_config({"compressor": "qsgd", "rules": [{"match": "*", "compressor": "topk"}]}).rules
    rule = dataclasses.replace(rules[0], method=own.method)
    found.put(dataclasses.replace(QSGD_8, rules=(rule,)), 2, [1.0])
    assert not list(tmp_path.iterdir())
