"""Compare the compressor hardthreshold with top-k at the same volume: volume, density over time, and loss.

    python benchmarks/hard_threshold.py docs/results/hard_threshold_volume.json

Two tasks on 4 simulated ranks, by SGD with a constant learning rate, with the means over the seeds 0, 1 and 2: a
logistic regression, and a matrix factorization with popular and rare items, as in recommender systems. Densities are
those of eighths of the run, as shares of the density that was asked. It takes some minutes.
"""

import logging
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tables

import grace

RANKS, STEPS, SEEDS, RATIO = 4, 1200, 3, 0.005
# Top-k with the volume that the run of hardthreshold with the same seed had.
SAME = "topk, volume of hardthreshold"
PLAIN = {"default_rules": False, "communicator": "allgather"}
METHODS = {
    "none": {"compressor": "none"},
    "topk": {"compressor": "topk", "compress_ratio": RATIO},
    "hardthreshold": {"compressor": "hardthreshold", "compress_ratio": RATIO},
    "hardthreshold, tune_steps 20": {"compressor": "hardthreshold", "compress_ratio": RATIO, "tune_steps": 20},
    "hardthreshold, controlled": {"compressor": "hardthreshold", "compress_ratio": RATIO, "controlled": True},
}
COLUMNS = {
    "task": {"title": "task"},
    "method": {"title": "method"},
    "loss": {"title": "loss", "format": ".4f"},
    "loss_range": {"title": "lowest to highest", "range": True},
    "volume": {"title": "volume / asked", "format": ".2f"},
    "volume_range": {"title": "lowest to highest", "range": True},
    "densities": {"title": "density by eighths"},
}


class Task(NamedTuple):
    """Weights at the start, the gradient of a batch, the loss, and the learning rate."""

    start: np.ndarray
    gradient: Callable[[np.ndarray], np.ndarray]
    loss: Callable[[np.ndarray], float]
    rate: float


def logistic_regression(seed: int) -> Task:
    """2,000 features of very different sizes, 3,000 samples, batches of 8."""
    rng, d = np.random.default_rng(seed), 2000
    a = rng.standard_normal((3000, d)) * np.exp(rng.standard_normal(d))
    a /= np.linalg.norm(a, axis=1, keepdims=True)
    y = np.sign(a @ rng.standard_normal(d))

    def gradient(w: np.ndarray) -> np.ndarray:
        rows = rng.integers(0, len(a), 8)
        margin = y[rows] * (a[rows] @ w)
        return -(a[rows] * (y[rows] / (1 + np.exp(margin)))[:, None]).mean(0)

    return Task(np.zeros(d), gradient, lambda w: float(np.log1p(np.exp(-y * (a @ w))).mean()), 5.0)


def matrix_factorization(seed: int) -> Task:
    """200 users and 150 items of 8 factors, 12,000 ratings, more of popular items, batches of 128."""
    rng, (users, items, factors), ratings = np.random.default_rng(seed), (200, 150, 8), 12000
    popular = 1 / np.arange(1, items + 1) ** 0.8
    user, item = rng.integers(0, users, ratings), rng.choice(items, ratings, p=popular / popular.sum())
    p, q = (rng.standard_normal((n, factors)) for n in (users, items))
    y = (p[user] * q[item]).sum(1) / np.sqrt(factors) + 0.3 * rng.standard_normal(ratings)

    def split(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return w[: users * factors].reshape(users, factors), w[users * factors :].reshape(items, factors)

    def gradient(w: np.ndarray) -> np.ndarray:
        rows, (p, q), found = rng.integers(0, ratings, 128), split(w), np.zeros(w.size)
        error = ((p[user[rows]] * q[item[rows]]).sum(1) - y[rows]) / len(rows)
        of_p, of_q = split(found)
        np.add.at(of_p, user[rows], error[:, None] * q[item[rows]])
        np.add.at(of_q, item[rows], error[:, None] * p[user[rows]])
        return found

    def loss(w: np.ndarray) -> float:
        p, q = split(w)
        return float((((p[user] * q[item]).sum(1) - y) ** 2).mean())

    return Task(0.3 * rng.standard_normal((users + items) * factors), gradient, loss, 2.0)


def train(make: Callable[[int], Task], config: dict[str, Any], seed: int) -> tuple[float, np.ndarray]:
    """Return the loss at the end, and the density of every step as a share of what was asked."""
    logging.getLogger("grace").setLevel(logging.ERROR)
    task = make(seed)
    weights, densities = task.start.copy(), []
    simulation = grace.Simulation(RANKS, {"w": weights.shape}, {**config, **PLAIN})
    for _ in range(STEPS):
        given = [{"w": task.gradient(weights).astype(np.float32)} for _ in range(RANKS)]
        weights = weights - task.rate * simulation.step(given)[0]["w"]
        # An entry takes 8 bytes.
        sent = sum(run.stats()["tensors"]["w"]["wire_bytes"] for run in simulation.runs) / 8
        densities.append(sent / (RANKS * weights.size * RATIO))
    return task.loss(weights), np.array(densities)


def main() -> None:
    tasks, rows = (logistic_regression, matrix_factorization), []
    with multiprocessing.Pool() as pool:
        runs = [(task, method, seed) for task in tasks for method in METHODS for seed in range(SEEDS)]
        ended = pool.starmap(train, [(task, METHODS[method], seed) for task, method, seed in runs], chunksize=1)
        results = dict(zip(runs, ended, strict=True))
        runs = [(task, SAME, seed) for task in tasks for seed in range(SEEDS)]
        volumes = [results[task, "hardthreshold", seed][1].mean() for task, _, seed in runs]
        again = [
            (task, {"compressor": "topk", "compress_ratio": min(1.0, volume * RATIO)}, seed)
            for (task, _, seed), volume in zip(runs, volumes, strict=True)
        ]
        results |= dict(zip(runs, pool.starmap(train, again, chunksize=1), strict=True))
    for task in tasks:
        for method in (*METHODS, SAME):
            found = [results[task, method, seed] for seed in range(SEEDS)]
            losses, densities = [loss for loss, _ in found], [density for _, density in found]
            row = {
                "task": task.__name__.replace("_", " "),
                "method": method,
                "loss": round(float(np.mean(losses)), 5),
                "loss_range": [f"{min(losses):.4f}", f"{max(losses):.4f}"],
            }
            if method != "none":
                volumes = [density.mean() for density in densities]
                eighths = np.mean(densities, axis=0).reshape(8, -1).mean(1)
                row |= {
                    "volume": round(float(np.mean(volumes)), 3),
                    "volume_range": [f"{min(volumes):.2f}", f"{max(volumes):.2f}"],
                    "densities": " ".join(f"{share:.2f}" for share in eighths),
                }
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    tables.write(
        sys.argv[1],
        f"{RANKS} ranks, {STEPS} steps, {100 * RATIO:g} % asked; means over {SEEDS} seeds",
        COLUMNS,
        rows,
    )


if __name__ == "__main__":
    main()
