"""The tables that pages show of the study: which methods, tasks and runs they have, and what is bold."""

from __future__ import annotations

import importlib
import json
import re
import sys

import pytest

from grace.report.methods import EQUAL
from tests.report.made import dense, run, runs
from tests.support.launch import ROOT

pytest.importorskip("torch")
PAGE = ROOT / "docs" / "guide.md"
MORE = {"versions": {"numpy": "2", "mlxtend": "3"}}


@pytest.fixture(scope="module")
def study_tables():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "scripts" / "pages"), *sys.path])
        importlib.import_module("study_findings")
        yield importlib.import_module("study_tables")


@pytest.fixture
def table(study_tables, monkeypatch):
    """Return a function that writes a block from made-up results; it returns cells by the first of their row."""

    def clear():
        study_tables.found.cache_clear()
        sys.modules["study_findings"].compared.cache_clear()

    def write(name, results):
        clear()
        monkeypatch.setattr(study_tables, "runs", lambda: [{**result, **MORE} for result in results])
        kind, *arguments = name.split()
        registry = sys.modules["registry"]
        lines = registry.kinds[kind](registry.Block(arguments, PAGE, ""))
        rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
        return {row[0]: row[1:] for row in rows}, [line for line in lines if line and not line.startswith("|")]

    yield write
    clear()


def test_a_table_has_the_tasks_of_an_optimizer_and_the_best_method_first(table):
    results = [
        *dense(), *runs("topk", (0.11, 0.13)), *runs("qsgd", (0.1, 0.1), share=0.25), *dense("ncf"),
        *runs("qsgd", (0.6,), task="ncf", share=0.26), *runs("qsgd", (0.1,), ranks=8), *runs("qsgd, feedback", (0.1,)),
    ]  # fmt: skip
    rows, text = table("study SGD", results)
    assert list(rows) == ["method", "---", "`none`", "`qsgd`", "`topk`"]
    assert rows["method"] == ["bytes, %", "`mf`"]
    assert rows["`none`"] == ["100.0", "100.0 (90.9 to 111.1)"]
    assert rows["`qsgd`"] == ["25.0", "100.0 (90.0 to 110.0)"]
    # The difference is as large as the noise.
    assert rows["`topk`"] == ["10.0", "83.3 (81.8 to 84.6)"]
    assert "4 simulated ranks, seeds 0, 1. a machine, CPU only; NumPy 2. 2026-01-01." in " ".join(text)
    rows, _ = table("study Adam", results)
    assert rows["method"] == ["bytes, %", "`ncf`"]
    assert rows["`qsgd`"] == ["26.0", "101.7 (one seed)"]


def test_what_is_behind_by_more_than_the_noise_is_bold(table):
    slower, diverges = runs("topk", (0.11, 0.131)), [run("dgc", 0.1), run("dgc", None, seed=1)]
    rows, _ = table("study SGD", [*dense(), *slower, *diverges, *runs("terngrad", (None, None))])
    assert rows["`topk`"][1].startswith("**83.0 (")
    assert rows["`dgc`"][1] == "**diverges, 1 of 2**"
    assert rows["`terngrad`"][1] == "**diverges**"
    rows, _ = table("study Adam", [*dense("ncf"), *runs("topk", (0.57, 0.585), task="ncf")])
    assert rows["`topk`"][1] == "**96.2 (95.9 to 96.6)**"


def test_bytes_that_depend_on_the_task_are_a_range(table):
    results = [result for task in ("mf", "cnn") for result in dense(task)]
    results += runs("powersgd", (0.1,), share=0.5) + runs("powersgd", (0.6,), share=0.08, task="cnn")
    assert table("study SGD", results)[0]["`powersgd`"][0] == "8.0 to 50.0"


def test_the_methods_on_several_numbers_of_ranks_are_compared(table):
    results = [result for ranks in (2, 8) for result in dense(ranks=ranks)]
    results += [*runs("topk", (0.1,), ranks=2), *runs("topk", (0.2,), ranks=8), *runs("qsgd", (0.1,), ranks=8)]
    rows, _ = table("study-ranks mf", results)
    assert rows["method"] == ["`mf`, 2 ranks", "`mf`, 8 ranks"]
    assert rows["`topk`"] == ["90.0", "**45.0**"]
    assert "`qsgd`" not in rows


def test_methods_are_shown_with_and_without_error_feedback(table):
    results = [*dense(), *runs("topk", (0.1, 0.1)), *runs("topk, no feedback", (0.2, 0.2)), *runs("qsgd", (0.1, 0.1))]
    results += runs("qsgd, feedback", (0.2, 0.2))
    rows, _ = table("study-feedback", results)
    assert rows["method"] == ["default", "`mf`"]
    assert rows["`topk`"] == ["with", "100.0 / **50.0**"]
    assert rows["`qsgd`"] == ["without", "**50.0** / 100.0"]


