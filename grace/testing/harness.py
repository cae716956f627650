"""Shared helpers of the contracts: difficult inputs, and a step's calls of a compressor without a step."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, TypeVar

import numpy as np

from grace.core.config.config import Method
from grace.core.config.registry import communicators, compressors, memories
from grace.core.methods.capabilities import Learning
from grace.core.methods.compressor import Compressor, usual_communicator
from grace.core.methods.memory import Memory
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.ops.numpy_ops import NumpyOps
from grace.core.plan.unit import Assignment, Unit, whole
from grace.core.session.simulation import negotiate, run_programs
from grace.core.spec import Array, Field, Payload, State, TensorSpec
from grace.core.state.states import initial
from grace.core.step.unit_step import UnitStep
from grace.core.transport.collectives import Program
from grace.core.transport.transport import Transport
from grace.core.wire.layout import GatherLayout

FRAMEWORKS = tuple(name for name in ("numpy", "torch", "tensorflow") if importlib.util.find_spec(name) is not None)
# The seed of the run in which components are tested.
SEED = 0
_HOST = NumpyOps()
T = TypeVar("T")
C = TypeVar("C", bound=Compressor)
# Limits per dtype of the gradient. 16-bit gradients are decoded in float32; only the inputs have 16 bits.
LARGEST = {"float16": 6e4, "bfloat16": 1e30, "float32": 1e30, "float64": 1e30}
SMALLEST = {"float16": 6e-8, "bfloat16": 1e-40, "float32": 1.4e-45, "float64": 5e-324}
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
_NORMAL = {"float32": 2.0**-126, "float64": 2.0**-1022}


def host(ops: ArrayOps, x: Array) -> np.ndarray[Any, Any]:
    """Return a NumPy copy of an array of any framework, dtype and shape."""
    data = ops.to_bytes(x)
    # NumPy converts TensorFlow's tensors itself, and TensorFlow's own `cpu` is deprecated.
    data = np.asarray(data if ops.device == "cpu" else data.cpu()).copy()
    return np.reshape(_HOST.from_bytes(data, ops.dtype(x)), tuple(x.shape))


def array(ops: ArrayOps, values: Any, dtype: str) -> Array:
    """Return a new array of a framework with these values."""
    # The array is made from bytes, because a cast by the framework may flush denormals.
    data = _HOST.to_bytes(_HOST.cast(np.array(values, np.float64), dtype))
    return ops.reshape(ops.from_bytes(ops.cast(data, "uint8"), dtype), np.shape(values))


@cache
def flushed_below(ops: ArrayOps, dtype: str) -> float:
    """Return the magnitude below which the framework flushes values to 0 in arithmetic; 0 if it keeps denormals.

    TensorFlow flushes denormals, in eager mode and in graphs. Kernels keep them, and so do operations that only copy or
    select elements.
    """
    smallest = array(ops, [SMALLEST[dtype]], dtype)
    return 0.0 if host(ops, smallest + smallest).any() else _NORMAL[dtype]


def wide(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return x in float64, in which the squares of all float32 values are finite."""
    return x.astype(np.float64)


