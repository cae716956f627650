"""Train two small models on four simulated ranks, by allgather and by two_shot: what a second compression costs.

    python benchmarks/second_compression.py docs/results/second_compression.json

The tasks are a factorisation of a matrix of ratings, and a character model of the text of Python's own library. Every
rank has data of its own. The optimizer is SGD with momentum, and its learning rate is that of dense training, or less
for methods that would diverge. All ranks live in one process, so the losses are those of a real run, and the time is
not. It takes about half an hour on one core. With a second file as an argument, each run adds a line to it, and a new
start takes up the runs that it has.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", GRACE_NUM_THREADS="1")

import numpy as np
import numpy.typing as npt
import tables

import grace
from grace.core.communicators.auto import error_of_normal
from grace.core.config.config import make_config
from grace.core.config.registry import communicators, compressors
from grace.core.errors import IncompatibleError
from grace.core.plan.unit import Assignment
from grace.core.spec import Ranks, TensorSpec
from grace.report.tasks.data import library
from grace.report.tasks.factorization import SGD, Arrays, Factorization, Ratings

RANKS, SEEDS = 4, (0, 1, 2)
# The learning rate of dense training is divided by one of these.
SLOWER = (1, 4, 16, 64, 256)
# Settings beside the defaults: more and fewer bits or elements.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "topk": [{"compress_ratio": ratio} for ratio in (0.01, 0.02, 0.1, 0.5)],
    "qsgd": [{"quantum_num": levels} for levels in (1, 3, 7, 15, 127)],
    "eden": [{"bits": bits} for bits in (1, 2, 3, 4)],
    "blockwise": [{"format": name} for name in ("nf4", "int8")],
    "mucsc": [{"bits": bits} for bits in (2, 4)],
}
# The mean is compressed to 8 bits per element, for two methods of few bits.
FINER = {"name": "two_shot", "second": "qsgd"}
WITH_FINER: list[dict[str, Any]] = [{"compressor": "topk", "compress_ratio": 0.01}, {"compressor": "efsignsgd"}]
COMMUNICATORS: dict[str, Any] = {
    "allreduce": "allreduce", "allgather": "allgather", "two_shot": "two_shot", "finer": FINER
}  # fmt: skip


class Characters(SGD):
    """The next character from the eight before it, by a perceptron; a rank has modules of its own."""

    symbols, context, width, hidden = 64, 8, 12, 128

    def __init__(self, seed: int, ranks: int, batch: int, lr: float, momentum: float) -> None:
        self.seed, self.batch, text = seed, batch, library()
        rng = np.random.default_rng(3000 + seed)
        windows = np.lib.stride_tricks.sliding_window_view(text, self.context + 1)
        # Every 20th stretch of 500 characters is kept for the loss.
        kept = np.arange(len(windows)) // 500 % 20 == 0
        self.test = windows[kept][:: max(1, int(kept.sum()) // 4000)]
        self.parts = np.array_split(np.flatnonzero(~kept), ranks)
        self.windows = windows
        inputs = self.context * self.width
        shapes = {
            "embedding": (self.symbols, self.width),
            "hidden": (inputs, self.hidden),
            "hidden bias": (self.hidden,),
            "output": (self.hidden, self.symbols),
            "output bias": (self.symbols,),
        }
        weights: Arrays = {
            name: (rng.standard_normal(shape) / math.sqrt(shape[0] if len(shape) == 2 else math.inf)).astype(np.float32)
            for name, shape in shapes.items()
        }
        weights["embedding"] *= math.sqrt(self.symbols)
        super().__init__(weights, lr, momentum)

    def _forward(self, windows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float32], ...]:
        w = self.weights
        x = w["embedding"][windows[:, :-1]].reshape(len(windows), -1)
        h = np.tanh(x @ w["hidden"] + w["hidden bias"])
        z = h @ w["output"] + w["output bias"]
        z -= z.max(1, keepdims=True)
        return x, h, z - np.log(np.exp(z).sum(1, keepdims=True))

    def gradients(self, rank: int, step: int) -> Arrays:
        chosen = self.windows[np.random.default_rng((self.seed, rank, step)).choice(self.parts[rank], self.batch)]
        w = self.weights
        x, h, logs = self._forward(chosen)
        out = np.exp(logs)
        out[np.arange(self.batch), chosen[:, -1]] -= 1
        out /= self.batch
        inner = (out @ w["output"].T) * (1 - h * h)
        embedding = np.zeros_like(w["embedding"])
        np.add.at(embedding, chosen[:, :-1], (inner @ w["hidden"].T).reshape(self.batch, self.context, self.width))
        return {
            "embedding": embedding,
            "hidden": x.T @ inner,
            "hidden bias": inner.sum(0),
            "output": h.T @ out,
            "output bias": out.sum(0),
        }

    def loss(self) -> float:
        _, _, logs = self._forward(self.test)
        return float(-logs[np.arange(len(logs)), self.test[:, -1]].mean())


class Setting(NamedTuple):
    """A task: title, class, steps of a run, batch of a rank, and learning rate of dense training."""

    title: str
    training: type[Ratings] | type[Characters]
    steps: int
    batch: int
    lr: float


MF = Factorization()
TASKS = {
    "factorisation": Setting("matrix factorisation", Ratings, MF.steps, MF.batch, MF.lr),
    "characters": Setting("character model", Characters, 250, 32, 0.1),
}


def train(task: Setting, config: Mapping[str, Any], seed: int, slower: float = 1) -> float:
    """Return the mean loss over the last third of a run; infinity if it diverged."""
    model = task.training(seed, RANKS, task.batch, task.lr / slower, MF.momentum)
    simulation = grace.Simulation(RANKS, model.shapes, {"default_rules": False, "seed": seed, **config})
    late = []
    for step in range(task.steps):
        gradients = [model.gradients(rank, step) for rank in range(RANKS)]
        model.apply(simulation.step(gradients, lr=model.rate(step))[0], step)
        if step >= task.steps * 2 // 3 and step % 10 == 9:
            late.append(model.loss())
            if not late[-1] < 1e3:
                return math.inf
    return statistics.fmean(late)


def chosen(config: Mapping[str, Any]) -> str:
    """Return the communicator that `auto` takes."""
    item = Assignment(TensorSpec("w", (256, 256)), make_config({"default_rules": False, **config}).method)
    return communicators.name_of(item.communicator.resolve(item, Ranks(RANKS))[0])


def carried(config: Mapping[str, Any]) -> bool:
    """Return whether two_shot can carry a method, and nothing but the second compression speaks against it."""
    try:
        needed = compressors.needed(config["compressor"])
        compressor = make_config({**needed, **config, "communicator": "two_shot"}).method.compressor
    except IncompatibleError:
        return False
    return compressor.averages and not compressor.absolute


def methods() -> list[dict[str, Any]]:
    """Return the configurations of the methods, some with several settings."""
    names = [name for name, _ in compressors.ready()]
    found = [{"compressor": name, **options} for name in names for options in SETTINGS.get(name, [{}])]
    return [config for config in found if carried(config)]


def setting(config: Mapping[str, Any]) -> str:
    """Return the options of a method as text."""
    return " ".join(f"{key} {value}" for key, value in config.items() if key != "compressor")


class Runs:
    """Losses of runs by task, method, communicator, seed and learning rate, kept in a file of lines if one is named."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        lines = Path(path).read_text().splitlines() if path and Path(path).exists() else []
        self.found: dict[str, float] = {key: loss for line in lines for key, loss in json.loads(line).items()}

    def loss(self, task: str, config: Mapping[str, Any], communicator: str, seed: int, slower: int) -> float:
        title = f"{config['compressor']} {setting(config)}".strip()
        key = f"{task}; {title}; {communicator}; seed {seed}; lr / {slower}"
        if key not in self.found:
            # A run that diverges overflows first.
            with np.errstate(all="ignore"):
                self.found[key] = train(
                    TASKS[task], {**config, "communicator": COMMUNICATORS[communicator]}, seed, slower
                )
            print(f"{key:90} {self.found[key]:.4f}", file=sys.stderr, flush=True)
            if self.path:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write(json.dumps({key: self.found[key]}) + "\n")
        return self.found[key]


