"""Train a character transformer by outer steps, and beside them by synchronous AdamW and 1-bit Adam.

    python benchmarks/outer.py docs/results/outer.json
    python benchmarks/outer.py docs/results/outer.json --steps 600 --seeds 0 --methods synchronous DiLoCo

Four ranks are simulated in one process of one thread, and take equally many tokens. The file gets a line per run. What
it has already is not trained again, so that a command which was stopped goes on where it is called again, also on
another machine. A run of 600 steps takes two minutes of one core.
"""

import argparse
import itertools
import json
import math
import os
import shlex
import sys
import time

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", GRACE_NUM_THREADS="1")

import numpy as np
import tables
import torch

import grace
from grace.core.ops import get_ops
from grace.core.optim.adam import Adam
from grace.core.optim.moments import freeze_step_of
from grace.core.transport.collectives import KINDS, copies
from grace.machine import commit, processor
from grace.report.replicas import Alike, replicas
from grace.report.tasks.data import characters
from grace.report.tasks.language import Characters
from grace.torch.optim.exchanging import ONE_BIT

RANKS, EVERY = 4, 30
# 2,000 steps are no whole number of periods.
STEPS, SEEDS = (600, 2010, 6000), (0, 1, 2)
# An outer optimizer with momentum applies each change several times, so lower learning rates are tried, too.
RATES = (4e-3, 2e-3, 1e-3)
# How often a run is evaluated.
POINTS = 10
# Seconds of an inner step of a rank, and bits per second of a link, for the utilisation.
COMPUTE, LINK = 0.045, 1e8
DILOCO = {"preset": "diloco", "every": EVERY}
SPARSELOCO = {
    "compressor": {
        "name": "chain",
        "sparsifier": {"name": "topk", "compress_ratio": 1 / 64},
        "quantizer": {"name": "eden", "bits": 2},
    },
    "memory": {"name": "residual", "beta": 0.95},
    "communicator": {"name": "allgather", "reduce": "senders", "clip": "median_norm"},
    "index_coding": "golomb",
    # Chunks of 4,096 elements, as published. A chain joins no tensors, so that the chunks share a bucket.
    "split_bytes": 4 * 4096,
    "default_rules": False,
    "outer": {"preset": "sparseloco", "every": EVERY},
}
# Each method by its configuration; None is 1-bit Adam, which has two.
METHODS = {
    "synchronous": {"compressor": "none"},
    "local SGD": {"compressor": "none", "outer": {"preset": "local_sgd", "every": EVERY}},
    "DiLoCo": {"compressor": "none", "outer": DILOCO},
    "SparseLoCo": SPARSELOCO,
    "1-bit Adam": None,
    "streaming DiLoCo": {
        "compressor": "none",
        "outer": {"preset": "streaming_diloco", "every": EVERY, "fragments": 3, "delay": 5},
    },
    "SparseLoCo, float values": {
        **SPARSELOCO,
        "compressor": {"name": "topk", "compress_ratio": 1 / 64},
        "index_coding": "int32",
        # In a bucket, its chunks would be joined.
        "bucket_bytes": 0,
    },
}


