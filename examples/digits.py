"""What the digits examples share: settings, data, command line, the order of the runs, and the table.

Nothing here knows a framework. How a script uses grace is in torch_digits.py, keras_digits.py and tensorflow_digits.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.datasets import load_digits
from tqdm import tqdm

from grace import Config, compressors, make_config
from grace.core.errors import GraceError

TEST_IMAGES = 360


@dataclass(frozen=True)
class Setting:
    """What a method needs to train this network well: the optimizer's side and the configuration of grace."""

    lr: float = 0.05
    momentum: float = 0.9
    options: dict[str, Any] = field(default_factory=dict)


# The first thing to retune on another network is the learning rate of the sign and ternary methods.
SETTINGS = {
    "none": Setting(),
    "fp16": Setting(),
    "bf16": Setting(),
    "topk": Setting(options={"compress_ratio": 0.01}),
    # A coordinate waits 1 / compress_ratio steps on average for its turn; so long a delay wants less momentum.
    "randomk": Setting(lr=0.15, momentum=0.5, options={"compress_ratio": 0.1}),
    "hardthreshold": Setting(options={"compress_ratio": 0.01}),
    "threshold": Setting(options={"threshold": 0.01}),
    "qsgd": Setting(options={"quantum_num": 15}),
    "natural": Setting(),
    "lpc": Setting(),
    "eightbit": Setting(),
    "inceptionn": Setting(),
    "terngrad": Setting(),
    # A step is lr in every coordinate, whatever the size of the gradient.
    "signsgd": Setting(lr=0.0005),
    # Its memory holds the momentum, so the optimizer must have none.
    "signum": Setting(lr=0.001, momentum=0.0),
    "efsignsgd": Setting(options={"lr": 0.05}),  # of the memory: the optimizer's initial learning rate
    "onebit": Setting(),
    "chain": Setting(options={"sparsifier": "topk", "quantizer": {"name": "qsgd", "quantum_num": 15}}),
    "qsparse": Setting(options={"compress_ratio": 0.01}),
    "3lc": Setting(),
    "adaptive": Setting(options={"compress_ratio": 0.01}),
    "wangni": Setting(options={"compress_ratio": 0.1}),
    "variance": Setting(options={"alpha": 1.5}),
    # The memory of dgc holds the momentum, so the optimizer must have none.
    "dgc": Setting(momentum=0.0, options={"compress_ratio": 0.01, "momentum": 0.9}),
    # As dgc; sketches name coordinates later than exact magnitudes would.
    "sketchedsgd": Setting(lr=0.1, momentum=0.0, options={"memory": "dgc", "momentum": 0.9}),
    "sketchml": Setting(),
    "atomo": Setting(options={"compress_rank": 3}),
    # With error feedback, and a short cycle: what the components lack comes in one burst with the next full step.
    "gradiveq": Setting(options={"memory": "residual", "training_steps": 2, "compressed_steps": 8}),
    "gradzip": Setting(options={"compress_rank": 2}),
    "powersgd": Setting(options={"compress_rank": 2}),
}

# What the table needs of the statistics of every step.
BYTES = ("wire_bytes", "dense_bytes", "compressed_wire_bytes", "compressed_dense_bytes")


@dataclass(frozen=True)
class Run:
    """One training run."""

    label: str
    config: Config
    lr: float
    momentum: float


class Images(NamedTuple):
    """Images of 8 x 8 pixels between 0 and 1 (float32), and the digits that they show (int64)."""

    images: np.ndarray
    labels: np.ndarray


class Data(NamedTuple):
    """What to train on and what to test with."""

    train: Images
    test: Images


@dataclass(frozen=True)
class Outcome:
    """What one rank says at the end of a run."""

    accuracy: float
    fingerprint: str
    per_step: Mapping[str, float]


def load_data() -> Data:
    """Training and test images, the same split on every rank, in every run and in every framework."""
    digits = load_digits()
    images, labels = (digits.images / 16).astype(np.float32), digits.target.astype(np.int64)
    # A shuffle by hand: it gives the permutation of PyTorch's randperm with seed 0, whatever is installed.
    generator = np.random.RandomState(0)
    order = np.arange(len(labels))
    for i in range(len(order) - 1):
        other = i + int(generator.randint(2**32, dtype=np.uint32)) % (len(order) - i)
        order[[i, other]] = order[[other, i]]
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return Data(Images(images[train], labels[train]), Images(images[test], labels[test]))


