"""Numbers that sentences quote: those of measurements, defaults, sizes and versions.

A sentence has a number between `<!--=PAGE.NAME-->` and `<!--/-->`. The function that is registered for the page, here
named by one word, yields the names and the texts. It raises an AssertionError if a sentence is no longer true that
says a number in words.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import measurements
import numpy as np
import outer_runs
import study_findings
import study_tables
from registry import ROOT

import grace
from grace import compressors, memories
from grace.advice import advise
from grace.bench import command as codec_command
from grace.bench.step import command as step_command
from grace.bench.step import models, run
from grace.core.communicators import sparse_allreduce
from grace.core.config.config import Config, default_rules
from grace.core.guards.replicas import SUMMARY_BYTES, summary
from grace.core.guards.waiting import WARN_SECONDS
from grace.core.ops import get_ops
from grace.core.plan.unit import SHARD_GRAIN
from grace.core.spec import MAX_MAGNITUDE
from grace.core.transport.transport import TIMEOUT
from grace.core.wire import indices, lanes, rans
from grace.report.findings.finding import timed
from grace.report.findings.grace_paper import AIMS

MARK = re.compile(r"<!--=(\w+)\.(\w+)-->.*?<!--/-->", re.DOTALL)
MIB = 2**20
TEST_IMAGES = 360
Row = dict[str, Any]
Values = Iterator[tuple[str, str]]
pages: dict[str, Callable[[], Values]] = {}


def quoted(function: Callable[[], Values]) -> Callable[[], Values]:
    """Register a function by its name, for the page that the name says."""
    pages[function.__name__] = function
    return function


@cache
def values(page: str) -> dict[str, str]:
    """Return the texts of a page by their names."""
    if page not in pages:
        raise SystemExit(
            f"scripts/pages/quoted.py has no numbers of the page {page!r}; expected one of {sorted(pages)}."
        )
    return dict(pages[page]())


def filled(text: str) -> str:
    """Return the text of a page with all quoted numbers written again."""

    # Markdown takes a line that begins with a comment for a block of HTML.
    if wrong := re.search(r"^[ >*+-]*<!--=.*", text, re.MULTILINE):
        raise SystemExit(f"a quoted number must not begin a line: {wrong[0]}")

    def fill(mark: re.Match[str]) -> str:
        page, name = mark[1], mark[2]
        if name not in values(page):
            raise SystemExit(f"no number is named {page}.{name}; expected one of {sorted(values(page))}.")
        return f"<!--={page}.{name}-->{values(page)[name]}<!--/-->"

    return MARK.sub(fill, text)


# --- measurements ---------------------------------------------------------------------------------------------------


def rows(name: str) -> list[Row]:
    return measurements.load(name)["rows"]


def row(name: str, method: str, setting: str | None = None) -> Row:
    (found,) = (r for r in rows(name) if r["method"] == method and setting in (None, r.get("setting", "")))
    return found


def points(a: float, b: float) -> float:
    """Return a difference of accuracies, which are numbers of the 360 test images."""
    return round((a - b) * 3.6) / 3.6


def error(method: str, setting: str, of: str = "normal") -> float:
    return row("errors", method, setting)[of]


def over(a: tuple[str, str], b: tuple[str, str], *gradients: str) -> list[float]:
    """Return the ratios of two errors."""
    return [error(*a, of) / error(*b, of) for of in gradients]


EDEN, MAX, L2 = ("eden", "bits 4"), ("qsgd", "quantum_num 7"), ("qsgd", "quantum_num 7 norm l2")
ALQ, NUQSGD = ("alq", "quantum_num 7"), ("nuqsgd", "quantum_num 7")
EVERY = ("normal", "laplace", "lognormal", "recorded")


@quoted
def errors() -> Values:
    normal, lognormal = over(MAX, EDEN, "normal", "lognormal")
    yield "qsgd_normal", f"{normal:.0f}"
    yield "qsgd_lognormal", f"{lognormal:.0f}"
    yield "l2_4_bits", f"{over(L2, MAX, 'normal')[0]:.0f}"
    (at_8,) = over(("qsgd", "quantum_num 127 norm l2"), ("qsgd", "quantum_num 127"), "normal")
    yield "l2_8_bits", f"{at_8:.0f}"
    nf4 = over(("blockwise", "format nf4"), EDEN, *EVERY)
    yield "nf4_least", f"{min(nf4):.1f}"
    yield "nf4_most", f"{max(nf4):.1f}"
    normal, lognormal = over(ALQ, MAX, "normal", "lognormal")
    assert (round(3 * normal), round(5 * lognormal)) == (2, 1), "two thirds and a fifth"
    yield "nuqsgd", f"{over(NUQSGD, MAX, 'normal')[0]:.1f}"
    assert [round(2 * r) for r in over(("uveqfed", "bits 4"), MAX, *EVERY)] == [1] * 4, "half the error of qsgd"
    vqsgd = over(("vqsgd", ""), ("eden", "bits 2"), *EVERY)
    yield "vqsgd_bits", f"{row('errors', 'vqsgd', '')['bits']}"
    yield "vqsgd_least", f"{min(vqsgd):.0f}"
    yield "vqsgd_most", f"{max(vqsgd):.0f}"
    low_rank = [r for r in rows("errors") if r["method"] in ("powersgd", "acpsgd", "gradzip", "truncatedsvd", "atomo")]
    low_rank = [r for r in low_rank if r["setting"] in ("", "compress_rank 4")]
    assert all(r["recorded"] < 0.2 and r["normal"] > 0.9 for r in low_rank), "little of normal numbers"
    yield "atomo", f"{error('atomo', ''):.0f}"
    share = row("errors", "m22", "compress_ratio 0.1")["bits"] / row("errors", "topk", "compress_ratio 0.1")["bits"]
    yield "m22_share", f"{100 * share:.0f}"


@quoted
def accuracy() -> Values:
    yield "tasks", f"{len(study_tables.tasks_of('SGD'))}"
    better = {r["method"]: points(r["fsdp"], r["horovod"]) for r in rows("digits_launchers") if "fsdp" in r}
    yield "fsdp_worst", f"{-min(better.values()):.2f}"
    assert max(better, key=better.get) == "scalecom"
    yield "fsdp_best", f"{better['scalecom']:.2f}"
    sizes, images = network()
    yield "parameters", f"{sum(sizes):,}"
    yield "images", f"{images:,}"
    yield "test_images", f"{TEST_IMAGES}"
    yield "one_image", f"{100 / TEST_IMAGES:.2f}"


def example(name: str) -> ModuleType:
    """Return the module of an example."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@cache
