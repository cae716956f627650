"""Shared helpers of the paper tests, with NumPy arrays as inputs and outputs."""

from __future__ import annotations

import numpy as np

import grace
from grace.core.config.config import Config, Method
from grace.core.config.registry import communicators, compressors, memories
from grace.core.methods.compressor import usual_communicator
from grace.core.ops.numpy_ops import NumpyOps
from grace.core.spec import TensorSpec
from grace.core.wire.layout import payload_bytes
from grace.testing.harness import exchange, wide

OPS = NumpyOps()


def normal(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def spec(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec("w", shape, dtype)


def make(name: str, **options):
    return compressors.make({"name": name, **options})


def send(compressor, x: np.ndarray, *, step: int = 0, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """Return decompress(compress(x)) on one rank, in float64."""
    ex = exchange(compressor, OPS, spec(*(shape or x.shape)), [x.ravel()], step=step)
    return wide(OPS.cast(compressor.decompress(ex.payloads[0], ex.sites[0]), "float64"))


def payload(compressor, x: np.ndarray, *, step: int = 0) -> dict[str, np.ndarray]:
    return exchange(compressor, OPS, spec(*x.shape), [x.ravel()], step=step).payloads[0]


def bits_per_element(compressor, n: int) -> float:
    """Return the bits per element of the payload's fields, without header and padding."""
    return 8 * payload_bytes(compressor.wire(spec(n))) / n


def variance(compressor, x: np.ndarray, trials: int) -> tuple[float, float]:
    """Return the mean of |C(x) - x|^2 over random keys, and six times the standard deviation of that mean."""
    errors = [np.sum((send(compressor, x, step=step) - x) ** 2) for step in range(trials)]
    return float(np.mean(errors)), float(6 * np.std(errors, ddof=1) / np.sqrt(trials))


def simulate(size: int, shape: tuple[int, ...], compressor, memory="none", communicator=None, **options):
    """Return a simulation of ranks with one tensor `w`."""
    chosen = Method(
        compressor,
        memories.make(memory),
        communicators.make(communicator or usual_communicator(compressor)),
    )
    return grace.Simulation(size, {"w": shape}, Config(chosen, default_rules=False), **options)


def step(sim, xs: list[np.ndarray]) -> np.ndarray:
    """Run one step and return the merged gradient. Fail if the ranks differ."""
    merged = [mine["w"] for mine in sim.step([{"w": x.copy()} for x in xs])]
    assert all(np.array_equal(mine, merged[0]) for mine in merged)
    return merged[0]


def state(sim, rank: int, field: str = "residual", kind: str = "memory") -> np.ndarray:
    return sim.runs[rank].state_dict()["tensors"]["w"][kind][field].copy()
