"""`grace what-if`: its sentence, tables and files, and its refusals."""

import json
import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from grace.advice import what_if
from grace.advice.accuracy import ACCURACY, WHAT_IF
from grace.advice.cost import Codec, Cost
from grace.advice.model import Link, Machine
from grace.advice.passes import assumed
from grace.bench.variants import Variant
from grace.cli import main
from grace.core.spec import TensorSpec

OWN = """
import torch

def build():
    model = torch.nn.Linear(300, 100)
    return model, lambda: model(torch.ones(2, 300)).sum()
"""
SMALL = ["what-if", "--params", "3M", "--compute", "50ms", "--compressors", "qsgd", "--ranks", "2:8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder for what the tests of this file measure."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache(folder, monkeypatch):
    """Let the command keep the times of codecs there."""
    monkeypatch.setenv("GRACE_CACHE", str(folder))


class Fixed:
    """Codecs of a given cost, so that predictions are the same on every machine."""

    when = "measured now"

    def __init__(self, seconds_per_element):
        self.cost = Cost(1e-5, seconds_per_element / 2)

    def of(self, config, ranks):
        # As many bytes as the plan says, if it knows.
        return Codec(self.cost, self.cost, 1.0, 0.01)


def answer(bits_per_second, cost=1e-9, optimizer="adam", **options):
    specs = [TensorSpec(f"w{i}", (2048, 2048)) for i in range(6)]
    model = what_if.Model("six layers", specs, assumed(specs, 0.1))
    variants = [Variant("none"), Variant("fp16"), Variant("qsgd"), Variant("topk")]
    machines = [Machine(n, Link(bits_per_second / 8, 1e-5)) for n in (2, 4, 8)]
    return what_if.answer_of(model, variants, machines, Fixed(cost), what_if.OPTIMIZERS[optimizer], **options)


def test_compression_pays_on_a_slow_link_and_not_on_a_fast_one():
    slow, fast = answer(1e9), answer(1e12)
    assert slow.best.label == "qsgd"
    assert slow.speedup(slow.best) > 3
    assert "pays" in slow.sentence
    assert slow.best.label in slow.sentence
    assert slow.knee == slow.machine or slow.knee.ranks < 8
    assert fast.best.label == "none"
    assert "does not pay" in fast.sentence
    # A codec that takes longer than the link never pays.
    dear = answer(1e10, cost=1e-6)
    assert all(row.break_even is not None and row.break_even < 1e10 / 8 for row in dear.rows if row.label != "none")


def test_the_sentence_names_the_fastest_method_of_low_risk_and_then_a_faster_one():
    for optimizer, risk in (("adam", "high risk with Adam"), ("sgd", "medium risk with SGD")):
        found = answer(1e9, optimizer=optimizer)
        assert (found.best.label, found.risky.label) == ("qsgd", "topk")
        first, second = found.sentence.split(". ")
        assert " pays " in first
        assert "(qsgd, " in first
        assert second == f"topk is faster ({found.speedup(found.risky):.1f}x), at a {risk}."
        table = what_if.lines(found)
        assert next(line for line in table if line.startswith("topk ")).endswith(f" {risk.split()[0]}")
        # The whole table of ranks has none of it either.
        ranks = table[table.index("By the number of ranks, with the fastest method of no or low risk:") + 2 :][:3]
        assert [line.split()[0] for line in ranks] == ["2", "4", "8"]
        assert all(" qsgd " in line for line in ranks)
    gentle = what_if.answer_of(
        found.model, [Variant("none"), Variant("topk")], [found.machine], Fixed(1e-9), found.optimizer
    )
    assert "compression of low risk does not pay; " in gentle.sentence
    assert "topk is faster" in gentle.sentence
    assert answer(1e12).risky is None


def test_break_even_lies_between_links_where_it_pays_and_where_it_does_not():
    found = next(row for row in answer(1e9).rows if row.label == "qsgd")
    bits = 8 * found.break_even
    for factor, pays in ((0.9, True), (1.1, False)):
        there = answer(bits * factor)
        row = next(row for row in there.rows if row.label == "qsgd")
        assert (there.speedup(row) > 1) is pays


def test_the_output_says_where_codecs_were_timed():
    here = what_if.lines(answer(1e9))
    assert "Times of codecs: one core of this CPU, measured now; with GPUs, give --codec-speed." in here
    faster = answer(1e9, faster=100.0)
    assert "Times of codecs: one core of this CPU, measured now, divided by 100." in what_if.lines(faster)
    assert what_if.to_dict(faster)["codec_speed"] == 100
    assert what_if.to_dict(faster)["codecs"] == "measured now"


def test_rare_exchanges_and_faster_codecs_are_faster():
    plain = answer(1e9)
    for options in ({"every": 10}, {"backwards": 4}, {"faster": 100.0}):
        other = answer(1e9, **options)
        for row, before in zip(other.rows, plain.rows, strict=True):
            per_example = row.prediction.seconds / options.get("backwards", 1)
            assert per_example <= before.prediction.seconds


def test_the_command_prints_the_sentence_first_and_writes_json_and_a_page(capsys, tmp_path):
    files = tmp_path / "found.json", tmp_path / "page.html"
    assert main([*SMALL, "--link", "1gbit:50us", "--json", str(files[0]), "--html", str(files[1])]) == 0
    text = capsys.readouterr().out
    assert text.startswith("On this network and 8 ranks, compression ")
    assert [line.split()[0] for line in text.splitlines()[4:7]] == ["none", "fp16", "qsgd"]
    assert "measured steps that were held out" in text
    assert "Without that calibration, as here, steps took" in text
    found = json.loads(files[0].read_text())
    assert [row["method"] for row in found["rows"]] == ["none", "fp16", "qsgd"]
    assert sorted(found["by_ranks"]) == ["2", "4", "8"]
    assert found["machine"]["link"] == pytest.approx({"bandwidth": 125e6, "latency": 50e-6})
    page = files[1].read_text()
    assert len(page) < 100_000
    assert "http" not in page.replace("http://www.w3.org", "")
    figures = page.split("<svg viewBox")[1:]
    assert len(figures) == 2
    ET.fromstring("<svg viewBox" + figures[0].split("</figure>")[0].split("<ul")[0])


def test_it_says_when_rings_take_most_of_the_time(capsys):
    many = [*SMALL[:-1], "2:4096"]
    assert main(many) == 0
    output = capsys.readouterr().out
    assert "8,190 messages follow each other" in output
    (in_trees,) = re.findall(r"without compression takes ([\d.]+ m?s): give --allreduce tree", output)
    assert main([*many, "--allreduce", "tree"]) == 0
    output = capsys.readouterr().out
    assert "follow each other" not in output
    assert re.search(rf"^none +{in_trees} ", output, re.MULTILINE)
    assert main(SMALL) == 0
    assert "follow each other" not in capsys.readouterr().out


def test_nodes_share_their_link(capsys):
    assert main(["what-if", "--params", "3M", "--compute", "50ms", "--nodes", "2x4", "--compressors", "topk"]) == 0
    assert "8 ranks, 2 nodes of 4" in capsys.readouterr().out


def test_nodes_may_exchange_shards_that_their_ranks_have_added(monkeypatch):
    variants = [Variant("none"), Variant("qsgd"), Variant("qsgd", {"communicator": "hierarchical"})]
    specs = [TensorSpec(f"w{i}", (2048, 2048)) for i in range(6)]
    model = what_if.Model("six layers", specs, assumed(specs, 0.1))
    machines = [Machine(8 * n, Link(1.25e8, 1e-5), 8) for n in (1, 16, 2048)]
    found = what_if.answer_of(model, variants, machines, Fixed(1e-10), what_if.OPTIMIZERS["adam"])
    _, alone, by_nodes = found.rows
    # Of a node of eight ranks, each has an eighth of what one rank alone would send to other nodes.
    assert by_nodes.prediction.seconds < alone.prediction.seconds / 4
    assert found.speedup(by_nodes) > 2
    assert found.best.label == "qsgd:communicator=hierarchical"
    # On one node it is an uncompressed allreduce.
    first = found.by_ranks[8]
    assert first[by_nodes.label].sent == pytest.approx(first["none"].sent)
    # It is in the table if there are nodes, and nobody names methods.
    named = []
    monkeypatch.setattr(what_if, "parse_variants", lambda given: named.append(given) or [Variant("fp16")])
    for arguments in (["--nodes", "2x4"], ["--ranks", "8"], ["--nodes", "2x4", "--compressors", "qsgd"]):
        assert main(["what-if", "--params", "1M", "--compute", "1s", *arguments]) == 0
    assert ["qsgd:communicator=hierarchical" in given for given in named] == [True, False, False]


def test_a_model_of_the_user_is_measured(capsys, tmp_path):
    pytest.importorskip("torch")
    own = tmp_path / "mine_what_if.py"
    own.write_text(OWN)
    assert main(["what-if", "--model", f"{own}:build", "--ranks", "2", "--compressors", "fp16"]) == 0
    assert "0.0 M parameters" in capsys.readouterr().out


@pytest.mark.parametrize(("told", "threads"), [("3", 3), ("", len(os.sched_getaffinity(0)))])
def test_a_model_is_measured_with_the_threads_of_its_user(told, threads, capsys, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", told)
    own = tmp_path / f"mine_on_{threads}_{len(told)}.py"
    own.write_text(OWN)
    found = []
    real = what_if.measured
    monkeypatch.setattr(what_if, "measured", lambda *given: found.append(torch.get_num_threads()) or real(*given))
    assert main(["what-if", "--model", f"{own}:build", "--ranks", "2", "--compressors", "fp16"]) == 0
    assert (found, torch.get_num_threads()) == ([threads], 1)
    assert f"(measured here on {threads} thread" in capsys.readouterr().out


def test_a_model_with_nothing_to_train_is_refused(capsys, tmp_path):
    pytest.importorskip("torch")
    own = tmp_path / "mine_frozen.py"
    own.write_text(OWN.replace("    return", "    model.requires_grad_(False)\n    return"))
    assert main(["what-if", "--model", f"{own}:build", "--ranks", "2"]) == 2
    assert "expected a model with parameters to train" in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_gradients_have_as_many_bytes_as_their_type(dtype, itemsize, capsys, tmp_path):
    torch = pytest.importorskip("torch")
    own, found = tmp_path / f"mine_in_{dtype}.py", tmp_path / "found.json"
    own.write_text(OWN.replace("00)", f"00, dtype=torch.{dtype})"))
    assert getattr(torch, dtype).itemsize == itemsize
    for model, numel in ((["--model", f"{own}:build"], 30_100), (["--params", "3M", "--dtype", dtype], 3_000_000)):
        arguments = [*model, "--compute", "10ms", "--ranks", "2", "--compressors", "fp16", "--json", str(found)]
        assert main(["what-if", *arguments]) == 0
        rows = {row["method"]: row for row in json.loads(found.read_text())["rows"]}
        # Of two ranks in a ring, each sends a copy.
        assert rows["none"]["sent"] == itemsize * numel
        assert f"M parameters in {dtype}, " in capsys.readouterr().out


def test_a_timeline_gives_the_sizes_of_buckets(capsys, tmp_path, monkeypatch):
    import numpy as np

    import grace

    simulation = grace.Simulation(2, {"a": (512, 512), "b": (256, 64)}, {"compressor": "none"})
    simulation.start_timeline(tmp_path / "trace.json")
    gradients = {"a": np.ones((512, 512), np.float32), "b": np.ones((256, 64), np.float32)}
    simulation.step([gradients, gradients])
    path = sorted(tmp_path.glob("trace*.json"))[0]
    assert main(["what-if", "--trace", str(path), "--compute", "10ms", "--ranks", "2", "--compressors", "fp16"]) == 0
    assert "0.3 M parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--params", "124M"], "--compute"),
        (["--params", "many", "--compute", "1s"], "124M"),
        (["--params", "1M", "--compute", "fast"], "250ms"),
        (["--params", "1M", "--compute", "1s", "--ranks", "1"], "from 2 on"),
        (["--params", "1M", "--compute", "1s", "--ranks", "8:2"], "received '8:2'; write '2:8'"),
        (["--params", "1M", "--compute", "1s", "--ranks", "8:1"], "received '8:1'; write"),
        (["--params", "1M", "--compute", "1s", "--nodes", "8"], "128x8"),
        (["--params", "1M", "--compute", "1s", "--nodes", "1x1"], "at least 2 ranks in all, received '1x1'"),
        (["--params", "1M", "--compute", "1s", "--link", "quick"], "--link: expected 100mbit"),
        (["--params", "1M", "--compute", "1s", "--inside", "quick"], "--inside: expected 100mbit"),
        (["--params", "1M", "--compute", "1s", "--inside", "none"], "--inside: expected a rate such as 10gbit"),
        (["--params", "1M", "--compute", "1s", "--every", "0"], "--every"),
        (["--params", "1M", "--compute", "1s", "--codec-speed", "-1"], "--codec-speed"),
        (["--model", "mlp"], "FILE.py:FUNCTION"),
        (["--model", "mine.py:build", "--dtype", "float16"], "--dtype is for --params and --trace"),
        (["--trace", "missing.json", "--compute", "1s"], "GRACE_TIMELINE"),
        (["--params", "1M", "--compute", "1s", "--html", "missing/page.html"], "cannot be written"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, capsys):
    assert main(["what-if", *arguments]) == 2
    assert message in capsys.readouterr().err