def network() -> tuple[list[int], int]:
    """Return the elements of each parameter of the digits example, and the number of images."""
    data = example("digits").load_data()
    assert len(data.test.labels) == TEST_IMAGES
    sizes = [p.numel() for p in example("digits_torch").Network().parameters()]
    return sizes, TEST_IMAGES + len(data.train.labels)


@quoted
def mls_bench() -> Values:
    dense = row("mls_bench", "none")
    without_bias = [r for r in rows("mls_bench") if r["kind"] == "unbiased"]
    unbiased = [r for r in without_bias if r is not dense]
    spreads = [r["spread"] for r in unbiased]
    deviation = np.mean([np.var(list(r["seeds"].values()), ddof=1) for r in without_bias]) ** 0.5
    assert min(min(r["seeds"].values()) for r in unbiased) > 95, "no run falls"
    yield "methods", f"{len(unbiased)}"
    yield "dense", f"{dense['spread']:.1f}"
    yield "least", f"{min(spreads):.1f}"
    yield "most", f"{max(spreads):.1f}"
    yield "below", f"{sum(spread < 0.5 for spread in spreads)}"
    yield "deviation", f"{deviation:.2f}"
    # The mean range of three draws from a normal distribution is 3 / sqrt(pi) standard deviations.
    yield "expected", f"{3 / np.pi**0.5 * deviation:.1f}"
    yield "furthest", f"{dense['accuracy'] - min(r['accuracy'] for r in unbiased):.1f}"


