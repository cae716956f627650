"""Compare predicted steps with measured ones: the cost model is calibrated on 2 ranks and predicts 4 and 8.

    python benchmarks/predictions.py docs/results/predictions.json

First it measures every model, link and method on 2 ranks, and fits the constants of `Constants` to the models that are
not in `HELD_OUT`. Then it predicts and measures the steps on more ranks. Of a held-out model, only the time of a step
without exchange on 2 ranks is known. Every step is measured in two rounds, whose difference is the noise. It takes a
quarter of an hour of two idle cores, and writes what `grace what-if` says of its accuracy (grace/advice/accuracy.py).
"""

import argparse
import dataclasses
import itertools
import os
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", GRACE_NUM_THREADS="1")

import numpy as np
import tables
import torch

from grace.advice.cost import Codecs, buckets, ddp_buckets
from grace.advice.model import Link, Machine, Step, predict
from grace.bench.frameworks import set_up
from grace.bench.step.methods import COMPUTE, Method
from grace.bench.step.models_torch import MODELS
from grace.bench.step.run import Setting, measure
from grace.core.config.config import make_config
from grace.core.config.registry import compressors
from grace.core.spec import TensorSpec

MODEL_NAMES = ("mlp", "vgg", "transformer")
#: Named before anything was fitted: a third of the cells.
HELD_OUT = ("transformer",)
LINKS = {"1gbit": 1e9, "10gbit": 1e10}
METHODS = ("ddp", "fp16", "qsgd", "blockwise", "eden", "powersgd", "topk", "signsgd")
CALIBRATED, PREDICTED = 2, (4, 8)
ROUNDS, STEPS = 2, 3
# The part of a step in which the forward pass runs.
FORWARD = 1 / 3
CORES = os.cpu_count() or 1
# How often the fit tries to change its constants by each of these factors.
PASSES, FACTORS = 60, (1.3, 1.1, 1.03, 1.01)


class Constants(NamedTuple):
    """Constants of the fit: how much of a link is used, and seconds of processor time besides codecs and the model.

    `efficiency` is the part of the nominal bandwidth, `latency` the time of a message. `codec` multiplies the measured
    times of codecs, since two ranks share the memory. `handling` is the time per byte that is sent, and `copying` that
    per byte of a gradient, for DDP's buckets.
    """

    efficiency: float = 0.9
    latency: float = 1e-4
    codec: float = 1.3
    handling: float = 5e-10
    copying: float = 2e-10


class Cell(NamedTuple):
    model: str
    link: str
    ranks: int
    method: str


def measured(models, links, ranks):
    """Return the median seconds of both rounds of every cell, by the cell, and those of compute by model and link."""
    found = {}
    for model, link, n in itertools.product(models, links, ranks):
        setting = Setting("torch", model, n, link, None, ROUNDS, STEPS)
        methods = [Method(COMPUTE), *(Method(name) for name in METHODS)]
        results = measure(setting, methods, lambda text: None)
        for method, result in zip(methods, results, strict=True):
            halves = [statistics.median(result.times[i * STEPS : (i + 1) * STEPS]) for i in range(ROUNDS)]
            found[Cell(model, link, n, method.name)] = halves
            print(Cell(model, link, n, method.name), [round(x, 4) for x in halves], file=sys.stderr, flush=True)
    return found


def specs_of(model):
    """Return the tensors of a model."""
    return [TensorSpec(name, tuple(p.shape)) for name, p in MODELS[model]().named_parameters()]


def predicted(cell, compute, specs, codecs, constants):
    """Return the seconds of a cell's step, from the compute of a rank that has a core of its own."""
    forward, backward = compute * FORWARD, compute * (1 - FORWARD)
    if cell.method == "ddp":
        found = ddp_buckets(specs, backward)
    else:
        config = make_config({**compressors.needed(cell.method), "compressor": cell.method})
        found = buckets(specs, config, cell.ranks, codecs.of(config, cell.ranks), backward)
    factor = constants.codec
    found = [dataclasses.replace(b, before=b.before * factor, after=b.after * factor) for b in found]
    update = constants.copying * 4 * sum(spec.numel for spec in specs)
    link = Link(LINKS[cell.link] / 8 * constants.efficiency, constants.latency)
    machine = Machine(cell.ranks, link, sharing=max(1.0, cell.ranks / CORES))
    return predict(Step(forward, backward, update, tuple(found), handling=constants.handling), machine).seconds