def slower_by(runs: Runs, task: str, config: Mapping[str, Any]) -> int:
    """Return the first number to divide the learning rate by with which the loss is at most twice that of dense runs.

    If there is none, return the one with the smallest loss. Only the first seed counts.
    """
    dense = runs.loss(task, {"compressor": "none"}, "allreduce", SEEDS[0], 1)
    losses = []
    for slower in SLOWER:
        losses.append(runs.loss(task, config, "allgather", SEEDS[0], slower))
        if losses[-1] <= 2 * dense:
            break
    return SLOWER[losses.index(min(losses))]


def measure(runs: Runs, task: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mean loss by allgather, by how much its seeds differ, and what two_shot adds to it."""
    slower = slower_by(runs, task, config)
    names = ["allgather", "two_shot", *(["finer"] if config in WITH_FINER else [])]
    once, *others = ([runs.loss(task, config, name, seed, slower) for seed in SEEDS] for name in names)
    row: dict[str, Any] = {task: round(statistics.fmean(once), 4), f"{task}_spread": round(max(once) - min(once), 4)}
    for key, losses in zip(("added", "finer"), others, strict=False):
        added = statistics.fmean(losses) - statistics.fmean(once)
        row[f"{task}_{key}"] = "diverges" if added == math.inf else round(added, 4)
    return row


def columns() -> dict[str, dict[str, Any]]:
    """Return the columns of the table."""
    found: dict[str, dict[str, Any]] = {
        "method": {"title": "method"},
        "setting": {"title": "setting"},
        "error": {"title": "relative error", "format": ".2g"},
        "auto": {"title": f"`auto` on {RANKS} ranks"},
    }
    for key, task in TASKS.items():
        found[key] = {"title": f"{task.title}: allgather", "format": ".3f"}
        found[f"{key}_spread"] = {"title": "seeds differ by", "format": ".4f"}
        found[f"{key}_added"] = {"title": "two_shot adds", "format": "+.4f", "goal": f"{key}_spread"}
        found[f"{key}_finer"] = {"title": "with `second` = qsgd", "format": "+.4f", "goal": f"{key}_spread"}
    return found


def main(path: str, lines: str | None = None) -> None:
    """Measure every method, and write the table to a file."""
    runs, rows, dense = Runs(lines), [], []
    for key, task in TASKS.items():
        losses = [runs.loss(key, {"compressor": "none"}, "allreduce", seed, 1) for seed in SEEDS]
        dense.append(f"{statistics.fmean(losses):.3f} ({task.title}, seeds differ by {max(losses) - min(losses):.4f})")
    for config in methods():
        compressor = make_config(config).method.compressor
        row = {"method": config["compressor"], "setting": setting(config), "auto": chosen(config)}
        row["error"] = float(f"{error_of_normal(compressor):.4g}")
        for key in TASKS:
            row |= measure(runs, key, config)
        rows.append(row)
    tables.write(
        path,
        f"Training loss on {RANKS} simulated ranks at the end of a run: means over the seeds "
        f"{', '.join(map(str, SEEDS))}. Uncompressed: {' and '.join(dense)}",
        columns(),
        sorted(rows, key=lambda row: row["error"]),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