def batches(images: int, args: argparse.Namespace, rank: int, ranks: int) -> np.ndarray:
    """Which images this rank uses: an array of epochs x steps x batch size.

    All ranks shuffle alike in every epoch and take every ranks-th image; what does not fill a batch on all ranks is
    left out of that epoch.
    """
    steps = images // ranks // args.batch_size
    orders = [np.random.default_rng((args.seed, epoch)).permutation(images) for epoch in range(args.epochs)]
    return np.stack([order[rank::ranks][: steps * args.batch_size].reshape(steps, -1) for order in orders])


def fingerprint(weights: Mapping[str, np.ndarray]) -> str:
    """A hash of every bit of the weights."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(name.encode() + value.tobytes())
    return digest.hexdigest()


class Progress:
    """Clock and byte counter of every rank, and the bar of rank 0."""

    def __init__(self, label: str, steps: int, rank: int) -> None:
        self._bar = tqdm(total=steps, desc=f"{label:>10}", unit="step", ncols=100, disable=rank != 0)
        self._times = [time.perf_counter()]
        self._sent = dict.fromkeys(BYTES, 0)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def step(self, stats: Mapping[str, Any]) -> None:
        """A step is done; `stats` is what grace says about it."""
        self._sent = {key: total + stats[key] for key, total in self._sent.items()}
        self._times.append(time.perf_counter())
        self._bar.update()

    def epoch(self, loss: float) -> None:
        self._bar.set_postfix(loss=f"{loss:.3f}")

    def per_step(self) -> dict[str, float]:
        """Means over the steps; that of the time without the first step, which builds graphs and buffers."""
        times = self._times[1:] if len(self._times) > 2 else self._times
        steps = len(self._times) - 1
        return {
            "seconds_per_step": (times[-1] - times[0]) / (len(times) - 1),
            **{f"{key}_per_step": total / steps for key, total in self._sent.items()},
        }


def compressed_part(row: dict[str, Any]) -> str:
    """The same ratio without the tensors that every method leaves dense: biases and small weights."""
    dense = row["compressed_dense_bytes_per_step"]
    return f"{row['compressed_wire_bytes_per_step'] / dense:.2%}" if dense else "-"


def table(rows: list[dict[str, Any]]) -> str:
    """The result for the reader."""
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
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--compressor", nargs="+", metavar="NAME", default=["none", "topk"], help="trained in turn (default: none topk)"
    )
    source.add_argument("--config", metavar="FILE.toml", help="a configuration file instead of --compressor")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        type=key_value,
        default=[],
        metavar="KEY=VALUE",
        help="options of grace, for every run; each compressor must know them",
    )
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
    parser.add_argument("--lr", type=float, help="initial learning rate (default: the setting of the compressor)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and shuffling (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, as a list of objects")
    args = parser.parse_args()
    if min(args.epochs, args.batch_size) < 1:
        parser.error("--epochs and --batch-size must be at least 1")
    if args.lr is not None and args.lr <= 0:
        parser.error("--lr must be positive")
    return args


def key_value(text: str) -> tuple[str, Any]:
    """KEY=VALUE, the value as JSON (0.01, true, null) or else as it stands."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, received '{text}'")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def plan_runs(args: argparse.Namespace) -> list[Run]:
    """The runs asked for. Raises a GraceError for a wrong configuration before any of them starts."""
    sources: list[Any] = [args.config]
    if not args.config:
        sources = [{"compressor": name, **SETTINGS.get(name, Setting()).options} for name in args.compressor]
    runs = []
    for source in sources:
        config = make_config(source, **dict(args.set))
        name = compressors.name_of(config.parts.compressor)
        setting = SETTINGS.get(name, Setting())
        runs.append(Run(name, config, args.lr or setting.lr, setting.momentum))
    return runs


def main(framework: str, description: str, hvd: Any, train: Callable[[Run, Data, argparse.Namespace], Outcome]) -> int:
    """Run what the command line asks for; the exit status. `hvd` is Horovod for the framework."""
    args = parse_arguments(description)
    try:
        runs = plan_runs(args)
    except GraceError as error:
        print(f"{framework}_digits: {error}", file=sys.stderr)
        return 2
    hvd.init()
    data = load_data()
    if len(data.train.labels) // hvd.size() < args.batch_size:
        print(
            f"{framework}_digits: {len(data.train.labels)} training images are too few for {hvd.size()} ranks and "
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