def fit(errors):
    """Return constants that make the mean of the absolute `errors(constants)` small, by trying one after the other."""
    best, least = Constants(), float("inf")
    for step in itertools.chain.from_iterable([factor] * PASSES for factor in FACTORS):
        before = least
        for name in Constants._fields:
            for factor in (step, 1 / step):
                tried = best._replace(**{name: getattr(best, name) * factor})
                if tried.efficiency <= 1 and (cost := float(np.mean(np.abs(errors(tried))))) < least:
                    best, least = tried, cost
        if least == before:
            continue
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="the file of results")
    parser.add_argument("--models", nargs="+", choices=MODEL_NAMES, default=MODEL_NAMES)
    parser.add_argument("--links", nargs="+", choices=tuple(LINKS), default=tuple(LINKS))
    parser.add_argument("--ranks", nargs="+", type=int, default=PREDICTED)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    codecs = Codecs(set_up("torch", "cpu", 1, True))
    specs = {model: specs_of(model) for model in arguments.models}
    # All codecs are measured before the ranks start, on an idle machine.
    for method, n in itertools.product(METHODS[1:], (CALIBRATED, *arguments.ranks)):
        codecs.of(make_config({**compressors.needed(method), "compressor": method}), n)
    known = measured(arguments.models, arguments.links, (CALIBRATED,))
    compute = {
        model: statistics.median(statistics.fmean(known[Cell(model, link, 2, COMPUTE)]) for link in arguments.links)
        for model in arguments.models
    }

    def guess(cell, constants):
        return predicted(cell, compute[cell.model], specs[cell.model], codecs, constants)

    fitted = [cell for cell in known if cell.method != COMPUTE and cell.model not in HELD_OUT]
    constants = fit(lambda tried: [np.log(guess(c, tried) / statistics.fmean(known[c])) for c in fitted])
    print(constants, file=sys.stderr, flush=True)
    rows = []
    for cell, halves in {**known, **measured(arguments.models, arguments.links, arguments.ranks)}.items():
        if cell.method != COMPUTE:
            seconds, said = statistics.fmean(halves), guess(cell, constants)
            rows.append(
                {
                    **cell._asdict(),
                    "measured": round(seconds, 5),
                    "predicted": round(said, 5),
                    "error": round(said / seconds - 1, 4),
                    "noise": round(abs(halves[0] - halves[1]) / seconds, 4),
                    "use": "held out" if cell.model in HELD_OUT else "fitted" if cell.ranks == 2 else "predicted",
                }
            )
    checked = [row for row in rows if row["ranks"] != CALIBRATED]
    what = f"Predicted and measured seconds of a step with DDP, on {len(checked)} cells of 4 and 8 ranks that share "
    summary = {name: errors_of([r for r in checked if name in (r["use"], "all")]) for name in ("all", "held out")}
    columns = {
        "model": {"title": "model"},
        "link": {"title": "link"},
        "ranks": {"title": "ranks"},
        "method": {"title": "method"},
        "measured": {"title": "measured: s", "format": ".3f"},
        "predicted": {"title": "predicted: s", "format": ".3f"},
        "error": {"title": "error", "format": "+.0%"},
        "noise": {"title": "noise", "format": ".0%"},
        "use": {"title": "use"},
    }
    more = {"constants": constants._asdict(), "held_out": list(HELD_OUT), "summary": summary, "compute": compute}
    tables.write(str(arguments.path), f"{what}{CORES} cores", columns, rows, **more)
    print(summary)


def errors_of(rows):
    """Return median, 95th percentile and worst of the absolute errors of rows, their number and the median noise."""
    errors = [abs(row["error"]) for row in rows]
    return {
        "median": round(float(np.median(errors)), 4),
        "high": round(float(np.quantile(errors, 0.95)), 4),
        "worst": round(max(errors), 4),
        "cells": len(rows),
        "noise": round(float(np.median([row["noise"] for row in rows])), 4),
    }


if __name__ == "__main__":
    main()