class Million(Characters):
    """A transformer of four layers on all modules of Python's library, 826,000 parameters."""

    # 2,048 symbols of all ranks in a step, as in the design's trial.
    batch, length, layers = 4, 128, 4

    def text(self):
        text = characters(self.length + 1, None)
        # 150 rows are enough to compare, and take a second.
        return text._replace(unseen=text.unseen[:: max(1, len(text.unseen) // 150)])


class OneBit(Alike):
    """1-bit Adam on all ranks: gradients as they are in the warm-up, and momenta of one bit per element from then on.

    `grace.torch.optim.OneBitAdam` needs a process per rank. This is its rule on simulated ranks.
    """

    def __init__(self, training, seed):
        shapes, self._ops = training.shapes, get_ops("torch")
        super().__init__(training, grace.Simulation(RANKS, shapes, {"compressor": "none"}, framework="torch"))
        self._momenta = grace.Simulation(RANKS, shapes, {**ONE_BIT, "seed": seed}, framework="torch")
        self._freeze = freeze_step_of(None, training.run.steps, "benchmarks/outer.py")
        self._rule = Adam((training.run.momentum, 0.99), weight_decay=0.1, decoupled_weight_decay=True)
        self._weights = {name: w.flatten() for name, w in training.get_weights().items()}
        self._state = {name: self._rule.init(self._ops, w) for name, w in self._weights.items()}

    def advance(self, step):
        (training,), take = self._trainings, self._rule.step
        given = [training.gradients(rank, step) for rank in range(RANKS)]
        if step >= self._freeze:
            self.simulation, take = self._momenta, self._rule.frozen_step
            given = [{name: self._momentum(name, g) for name, g in mine.items()} for mine in given]
        merged = self.simulation.step(given, lr=training.rate(step))[0]
        for name, received in merged.items():
            before = self._weights[name], received.flatten(), self._state[name]
            self._weights[name], state = take(self._ops, *before, training.rate(step), step + 1)
            freezes = step + 1 == self._freeze
            self._state[name] = self._rule.freeze(self._ops, state, step + 1) if freezes else state
        training.set_weights({name: w.view(training.shapes[name]) for name, w in self._weights.items()})
        self._sent.append(self.simulation.stats(step % RANKS)["collectives"])

    def _momentum(self, name, gradient):
        found = self._rule.momentum(self._ops, self._weights[name], gradient.flatten(), self._state[name])
        return found.view(gradient.shape)


def ranks_of(method, seed, steps, task, lr):
    """Return the ranks of a run at its beginning."""

    def start():
        return task.start(seed, RANKS, steps=steps, lr=lr, momentum=task.momentum)

    config = METHODS[method]
    return OneBit(start(), seed) if config is None else replicas(start, {**config, "seed": seed}, RANKS)


def train(method, seed, steps, task, lr=RATES[0]):
    """Return the row of a run: what it is, its loss at the end, bytes per inner step, and its curve.

    bytes: what a rank hands to collectives, `link_bytes` what leaves it in a ring, on the average of all steps.
    curve: steps, loss and `link_bytes` of all steps until then.
    seconds: processor time of a step of a rank, exchange included.
    """
    ranks, curve, spent = ranks_of(method, seed, steps, task, lr), [], 0.0
    points = {round(steps * i / POINTS) for i in range(1, POINTS + 1)}
    for step in range(steps):
        started = time.process_time()
        ranks.advance(step)
        spent += time.process_time() - started
        if step + 1 in points:
            sent = ranks.sent()
            on_link = sum(float(copies(kind, RANKS)) * sent[kind] for kind in KINDS)
            loss = ranks.evaluate()[0]
            curve.append([step + 1, round(loss, 4) if math.isfinite(loss) else None, round(on_link * (step + 1))])
    return {
        "method": method,
        "steps": steps,
        "seed": seed,
        "lr": lr,
        "loss": curve[-1][1],
        "bytes": round(sum(sent.values()), 1),
        "link_bytes": round(on_link, 1),
        "dense_bytes": ranks.simulation.stats()["dense_bytes"],
        "utilisation": round(compute_utilisation(method, on_link), 4),
        "seconds": round(spent / steps / RANKS, 4),
        "curve": curve,
    }


def compute_utilisation(method, link_bytes):
    """Return the share of the time that inner steps take, with `COMPUTE` and `LINK`, and without latency.

    During the delay of each fragment, what it sends travels beside the computation.
    """
    outer = (METHODS[method] or {}).get("outer", {})
    beside = outer.get("fragments", 1) * outer.get("delay", 0) / EVERY
    return COMPUTE / (COMPUTE + max(0.0, 8 * link_bytes / LINK - beside * COMPUTE))


def load(path):
    """Return the runs of a file, and where they come from; nothing if there is no file yet."""
    if not os.path.exists(path):
        return [], {}
    with open(path, encoding="utf-8") as file:
        found = json.load(file)
    return found["rows"], found["origins"]


def save(path, rows, origins):
    """Write all runs, in the order of methods, steps and seeds."""
    order = list(METHODS)
    seeds = sorted({row["seed"] for row in rows})
    what = "Validation loss of a character transformer of 826,000 parameters on 4 simulated ranks, seed"
    data = {
        "what": f"{what}{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}",
        "compute": COMPUTE,
        "link": LINK,
        "every": EVERY,
        "origins": origins,
        "rows": sorted(rows, key=lambda row: (row["steps"], order.index(row["method"]), row["lr"], row["seed"])),
    }
    tables.save(path, data)


def describe_origin():
    """Return the command, commit, machine, date and versions of the runs of this process."""
    return {
        "command": shlex.join(["python", "benchmarks/outer.py", *sys.argv[1:]]),
        "commit": commit(),
        "machine": f"{processor()}, CPU only",
        "date": time.strftime("%Y-%m-%d"),
        "versions": f"Python {sys.version.split()[0]}, NumPy {np.__version__}, PyTorch {torch.__version__}",
    }


def main():
    parser = argparse.ArgumentParser(description="Train the runs that a file lacks, and add them.")
    parser.add_argument("path", help="the file of results")
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    arguments = parser.parse_args()
    rows, origins = load(arguments.path)
    mine = describe_origin()
    name = next((name for name, known in origins.items() if known == mine), f"{len(origins) + 1}")
    done = {(row["steps"], row["lr"], row["seed"], row["method"]) for row in rows}
    asked = arguments.steps, arguments.rates, arguments.seeds, arguments.methods
    for steps, lr, seed, method in itertools.product(*asked):
        if (steps, lr, seed, method) not in done:
            row = train(method, seed, steps, Million(), lr)
            print({key: row[key] for key in row if key != "curve"}, flush=True)
            rows.append({**row, "origin": name})
            save(arguments.path, rows, {**origins, name: mine})


if __name__ == "__main__":
    main()
