"""Compare predicted steps with measured ones: the cost model is calibrated on 2 ranks and predicts 4 and 8.

    python benchmarks/predictions.py docs/results/predictions.json
    python benchmarks/predictions.py docs/results/predictions.json --fit

The first command measures every model, link and method on 2 ranks, with a core each and over one link also with both on
one core, and fits `Constants` to the models that are not in `HELD_OUT`. Then it predicts and measures the steps on more
ranks. Of a held-out model, only its passes are known, and the time of a step without exchange on 2 ranks. Every step is
measured in two rounds, whose difference is the noise. It takes 25 to 30 minutes of two idle cores, as root, and SciPy.

The file keeps all that was measured, from which `--fit` makes everything else again. While steps are measured, it is in
FILE.part, which `--fit` takes if it is there. After an error, the first command goes on with FILE.part, if it is of the
same commit and machine. A whole run also writes what `grace what-if` and `grace advise` know of the cost model
(grace/advice/accuracy.py).
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
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
from grace.advice.cost import Codec, Codecs, Cost, buckets, ddp_buckets
from grace.advice.model import LATENCY, Link, Machine, Overhead, Step, predict
from grace.advice.passes import Passes
from grace.advice.passes import measured as measured_passes
from grace.bench.frameworks import set_up
from grace.bench.step.methods import COMPUTE, Method
from grace.bench.step.models_torch import MODELS
from grace.bench.step.run import Setting, measure
from grace.core.config.config import make_config
from grace.core.config.registry import compressors
from grace.core.spec import Ranks, TensorSpec
from grace.core.transport.ordered import OrderedTransport
from grace.machine import commit, processor

MODEL_NAMES = ("mlp", "vgg", "transformer")
#: Named before anything was fitted: a third of the cells.
HELD_OUT = ("transformer",)
LINKS = {"1gbit": 1e9, "10gbit": 1e10}
METHODS = [Method("ddp"), *map(Method, ("fp16", "qsgd", "blockwise", "eden", "powersgd", "topk", "signsgd"))]
# Two ranks take one round for what more of them take two for.
TWO_ROUNDS = [Method(name, {"communicator": "two_shot"}) for name in ("qsgd", "blockwise")]
CALIBRATED, PREDICTED = 2, (4, 8)
ROUNDS, WARM_UP = 2, 2
CORES = len(os.sched_getaffinity(0))
COLUMNS = {
    "model": {"title": "model"},
    "link": {"title": "link"},
    "ranks": {"title": "ranks"},
    "method": {"title": "method"},
    "measured": {"title": "measured: s", "format": ".3f"},
    "predicted": {"title": "predicted: s", "format": ".3f"},
    "error": {"title": "error", "format": "+.0%"},
    "what_if": {"title": "not calibrated: error", "format": "+.0%"},
    "noise": {"title": "noise", "format": ".0%"},
    "cores": {"title": "cores"},
    "use": {"title": "use"},
}


class Constants(NamedTuple):
    """Constants of the fit.

    `efficiency` is the used part of a link's bandwidth, and `codec` a factor of the measured times of codecs. Then come
    the fields of `Overhead`. `contention` is how many times as long codecs, copies and the transport take if all cores
    work, which share the bandwidth of the memory.
    """

    efficiency: float
    codec: float
    copying: float
    handling: float
    serving: float
    waking: float
    contention: float


#: Of predictions that know the times of passes and codecs, and nothing else of the machine, as those of `what-if`.
UNKNOWN = Constants(1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0)
START = Constants(0.95, 1.0, 1e-10, 6e-10, 1e-4, 1e-3, 1.2)
LEAST = Constants(0.7, 0.5, 1e-12, 1e-12, 1e-6, 1e-5, 1.0)
MOST = Constants(1.0, 2.0, 1e-8, 1e-8, 1e-2, 5e-2, 2.0)


class Cell(NamedTuple):
    model: str
    link: str
    ranks: int
    method: str
    cores: int = CORES


class Measurements:
    """All measurements, as the file keeps them: passes by model, codecs, and the seconds of steps by cell."""

    def __init__(self, path):
        self.path = path
        self.passes, self.codecs, self.steps = {}, [], []
        if path.exists():
            data = json.loads(path.read_text(encoding="utf-8"))
            clean = not (commit() or "-dirty").endswith("-dirty")
            if clean and data["commits"] == [commit()] and data["machine"].startswith(processor()):
                self.passes, self.codecs, self.steps = data["passes"], data["codecs"], data["steps"]

    def save(self):
        """Write what there is."""
        told = {"passes": self.passes, "codecs": self.codecs, "steps": self.steps}
        tables.write(str(self.path), "", COLUMNS, [], **told)

    def take_passes(self, model):
        """Measure the passes of a model in this process, and its update."""
        if model in self.passes:
            return
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
        ready = {name: round(at, 6) for name, at in passes.ready.items()}
        update = statistics.median(times[1:])
        self.passes[model] = {"forward": passes.forward, "backward": passes.backward, "update": update, "ready": ready}

    def take_codec(self, codecs, method, ranks):
        """Measure the codec of a method."""
        if any((row["method"], row["ranks"]) == (method.label, ranks) for row in self.codecs):
            return
        found = codecs.of(config_of(method), Ranks(ranks, 1))
        parts = {"before": list(found.before), "after": list(found.after)}
        self.codecs.append({"method": method.label, "ranks": ranks, **parts, "bytes": found.bytes})

    def take_steps(self, model, link, ranks, methods, cores=CORES):
        """Measure steps without exchange and with the methods: the median seconds of each round."""
        methods = [Method(COMPUTE), *methods]
        done = {Cell(*(row[key] for key in Cell._fields)) for row in self.steps}
        if done.issuperset(Cell(model, link, ranks, method.label, cores) for method in methods):
            return
        # Steps of many ranks are long, and vary less.
        steps = 3 if ranks < 8 else 2
        setting = Setting("torch", model, ranks, link, None, ROUNDS, steps, warm_up=WARM_UP)
        with limit_cores(cores):
            results = measure(setting, methods, lambda text: None)
        for method, result in zip(methods, results, strict=True):
            halves = [round(statistics.median(result.times[i * steps : (i + 1) * steps]), 5) for i in range(ROUNDS)]
            cell = Cell(model, link, ranks, method.label, cores)
            self.steps.append({**cell._asdict(), "seconds": halves})
            print(*cell, halves, file=sys.stderr, flush=True)
        self.save()


@contextlib.contextmanager
def limit_cores(cores):
    """Let this process, and the ranks that it starts, have the first of its cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def config_of(method):
    """Return the configuration of a method."""
    return make_config({**compressors.required(method.name), "compressor": method.name, **method.options})


