"""Tests of the GPU kernels: on a GPU (`pytest -m gpu`), and on every machine by an emulator of CUDA on the CPU."""

from __future__ import annotations

import pytest

from tests.kernels import cases
from tests.support.covering import ALL

torch = pytest.importorskip("torch")

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device: torch.cuda.is_available()"),
]


def plans():
    """Return size, kind and seed: every size for which the GPU kernels differ, each with one kind of numbers.

    Without --all, one size stands for those around a byte, and two for those around and above the share of a block.
    The order of threads is tested with normal numbers.
    """
    for seed, n in enumerate((0, 1, 7, 8, 9, 65, 1000, 2048, 2049, 4097, 20001)):
        if ALL or n not in (7, 8, 2048, 4097):
            yield n, cases.KINDS[seed % len(cases.KINDS)], seed
        if ALL:
            yield n, "normal", seed


def differences(name, ops, reference, dtype, plan):
    """Return the differences between the results of a case with two implementations."""
    for n, kind, seed in plan:
        got, wanted = (cases.results(name, cases.Given(way, n, dtype, kind, seed)) for way in (ops, reference))
        for i, pair in enumerate(zip(got, wanted, strict=True)):
            difference = cases.difference(*pair)
            if difference is not None:
                yield f"{kind}, n = {n}, seed {seed}, result {i}: {difference}"
