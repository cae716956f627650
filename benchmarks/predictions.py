"""Compare predicted steps with measured ones: the cost model is calibrated on 2 ranks and predicts 4 and 8.

    python benchmarks/predictions.py docs/results/predictions.json

First it measures every model, link and method on 2 ranks, with a core each and both on one core, and fits `Constants`
to the models that are not in `HELD_OUT`. Then it predicts and measures the steps on more ranks. Of a held-out model,
only its passes are known, and the time of a step without exchange on 2 ranks. Every step is measured in two rounds,
whose difference is the noise. It takes 25 to 45 minutes of two idle cores, as root, and needs SciPy. A whole run also
writes what `grace what-if` says of its accuracy (grace/advice/accuracy.py).
"""

import argparse
import contextlib
import dataclasses
import itertools
import math
import os
import re
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", GRACE_NUM_THREADS="1")

import numpy as np
import tables
import torch
from scipy.optimize import least_squares

from grace.advice import accuracy
from grace.advice.cost import Codecs, buckets, ddp_buckets
from grace.advice.model import LATENCY, Link, Machine, Step, predict
from grace.advice.passes import measured as measured_passes
from grace.bench.frameworks import set_up
from grace.bench.step.methods import COMPUTE, Method
from grace.bench.step.models_torch import MODELS
from grace.bench.step.run import Setting, measure
from grace.core.config.config import make_config
from grace.core.config.registry import compressors
from grace.core.spec import Ranks, TensorSpec
from grace.machine import processor

MODEL_NAMES = ("mlp", "vgg", "transformer")
#: Named before anything was fitted: a third of the cells.
HELD_OUT = ("transformer",)
LINKS = {"1gbit": 1e9, "10gbit": 1e10}
METHODS = ("ddp", "fp16", "qsgd", "blockwise", "eden", "powersgd", "topk", "signsgd")
CALIBRATED, PREDICTED = 2, (4, 8)
ROUNDS, STEPS = 2, 3
CORES = len(os.sched_getaffinity(0))


class Constants(NamedTuple):
    """Constants of the fit: how much of a link is used, and seconds that neither codecs nor the model explain.

    `efficiency` is the part of the nominal bandwidth, and `codec` a factor of the measured times of codecs. `copying`
    is the time per byte of a gradient that a hook of DDP takes beside the codec, `handling` that of the transport per
    byte sent, and `serving` that per round and rank. `meeting` is the time per round in which ranks wait for each
    other; with s ranks per core, (s - 1) `turn` is added.
    """

    efficiency: float
    codec: float
    copying: float
    handling: float
    serving: float
    meeting: float
    turn: float


START = Constants(0.95, 1.0, 3e-10, 1e-9, 5e-4, 1e-3, 1e-3)
LEAST = Constants(0.7, 0.5, 1e-12, 1e-12, 1e-6, 1e-5, 1e-5)
MOST = Constants(1.0, 3.0, 1e-8, 1e-8, 1e-2, 5e-2, 1e-1)


class Cell(NamedTuple):
    model: str
    link: str
    ranks: int
    method: str
    cores: int = CORES


def measured(models, links, ranks, cores=CORES):
    """Return the median seconds of both rounds of every cell, by the cell, and those of compute by model and link."""
    found = {}
    for model, link, n in itertools.product(models, links, ranks):
        setting = Setting("torch", model, n, link, None, ROUNDS, STEPS)
        methods = [Method(COMPUTE), *(Method(name) for name in METHODS)]
        with running_on(cores):
            results = measure(setting, methods, lambda text: None)
        for method, result in zip(methods, results, strict=True):
            halves = [statistics.median(result.times[i * STEPS : (i + 1) * STEPS]) for i in range(ROUNDS)]
            cell = Cell(model, link, n, method.name, cores)
            found[cell] = halves
            print(cell, [round(x, 4) for x in halves], file=sys.stderr, flush=True)
    return found


