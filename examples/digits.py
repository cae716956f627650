"""Shared code of the digits examples: data, command line, the sequence of runs, and the table.

This module uses no framework. To see how a script uses grace, read one of the others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.datasets import load_digits
from tqdm import tqdm

import grace

TEST_IMAGES = 360


# The statistics of each step that the table needs.
BYTES = ("wire_bytes", "dense_bytes", "compressed_wire_bytes", "compressed_dense_bytes")


@dataclass(frozen=True)
class Run:
    """One training run."""

    label: str
    config: grace.Config
    lr: float
    momentum: float


class Images(NamedTuple):
    """Images of 8 x 8 pixels between 0 and 1 (float32), and their digits (int64)."""

    images: np.ndarray
    labels: np.ndarray


class Data(NamedTuple):
    """Training and test data."""

    train: Images
    test: Images


@dataclass(frozen=True)
class Outcome:
    """The result of one rank at the end of a run."""

    accuracy: float
    fingerprint: str
    per_step: Mapping[str, float]


def load_data() -> Data:
    """Return training and test images. The split is equal on every rank, in every run and in every framework."""
    digits = load_digits()
    images, labels = (digits.images / 16).astype(np.float32), digits.target.astype(np.int64)
    # This shuffle gives the permutation of PyTorch's randperm with seed 0, without PyTorch.
    generator = np.random.RandomState(0)
    order = np.arange(len(labels))
    for i in range(len(order) - 1):
        other = i + int(generator.randint(2**32, dtype=np.uint32)) % (len(order) - i)
        order[[i, other]] = order[[other, i]]
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return Data(Images(images[train], labels[train]), Images(images[test], labels[test]))


def batches(images: int, args: argparse.Namespace, rank: int, ranks: int) -> np.ndarray:
    """Return the indices of the images that this rank uses: an array of shape (epochs, steps, batch size).

    In every epoch, all ranks use the same shuffled order, and each takes every `ranks`-th image. Images that do not
    fill a batch on all ranks are left out of that epoch.
    """
    steps = images // ranks // args.batch_size
    orders = [np.random.default_rng((args.seed, epoch)).permutation(images) for epoch in range(args.epochs)]
    return np.stack([order[rank::ranks][: steps * args.batch_size].reshape(steps, -1) for order in orders])


def fingerprint(weights: Mapping[str, np.ndarray]) -> str:
    """Return a hash of every bit of the weights."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(name.encode() + value.tobytes())
    return digest.hexdigest()


class Progress:
    """The clock and byte counters of a rank, and the progress bar of rank 0."""

    def __init__(self, label: str, steps: int, rank: int) -> None:
        # Only a terminal can draw a bar: None leaves it out elsewhere, as in horovodrun's output.
        disable = None if rank == 0 else True
        self._bar = tqdm(total=steps, desc=f"{label:>10}", unit="step", ncols=100, disable=disable)
        self._label, self._tells, self._loss = label, rank == 0, float("nan")
        self._times = [time.perf_counter()]
        self._sent = dict.fromkeys(BYTES, 0)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        if self._tells and self._bar.disable:
            seconds = self._times[-1] - self._times[0]
            print(
                f"{self._label:>10}: {len(self._times) - 1} steps in {seconds:.1f} s, loss {self._loss:.3f}", flush=True
            )

    def step(self, stats: Mapping[str, Any]) -> None:
        """Count a step. `stats` are grace's statistics of it."""
        self._sent = {key: total + stats[key] for key, total in self._sent.items()}
        self._times.append(time.perf_counter())
        self._bar.update()

    def epoch(self, loss: float) -> None:
        """Show the loss at the end of an epoch."""
        self._loss = loss
        self._bar.set_postfix(loss=f"{loss:.3f}")

    def per_step(self) -> dict[str, float]:
        """Return means over the steps. The mean time excludes the first step, which builds graphs and buffers."""
        times = self._times[1:] if len(self._times) > 2 else self._times
        steps = len(self._times) - 1
        return {
            "seconds_per_step": (times[-1] - times[0]) / (len(times) - 1),
            **{f"{key}_per_step": total / steps for key, total in self._sent.items()},
        }


