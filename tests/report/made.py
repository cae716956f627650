"""Made-up results of cells, for tests of what is shown of them."""

from __future__ import annotations

from grace.core.transport.collectives import KINDS
from grace.report.data_sets import BUILT_IN
from grace.report.methods import DENSE, methods

DENSE_BYTES = 1000
KNOWN = methods()


def run(
    method,
    quality,
    *,
    task="mf",
    seed=0,
    ranks=4,
    share=0.1,
    exchange=1e-3,
    compute=5e-3,
    curve=None,
    errors=None,
    config=None,
    data=BUILT_IN,
):
    """Return a result; `quality` None has diverged. Dense gradients travel by allreduce, others by allgather."""
    if method == DENSE:
        share = 1.0
    if config is None:
        config = KNOWN[method].made.to_dict() if method in KNOWN else {"compressor": {"name": method}}
    kind = "allreduce" if share == 1 else "allgather"
    equal = {"equal": KNOWN[method].equal} if method in KNOWN and KNOWN[method].equal else {}
    end = quality if task == "mf" else 1 - (quality or 0)
    middle = (None, None) if quality is None else ((1 + end) / 2, quality / 2)
    return {
        "cell": {"task": task, "method": method, "ranks": ranks, "seed": seed},
        "setting": {"config": {"memory": {"name": "residual"}, **config}, "communicator": kind, "data": data, **equal},
        "curve": curve or [[0, 1.0, 0.0], [50, *middle], [100, end, quality]],
        "errors": errors or [],
        "loss": end,
        "quality": quality,
        "diverged": quality is None,
        "bytes": share * DENSE_BYTES,
        "dense_bytes": DENSE_BYTES,
        "collectives": {name: share * DENSE_BYTES * (name == kind) for name in KINDS},
        "sends": {name: float(name == kind and share > 0) for name in KINDS},
        "compute_seconds": compute,
        "exchange_seconds": exchange,
        "command": "grace report",
        "version": "0",
        "commit": "abc",
        "machine": "a machine",
        "date": "2026-01-01 00:00",
    }


def runs(method, qualities, **more):
    """Return the results of seeds 0, 1, ..."""
    return [run(method, quality, seed=seed, **more) for seed, quality in enumerate(qualities)]


def dense(task="mf", **more):
    """Return uncompressed runs with a noise of 0.02: losses of 0.1, or hit rates of 0.6."""
    middle = 0.1 if task == "mf" else 0.6
    return runs(DENSE, (middle - 0.01, middle + 0.01), task=task, **{"exchange": 0.0, **more})


def error(text="it failed"):
    """Return the result of a cell that raised."""
    return {"cell": {"task": "mf", "method": "topk", "ranks": 4, "seed": 9}, "error": text}