def same(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Return whether two arrays are equal bit for bit, NaN included."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def draw(spec: TensorSpec, seed: int) -> np.ndarray[Any, Any]:
    """Return a flat, normally distributed gradient, rounded to the tensor's dtype and stored in its working dtype."""
    return _drawn(spec.numel, spec.dtype, spec.work_dtype, seed).copy()


# Tests of many methods draw the same gradients.
@lru_cache(maxsize=1024)
def _drawn(n: int, dtype: str, work_dtype: str, seed: int) -> np.ndarray[Any, Any]:
    values = np.random.default_rng(seed).standard_normal(n)
    return _HOST.cast(_HOST.cast(values, dtype), work_dtype)


def inputs(spec: TensorSpec) -> dict[str, np.ndarray[Any, Any]]:
    """Return gradients by name: an ordinary one, and several on which compressors tend to fail."""
    n = spec.numel
    normal, last = draw(spec, 0).astype(np.float64), np.zeros(n)
    last[-1:] = -3.0
    values = {
        "normal": normal,
        "zeros": np.zeros(n),
        "equal": np.full(n, -0.5),
        "one element": last,
        "alternating": np.where(np.arange(n) % 2, 1.0, -1.0),
        "heavy tail": normal**9,
        "shifted": normal + 10.0,
        "denormal": np.where(np.arange(n) % 3, SMALLEST[spec.work_dtype], -7 * SMALLEST[spec.work_dtype]),
        "huge": normal.clip(-1, 1) * LARGEST[spec.dtype],
        "huge and tiny": np.where(np.arange(n) % 5, 1e-30, LARGEST[spec.dtype]),
    }
    limit = LARGEST[spec.dtype]
    rounded = {k: _HOST.cast(_HOST.cast(v.clip(-limit, limit), spec.dtype), spec.work_dtype) for k, v in values.items()}
    # For tensors of one element or none, many of these are equal.
    unique = {v.tobytes(): k for k, v in reversed(rounded.items())}
    return {k: v for k, v in rounded.items() if unique[v.tobytes()] == k}


@dataclass
class Exchange:
    """One tensor of one step on all ranks: inputs, payloads and sites."""

    ops: ArrayOps
    xs: list[Array]
    payloads: list[Payload]
    sites: list[Site]


def unfused(compressor: C) -> C:
    """Return an equal compressor of a class of its own, which has no fusions."""
    result = copy.copy(compressor)
    object.__setattr__(result, "__class__", type(type(compressor).__name__, (type(compressor),), {}))
    return result


# Contracts ask for the same parts tens of thousands of times, and a registry checks the options of each one it makes.
_communicator = cache(communicators.make)
_memory = cache(memories.make)


def registered() -> Iterator[Compressor]:
    """Yield the example of every registered compressor; that of a class is made once."""
    for name in compressors:
        yield _example(name, compressors.get(name))


@cache
def _example(name: str, cls: type[Compressor]) -> Compressor:
    """Return the example of a name, as long as it is that of this class."""
    return compressors.example(name)


def unit_of(compressor: Compressor, memory: Memory, spec: TensorSpec) -> Unit:
    """Return a tensor as a unit of a compressor with this memory and the compressor's own communicator."""
    communicator = _communicator(usual_communicator(compressor))
    return whole(Assignment(spec, Method(compressor, memory, communicator)))


def exchange(
    compressor: Compressor,
    ops: ArrayOps,
    spec: TensorSpec,
    xs: Sequence[np.ndarray[Any, Any]],
    *,
    step: int = 0,
    state: State | None = None,
) -> Exchange:
    """Compress one gradient per rank as a step does, including the negotiation, but without memory."""
    unit = unit_of(compressor, _memory("none"), spec)
    steps = []
    for rank, x in enumerate(xs):
        states = initial(unit, ops, SEED, rank)
        if state is not None:
            states["compressor"] = state
        steps.append(UnitStep(unit, states, ops, seed=SEED, step=step, rank=rank, size=len(xs)))
        steps[-1].begin(array(ops, x, spec.work_dtype))
    negotiate(steps)
    return Exchange(ops, [s.x for s in steps], [s.payload for s in steps], [s.site for s in steps])


def learnt(compressor: Compressor, payloads: Sequence[Payload], at: Site) -> State:
    """Return the state that a compressor learns from payloads; that of the site if it does not learn."""
    return compressor.learn(payloads, at) if isinstance(compressor, Learning) else at.state


def run_program(program: Program[T], transport: Transport, name: str) -> T:
    """Run a program of rounds over a transport to its end, and return its result; blocks."""
    return run_programs([program], [transport], name)[0]


def payload_on_host(ops: ArrayOps, payload: Payload) -> dict[str, np.ndarray[Any, Any]]:
    """Return NumPy copies of a payload's fields."""
    return {name: host(ops, value) for name, value in payload.items()}


def overflowed(ops: ArrayOps, payload: Payload, fields: Sequence[Field]) -> bool:
    """Return whether a float field of the payload is not finite. A step then changes no state of this tensor."""
    floats = [f.name for f in fields if f.dtype.startswith(("float", "bfloat"))]
    return not all(np.isfinite(wide(host(ops, payload[name]))).all() for name in floats)


def wire_bytes(compressor: Compressor, ops: ArrayOps, spec: TensorSpec, x: np.ndarray[Any, Any]) -> bytes:
    """Return the bytes that one rank passes to an allgather of this tensor alone."""
    layout = GatherLayout([spec], [compressor.wire(spec)], [True])
    ex = exchange(compressor, ops, spec, [x])
    return bytes(host(ops, layout.encode(ops, ex.payloads, [False], 0)))