def compressed_part(row: dict[str, Any]) -> str:
    """Return the ratio of the compressed tensors alone, without the biases and small weights, which stay dense."""
    dense = row["compressed_dense_bytes_per_step"]
    return f"{row['compressed_wire_bytes_per_step'] / dense:.2%}" if dense else "-"


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as a table."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "compressor": lambda row: row["compressor"],
        "test accuracy": lambda row: f"{row['accuracy']:.2%}",
        "wire bytes/step": lambda row: f"{row['wire_bytes_per_step']:,.0f}",
        "of dense": lambda row: f"{row['wire_bytes_per_step'] / row['dense_bytes_per_step']:.2%}",
        "compressed part": compressed_part,
        "seconds/step": lambda row: f"{row['seconds_per_step']:.4f}",
        "replicas identical": lambda row: "yes" if row["replicas_identical"] else "NO",
    }
    cells = [list(columns), *([show(row) for show in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def parse_arguments(description: str) -> argparse.Namespace:
    """Parse the command line. Exit with an error message if it is wrong."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--compressor", nargs="+", metavar="NAME", default=["none", "qsgd"], help="trained in turn (default: none qsgd)"
    )
    source.add_argument("--config", metavar="FILE.toml", help="a configuration file instead of --compressor")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        type=key_value,
        default=[],
        metavar="KEY=VALUE",
        help="options of grace for all runs; every compressor must have them",
    )
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
    parser.add_argument("--lr", type=float, help="initial learning rate (default: depends on the compressor)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and shuffling (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as a list of objects")
    args = parser.parse_args()
    if min(args.epochs, args.batch_size) < 1:
        parser.error("--epochs and --batch-size must be at least 1")
    if args.lr is not None and args.lr <= 0:
        parser.error("--lr must be positive")
    return args


def key_value(text: str) -> tuple[str, Any]:
    """Return key and value of KEY=VALUE. A value that is not valid JSON (0.01, true, null) is a string."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, received '{text}'")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def plan_runs(args: argparse.Namespace) -> list[Run]:
    """Return the runs of the command line. Raises GraceError for a wrong configuration, before any run starts."""
    sources: list[Any] = [args.config]
    if not args.config:
        options = {name: grace.compressors.about(name).digits.options for name in args.compressor}
        sources = [{"compressor": name, **options[name]} for name in args.compressor]
    runs = []
    for source in sources:
        config = grace.make_config(source, **dict(args.set))
        if not config.check_replicas and "check_replicas" not in dict(args.set):
            # Every 20 steps, about once per epoch, the ranks compare their weights, by 8 bytes.
            config = replace(config, check_replicas=20)
        name = grace.compressors.name_of(config.method.compressor)
        setting = grace.compressors.about(name).digits
        runs.append(Run(name, config, args.lr or setting.lr, setting.momentum))
    return runs


def main(framework: str, description: str, hvd: Any, train: Callable[[Run, Data, argparse.Namespace], Outcome]) -> int:
    """Run the command line and return the exit status. `hvd` is Horovod's module for the framework."""
    args = parse_arguments(description)
    try:
        runs = plan_runs(args)
    except grace.errors.GraceError as error:
        print(f"{framework}_digits: {error}", file=sys.stderr)
        return 2
    hvd.init()
    data = load_data()
    if len(data.train.labels) // hvd.size() < args.batch_size:
        print(
            f"{framework}_digits: {len(data.train.labels)} training images are too few for {hvd.size()} ranks with "
            f"--batch-size {args.batch_size}; use fewer ranks or a smaller batch.",
            file=sys.stderr,
        )
        return 2

    rows = []
    for run in runs:
        outcomes = hvd.allgather_object(train(run, data, args))
        keys = outcomes[0].per_step
        rows.append(
            {
                "framework": framework,
                "compressor": run.label,
                "accuracy": outcomes[0].accuracy,
                **{key: sum(outcome.per_step[key] for outcome in outcomes) / len(outcomes) for key in keys},
                "replicas_identical": len({outcome.fingerprint for outcome in outcomes}) == 1,
                "ranks": hvd.size(),
                "epochs": args.epochs,
            }
        )
    if hvd.rank() == 0:
        print(
            f"\n{framework}: {args.epochs} epochs on {hvd.size()} rank(s); bytes are what one rank sends per step\n\n"
            f"{table(rows)}"
        )
        if args.json:
            args.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row["replicas_identical"] for row in rows) else 1