def measure_all(path, models, links, ranks):
    """Measure all that the predictions need, and then the steps that they are compared with."""
    found = Measurements(path)
    # Everything in this process comes before the ranks start, on an idle machine.
    codecs = Codecs(set_up("torch", "cpu", 1, True))
    for model in models:
        found.take_passes(model)
    for method, n in [*itertools.product(METHODS[1:], (CALIBRATED, *ranks)), *zip(TWO_ROUNDS, itertools.repeat(2))]:
        found.take_codec(codecs, method, n)
    for model, link in itertools.product(models, links):
        methods = [] if model in HELD_OUT else METHODS + TWO_ROUNDS
        found.take_steps(model, link, CALIBRATED, methods)
        # What ranks on one core cost each other does not depend on the link.
        if methods and link == links[-1]:
            found.take_steps(model, link, CALIBRATED, methods, cores=1)
    for n, model, link in itertools.product(ranks, models, links):
        found.take_steps(model, link, n, METHODS)


class Predictor:
    """Predictions of cells from what was measured on 2 ranks, as a file of results keeps it."""

    def __init__(self, data):
        self._passes, self._specs = data["passes"], {}
        for model in self._passes:
            self._specs[model] = [TensorSpec(name, tuple(p.shape)) for name, p in MODELS[model]().named_parameters()]
        self._codecs = {
            (row["method"], row["ranks"]): Codec(Cost(*row["before"]), Cost(*row["after"]), row["bytes"], 0.0)
            for row in data["codecs"]
        }
        #: The seconds of both rounds of every cell.
        self.steps = {Cell(*(row[field] for field in Cell._fields)): row["seconds"] for row in data["steps"]}
        self._methods = {method.label: method for method in METHODS + TWO_ROUNDS}

    def compute(self, model, cores):
        """Return the seconds of a step without exchange of a rank, from those of 2 ranks on so many cores."""
        found = [
            statistics.fmean(x) * cores / CALIBRATED
            for cell, x in self.steps.items()
            if (cell.model, cell.ranks, cell.method, cell.cores) == (model, CALIBRATED, COMPUTE, cores)
        ]
        return statistics.median(found)

    def seconds(self, cell, constants):
        """Return the predicted seconds of a cell's step."""
        told, specs, method = self._passes[cell.model], self._specs[cell.model], self._methods[cell.method]
        # Ranks that have the machine's memory for themselves compute faster.
        compute = self.compute(cell.model, cell.cores)
        share = told["update"] / (told["forward"] + told["backward"] + told["update"])
        passes = Passes(told["forward"], told["backward"], told["ready"]).scaled(compute * (1 - share))
        # Alone on the machine, a core has all of its memory's bandwidth.
        slower = 1.0 if cell.cores == CORES else 1 / constants.contention
        if method.compresses:
            ranks = Ranks(cell.ranks, 1)
            codec, factor = self._codecs[cell.method, cell.ranks], constants.codec * slower
            before, after = (Cost(*(factor * x for x in part)) for part in (codec.before, codec.after))
            codec = codec._replace(before=before, after=after)
            found = buckets(specs, config_of(method), ranks, codec, passes.ready)
        else:
            found = ddp_buckets(specs, passes.ready)
        overhead = Overhead(
            slower * constants.copying, slower * constants.handling, constants.serving, constants.waking
        )
        step = Step(
            passes.forward, passes.backward, compute * share, tuple(found), overhead, lanes=OrderedTransport.lanes
        )
        link = Link(LINKS[cell.link] / 8 * constants.efficiency, LATENCY)
        return predict(step, Machine(cell.ranks, link, sharing=max(1.0, cell.ranks / cell.cores))).seconds

    def fit(self):
        """Return the constants with which the predictions of cells on 2 ranks are best."""
        cells = [
            (cell, statistics.fmean(x))
            for cell, x in self.steps.items()
            if cell.ranks == CALIBRATED and cell.method != COMPUTE and cell.model not in HELD_OUT
        ]

        def constants(x):
            # All of them are positive.
            return Constants(*np.exp(x).tolist())

        # A few cells that something disturbed must not decide, and predictions have kinks, so the steps are wide.
        found = least_squares(
            lambda x: [math.log(self.seconds(cell, constants(x)) / seconds) for cell, seconds in cells],
            np.log(START),
            bounds=(np.log(LEAST), np.log(MOST)),
            loss="soft_l1",
            f_scale=0.05,
            diff_step=0.02,
        )
        return constants(found.x)


