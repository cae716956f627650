"""Compare the error of every method with the bits that it sends per element, on four kinds of gradients.

    python benchmarks/errors.py docs/results/errors.json                            # of every method, to a file
    python benchmarks/errors.py docs/results/errors.json --compressors eden         # only the rows of these in the file
    python benchmarks/errors.py --compressors eden:bits=4 mine --import ./mine.py   # of these, as a table

The error is |x - C(x)|^2 / |x|^2 on one rank, without a memory; for normal x also that of the mean of eight ranks that
all have x. The bits are all that a rank of two sends in a step: payloads, and what the ranks combine before they
compress. All are means over the draws of random methods. The gradients are matrices of 512 x 512 elements: normal,
Laplace and log-normal numbers, and the gradient of a layer of a small network in training. Methods that learn see the
gradient three times before. All methods take some minutes, one takes some seconds.
"""

import argparse
import functools
import logging
import multiprocessing
import os
import sys
from typing import Any

import numpy as np
import tables
import torch
from sklearn.datasets import load_digits

import grace
from grace.bench.command import add_variants
from grace.bench.variants import import_own, parse_variants
from grace.core.communicators.two_shot import keeps_state
from grace.core.methods.compressor import usual_communicator

WIDTH, LESSONS, DRAWS, RANKS = 512, 3, 8, 8
SHARED = {"memory": "none", "default_rules": False}
COLUMNS = {
    "method": {"title": "method"},
    "setting": {"title": "setting"},
    "bits": {"title": "bits per element", "format": ".2f"},
    "normal": {"title": "normal", "format": ".2g"},
    "mean": {"title": f"mean of {RANKS}", "format": ".2g"},
    "laplace": {"title": "Laplace", "format": ".2g"},
    "lognormal": {"title": "log-normal", "format": ".2g"},
    "recorded": {"title": "recorded", "format": ".2g"},
}


def record_gradient() -> np.ndarray:
    """Return the gradient of a layer for all images, after one epoch of training."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    for rows in torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).split(32):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    return model[2].weight.grad.numpy()


def make_gradients() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (WIDTH, WIDTH)
    found = {
        "normal": rng.standard_normal(shape),
        "laplace": rng.laplace(size=shape),
        "lognormal": np.exp(rng.standard_normal(shape)) * rng.choice([-1, 1], shape),
        "recorded": record_gradient(),
    }
    return {name: x.astype(np.float32) for name, x in found.items()}


def measure_last_step(config: dict[str, Any], x: np.ndarray, ranks: int) -> tuple[float, float]:
    """Return the bits per element that a rank sends in the last step, and the error of the mean of all ranks."""
    simulation = grace.Simulation(ranks, {"w": (WIDTH, WIDTH)}, config)
    (unit,) = simulation.plan.units
    for _ in range(LESSONS + 1 if keeps_state(unit.compressor) else 1):
        merged = simulation.step([{"w": x}] * ranks)[0]["w"].astype(np.float64)
    sent = simulation.runs[0].stats()["tensors"]["w"]["wire_bytes"]
    return 8 * sent / x.size, float(np.sum((x - merged) ** 2) / np.sum(x.astype(np.float64) ** 2))


def mean_over_draws(config: dict[str, Any], x: np.ndarray, ranks: int) -> tuple[float, float]:
    """Return the means of what `measure_last_step` returns over seeds, or a single one if nothing is random."""
    found = [measure_last_step({**config, "seed": seed}, x, ranks) for seed in (0, 1)]
    if found[0] == found[1]:
        return found[0]
    found += [measure_last_step({**config, "seed": seed}, x, ranks) for seed in range(2, DRAWS)]
    return tuple(map(float, np.mean(found, axis=0)))


def row_of(found: dict[str, np.ndarray], name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a method with a setting."""
    # Without a memory, most methods would warn.
    logging.getLogger("grace").setLevel(logging.ERROR)
    config = {**grace.compressors.required(name), **SHARED, "compressor": name, **options}
    bits, _ = mean_over_draws(config, found["normal"], 2)
    errors = {kind: mean_over_draws(config, x, 1)[1] for kind, x in found.items()}
    # Owners that send the mean on would round it once more.
    gathered = {"communicator": usual_communicator(grace.make_config(config).method.compressor), **config}
    errors["mean"] = mean_over_draws(gathered, found["normal"], RANKS)[1]
    setting = " ".join(f"{key} {value}" for key, value in options.items())
    row = {"method": name, "setting": setting, "bits": round(bits, 4)}
    row |= {kind: float(f"{error:.4g}") for kind, error in errors.items()}
    print(row, file=sys.stderr, flush=True)
    return row


def settings_of(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Return the methods of the command line with their options. Raises GraceError for wrong ones."""
    import_own(args.modules)
    if args.file:
        names = args.compressors or grace.compressors
        return [(name, dict(options)) for name in names for options in grace.compressors.about(name).errors]
    return [(variant.name, dict(variant.options)) for variant in parse_variants(args.compressors, **SHARED)]


def sort_key(row: dict[str, Any]) -> tuple[float, float]:
    """Return what sorts the rows of a file: those with most bits first."""
    return -row["bits"], row["normal"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the error of methods with the bits that they send.")
    parser.add_argument("file", nargs="?", metavar="FILE", help="write the rows of the methods to a JSON file")
    add_variants(parser, "all, to FILE")
    args = parser.parse_args()
    if args.file is None and args.compressors is None:
        parser.error("expected FILE, for a table in a file, or --compressors, for one of some methods, or both")
    if args.file and args.compressors and not os.path.exists(args.file):
        parser.error(f"expected a FILE with rows to renew, received {args.file}, which does not exist; leave out one")
    try:
        settings = settings_of(args)
    except grace.errors.GraceError as error:
        parser.error(str(error))
    with multiprocessing.Pool() as pool:
        rows = pool.starmap(functools.partial(row_of, make_gradients()), settings, chunksize=1)
    if args.file is None:
        print(tables.format_markdown(COLUMNS, rows))
        return 0
    if args.compressors:
        tables.renew(args.file, rows, sort_key)
        return 0
    tables.write(
        args.file,
        "Error |x - C(x)|^2 / |x|^2 of matrices of 512 x 512 elements; error of the mean of eight ranks that all have "
        "the normal x; bits that a rank of two sends of normal x; "
        f"means over {DRAWS} draws of random methods",
        COLUMNS,
        sorted(rows, key=sort_key),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