@quoted
def adam() -> Values:
    yield "tasks", f"{len(study_tables.tasks_of('Adam'))}"
    for name, method in [*((n, n) for n in ("qsgd", "blockwise", "terngrad", "topk")), ("tenth", "topk 10 %")]:
        yield name, f"{study_tables.least(method, 'Adam'):.0f}"
    plain = row("optimizers", "Adam")
    for name, method in (("one_bit", "OneBitAdam"), ("zero_one", "ZeroOneAdam")):
        found = row("optimizers", method)
        assert plain["digits_range"][0] < found["digits"] < plain["digits_range"][1], "within what seeds make"
        yield f"{name}_behind", f"{100 * (found['transformer'] / plain['transformer'] - 1):.1f}"
    for name, method in (("one_bit", "OneBitAdam"), ("frozen", "OneBitAdam, uncompressed")):
        found = row("optimizers", method)
        for task in ("digits", "transformer"):
            yield f"{name}_{task}", f"{found[f'{task}_above']:.1f}"
            yield f"{name}_{task}_error", f"{found[f'{task}_deviation']:.1f}"
    early = row("optimizers", "OneBitAdam, warm-up of 10 %")
    assert early["digits_above"] < -2 * early["digits_deviation"], "a short warm-up is ahead on the digits"
    yield "early_digits", f"{-early['digits_above']:.0f}"
    yield "early_transformer", f"{early['transformer_above']:.1f}"
    signs = row("optimizers", "Adam, signs of gradients")
    yield "signs_behind", f"{100 * (signs['transformer'] / plain['transformer'] - 1):.0f}"


@quoted
def outer_steps() -> Values:
    rows = {
        (name, task): study_tables.row_of(label, task)
        for name, label in study_tables.study.OUTER.items()
        for task in ("mf_adam", "ncf", "transformer")
    }
    share = {key: 100 * (row.relative or 0.0) for key, row in rows.items()}
    for method in ("topk", "efsignsgd"):
        gain = [share[f"{what}, `{method}`", "transformer"] for what in ("updates", "gradients")]
        assert gain[0] > gain[1] + 5, "updates are better than gradients on the transformer"
        assert share[f"updates, `{method}`", "mf_adam"] < share[f"gradients, `{method}`", "mf_adam"] - 20
        yield f"{method}_updates", f"{gain[0]:.0f}"
        yield f"{method}_gradients", f"{gain[1]:.0f}"
    for name, what in (("updates", "updates"), ("mean", "mean of the weights every 10 steps")):
        yield name, f"{share[what, 'transformer']:.0f}"
        yield f"{name}_apart", f"{share[what, 'mf_adam']:.0f}"
    rare = [what for what in study_tables.study.OUTER if "25 steps" in what]
    assert all(share[what, task] < 95 for what in rare for task in ("mf_adam", "transformer")), "short runs suffer"
    yield from million()


def million() -> Values:
    """Yield what the page on outer steps says of the runs with 600 steps, and of those with 6,000."""
    steps, plain = 600, outer_runs.PLAIN
    for name, method in (("diloco_behind", "DiLoCo"), ("local_behind", "local SGD"), ("one_bit_above", "1-bit Adam")):
        yield name, f"{np.mean(outer_runs.behind(method, steps)):.1f}"
    high, *lower = (outer_runs.runs("DiLoCo", steps, lr)[0]["loss"] for lr in (0.004, 0.002, 0.001))
    assert high < min(lower), "lower learning rates do not help DiLoCo"
    sparse = outer_runs.runs("SparseLoCo", steps)[0]
    end = outer_runs.seconds(sparse, steps, sparse["curve"][-1][2])
    slow = outer_runs.loss_at(plain, steps, end)
    assert slow > sparse["loss"], "at equal time, SparseLoCo is ahead"
    yield "sparse_end", f"{end:.0f}"
    yield "sparse_loss", f"{sparse['loss']:.2f}"
    yield "plain_loss", f"{slow:.2f}"
    one_bit = outer_runs.runs("1-bit Adam", steps)[0]
    # A fifth of the steps is the second of ten points of the curve.
    (warm, _, before), (last, _, after) = one_bit["curve"][1], one_bit["curve"][-1]
    dense = outer_runs.runs(plain, steps)[0]["link_bytes"]
    yield "one_bit_fewer", f"{dense * (last - warm) / (after - before):.0f}"
    assert 4000 < outer_runs.fewer("SparseLoCo") < 6000, "at least 4,000 times fewer bytes"
    yield "sparse_fewer", f"{outer_runs.fewer('SparseLoCo'):,.0f}"
    for steps, end in ((600, ""), (6000, "_long")):
        alone = {
            (row["method"], row["seed"]): row["loss"]
            for row in measurements.load("outer_reference")["rows"]
            if row["steps"] == steps
        }
        for name, method in (("diloco_reference", "DiLoCo"), ("sparse_reference", "SparseLoCo")):
            theirs = {seed: loss for (what, seed), loss in alone.items() if what == method}
            ours = np.mean([outer_runs.runs(method, steps)[seed]["loss"] for seed in theirs])
            mean = np.mean([*theirs.values()])
            # Rounding errors grow with the steps.
            most = 0.015 if method == "SparseLoCo" else 0.005 if steps == 600 else 0.01
            assert abs(ours / mean - 1) < most, "grace follows the recursion"
            yield f"{name}{end}", f"{mean:.3f}"
            yield f"{name}_here{end}", f"{ours:.3f}"
        sparse = [(seed, loss) for (what, seed), loss in alone.items() if what == "SparseLoCo"]
        behind = [100 * (loss / alone["DiLoCo", seed] - 1) for seed, loss in sparse]
        assert min(behind) > 2, "the recursion itself falls behind"
        yield f"sparse_reference_behind{end}", f"{np.mean(behind):.1f}"
        yield f"sparse_behind{end}", f"{np.mean(outer_runs.behind('SparseLoCo', steps, other='DiLoCo')):.1f}"
    short, long = (np.mean(outer_runs.behind("DiLoCo", steps)) for steps in (600, 6000))
    assert long < short / 3, "the gap closes in longer runs"
    yield "diloco_long", f"{long:.1f}"
    diloco, local = (outer_runs.behind(method, 2010) for method in ("DiLoCo", "local SGD"))
    assert 2 * max(diloco) < min(local), "outer momentum pays in longer runs"
    yield "diloco_middle", f"{np.mean(diloco):.1f}"
    yield "local_middle", f"{np.mean(local):.1f}"


