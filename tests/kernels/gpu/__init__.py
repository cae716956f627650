"""Tests of the kernels for GPUs: on a GPU (`pytest -m gpu`), and everywhere by an emulator of CUDA on the CPU."""

from __future__ import annotations

import pytest

from tests.kernels import cases

torch = pytest.importorskip("torch")

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device: torch.cuda.is_available()"),
]


def plans():
    """Size, kind and seed: the sizes that the kernels for GPUs tell apart, a kind of numbers each."""
    for seed, n in enumerate((0, 1, 7, 8, 9, 65, 1000, 2048, 2049, 4097, 20001)):
        yield n, cases.KINDS[seed % len(cases.KINDS)], seed
        yield n, "normal", seed


def differences(name, ops, reference, dtype, plan):
    """What differs between the results of a case by two ways to run it."""
    for n, kind, seed in plan:
        got, wanted = (cases.results(name, cases.Given(way, n, dtype, kind, seed)) for way in (ops, reference))
        for i, pair in enumerate(zip(got, wanted, strict=True)):
            difference = cases.difference(*pair)
            if difference is not None:
                yield f"{kind}, n = {n}, seed {seed}, result {i}: {difference}"
