"""Train a small convolutional network on handwritten digits, with compressed gradients.

    horovodrun -np 2 --gloo python examples/torch_digits.py --compressor none topk qsgd efsignsgd powersgd
    mpirun -np 2 python examples/torch_digits.py --config examples/grace.toml
    python examples/torch_digits.py --compressor topk --set compress_ratio=0.001

The data are the 1,797 images of 8 x 8 pixels that come with scikit-learn; nothing is downloaded. Several compressors
are trained one after the other. Rank 0 ends with a table, and with a JSON file if asked. The exit status is 1 if the
ranks hold different weights at the end of a run.

What concerns grace is in `train`, between the two lines marked GRACE.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import grace.torch as grace
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
    "threshold": Setting(options={"threshold": 0.01}),
    "qsgd": Setting(options={"quantum_num": 15}),
    "terngrad": Setting(),
    # A step is lr in every coordinate, whatever the size of the gradient.
    "signsgd": Setting(lr=0.0005),
    "efsignsgd": Setting(options={"lr": 0.05}),  # of the memory: the optimizer's initial learning rate
    "onebit": Setting(),
    # The memory of dgc holds the momentum, so the optimizer must have none.
    "dgc": Setting(momentum=0.0, options={"compress_ratio": 0.01, "momentum": 0.9}),
    "powersgd": Setting(options={"compress_rank": 2}),
}


@dataclass(frozen=True)
class Run:
    """One training run."""

    label: str
    config: Config
    lr: float
    momentum: float


class Network(nn.Module):
    """Two convolutions and one hidden layer: 151,306 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.hidden = nn.Linear(64 * 4 * 4, 128)
        self.output = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(images))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.hidden(x.flatten(1)))
        return self.output(x)


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Training and test images, the same split on every rank and in every run."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def train(run: Run, data: TensorDataset, epochs: int, batch_size: int, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """Train one network; the network and this rank's measurements."""
    torch.manual_seed(seed)
    model = Network()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=run.lr, momentum=run.momentum)

    # GRACE: everything that compressed gradients add to a script ----------------------------------------------------
    optimizer = grace.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        config=run.config,  # or a dictionary such as {"compressor": "topk", "compress_ratio": 0.01}, or a TOML file
    )
    # GRACE: end -----------------------------------------------------------------------------------------------------

    sampler = DistributedSampler(data, hvd.size(), hvd.rank(), seed=seed, drop_last=True)
    loader = DataLoader(data, batch_size, sampler=sampler, drop_last=True)
    steps = epochs * len(loader)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

    totals = dict.fromkeys(("wire_bytes", "dense_bytes", "compressed_wire_bytes", "compressed_dense_bytes"), 0)
    started = time.perf_counter()
    with tqdm(total=steps, desc=f"{run.label:>10}", unit="step", ncols=100, disable=hvd.rank() != 0) as progress:
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                schedule.step()

                stats = optimizer.grace.stats()
                for key in totals:
                    totals[key] += stats[key]
                progress.update()
            progress.set_postfix(loss=f"{loss.item():.3f}")
    seconds = (time.perf_counter() - started) / steps
    return model, {"seconds_per_step": seconds, **{f"{key}_per_step": total / steps for key, total in totals.items()}}


def evaluate(model: nn.Module, data: TensorDataset) -> float:
    """Share of the images that the model names rightly."""
    images, labels = data.tensors
    model.eval()
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).float().mean().item()


def fingerprint(model: nn.Module) -> str:
    """A hash of every bit of the weights."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def measure(run: Run, data: tuple[TensorDataset, TensorDataset], args: argparse.Namespace) -> dict[str, Any]:
    """Train and evaluate; the row of the table, equal on all ranks but for the time."""
    model, mine = train(run, data[0], args.epochs, args.batch_size, args.seed)
    reports = hvd.allgather_object((fingerprint(model), mine))
    mean = {key: sum(numbers[key] for _, numbers in reports) / len(reports) for key in mine}
    return {
        "framework": "torch",
        "compressor": run.label,
        "accuracy": evaluate(model, data[1]),
        **mean,
        "replicas_identical": len({weights for weights, _ in reports}) == 1,
        "ranks": hvd.size(),
        "epochs": args.epochs,
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


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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


def main() -> int:
    args = parse_arguments()
    try:
        runs = plan_runs(args)
    except GraceError as error:
        print(f"torch_digits: {error}", file=sys.stderr)
        return 2
    hvd.init()
    torch.set_num_threads(1)  # the ranks share the cores of one machine
    data = load_data()
    if len(data[0]) // hvd.size() < args.batch_size:
        print(
            f"torch_digits: {len(data[0])} training images are too few for {hvd.size()} ranks and --batch-size "
            f"{args.batch_size}; use fewer ranks or a smaller batch.",
            file=sys.stderr,
        )
        return 2

    rows = [measure(run, data, args) for run in runs]
    if hvd.rank() == 0:
        print(
            f"\n{args.epochs} epochs on {hvd.size()} rank(s); bytes are what one rank sends per step\n\n{table(rows)}"
        )
        if args.json:
            args.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row["replicas_identical"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