@quoted
def communicators() -> Values:
    dense, signs = row("many_ranks", "none")["allreduce"], row("many_ranks", "efsignsgd")
    yield "one_bit", f"{dense - signs['two_shot']:.1f}"
    yield "four_bits", f"{dense - signs['finer']:.1f}"
    yield "counted_from", f"{sparse_allreduce._COUNTED_FROM:,}"
    taken, others = study_tables.lost_by_second_compression()
    yield "most_twice", f"{max(taken.values()):.1f}"
    yield "least_twice", f"{min(others.values()):.1f}"
    once = study_tables.ways("topk", "mf")
    twice = study_tables.ways("topk:compress_ratio=0.02", "mf")
    for name, found in (("one_percent", once[0]), ("two_percent", twice[1]), ("finer_mean", once[2])):
        yield name, f"{100 * found.relative:.0f}"
    *_, (coarsest, more) = study_tables.study.COARSE.items()
    of_method = {"": ("terngrad", "terngrad, feedback"), "qsgd_": (coarsest, coarsest + more)}
    for prefix, task in (("", "mf"), ("", "transformer"), ("qsgd_", "mf"), ("qsgd_", "mf_adam")):
        for name, label in zip(("without", "with"), of_method[prefix], strict=True):
            yield f"{prefix}{task}_{name}", f"{100 * study_tables.row_of(label, task).relative:.0f}"


@quoted
def findings() -> Values:
    cases = timed(case for case in study_findings.compared() if not case.is_baseline)
    small = [case for case in cases if study_findings.is_small(case)]
    networks = [case for case in cases if case not in small]
    for of, gbit, faster, met in (
        (networks, 1, 1, False), (networks, 10, 1, False), (networks, 1, 100, True), (networks, 10, 100, True),
        (cases, 1, 100, True), (cases, 10, 100, True),
    ):  # fmt: skip
        share = np.mean([case.throughput(gbit, faster) > 1 for case in of])
        assert (share >= 1 - AIMS[gbit]) == met, f"{share} at {gbit} Gbit/s with f = {faster}"
    most = max(case.dense_parts.link_share(10) for case in networks)
    assert most < 0.3, "the link takes so little of a step that no method can gain much"
    yield "link", f"{100 * most:.0f}"
    lost = [case for case in cases if case.throughput(1, 100) <= 1]
    assert all(case in small for case in lost), "they lose by their messages"
    yield "lost", f"{len(lost)}"
    (size,) = {run["dense_bytes"] for case in small for run in case.runs.values()}
    yield "small", f"{size / 1000:.0f}"


@quoted
def choose() -> Values:
    yield from adam()
    yield from list(communicators())[:2]