def test_one_and_two_compressions_are_shown_the_smallest_error_first(table):
    results = [
        *dense(), *runs("qsgd:communicator=allgather", (0.1, 0.1)), *runs("qsgd:communicator=two_shot", (0.11, 0.11)),
        *runs("topk:communicator=allgather", (0.125, 0.125)), *runs("topk:communicator=two_shot", (0.2, 0.2)),
        *runs('topk:communicator={"name":"two_shot","second":"qsgd"}', (0.125, 0.125)),
    ]  # fmt: skip
    rows, _ = table("study-twice mf", results)
    assert rows["`qsgd`"] == ["0.0001", "two_shot", "100.0 / 90.9"]
    assert rows["`topk`"] == ["0.92", "allgather", "**80.0** / **50.0** / **80.0**"]
    assert list(rows).index("`qsgd`") < list(rows).index("`topk`")


def test_gradients_updates_and_rare_syncs_are_compared(table):
    results = [*dense(), *runs("topk", (0.125, 0.125), share=0.02), *runs("topk:outer=update", (0.2, 0.2), share=0.02)]
    rows, _ = table("study-outer mf", results)
    assert list(rows) == ["what the ranks exchange", "---", "gradients", "gradients, `topk`", "updates, `topk`"]
    assert rows["updates, `topk`"] == ["2.0", "**50.0 (45.0 to 55.0)**"]


def test_the_bytes_of_thresholds_are_those_of_topk_times_something(study_tables, table):
    results = [*dense(), *runs("topk", (0.1, 0.1), share=0.02)]
    for name in (*study_tables.study.VOLUME, EQUAL):
        results += runs(name, (0.1, 0.1), share=0.03)
    rows, _ = table("study-volume mf", results)
    assert rows["method"] == ["`mf`: bytes", "`mf`: quality"]
    assert rows["`topk`"] == ["1.00", "100.0 (90.0 to 110.0)"]
    assert rows[f"`{EQUAL}`"][0] == "1.50"


def test_each_finding_of_a_paper_has_a_row(table):
    slow = [run(name, 0.1, exchange=1.0) for name in ("qsgd", "eden", "topk", "natural", "uniform")]
    rows, _ = table("study-findings GRACE", [*dense(), *slow])
    assert rows["V-D, Fig. 8"][1:] == [
        "reproduced",
        "codecs add 20000 % of the computation of a step (median), on one core",
    ]
    assert rows["V-E, Fig. 10"][1] == "not reproduced"
    assert rows["V-E, Fig. 9"][1] == "not tested"
    assert "Fig. 1, 3" in table("study-findings hard threshold", slow)[0]


def test_cells_that_are_faster_than_uncompressed_training_are_counted(table):
    results = [*dense(), *dense("cnn"), run("qsgd", 0.1), run("eden", 0.1, exchange=9.0), run("topk", 0.5, task="cnn")]
    rows, _ = table("study-faster", results)
    assert rows["1 Gbit/s"] == ["95 %", "0 of 3 (0 %)", "2 of 3 (67 %)", "0 of 1 (0 %)", "1 of 1 (100 %)"]
    rows, _ = table("study-links", results)
    # 6 messages of 25 us and 1,500 bytes, and 5 ms of computation or a hundredth of it.
    assert rows["`mf`"] == ["1", "3 %", "3 %", "76 %", "75 %"]


def test_methods_are_grouped_by_what_they_gain_from_feedback(table):
    results = [*dense(), *dense("ncf"), run("topk", 0.1), run("topk, no feedback", 0.2)]
    results += [run("terngrad", 0.1), run("terngrad, feedback", 0.2)]
    results += [run("terngrad", 0.4, task="ncf"), run("terngrad, feedback", 0.5, task="ncf")]
    results += [run("qsgd", 0.1), run("qsgd, feedback", 0.11), run("eden", 0.1), run("eden, feedback", 0.2)]
    rows, _ = table("study-gains", results)
    assert rows["gain on all tasks that tell"] == ["`topk`"]
    assert rows["gain on some, lose on others"] == ["`terngrad`"]
    assert rows["lose"] == ["`eden`"]
    assert rows["differ by no more than the noise"] == ["`qsgd`"]


@pytest.mark.parametrize("page", ["accuracy", "adam", "hard_threshold", "mls_bench"])
def test_the_figures_of_a_page_on_accuracy_come_from_runs_that_can_be_repeated(page):
    files = set(re.findall(r"results/([\w/]+\.json)", (ROOT / f"docs/{page}.md").read_text("utf-8")))
    assert files
    for name in files:
        data = json.loads((ROOT / "docs/results" / name).read_text("utf-8"))
        if "origins" in data:
            assert all(run["origin"] in data["origins"] and isinstance(run["seed"], int) for run in data["cells"])
            for origin in data["origins"].values():
                assert all(origin[key] for key in ("command", "commit", "machine"))
        else:
            assert all(data[key] for key in ("commands", "commits", "machine"))
            assert "seed" in data["what"]