def fit_and_predict(path, data):
    """Fit the constants to a file of measurements, and write it with the predictions. Return the constants."""
    predictor = Predictor(data)
    constants = predictor.fit()
    print(constants, file=sys.stderr, flush=True)
    rows = []
    for cell, halves in predictor.steps.items():
        if cell.method != COMPUTE:
            seconds = statistics.fmean(halves)
            said, untold = (predictor.seconds(cell, each) for each in (constants, UNKNOWN))
            rows.append(
                {
                    **cell._asdict(),
                    "measured": round(seconds, 5),
                    "predicted": round(said, 5),
                    "error": round(said / seconds - 1, 4),
                    "what_if": round(untold / seconds - 1, 4),
                    "noise": round(abs(halves[0] - halves[1]) / seconds, 4),
                    "use": "held out" if cell.model in HELD_OUT else "fitted" if cell.ranks == 2 else "predicted",
                }
            )
    checked = [row for row in rows if row["ranks"] != CALIBRATED]
    summary = {}
    for use in ("all", "held out"):
        if chosen := [row for row in checked if use in (row["use"], "all")]:
            summary[use] = errors_of(chosen, "error")
    # Nothing was fitted to any cell.
    summary["not calibrated"] = errors_of(checked, "what_if")
    what = (
        f"Predicted and measured seconds of a step with DDP, {len(checked)} of them of ranks that share {CORES} cores"
    )
    commands = [f"python benchmarks/predictions.py {path}"]
    more = {"constants": constants._asdict(), "held_out": list(HELD_OUT), "summary": summary}
    tables.save(str(path), {**data, "what": what, "commands": commands, **more, "rows": rows})
    print(summary)
    return constants, summary


