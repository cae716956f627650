"""Sums of 16-bit floats in real processes: inputs of every rank, and checks of the results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
# Fewer elements than ranks, and numbers of elements that are not multiples of the number of ranks.
SIZES = (1, 2, 3, 5, 1000, 4099)

# A function that starts the reduction of an array, with "sum" or "mean" and a name, and returns a function that waits.
Reduce = Callable[[np.ndarray, str, str], Callable[[], np.ndarray]]


def given(dtype: np.dtype[Any], n: int, rank: int) -> np.ndarray:
    """Return numbers of many sizes. Longer arrays contain infinities, NaN, and sums that overflow float16 only."""
    rng = np.random.default_rng([n, rank])
    x = rng.standard_normal(n) * 2.0 ** rng.integers(-24, 8, n)
    if n >= 1000:
        x[1] = np.inf if rank == 0 else 1
        x[n // 2] = np.inf if rank == 0 else -np.inf
        x[n - 2] = np.nan if rank == 0 else 2
        x[n - 1] = 60000
    return x.astype(dtype)


def reductions(reduce: Reduce, ranks: Sequence[int], rank: int) -> dict[str, Any]:
    """Return for each case whether a reduction equals that of float32, rounded once, and a digest of its bytes."""
    results: dict[str, Any] = {}
    for dtype in DTYPES:
        for n in SIZES:
            waits = {op: reduce(given(dtype, n, rank), op, f"{dtype}.{n}.{op}") for op in ("sum", "mean")}
            for op, wait in waits.items():
                factor = np.float32(1 / len(ranks) if op == "mean" else 1)
                with np.errstate(over="ignore", invalid="ignore"):
                    wide = [given(dtype, n, other).astype(np.float32) * factor for other in ranks]
                    expected = sum(wide[1:], start=wide[0]).astype(dtype)
                got = wait()
                results[f"{dtype}/{n}/{op}"] = {
                    "equal": got.dtype == dtype and got.shape == (n,) and _same(got, expected),
                    "special": [str(got[i]) for i in (1, n // 2, n - 2, n - 1)] if n >= 1000 else None,
                    "digest": hashlib.sha256(got.tobytes()).hexdigest(),
                }
    return results


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether the bits are equal, except those of NaN."""
    nan = np.isnan(a.astype(np.float32))
    same = a.view(np.uint16) == b.view(np.uint16)
    return bool((nan == np.isnan(b.astype(np.float32))).all() and (same | nan).all())


def check(ranks: Sequence[dict[str, Any]]) -> None:
    """Fail unless all results are correct on all ranks, and all ranks have the same bits."""
    assert len(ranks[0]) == len(DTYPES) * len(SIZES) * 2
    for label, result in ranks[0].items():
        assert all(rank[label] == result for rank in ranks), label
        assert result["equal"], label
        if result["special"] is not None:
            infinite = label.startswith("float16") and label.endswith("sum")
            assert result["special"][:3] == ["inf", "nan", "nan"], label
            assert (result["special"][3] == "inf") == infinite, label


def check_sets(ranks: Sequence[dict[str, Any]]) -> None:
    """Check the reports for every list of participating ranks that contains rank 0, which has infinities."""
    assert "[0, 2, 3]" in ranks[0] or len(ranks) < 4
    for members in ranks[0]:
        check([ranks[rank][members] for rank in json.loads(members)])
