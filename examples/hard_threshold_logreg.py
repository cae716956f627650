"""Logistic regression with 20 workers: no compression, top-k and hard threshold, the last two with error feedback.

    python examples/hard_threshold_logreg.py --output figure.png
    python examples/hard_threshold_logreg.py --data gisette_scale.bz2 --match
    mpirun -np 4 python -m mpi4py examples/hard_threshold_logreg.py --mpi --quick

This is the experiment of Sahu et al., "Rethinking gradient sparsification as total error minimization", NeurIPS 2021,
Figure 1: minimise (1/N) sum_i log(1 + exp(-y_i <a_i, x>)) + l2/2 |x|^2 by SGD with one sample per worker and step. The
step size gamma is constant. The paper's memory e contains gamma; so e is gamma times the residual that grace keeps. The
data are gisette if --data gives the file (from LIBSVM's site). Otherwise they are generated and resemble gisette.

All workers run in this process over a simulated network. With --mpi, one worker runs in each process of mpirun. Rank 0
prints a table and which of the paper's claims hold, and optionally writes a figure and a JSON file. The exit status is
1 if the error of hard threshold ever exceeded its bound.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.sparse.linalg import svds
from scipy.special import expit
from tqdm import tqdm

import grace

HARD_THRESHOLD = "hardthreshold"
SAMPLES, FEATURES = 6000, 5000  # the size of gisette
RECORDS = 150  # points per curve, in addition to the first hundred iterations
CHECKED = 20  # steps between two comparisons of the weights
SPLITS = {"iid": "i.i.d. split", "sorted": "split sorted by label"}


class Problem(NamedTuple):
    """The problem: samples as rows, labels of -1 and 1, constants and solution."""

    samples: np.ndarray
    labels: np.ndarray
    l2: float
    smoothness: float
    solution: np.ndarray
    minimum: float

    @property
    def step_size(self) -> float:
        """The constant step size gamma."""
        return 1 / (self.smoothness + self.l2)

    def losses(self, points: np.ndarray) -> np.ndarray:
        """Return f at each row of `points`."""
        margins = (self.samples @ points.T) * self.labels[:, None]
        return np.logaddexp(0, -margins).mean(axis=0) + self.l2 / 2 * (points**2).sum(axis=1)


@dataclass(frozen=True)
class Method:
    """The method behind one curve."""

    label: str
    config: dict[str, Any]
    threshold: float | None = None


@dataclass(frozen=True)
class Result:
    """The measurements of one run. `kept`, `sent`, `residuals` and `largest` are per iteration and worker."""

    method: Method
    split: str
    recorded: np.ndarray  # iterations at which the loss is recorded
    gaps: np.ndarray  # f - f* at these iterations
    kept: np.ndarray  # elements
    sent: np.ndarray  # bytes
    residuals: np.ndarray  # squared norm, in units of the gradient
    largest: np.ndarray  # largest magnitude in the residual
    seconds: float


# --- data -------------------------------------------------------------------------------------------------------------


def read_data(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples and labels in a file of LIBSVM's format."""
    from sklearn.datasets import load_svmlight_file

    samples, labels = load_svmlight_file(str(path))
    return samples.toarray(), np.where(labels > 0, 1.0, -1.0)