PREDICTIONS = Path(__file__).parents[2] / "docs" / "results" / "predictions.json"


@pytest.mark.parametrize(("said", "summary"), [(ACCURACY, "held out"), (WHAT_IF, "not calibrated")])
def test_what_is_said_of_the_accuracy_is_what_was_measured(said, summary):
    measured = json.loads(PREDICTIONS.read_text(encoding="utf-8"))
    found = json.loads(json.dumps(said._asdict()))
    assert measured["machine"].startswith(found.pop("machine").partition(", ")[0])
    assert found == measured["summary"][summary]


def test_bands_have_95_percent_of_what_was_measured():
    rows = {
        tuple(row[key] for key in ("model", "link", "ranks", "method")): row
        for row in json.loads(PREDICTIONS.read_text(encoding="utf-8"))["rows"]
        if row["use"] == "held out"
    }
    steps, speedups = [], []
    for (*cell, method), row in rows.items():
        low, high = ACCURACY.band(row["predicted"])
        steps.append(low <= row["measured"] <= high)
        if method != "ddp":
            dense = rows[(*cell, "ddp")]
            low, high = what_if.band_of_speedup(dense["predicted"] / row["predicted"])
            speedups.append(low <= dense["measured"] / row["measured"] <= high)
    # Of few rows, those at the ends of a band may be just outside.
    for within in (steps, speedups):
        assert 0.9 <= sum(within) / len(within) < 1


def test_a_small_speed_up_may_pay():
    near = next(found for i in range(100) if (found := answer(1e12 * 0.9**i)).best.label != "none")
    low, high = what_if.band_of_speedup(near.speedup(near.best))
    assert low < 1 < high
    assert f"compression may pay {near.speedup(near.best):.1f}x ({near.best.label}, band {low:.1f}" in near.sentence