@contextlib.contextmanager
def running_on(cores):
    """Let this process, and the ranks that it starts, have the first of its cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def specs_of(model):
    """Return the tensors of a model."""
    return [TensorSpec(name, tuple(p.shape)) for name, p in MODELS[model]().named_parameters()]


def parts_of(model):
    """Return the passes of a model in this process, and the seconds of its update."""
    torch.manual_seed(0)
    made = MODELS[model]()
    passes = measured_passes(made, made.loss)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.001, momentum=0.9, fused=True)
    times = []
    for _ in range(6):
        made.loss().backward()
        begin = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - begin)
        optimizer.zero_grad()
    return passes, statistics.median(times[1:])


def predicted(cell, compute, parts, specs, codecs, constants):
    """Return the seconds of a cell's step, from the compute of a rank that has a core of its own, and its parts."""
    passes, update = parts
    share = update / (passes.compute + update)
    passes, update = passes.scaled(compute * (1 - share)), compute * share
    if cell.method == "ddp":
        found, codec = ddp_buckets(specs, passes.ready), 1.0
    else:
        config = make_config({**compressors.needed(cell.method), "compressor": cell.method})
        ranks = Ranks(cell.ranks, 1)
        found = buckets(specs, config, ranks, codecs.of(config, ranks), passes.ready)
        codec = constants.codec
    # A bucket's gradients are copied before and after, beside its codec.
    copying = constants.copying * 4 * sum(spec.numel for spec in specs) / len(found) / 2
    found = [
        dataclasses.replace(each, before=codec * each.before + copying, after=codec * each.after + copying)
        for each in found
    ]
    sharing = max(1.0, cell.ranks / cell.cores)
    step = Step(
        passes.forward,
        passes.backward,
        update,
        tuple(found),
        handling=constants.handling,
        serving=constants.serving,
        meeting=constants.meeting + constants.turn * (sharing - 1),
    )
    link = Link(LINKS[cell.link] / 8 * constants.efficiency, LATENCY)
    return predict(step, Machine(cell.ranks, link, sharing=sharing)).seconds


def fit(errors):
    """Return the constants that make `errors(constants)` small, in logarithms, because all are positive."""

    def constants(x):
        return Constants(*np.exp(x).tolist())

    # A few cells that something disturbed must not decide, and predictions have kinks, so the steps are wide.
    found = least_squares(
        lambda x: errors(constants(x)),
        np.log(START),
        bounds=(np.log(LEAST), np.log(MOST)),
        loss="soft_l1",
        f_scale=0.05,
        diff_step=0.02,
    )
    return constants(found.x)


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
    parts = {model: parts_of(model) for model in arguments.models}
    # All codecs are measured before the ranks start, on an idle machine.
    for method, n in itertools.product(METHODS[1:], (CALIBRATED, *arguments.ranks)):
        codecs.of(make_config({**compressors.needed(method), "compressor": method}), Ranks(n, 1))
    known = measured(arguments.models, arguments.links, (CALIBRATED,))
    fitting = [model for model in arguments.models if model not in HELD_OUT]
    # What ranks on one core cost each other does not depend on the link.
    crowded = measured(fitting, arguments.links[-1:], (CALIBRATED,), cores=1)
    compute = {
        model: statistics.median(statistics.fmean(known[Cell(model, link, 2, COMPUTE)]) for link in arguments.links)
        for model in arguments.models
    }

    def guess(cell, constants):
        return predicted(cell, compute[cell.model], parts[cell.model], specs[cell.model], codecs, constants)

    fitted = {c: x for c, x in {**known, **crowded}.items() if c.method != COMPUTE and c.model in fitting}
    constants = fit(lambda tried: [math.log(guess(c, tried) / statistics.fmean(x)) for c, x in fitted.items()])
    print(constants, file=sys.stderr, flush=True)
    rows = []
    for cell, halves in {**known, **crowded, **measured(arguments.models, arguments.links, arguments.ranks)}.items():
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
    what = (
        f"Predicted and measured seconds of a step with DDP, {len(checked)} of them of ranks that share {CORES} cores"
    )
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
        "cores": {"title": "cores"},
        "use": {"title": "use"},
    }
    more = {"constants": constants._asdict(), "held_out": list(HELD_OUT), "summary": summary, "compute": compute}
    tables.write(str(arguments.path), what, columns, rows, **more)
    print(summary)
    if (set(arguments.models), set(arguments.links), set(arguments.ranks)) == (
        set(MODEL_NAMES),
        set(LINKS),
        {*PREDICTED},
    ):
        tell(summary["held out"])


def tell(found):
    """Write the errors into grace/advice/accuracy.py."""
    path = Path(accuracy.__file__)
    told = accuracy.Accuracy(**found, machine=f"{processor()}, {CORES} cores")
    figures = ", ".join(map(str, told[:-1]))
    text, changed = re.subn(
        r"^ACCURACY = .*$", f'ACCURACY = Accuracy({figures}, "{told.machine}")', path.read_text(), flags=re.MULTILINE
    )
    assert changed == 1
    path.write_text(text)


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