@quoted
def speed() -> Values:
    data = measurements.load("codec")
    yield "elements", f"{data['elements'] / 1e6:.0f}"
    yield "copy_least", f"{data['copy_ms'][0]}"
    yield "copy_most", f"{data['copy_ms'][1]}"
    slow = {r["method"] for r in data["rows"] if r.get("break_even", 9) < 1.3}
    assert slow == {"deepreduce", "fedqcs", "homomorphic", "qcs"}, "what pays on slow links only"
    for name, version in data["versions"].items():
        yield name.lower().replace(" ", "_"), version
    yield "mlp", f"{mlp() / 1e6:.1f}"
    ddp = {r["method"]: r["two"] for r in rows("step_ddp")}
    assert round(4 * ddp["topk"] / ddp["ddp-fp16"]) == 1, "about a quarter"
    assert 0.3 < ddp["powersgd"] / ddp["ddp-powersgd"] < 0.4, "less than two fifths"
    plain, bits8 = row("step_fsdp", "fsdp")["mb"], row("step_fsdp", "eightbit")["mb"]
    yield "fsdp", f"{plain:.0f}"
    yield "fsdp_gradients", f"{plain / 2:.0f}"
    yield "fsdp_eightbit", f"{bits8 - plain / 2:.0f}"


@quoted
def codecs() -> Values:
    columns = measurements.load("codec")["columns"]
    yield "goal_numpy", f"{columns['small_numpy']['goal']}"
    yield "goal_torch", f"{columns['small_torch']['goal']}"
    products, step = {r["products"]: r["together"] for r in rows("products")}, row("codec", "powersgd")
    yield "frameworks_numpy", f"{step['numpy'] / products['NumPy']:.1f}"
    yield "frameworks_torch", f"{step['torch'] / products['PyTorch']:.1f}"
    yield "kernels_numpy", f"{step['numpy'] / products['kernels']:.1f}"
    yield "kernels_torch", f"{step['torch'] / products['kernels']:.1f}"
    assert len(models.MLP) == 4, "three large matrices"


def mlp() -> int:
    """Return the number of the parameters of the benchmark's perceptron, without biases."""
    return sum(a * b for a, b in zip(models.MLP, models.MLP[1:], strict=False))


@quoted
def hard_threshold() -> Values:
    plain, topk, paper, equal = (rows("hard_threshold")[i::4] for i in range(4))
    (iid, by_label), lam = paper, 4.2
    assert {r["run"] for r in paper} == {f"threshold {lam}"}
    fewer = [p["bytes"] / r["bytes"] for p, r in zip(plain, paper, strict=True)]
    # The density is rounded.
    assert abs(plain[0]["density"] / iid["density"] - 648) < 0.6, "648 times fewer values"
    yield "lambda", f"{lam}"
    yield "fewer_iid", f"{fewer[0]:.0f}"
    yield "fewer_by_label", f"{fewer[1]:.0f}"
    yield "late_equal", f"{equal[1]['late'] / plain[1]['late']:.1f}"
    yield "late_topk", f"{topk[0]['late'] / equal[0]['late']:.0f}"
    yield "steps_topk", f"{topk[0]['steps']}"
    yield "steps_equal", f"{equal[0]['steps']}"
    yield "largest_topk", f"{topk[0]['largest']}"
    yield "worker_iid", f"{iid['worker']}"
    yield "bound_iid", f"{iid['bound']}"
    yield "workers", "; ".join(f"{r['worker']} of {r['bound']}" for r in (by_label, equal[1]))
    yield "density_iid", f"{iid['density']:.2f}"
    yield "density_by_label", f"{by_label['density']:.1f}"
    logreg = example("hard_threshold_logreg")
    args = logreg.parse_arguments([])
    n, d, steps = logreg.SAMPLES, logreg.FEATURES, args.iterations
    each = n // args.workers
    yield "samples", f"{n:,}"
    yield "features", f"{d:,}"
    yield "number_of_workers", f"{args.workers}"
    yield "samples_of_a_worker", f"{each}"
    yield "steps", f"{steps:,}"
    yield "epochs", f"{steps // each}"
    text = (ROOT / "docs/hard_threshold.md").read_text(encoding="utf-8")
    smoothness, start, minimum = (
        float(re.findall(rf"{name} = ([\d.]+\d)", text)[0]) for name in ("4N\\)", "x_0\\)", "f\\*")
    )
    gamma = 1 / (smoothness * (1 + 1e-4))
    yield "gamma", f"{gamma * 1e3:.3f}e-3"
    yield "smoothness", f"{smoothness}"
    yield "minimum", f"{minimum}"
    yield "gap_start", f"{start - minimum:.0f}"
    yield "gap_topk", f"{topk[1]['gap']}"
    for r in (*paper, *equal):
        assert abs(r["bound"] / (gamma**2 * d * float(r["run"].split()[1]) ** 2) - 1) < 5e-3
    assert {r["bytes"] for r in plain} == {4 * d * steps}
    # Ten values and indices, and a header of 16 bytes.
    assert {r["bytes"] for r in topk} == {(8 * args.k + 16) * steps}
    for task in ("cnn", "ncf"):
        yield f"probe_{task}", study_tables.share_of_topk(study_tables.row_of(study_tables.study.VOLUME[0], task), task)


