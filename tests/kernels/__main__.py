"""Run every case with NumPy kernels and print digests of the results. Also run the cases on NaN and infinity.

The environment chooses the kernels: GRACE_ISA, GRACE_NATIVE (the path of another build), OMP_NUM_THREADS.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from functools import cache

import numpy as np

from grace.core.ops import get_ops, native
from tests.kernels import cases


@cache
def digests() -> dict[str, str]:
    """Return the digests by case and dtype. All NaNs count as equal."""
    ops, found = get_ops("numpy", native=True), {}
    for name in cases.CASES:
        for dtype in native.FLOATS:
            digest = hashlib.sha256()
            for n, kind, seed in cases.sizes():
                for result in cases.results(name, cases.Given(ops, n, dtype, kind, seed)):
                    value = result.value if isinstance(result, cases.Loose) else result
                    digest.update(cases.plain(value).tobytes())
            found[f"{name} {dtype}"] = digest.hexdigest()
    return found


def endure() -> int:
    """Run every case on numbers for which kernels only promise to terminate. Return the number of calls."""
    ops, calls = get_ops("numpy", native=True), 0
    for name in cases.CASES:
        for dtype in native.FLOATS:
            for n in (1, 65, 70000):
                for kind in cases.BROKEN:
                    with warnings.catch_warnings(), np.errstate(all="ignore"):
                        warnings.simplefilter("ignore")
                        cases.results(name, cases.Given(ops, n, dtype, kind))
                    calls += 1
    return calls


if __name__ == "__main__":
    print(json.dumps({"isa": native.module.isa(), "endured": endure(), "digests": digests()}))
