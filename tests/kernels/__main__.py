"""Run every case with NumPy kernels and print digests of the results. With `endure`, run them on NaN and infinity, too.

The environment chooses the kernels: GRACE_ISA, GRACE_NATIVE (the path of another build), OMP_NUM_THREADS. The first
argument, `even` or `odd`, chooses half of the pairs of a case and a dtype. Either half has every case and every dtype.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from functools import cache

import numpy as np

from grace.core.ops import get_ops, native
from tests.kernels import cases
from tests.support.covering import ALL


def pairs(half: str) -> list[tuple[str, str]]:
    """Return the pairs of a case and a dtype in a half; under `--all` all pairs."""
    found = [(name, dtype, i + j) for i, name in enumerate(cases.CASES) for j, dtype in enumerate(native.FLOATS)]
    return [(name, dtype) for name, dtype, number in found if ALL or number % 2 == ("even", "odd").index(half)]


@cache
def digests(half: str) -> dict[str, str]:
    """Return the digests by case and dtype. All NaNs count as equal."""
    ops, found = get_ops("numpy", native=True), {}
    for name, dtype in pairs(half):
        digest = hashlib.sha256()
        for n, kind, seed in cases.sizes(dtype):
            for result in cases.results(name, cases.Given(ops, n, dtype, kind, seed)):
                value = result.value if isinstance(result, cases.Loose) else result
                digest.update(cases.plain(value).tobytes())
        found[f"{name} {dtype}"] = digest.hexdigest()
    return found


def endure(half: str) -> int:
    """Run every case on numbers for which kernels only promise to terminate. Return the number of calls."""
    ops, calls = get_ops("numpy", native=True), 0
    for name, dtype in pairs(half):
        for n in (1, 65, 70000):
            for kind in cases.BROKEN:
                with warnings.catch_warnings(), np.errstate(all="ignore"):
                    warnings.simplefilter("ignore")
                    cases.results(name, cases.Given(ops, n, dtype, kind))
                calls += 1
    return calls


if __name__ == "__main__":
    half, *more = sys.argv[1:]
    endured = endure(half) if more == ["endure"] else 0
    print(json.dumps({"isa": native.module.isa(), "endured": endured, "digests": digests(half)}))