@quoted
def fsdp() -> Values:
    yield "plain", f"{row('step_fsdp', 'fsdp')['mb']:.0f}"
    yield "eightbit", f"{row('step_fsdp', 'eightbit')['mb']:.0f}"


@quoted
def two_nodes() -> Values:
    yield "parameters", f"{measurements.load('step_original')['parameters'] / 1e6:.1f}"
    for method in ("ddp", "qsgd", "compute"):
        for link in ("1gbit", "10gbit"):
            yield f"{method}_{link}", f"{row('step_original', method)[link]}"


@quoted
def predictions() -> Values:
    found = measurements.load("predictions")
    for use, name in (("held out", "held_out"), ("all", "all"), ("not calibrated", "not_calibrated")):
        told = found["summary"][use]
        yield f"{name}_cells", f"{told['cells']}"
        for key in ("median", "high", "worst", "noise", "noise_high"):
            yield f"{name}_{key}", f"{100 * told[key]:.0f}"
    # The choice of advice on the ranks that the calibration has not seen, among what has no or low risk with Adam. The
    # rows of a setting begin with plain DDP, and go from the gentlest method to the strongest.
    settings: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in found["rows"]:
        if row["ranks"] > 2 and row["method"] in ("ddp", "fp16", "qsgd", "blockwise"):
            settings.setdefault((row["model"], row["link"], row["ranks"]), {})[row["method"]] = row
    good = lost = 0
    for rows in settings.values():
        said = (advise.Row(name, row["predicted"], 0, 0, "", None, {"compressor": name}) for name, row in rows.items())
        chosen = rows[advise.best_of(said)]["measured"]
        good += chosen <= 1.05 * min(row["measured"] for row in rows.values())
        lost += chosen > 1.01 * rows["ddp"]["measured"]
    yield "settings", f"{len(settings)}"
    yield "good_choices", f"{good}"
    yield "lost_choices", f"{lost}"


# --- defaults and sizes ---------------------------------------------------------------------------------------------


