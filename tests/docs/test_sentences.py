"""Figures in sentences: they are those of the measurements that they speak of."""

from __future__ import annotations

import json

import pytest

from tests.support.launch import ROOT


def rows(name):
    return json.loads((ROOT / f"docs/results/{name}.json").read_text(encoding="utf-8"))["rows"]


def row(name, method, setting=None):
    (found,) = (r for r in rows(name) if r["method"] == method and setting in (None, r.get("setting", "")))
    return found


def points(a, b):
    """Return a difference of accuracies, which are numbers of the 360 test images."""
    return round((a - b) * 3.6) / 3.6


def below(name, column, *others):
    """Return how many points the worst method is below `none`, except for those named."""
    accuracies = {r["method"]: r[column] for r in rows(name) if column in r}
    return max(points(accuracies["none"], x) for method, x in accuracies.items() if method not in others)


def error(method, setting, of="normal"):
    return row("errors", method, setting)[of]


def over(a, b, *gradients):
    """Return the ratios of two errors."""
    return [error(*a, of) / error(*b, of) for of in gradients]


EDEN, MAX, L2 = ("eden", "bits 4"), ("qsgd", "quantum_num 7"), ("qsgd", "quantum_num 7 norm l2")
ALQ, NUQSGD = ("alq", "quantum_num 7"), ("nuqsgd", "quantum_num 7")
EVERY = ("normal", "laplace", "lognormal", "recorded")


def errors():
    normal, lognormal = over(MAX, EDEN, "normal", "lognormal")
    yield f"has {normal:.0f} times the error of `eden` at 4 bits for normal numbers, and {lognormal:.0f} times"
    (at_4,) = over(L2, MAX, "normal")
    (at_8,) = over(("qsgd", "quantum_num 127 norm l2"), ("qsgd", "quantum_num 127"), "normal")
    yield f"the error is {at_4:.0f} to {at_8:.0f} times as large for normal numbers"
    nf4 = over(("blockwise", "format nf4"), EDEN, *EVERY)
    yield f"has {min(nf4):.1f} to {max(nf4):.1f} times the error of `eden` at 4 bits, for half a bit more"
    normal, lognormal = over(ALQ, MAX, "normal", "lognormal")
    assert (round(3 * normal), round(5 * lognormal)) == (2, 1)
    yield "two thirds of the error of `qsgd` at 4 bits for normal numbers, a fifth for log-normal ones"
    (normal,) = over(NUQSGD, MAX, "normal")
    yield f"at 4 bits {normal:.1f} times that of `qsgd` for normal numbers"
    assert [round(2 * r) for r in over(("uveqfed", "bits 4"), MAX, *EVERY)] == [1] * 4
    yield "half the error of `qsgd` with nearly the same bits"
    vqsgd = over(("vqsgd", ""), ("eden", "bits 2"), *EVERY)
    yield f"at {row('errors', 'vqsgd', '')['bits']} bits its error is {min(vqsgd):.0f} to {max(vqsgd):.0f} times"
    share = row("errors", "m22", "compress_ratio 0.1")["bits"] / row("errors", "topk", "compress_ratio 0.1")["bits"]
    yield f"for {100 * share:.0f} % of the bits"


def accuracy():
    keras, torch = row("accuracy", "dgc")["keras_0"], row("accuracy", "dgc")["torch_1"]
    columns = ("torch_0", "torch_1", "keras_0")
    furthest = max(below("accuracy", column) for column in columns)
    others = max(below("accuracy", column, "dgc") for column in columns)
    yield f"`dgc` is furthest below, {furthest:.2f} points, with Keras ({keras:.2f} %) and with PyTorch and seed 1"
    yield f"seed 1 ({torch:.2f} %). All others are at most {others:.2f} points below."
    dense = row("accuracy", "none")["torch_0_bucket"]
    dgc, scalecom = (points(dense, row("accuracy", method)["torch_0_bucket"]) for method in ("dgc", "scalecom"))
    others = below("accuracy", "torch_0_bucket", "dgc", "scalecom")
    yield f"`dgc` is {dgc:.2f} points below `none`, `scalecom` {scalecom:.2f}, all others at most {others:.2f}."
    better = {r["method"]: points(r["fsdp"], r["horovod"]) for r in rows("digits_launchers")}
    others = max(abs(x) for method, x in better.items() if method != "scalecom")
    yield f"within {others + 0.05:.1f} points of the run over Horovod, except `scalecom`, which is"
    yield f"which is {better['scalecom']:.2f} points better."


def adam():
    named = ("qsgd", "powersgd", "topk, 10 %")
    worst = max(row("adamw", "none")["accuracy"] - row("adamw", method)["accuracy"] for method in named)
    yield f"Their test accuracies are at most {worst:.1f} points below that of `none`."


def many_ranks():
    dense, signs = row("many_ranks", "none")["allreduce"], row("many_ranks", "efsignsgd")
    yield f"one bit costs {dense - signs['two_shot']:.1f} points here, and with 4 bits {dense - signs['finer']:.1f}."


def choose():
    dense, signs = row("many_ranks", "none")["allreduce"], row("many_ranks", "efsignsgd")
    yield f"lost {dense - signs['two_shot']:.1f} points on digits, or {dense - signs['finer']:.1f} if the mean"


def speed():
    ddp = {r["method"]: r["two"] for r in rows("step_ddp")}
    assert round(4 * ddp["topk"] / ddp["ddp-fp16"]) == 1
    assert ddp["powersgd"] < ddp["ddp-powersgd"] / 2
    yield "top-k takes about a quarter of the time of PyTorch's fp16 hook, and `powersgd` less than half of"
    plain, bits8 = row("step_fsdp", "fsdp")["mb"], row("step_fsdp", "eightbit")["mb"]
    yield f"Of the {plain:.0f} MB of a plain step, half are gradients"
    yield f"The {plain / 2:.0f} MB of gradients become {bits8 - plain / 2:.0f}:"


def fsdp():
    plain, bits8 = row("step_fsdp", "fsdp")["mb"], row("step_fsdp", "eightbit")["mb"]
    yield f"sends {plain:.0f} MB in a step of the `mlp`"
    yield f"and {bits8:.0f} MB with `eightbit`"


@pytest.mark.parametrize(
    ("page", "sentences"),
    [
        ("errors.md", errors),
        ("accuracy.md", accuracy),
        ("adam.md", adam),
        ("communicators_and_memories.md", many_ranks),
        ("choose.md", choose),
        ("speed.md", speed),
        ("get_started/fsdp.md", fsdp),
    ],
)
def test_figures_in_sentences_are_those_of_the_measurements(page, sentences):
    text = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
    assert [sentence for sentence in sentences() if sentence not in text] == []