def make_data(count: int, features: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Generate samples and labels that resemble gisette in LIBSVM's scaling.

    The features are pixels of two digits: most are off (-1), the others lie in (-1, 1]. Ten hidden variables decide
    which pixels are on; the first of them depends on the label. The second half of the features are probes: copies of
    the first half, each shuffled among the samples.
    """
    rng = np.random.default_rng(seed)
    labels = np.where(np.arange(count) % 2 == 0, 1.0, -1.0)
    hidden = rng.normal(size=(count, 10))
    hidden[:, 0] += 1.8 * labels
    real = features - features // 2
    weights = rng.normal(size=(10, real)) * 0.4
    logits = rng.normal(-2.2, 1.0, real) + hidden @ weights
    on = rng.random((count, real)) < expit(logits)
    pixels = np.where(on, 2 * rng.random((count, real)) - 1, -1.0)
    probes = rng.permuted(pixels[:, : features // 2], axis=0)
    return np.concatenate([pixels, probes], axis=1), labels


def pose(samples: np.ndarray, labels: np.ndarray) -> Problem:
    """Return the problem for the data, solved by L-BFGS-B."""
    count, features = samples.shape
    (sigma,) = svds(samples, k=1, v0=np.ones(min(samples.shape)), return_singular_vectors=False)
    smoothness = float(sigma) ** 2 / (4 * count)
    l2 = smoothness / 1e4

    def loss_and_gradient(x: np.ndarray) -> tuple[float, np.ndarray]:
        margins = labels * (samples @ x)
        gradient = samples.T @ (-labels * expit(-margins)) / count + l2 * x
        return float(np.logaddexp(0, -margins).mean() + l2 / 2 * (x @ x)), gradient

    options = {"maxiter": 5000, "maxfun": 10000, "ftol": 1e-15, "gtol": 1e-7}
    found = minimize(loss_and_gradient, np.zeros(features), jac=True, method="L-BFGS-B", options=options)
    return Problem(samples, labels, l2, smoothness, found.x, float(found.fun))


def split(labels: np.ndarray, workers: int, how: str, seed: int) -> list[np.ndarray]:
    """Return the indices of every worker's samples. All workers have the same number of samples."""
    order = np.random.default_rng(seed).permutation(len(labels))
    if how == "sorted":
        order = order[np.argsort(labels[order], kind="stable")]
    return np.split(order, workers)


# --- workers ----------------------------------------------------------------------------------------------------------


class Simulated:
    """All workers in this process."""

    def __init__(self, workers: int) -> None:
        self.workers, self.local, self.rank = workers, range(workers), 0
        self._simulation: grace.Simulation | None = None

    def prepare(self, features: int, config: dict[str, Any]) -> Sequence[Any]:
        """Start a run. Return the runs of the workers in this process."""
        # Algorithm 1 of the paper compresses once, and gathers.
        communicator = "allreduce" if config["compressor"] == "none" else "allgather"
        config = {**config, "communicator": communicator}
        self._simulation = grace.Simulation(self.workers, {"x": (features,)}, config)
        return self._simulation.runs

    def exchange(self, gradients: np.ndarray) -> np.ndarray:
        """Exchange the gradients, one row per worker of this process. Return the mean of the decoded gradients."""
        return self._simulation.step([{"x": gradient} for gradient in gradients])[0]["x"]

    def check(self, x: np.ndarray) -> None:
        """Raise MismatchError if the weights x, which must be equal on all workers, differ."""

    def finish(self) -> None:
        """End a run."""

    def gather(self, mine: np.ndarray) -> np.ndarray:
        """Return the columns of all workers."""
        return mine

    def from_first(self, make: Any) -> Any:
        """Return the result of `make` on rank 0."""
        return make()


class Processes:
    """One worker in each process of mpirun."""

    def __init__(self) -> None:
        from mpi4py.MPI import COMM_WORLD

        self._comm = COMM_WORLD
        self.workers, self.rank = self._comm.Get_size(), self._comm.Get_rank()
        self.local = [self.rank]

    def prepare(self, features: int, config: dict[str, Any]) -> Sequence[Any]:
        self._exchange = grace.mpi.MPIExchange({"x": (features,)}, config)
        return [self._exchange.run]

    def exchange(self, gradients: np.ndarray) -> np.ndarray:
        return self._exchange({"x": gradients[0]})["x"]

    def check(self, x: np.ndarray) -> None:
        self._exchange.check_replicas({"x": x})

    def finish(self) -> None:
        self._exchange.close()

    def gather(self, mine: np.ndarray) -> np.ndarray:
        return np.concatenate(self._comm.allgather(mine), axis=1)

    def from_first(self, make: Any) -> Any:
        return self._comm.bcast(make() if self.rank == 0 else None)


# --- runs -------------------------------------------------------------------------------------------------------------


def train(problem: Problem, method: Method, how: str, workers: Simulated | Processes, args: Any) -> Result:
    """Run SGD with one method and return the measurements."""
    features = problem.samples.shape[1]
    shards = split(problem.labels, workers.workers, how, args.seed)
    drawn = np.stack([draw(shards[w], args.iterations, (args.seed, w)) for w in workers.local])
    runs = workers.prepare(features, {**method.config, "default_rules": False})
    x = problem.solution + args.offset
    every = max(1, args.iterations // RECORDS)
    recorded = sorted({*range(min(100, args.iterations)), *range(0, args.iterations, every), args.iterations})
    points = [x]
    shape = (args.iterations, len(runs))
    kept, sent, residuals, largest = np.zeros(shape), np.zeros(shape), np.zeros(shape), np.zeros(shape)
    # Only a terminal can draw a bar: None leaves it out elsewhere, as in the output of mpirun.
    disable = True if workers.rank else None
    bar = tqdm(total=args.iterations, desc=f"{how:>6} {method.label}", unit="step", ncols=100, disable=disable)
    began = time.perf_counter()
    for t in range(args.iterations):
        if t % CHECKED == 0:
            workers.check(x)
        rows, labels = problem.samples[drawn[:, t]], problem.labels[drawn[:, t]]
        slopes = -labels * expit(-labels * (rows @ x))
        gradients = (slopes[:, None] * rows + problem.l2 * x).astype(np.float32)
        x = x - problem.step_size * workers.exchange(gradients)
        for i, run in enumerate(runs):
            stats = run.stats()
            sent[t, i] = stats["wire_bytes"]
            # Values and indices have 4 bytes each. Without compression there are only values.
            kept[t, i] = stats["tensors"]["x"]["wire_bytes"] / (8 if method.config["compressor"] != "none" else 4)
            residual = run.state_dict()["tensors"]["x"]["memory"].get("residual")
            if residual is not None:
                wide = residual.astype(np.float64)
                residuals[t, i], largest[t, i] = wide @ wide, np.abs(wide).max()
        if t + 1 in recorded:
            points.append(x)
        bar.update()
    seconds = time.perf_counter() - began
    bar.close()
    if bar.disable and not workers.rank:
        print(f"{how:>6} {method.label}: {args.iterations} steps in {seconds:.1f} s", flush=True)
    workers.check(x)
    workers.finish()
    gaps = problem.losses(np.stack(points)) - problem.minimum
    series = [workers.gather(mine) for mine in (kept, sent, residuals, largest)]
    return Result(method, how, np.array(recorded), gaps, *series, seconds)


def draw(shard: np.ndarray, iterations: int, seed: tuple[int, int]) -> np.ndarray:
    """Return the sample of every iteration: the worker's samples, shuffled again in every epoch."""
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.permutation(shard) for _ in range(-(-iterations // len(shard)))])[:iterations]


def hard_threshold(threshold: float, label: str) -> Method:
    """Return the method hard threshold with this threshold."""
    return Method(label, {"compressor": HARD_THRESHOLD, "threshold": threshold}, threshold)


def match(problem: Problem, start: Result, target: float, workers: Simulated | Processes, args: Any) -> Result:
    """Tune the threshold so that a run keeps `target` elements. Return the run that came closest.

    It stops within 5 % of the target, or after eight runs.
    """
    tried: dict[float, Result] = {}  # by log(kept elements / target)
    result = start
    for _ in range(8):
        excess = math.log(max(result.kept.sum(), 1) / target)
        tried[excess] = result
        if abs(excess) <= 0.05:
            break
        above, below = [e for e in tried if e > 0], [e for e in tried if e <= 0]
        if above and below:
            more, less = min(above), max(below)
            low, high = (math.log(tried[e].method.threshold) for e in (more, less))
            share = min(max(more / (more - less), 0.1), 0.9)
            guess = math.exp(low + share * (high - low))
        else:
            # The number of kept elements is roughly proportional to 1 / threshold.
            guess = result.method.threshold * math.exp(excess)
        result = train(problem, hard_threshold(guess, f"tuning {guess:.3g}"), start.split, workers, args)
    best = tried[min(tried, key=abs)]
    label = f"hard threshold {best.method.threshold:.3g}, volume of top-{args.k}"
    return dataclasses.replace(best, method=hard_threshold(best.method.threshold, label))


# --- report -----------------------------------------------------------------------------------------------------------


def summarise(problem: Problem, result: Result) -> dict[str, Any]:
    """Return one row of the table."""
    features = problem.samples.shape[1]
    gamma = problem.step_size
    errors = gamma**2 * result.residuals.mean(axis=1)
    bound = None if result.method.threshold is None else gamma**2 * features * result.method.threshold**2
    reached = np.flatnonzero(result.gaps <= 0.01 * result.gaps[0])
    late = result.recorded >= 0.9 * result.recorded[-1]
    return {
        "split": result.split,
        "method": result.method.label,
        "threshold": result.method.threshold,
        "gap": float(result.gaps[-1]),
        "loss": float(result.gaps[-1] + problem.minimum),
        # The mean over the last tenth of the iterations, because single samples make noise.
        "late_gap": float(result.gaps[late].mean()),
        "first_gap": float(result.gaps[0]),
        "steps_to_1_percent": int(result.recorded[reached[0]]) if len(reached) else None,
        "density": float(result.kept.mean() / features),
        "sent_bytes": float(result.sent.sum(axis=0).mean()),
        "value_bytes": float(4 * result.kept.sum(axis=0).mean()),
        "total_error": float(errors.sum()),
        "largest_error": float(errors.max()),
        "largest_error_of_a_worker": float(gamma**2 * result.residuals.max()),
        "bound": bound,
        "within_bound": within_bound(result, features),
        "milliseconds_per_step": 1e3 * result.seconds / len(result.kept),
    }


def within_bound(result: Result, features: int) -> bool | None:
    """Return whether |e|^2 <= d threshold^2 for every worker after every step. None for other methods.

    The check uses units of the gradient, which need no rounding: every element of the residual is at most the
    threshold. If it holds for every worker, it holds for their mean.
    """
    if result.method.threshold is None:
        return None
    limit = float(np.float32(result.method.threshold))
    return bool((result.residuals <= features * limit**2).all() and (result.largest <= limit).all())


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    columns = {
        "split": lambda r: r["split"],
        "method": lambda r: r["method"],
        "f - f*": lambda r: f"{r['gap']:.2g}",
        "late mean": lambda r: f"{r['late_gap']:.2g}",
        "steps to 1 %": lambda r: "-" if r["steps_to_1_percent"] is None else f"{r['steps_to_1_percent']:,}",
        "density": lambda r: f"{r['density']:.4%}",
        "bytes sent": lambda r: f"{r['sent_bytes']:,.0f}",
        "total error": lambda r: f"{r['total_error']:.3g}",
        "max error": lambda r: f"{r['largest_error']:.3g}",
        "bound": lambda r: "-" if r["bound"] is None else f"{r['bound']:.3g}",
        "ms/step": lambda r: f"{r['milliseconds_per_step']:.1f}",
    }
    cells = [list(columns), *([show(row) for show in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def claims(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return for each split and run of hard threshold which of the paper's claims hold, with the numbers."""
    found: dict[str, dict[str, Any]] = {}
    for how in dict.fromkeys(row["split"] for row in rows):
        plain, topk, *hard = (row for row in rows if row["split"] == how)
        for row in hard:
            steps = [r["steps_to_1_percent"] or math.inf for r in (plain, topk, row)]
            late = [r["late_gap"] for r in (plain, topk, row)]
            found[f"{how}, {row['method']}"] = {
                # Differences of a thousandth of the first gap are noise of single samples.
                "tracks": late[2] <= 2 * late[0] + plain["first_gap"] / 1000 and steps[2] <= 2 * steps[0],
                "tracks_by": f"late mean of f - f* {late[2]:.2g} against {late[0]:.2g}, 1 % of the first gap reached "
                f"after {steps[2]} against {steps[0]} steps, "
                f"with {plain['sent_bytes'] / max(1, row['sent_bytes']):,.0f} times fewer bytes "
                f"({plain['value_bytes'] / max(1, row['value_bytes']):,.0f} times fewer values)",
                "topk_lags": late[1] > late[2] and steps[1] > steps[2],
                "topk_lags_by": f"top-k: late mean of f - f* {late[1]:.2g}, 1 % after {steps[1]} steps, density "
                f"{topk['density']:.3%} against {row['density']:.3%}, total error {topk['total_error']:.3g} "
                f"against {row['total_error']:.3g}",
                "topk_diverges": late[1] > topk["first_gap"] / 2,
                "bounded": row["within_bound"],
                "bounded_by": f"largest mean |e|^2 {row['largest_error']:.3g}, of one worker "
                f"{row['largest_error_of_a_worker']:.3g}, bound {row['bound']:.3g}",
            }
    return found


def report(rows: list[dict[str, Any]], found: dict[str, dict[str, Any]]) -> str:
    """Return the table and the claims as text."""
    lines = [table(rows), ""]
    for label, claim in found.items():
        yes = {True: "holds", False: "DOES NOT HOLD"}
        lines += [
            f"{label}:",
            f"  (1) tracks uncompressed SGD at less data: {yes[claim['tracks']]}: {claim['tracks_by']}",
            f"  (2) top-k lags: {yes[claim['topk_lags']]}: {claim['topk_lags_by']}"
            + ("; it diverges" if claim["topk_diverges"] else ""),
            f"  (3) mean |e|^2 <= gamma^2 d lambda^2 at every step: {yes[claim['bounded']]}: {claim['bounded_by']}",
        ]
    return "\n".join(lines)


def draw_figure(problem: Problem, results: list[Result], path: Path) -> None:
    """Plot f - f*, mean error and total error against iterations and against bytes, with two rows per split."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    hows = list(dict.fromkeys(result.split for result in results))
    figure, axes = plt.subplots(2 * len(hows), 3, figsize=(13, 5.5 * len(hows)), squeeze=False, constrained_layout=True)
    for result in results:
        at = result.recorded
        errors = problem.step_size**2 * result.residuals.mean(axis=1)
        curves = [(at, result.gaps), (at[1:], errors[at[1:] - 1]), (at[1:], np.cumsum(errors)[at[1:] - 1])]
        sent = np.concatenate([[0], np.cumsum(result.sent.mean(axis=1))])
        first = 2 * hows.index(result.split)
        color = f"C{[r.method.label for r in results if r.split == result.split].index(result.method.label)}"
        for column, (when, values) in enumerate(curves):
            # Logarithmic axes cannot show zeros.
            shown = values > 0
            for row, horizontal in ((first, when), (first + 1, sent[when])):
                visible = shown & (horizontal > 0) if row > first else shown
                axes[row, column].plot(
                    horizontal[visible], values[visible], color=color, lw=1.2, label=result.method.label
                )
    for row, column in np.ndindex(axes.shape):
        axis = axes[row, column]
        axis.set_yscale("log")
        if row % 2:
            axis.set_xscale("log")
        axis.set_xlabel("bytes sent per worker" if row % 2 else "iterations")
        axis.set_ylabel(["f - f*", "mean |e|$^2$", "total error"][column])
        axis.set_title(SPLITS[hows[row // 2]], fontsize=9)
        axis.grid(alpha=0.3)
    for row in range(0, len(axes), 2):
        axes[row, 0].legend(fontsize=7)
    figure.savefig(path, dpi=72)
    plt.close(figure)


# --- command line -----------------------------------------------------------------------------------------------------


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Exit with an error message if it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, help="number of steps (default: 3000, or 400 with --quick)")
    parser.add_argument("--workers", type=int, help="number of workers (default: 20; with --mpi one per process)")
    parser.add_argument("--k", type=int, help="elements that top-k keeps (default: 10, or 2 with --quick)")
    parser.add_argument("--threshold", type=float, default=4.2, help="in units of the gradient (default: 4.2)")
    parser.add_argument("--match", action="store_true", help="also tune a threshold to the volume of top-k")
    parser.add_argument("--data", type=Path, metavar="FILE", help="gisette in LIBSVM's format")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, splits and samples (default: 0)")
    parser.add_argument("--split", choices=[*SPLITS, "both"], default="both", help="how data are split (default: both)")
    parser.add_argument("--quick", action="store_true", help="use 400 generated samples of 200 features")
    parser.add_argument("--mpi", action="store_true", help="run one worker in each process of mpirun")
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="write the figure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table and the claims")
    args = parser.parse_args(words)
    if args.mpi and args.workers is not None:
        parser.error("--workers has no effect with --mpi; set the number of workers by mpirun -np")
    if args.quick and args.data:
        parser.error("--quick generates its own data; leave --data out")
    args.workers = 20 if args.workers is None else args.workers
    args.iterations = (400 if args.quick else 3000) if args.iterations is None else args.iterations
    args.k = (2 if args.quick else 10) if args.k is None else args.k
    if min(args.iterations, args.workers, args.k) < 1:
        parser.error("--iterations, --workers and --k must be at least 1")
    if not args.threshold > 0:
        parser.error("--threshold must be positive")
    return args


def run(args: argparse.Namespace, workers: Simulated | Processes) -> tuple[Problem, list[Result]]:
    """Run all methods and splits of the command line. Return the problem and the results."""
    if args.data:
        samples, labels = read_data(args.data)
    else:
        samples, labels = make_data(*((400, 200) if args.quick else (SAMPLES, FEATURES)), args.seed)
    used = len(labels) // workers.workers * workers.workers
    if used < len(labels):
        samples, labels = samples[:used], labels[:used]
    facts = workers.from_first(lambda: pose(samples, labels)[2:])
    problem = Problem(samples, labels, *facts)
    features = samples.shape[1]
    # 0.005 in every coordinate of gisette. Most features are -1, so all margins move by about the same distance.
    args.offset = 0.005 * FEATURES / features
    if workers.rank == 0:
        print(
            f"N = {used:,}, d = {features:,}, {workers.workers} workers, L = {problem.smoothness:,.3f}, "
            f"l2 = L/10,000, gamma = {problem.step_size:.4e}, f* = {problem.minimum:.5f}, "
            f"f(x_0) = {problem.losses(problem.solution[None] + args.offset)[0]:.4f}",
            flush=True,
        )
    # Add half an element, because the compressor rounds down.
    topk = {"compressor": "topk", "compress_ratio": min(1.0, (args.k + 0.5) / features)}
    methods = [
        Method("no compression", {"compressor": "none"}),
        Method(f"top-{args.k}", topk),
        hard_threshold(args.threshold, f"hard threshold {args.threshold:g}"),
    ]
    results = []
    for how in SPLITS if args.split == "both" else [args.split]:
        mine = [train(problem, method, how, workers, args) for method in methods]
        if args.match:
            mine.append(match(problem, mine[2], mine[1].kept.sum(), workers, args))
        results += mine
    return problem, results


def main(words: Sequence[str] | None = None) -> int:
    """Run the experiment, report the results and return the exit status."""
    args = parse_arguments(words)
    workers = Processes() if args.mpi else Simulated(args.workers)
    problem, results = run(args, workers)
    rows = [summarise(problem, result) for result in results]
    found = claims(rows)
    if workers.rank == 0:
        print(f"\n{report(rows, found)}")
        if args.json:
            facts = {"L": problem.smoothness, "gamma": problem.step_size, "minimum": problem.minimum}
            whole = {"workers": workers.workers, **facts, "rows": rows, "claims": found}
            args.json.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
        if args.output:
            draw_figure(problem, results, args.output)
    return 0 if all(row["within_bound"] is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