@quoted
def configuration() -> Values:
    ops, n, every = get_ops("numpy", "cpu"), 64 * 2**14, 64
    chosen = np.sort(np.random.default_rng(0).permutation(n)[: n // every]).astype(np.int32)
    for coding in ("delta", "golomb", "bitmap", "smallest"):
        bits = 8 * len(indices.encode(ops, chosen, indices.choose(ops, chosen, n, coding), n)) / len(chosen)
        yield coding, f"{bits:.1f}".removesuffix(".0")
    yield "rounds", f"{rans._PER_LANES // rans._LANES:,}"
    yield "digest", f"{SUMMARY_BYTES}"
    # An object of JSON takes 8 more bytes for its length.
    yield "digest_mpi", f"{8 + len(json.dumps(summary({}).hex()))}"
    small, _, vector, _ = default_rules()
    assert small.max_numel is not None
    assert vector.max_numel is not None
    yield "small", f"{small.max_numel + 1:,}"
    yield "vector", f"{vector.max_numel + 1:,}"


@quoted
def units() -> Values:
    yield "split_mib", f"{Config.split_bytes // MIB}"
    yield "bucket_mib", f"{Config.bucket_bytes // MIB}"
    yield "grain", f"{SHARD_GRAIN}"
    n, rng = 1000, np.random.default_rng(0)
    parts = [(size * rng.standard_normal(n)).astype(np.float32) for size in (1, 0.1, 0.01)]
    config = {"compressor": "efsignsgd", "memory": "none", "default_rules": False, "granularity": "layer"}

    def lost(x: Any) -> float:
        decoded = grace.Simulation(1, {"x": x.shape}, config).step([{"x": x}])[0]
        return float(np.sum((decoded["x"] - x)[-n:] ** 2))

    yield "times", f"{round(lost(np.concatenate(parts)) / lost(parts[-1]), -2):,.0f}"


@quoted
def wire_format() -> Values:
    assert [lanes.lanes(127 * ranks) for ranks in (2, 4, 5, 258, 259)] == [3, 3, 2, 2, 1], "three, two and one"
    yield "rans_bytes", f"{4 * rans._LANES}"
    yield "rans_symbols", f"{rans._PER_LANES:,}"
    # Three digests and their squares in float32; a digest of b bits is equal by chance with probability 2^-b.
    for ranks in (4, 256):
        yield f"bits_{ranks}", f"{3 * ((24 - (ranks - 1).bit_length()) // 2)}"


@quoted
def error_feedback() -> Values:
    assert (MAX_MAGNITUDE["float32"], MAX_MAGNITUDE["float64"]) == (2.0**104, 2.0**512)
    yield "float32", f"{MAX_MAGNITUDE['float32']:.0e}".replace("e+", "e")
    yield "float16", f"{MAX_MAGNITUDE['float16']:.0f}"


@quoted
def waiting() -> Values:
    yield "warn", f"{WARN_SECONDS:.0f}"
    yield "limit", f"{TIMEOUT}"


def arguments(add: Callable[[Any], None]) -> dict[str, Any]:
    """Return the defaults of a command's arguments."""
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers())
    return vars(parser.parse_args([add.__name__.removeprefix("add_")]))


@quoted
def measure() -> Values:
    for name, make in importlib.import_module("grace.bench.step.models_torch").MODELS.items():
        size = sum(p.numel() for p in make().parameters()) / 1e6
        yield name, f"{size:.2f}" if size < 1 else f"{size:.1f}".removesuffix(".0")
    codec, step = arguments(codec_command.add_codec), arguments(step_command.add_step)
    for name in ("ranks", "threads", "repetitions"):
        yield name, f"{codec[name]}"
    yield "rounds", f"{step_command.ROUNDS}"
    yield "steps", f"{step['steps']}"
    assert run.WARM_UP == 3, "three steps to warm up"


@quoted
def move() -> Values:
    topk, randomk, qsgd, powersgd, inceptionn = map(
        compressors.make, ("topk", "randomk", "qsgd", "powersgd", "inceptionn")
    )
    yield "topk_ratio", f"`{topk.compress_ratio}`"
    yield "randomk_ratio", f"`{randomk.compress_ratio}`"
    yield "bucket", f"{qsgd.bucket_size}"
    yield "rank", f"`{powersgd.compress_rank}`"
    yield "rank_option", f"`compress_rank={powersgd.compress_rank}`"
    assert (qsgd.quantum_num, memories.make("momentum").momentum) == (127, 0.9), "the same as in the original"
    assert inceptionn.relative
    assert inceptionn.error_bound == 2**-10
    yield "small", f"{default_rules()[0].max_numel + 1:,}"


@quoted
def statistics() -> Values:
    simulation, sizes = grace.Simulation(1, {"w": (64, 64)}, {"compressor": "topk"}), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        simulation.start_timeline(str(path))
        for _ in range(20):
            simulation.step([{"w": np.ones((64, 64), np.float32)}])
            sizes.append(path.stat().st_size)
        simulation.stop_timeline()
    yield "kilobytes", f"{(sizes[-1] - sizes[0]) / 19 / 1000:.1f}"


@quoted
def versions() -> Values:
    for file in ("requirements", "requirements_trainers"):
        text = (ROOT / f"scripts/{file}.txt").read_text(encoding="utf-8")
        for package in ("torch", "tensorflow-cpu", "numpy", "accelerate", "transformers", "lightning"):
            if found := re.search(rf"^{package}==([\w.]+)", text, re.MULTILINE):
                yield package.partition("-")[0], found[1]
        if older := re.search(r'^numpy==([\d.]+); python_version < "3.11"', text, re.MULTILINE):
            yield "numpy_3_10", older[1]
