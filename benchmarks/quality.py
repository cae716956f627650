"""Train the quick task of `grace report` with every method, and write how far from uncompressed training it may end.

    python benchmarks/quality.py docs/results/quality.json

The task is the matrix factorization on 4 simulated ranks, in few steps, by SGD with momentum. Every method has its
default options. The distance of a method is the largest difference of its loss from that of uncompressed training with
the same seed, plus the noise: how much the uncompressed runs differ. `tests/report/test_quality.py` allows no more. It
takes about a minute on one core.
"""

import json
import sys

import tables

from grace.bench.variants import Variant
from grace.core.config.registry import compressors
from grace.report.cell import Cell, train
from grace.report.methods import DENSE, Method

RANKS, STEPS, SEEDS = 4, 75, (0, 1, 2)
COLUMNS = {
    "method": {"title": "method"},
    "loss": {"title": "loss", "format": ".4f"},
    "distance": {"title": "distance", "format": ".4f"},
}


def measure_loss(name, seed, **options):
    """Return the loss at the end of a run with a method's default options; None if it diverged."""
    found = train(Cell("mf", Method(name, Variant(name, options).config()), RANKS, seed, STEPS))
    return None if found["diverged"] else found["loss"]


def measure_rows(names, seeds=SEEDS):
    """Return the noise, and a row for each method: losses, their mean and the distance, both None if a run diverged."""
    dense = [measure_loss(DENSE, seed) for seed in seeds]
    noise = max(dense) - min(dense)
    rows = []
    for name in names:
        losses = [measure_loss(name, seed) for seed in seeds]
        row = {"method": name, "losses": losses, "loss": None, "distance": None}
        if None not in losses:
            worst = max(x - y for x, y in zip(losses, dense, strict=True))
            row |= {"loss": sum(losses) / len(losses), "distance": round(worst + noise, 5)}
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    return noise, rows


def main(path):
    """Measure every method that needs no options, and write the file."""
    noise, rows = measure_rows(name for name, _ in compressors.ready())
    tables.write(
        path,
        f"Loss of the matrix factorization of grace report: {RANKS} simulated ranks, {STEPS} steps, default options; "
        f"means over the seeds {', '.join(map(str, SEEDS))}. Distance: the largest difference from uncompressed "
        "training with the same seed, plus the noise of uncompressed training",
        COLUMNS,
        sorted(rows, key=lambda row: (row["distance"] is None, row["distance"] or 0)),
        noise=noise,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