def write_constants(constants, summary):
    """Write the errors and the constants into grace/advice/accuracy.py."""
    path = Path(accuracy.__file__)
    machine = f"{processor()}, {CORES} cores"
    found = {}
    for name, use in (("ACCURACY", "held out"), ("WHAT_IF", "not calibrated")):
        figures = [str(tuple(x) if isinstance(x, list) else x) for x in summary[use].values()]
        found[name] = f'Accuracy({", ".join(figures)}, "{machine}")'
    fields = ", ".join(f"{field.name}={getattr(constants, field.name):.3g}" for field in dataclasses.fields(Overhead))
    text = path.read_text()
    for name, value in {**found, "OVERHEAD": f"Overhead({fields})"}.items():
        text, changed = re.subn(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
        assert changed == 1
    path.write_text(text)


def errors_of(rows, column):
    """Return what `Accuracy` has of rows and the errors in a column: all but the machine."""
    errors, noise = [abs(row[column]) for row in rows], [row["noise"] for row in rows]
    # Measured over predicted.
    factor_of = {(row["method"], row["model"], row["link"], row["ranks"]): 1 / (1 + row[column]) for row in rows}
    speedups = [factor_of[("ddp", *rest)] / factor for (method, *rest), factor in factor_of.items() if method != "ddp"]
    return {
        "median": round(float(np.median(errors)), 4),
        "high": round(float(np.quantile(errors, 0.95)), 4),
        "worst": round(max(errors), 4),
        "cells": len(rows),
        "noise": round(float(np.median(noise)), 4),
        "noise_high": round(float(np.quantile(noise, 0.95)), 4),
        "steps": [round(float(x), 3) for x in np.quantile(list(factor_of.values()), (0.025, 0.975))],
        "speedups": [round(float(x), 3) for x in np.quantile(speedups, (0.025, 0.975))],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="the file of results")
    parser.add_argument("--models", nargs="+", choices=MODEL_NAMES, default=MODEL_NAMES)
    parser.add_argument("--links", nargs="+", choices=tuple(LINKS), default=tuple(LINKS))
    parser.add_argument("--ranks", nargs="+", type=int, default=PREDICTED)
    parser.add_argument("--fit", action="store_true", help="fit to what the file keeps, and measure nothing")
    arguments = parser.parse_args()
    part = arguments.path.with_name(arguments.path.name + ".part")
    if not arguments.fit:
        torch.set_num_threads(1)
        measure_all(part, arguments.models, arguments.links, arguments.ranks)
    kept = part if part.exists() else arguments.path
    constants, summary = fit_and_predict(arguments.path, json.loads(kept.read_text(encoding="utf-8")))
    part.unlink(missing_ok=True)
    if summary.get("held out", {}).get("cells") == len(LINKS) * len(PREDICTED) * len(METHODS):
        write_constants(constants, summary)


if __name__ == "__main__":
    main()
