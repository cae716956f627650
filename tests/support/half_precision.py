"""Sums of 16-bit floats in real processes: what every rank hands in, and whether what comes out is what must."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
# Fewer elements than ranks, and numbers of them that no number of ranks divides.
SIZES = (1, 2, 3, 5, 1000, 4099)

# Starts the reduction of an array, with "sum" or "mean" and a name; the result waits for it.
Reduce = Callable[[np.ndarray, str, str], Callable[[], np.ndarray]]


def given(dtype: np.dtype[Any], n: int, rank: int) -> np.ndarray:
    """Numbers of many sizes; where there is room, infinities, NaN, and sums that only float16 cannot hold."""
    rng = np.random.default_rng([n, rank])
    x = rng.standard_normal(n) * 2.0 ** rng.integers(-24, 8, n)
    if n >= 1000:
        x[1] = np.inf if rank == 0 else 1
        x[n // 2] = np.inf if rank == 0 else -np.inf
        x[n - 2] = np.nan if rank == 0 else 2
        x[n - 1] = 60000
    return x.astype(dtype)


def reductions(reduce: Reduce, ranks: Sequence[int], rank: int) -> dict[str, Any]:
    """Per case whether a reduction over these ranks is the one of float32, rounded once; and a digest of its bytes."""
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
    """Equal bits, but for those of NaN."""
    nan = np.isnan(a.astype(np.float32))
    same = a.view(np.uint16) == b.view(np.uint16)
    return bool((nan == np.isnan(b.astype(np.float32))).all() and (same | nan).all())


def check(ranks: Sequence[dict[str, Any]]) -> None:
    """Fail unless all is as it must be on all ranks, and all have the same bits."""
    assert len(ranks[0]) == len(DTYPES) * len(SIZES) * 2
    for label, result in ranks[0].items():
        assert all(rank[label] == result for rank in ranks), label
        assert result["equal"], label
        if result["special"] is not None:
            infinite = label.startswith("float16") and label.endswith("sum")
            assert result["special"][:3] == ["inf", "nan", "nan"], label
            assert (result["special"][3] == "inf") == infinite, label


def check_sets(ranks: Sequence[dict[str, Any]]) -> None:
    """Check what ranks report by the list of ranks that took part, of every list with rank 0, which has infinities."""
    assert "[0, 2, 3]" in ranks[0] or len(ranks) < 4
    for members in ranks[0]:
        check([ranks[rank][members] for rank in json.loads(members)])
