"""A fuzzer: cases drawn from a kind and a number, each of which must end in a result or in an error of grace.

`python -m tests.support.fuzz KIND NUMBER [COUNT]` repeats the case that a failed test names, or runs a range of cases.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

import grace
from grace.core.config.config import make_config
from grace.core.config.registry import communicators, compressors, fields_of, memories
from grace.core.errors import GraceError, PayloadError, StateError
from grace.core.methods.capabilities import Tuning
from grace.core.methods.compressor import Compressor
from grace.core.ops.composites import ArrayOps
from grace.core.plan.plan import make_plans
from grace.core.spec import TensorSpec
from grace.core.wire.codings import CODECS, NAMES, Coding, valid
from grace.core.wire.layout import GatherLayout
from grace.testing.harness import Exchange, draw, exchange, host, learnt
from tests.support import covering
from tests.support.registered import all_compressors, ops_of

# Kinds with the cases of an ordinary run and those under `--all`, which are 200,000 together. Each case of "checksum"
# must be refused. TensorFlow is slow at small operations; tests/core/test_damaged_payloads.py runs the finds on it
# every time.
COUNTS = {
    "wire numpy": (800, 80_000),
    "wire numpy-reference": (200, 30_000),
    "wire torch": (200, 20_000),
    "wire torch-reference": (60, 10_000),
    "wire tensorflow": (0, 200),
    "checksum numpy": (300, 9_000),
    "checksum torch": (100, 1_000),
    "state": (800, 18_000),
    "states of ranks": (200, 6_000),
    "config": (600, 24_000),
    "gradient": (100, 1_800),
}
# More than any case here needs, and less than a damaged length could ask for.
MEMORY = 1 << 30
SECONDS = 60
RANKS = 2
STEP = 3
Draw = random.Random


class CaseError(AssertionError):
    """Case that ended in neither a result nor an error of grace."""


def count(kind: str) -> int:
    """Return the number of cases of a kind in this run."""
    return COUNTS[kind][covering.ALL]


def run(kind: str, first: int, number: int) -> int:
    """Run cases and return how many ended in a result. Raises CaseError with the command that repeats the case."""
    word, _, backend = kind.partition(" ")
    case: Callable[[Draw], bool] = {
        "wire": partial(_wire, backend),
        "checksum": partial(_checksum, backend),
        "state": _state,
        "states": _states,
        "config": _config,
        "gradient": _gradient,
    }[word]
    results = 0
    with _limits(), warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for i in range(first, first + number):
            signal.alarm(SECONDS)
            try:
                results += case(Draw(f"{kind}/{i}"))
            except Exception as error:
                raise CaseError(
                    f"{type(error).__name__}: {error}\nrepeat it with: python -m tests.support.fuzz '{kind}' {i}"
                ) from error
            finally:
                signal.alarm(0)
    return results


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Let a case fail that takes much memory or time, instead of the machine."""

    def too_long(signum: int, frame: Any) -> None:
        raise TimeoutError(f"a case took more than {SECONDS} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as memory:
        used = int(memory.read().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGALRM, too_long)
    # A sanitizer reserves terabytes of addresses and has a limit of its own.
    if used < 1 << 40:
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


# --- wire buffers -------------------------------------------------------------------------------------------------

SPECS = (TensorSpec("w", (12, 25)), TensorSpec("w", (77,)), TensorSpec("w", (24, 40), "float64"), TensorSpec("w", ()))


class Bucket(NamedTuple):
    """Payloads of one method on all ranks, and their good buffers."""

    compressor: Compressor
    layout: GatherLayout
    made: Exchange
    buffers: list[bytes]


@cache
def _methods() -> list[tuple[Compressor, TensorSpec, str]]:
    """Return every method of the registry and every extra configuration, with the tensors and codings it can have."""
    return [
        (compressor, spec, coding)
        for compressor in all_compressors()
        for spec in SPECS
        if fits(compressor, spec)
        for coding in ("none", "delta", "golomb", *CODECS, "smallest")
        if coding == "none" or any(coding in valid(f) and f.wire for f in compressor.wire(spec))
    ]


def fits(compressor: Compressor, spec: TensorSpec) -> bool:
    """Return whether the method can compress the tensor."""
    return compressor.unfit(spec) is None


@cache
def _bucket(backend: str, index: int, checked: bool = False) -> Bucket:
    compressor, spec, coding = _methods()[index]
    ops = ops_of(backend)
    fields = [f._replace(coding=Coding(coding).of(f) or "none") for f in compressor.wire(spec)]
    layout = GatherLayout([spec], [fields], [True], checked)
    made = exchange(compressor, ops, spec, [draw(spec, rank) for rank in range(RANKS)], step=STEP)
    buffers = [bytes(host(ops, layout.encode(ops, [payload], [False], STEP))) for payload in made.payloads]
    return Bucket(compressor, layout, made, buffers)


def _wire(backend: str, rng: Draw) -> bool:
    bucket = _bucket(backend, rng.randrange(len(_methods())))
    buffers = list(bucket.buffers)
    rank = rng.randrange(RANKS)
    for _ in range(rng.choice((1, 1, 2))):
        buffers[rank] = _damaged(rng, buffers[rank], bucket.layout, backend)
    ops, at = ops_of(backend), bucket.made.sites[0]
    try:
        received = bucket.layout.decode(ops, _array(ops, b"".join(buffers)), RANKS, STEP)
        payloads = [{**own, **got} for own, got in zip(bucket.made.payloads, received.payloads[0], strict=True)]
        for merged in (bucket.compressor.merge(payloads, at), bucket.compressor.decompress(payloads[rank], at)):
            assert (ops.dtype(merged), tuple(merged.shape)) == (at.spec.work_dtype, (at.spec.numel,))
        learnt(bucket.compressor, payloads, at)
        if isinstance(bucket.compressor, Tuning):
            bucket.compressor.tally(payloads, at)
    except GraceError:
        return False
    return True


def _checksum(backend: str, rng: Draw) -> bool:
    bucket = _bucket(backend, rng.randrange(len(_methods())), checked=True)
    rank, good = rng.randrange(RANKS), bucket.buffers
    buffers = list(good)
    while b"".join(buffers) == b"".join(good):
        buffers[rank] = _damaged(rng, good[rank], bucket.layout, backend)
    ops = ops_of(backend)
    try:
        bucket.layout.decode(ops, _array(ops, b"".join(buffers)), RANKS, STEP)
    except PayloadError:
        return False
    return True


def _array(ops: ArrayOps, data: bytes) -> Any:
    return ops.cast(np.frombuffer(data, np.uint8).copy(), "uint8")


def _damaged(rng: Draw, good: bytes, layout: GatherLayout, backend: str) -> bytes:
    data = bytearray(good)
    kind = rng.choice(("flip", "cut", "grow", "noise", "word", "header", "header", "header", "splice"))
    if kind == "flip":
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[rng.randrange(len(data)) :]
    elif kind == "grow":
        data += rng.randbytes(rng.randint(1, 64))
    elif kind == "noise":
        data[:] = rng.randbytes(len(data))
    elif kind == "splice":
        other = _bucket(backend, rng.randrange(len(_methods()))).buffers[0]
        at = rng.randrange(len(data))
        data = data[:at] + other[at:]
    else:
        words = len(layout.counts) + len(layout._coded) + 1
        start = layout._counts_offset // 4 + rng.randrange(words) if kind == "header" else rng.randrange(len(data) // 4)
        old = int.from_bytes(data[4 * start : 4 * start + 4], "little", signed=True)
        value = rng.choice(
            (old - 1, old + 1, 0, 1, -1, -3, 4, 5, 9, 299, 300, 301, 960, 2**29, 2**30, rng.getrandbits(31))
        )
        data[4 * start : 4 * start + 4] = (value & 0xFFFFFFFF).to_bytes(4, "little")
    # Further edits need a word to change.
    return bytes(data) if len(data) >= 4 else good


# --- states of checkpoints ----------------------------------------------------------------------------------------

TENSORS = {"a": (20, 30), "b": (20, 30)}
STATES: tuple[dict[str, Any], ...] = (
    {"compressor": "topk"},
    {"compressor": "topk", "lr_correction": True},
    {"compressor": "powersgd"},
    {"compressor": "gradzip"},
    {"compressor": "dgc"},
    {"compressor": "gradiveq", "slice_size": 30, "components": 2, "training_steps": 2, "compressed_steps": 1},
    {"compressor": "lpc", "memory": "svrg"},
    {"compressor": "qsgd", "memory": "diana"},
    {"compressor": "qsgd", "memory": "dore", "communicator": "two_shot"},
    {"compressor": "efsignsgd", "memory": "shared_momentum"},
    {"compressor": "hardthreshold", "compress_ratio": 0.1},
    {"compressor": "signum"},
    {"compressor": "variance", "memory": "variance"},
    {"compressor": "topk", "schedule": [{"step": 2, "compressor": "qsgd"}]},
)


@cache
def _trained(index: int) -> tuple[grace.Simulation, dict[str, Any], Any]:
    """Return a simulation at step 0, a state to load into it, and its contents now."""
    sim = grace.Simulation(1, TENSORS, {"granularity": "layer", "default_rules": False, **STATES[index]})
    _train(sim)
    state = copy.deepcopy(sim.runs[0].state_dict())
    sim.runs[0].reset()
    return sim, state, _contents(sim.runs[0].state_dict())


def _train(sim: grace.Simulation) -> None:
    gradients = {name: np.full(shape, 0.5, np.float32) for name, shape in TENSORS.items()}
    sim.step([gradients] * sim.size, lr=0.1)


def _state(rng: Draw) -> bool:
    sim, good, before = _trained(rng.randrange(len(STATES)))
    state, run = copy.deepcopy(good), sim.runs[0]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if isinstance(state, dict):
            state = _edited(rng, state)
    try:
        run.load_state_dict(state, lambda saved, current: np.array(saved, current.dtype))
    except StateError:
        assert _contents(run.state_dict()) == before, "half of a state was loaded"
        return False
    try:
        _train(sim)
    except GraceError:
        return False
    finally:
        sim.network.buffers.clear()
        run.reset()
    return True


@cache
def _trained_on(index: int, saved: int, size: int) -> tuple[grace.Simulation, list[Any], Any]:
    """Return a simulation of `size` ranks at step 0, the states of `saved` ranks to load, and its contents now."""
    config = {"granularity": "layer", "default_rules": False, **STATES[index]}
    before, sim = (grace.Simulation(n, TENSORS, config) for n in (saved, size))
    _train(before)
    return sim, copy.deepcopy(before.state_dict()["ranks"]), _contents(sim.state_dict())


def _states(rng: Draw) -> bool:
    sim, good, before = _trained_on(rng.randrange(len(STATES)), rng.choice((1, 2, 3)), rng.choice((1, 2, 3)))
    states = copy.deepcopy(good)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rank = rng.randrange(len(states))
        states[rank] = _edited(rng, states[rank]) if isinstance(states[rank], dict) else _rubbish(rng)
    try:
        sim.load_state_dict(states)
        _train(sim)
    except StateError:
        assert _contents(sim.state_dict()) == before, "half of a list of states was loaded"
        return False
    except GraceError:
        return False
    finally:
        sim.network.drop()
        for run in sim.runs:
            run.reset()
    return True


def _contents(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _contents(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_contents(value) for value in state]
    return (state.dtype, state.tobytes()) if isinstance(state, np.ndarray) else state


def _edited(rng: Draw, state: dict[Any, Any]) -> Any:
    """Return a nested mapping after one edit at a random depth."""
    if not state or rng.random() < 0.02:
        return _rubbish(rng)
    key = rng.choice(list(state))
    inner = state[key]
    if isinstance(inner, dict) and rng.random() < 0.8:
        state[key] = _edited(rng, inner)
        return state
    edit = rng.choice(("delete", "rename", "add", "replace", "replace", "array", "array"))
    if edit in ("delete", "rename"):
        del state[key]
    if edit in ("rename", "add"):
        state[rng.choice((f"{key} ", 7, None, ("a",), "residual", "step"))] = inner
    elif edit == "replace":
        state[key] = _rubbish(rng)
    elif edit == "array" and isinstance(inner, np.ndarray) and inner.ndim and inner.dtype.kind in "fi":
        state[key] = _other_array(rng, inner)
    elif edit == "array":
        state[key] = rng.choice((0, 1, 2, 3, 5, -1, 2**31, 2**62, 2**63, 2**64, np.int64(1), True))
    return state


def _other_array(rng: Draw, x: np.ndarray) -> Any:
    change = rng.choice(("dtype", "order", "shape", "grow", "cut", "values", "object", "steps", "scalar"))
    if change == "dtype":
        return x.astype(rng.choice(("float16", "float64", "int64", "int8", "complex64", "bool", "S4")))
    if change == "order":
        return x.astype(x.dtype.newbyteorder())
    if change == "shape":
        return x[None]
    if change == "grow":
        return np.concatenate([x, x])
    if change == "cut":
        return x[:-1]
    if change == "values":
        return np.full_like(
            x, rng.choice((0, 1, -1, 100, 2**31)) if x.dtype.kind == "i" else rng.choice((np.nan, np.inf, 1e38))
        )
    if change == "object":
        return x.astype(object)
    return np.repeat(x, 2, axis=0)[::2] if change == "steps" else x.reshape(-1)[:1].sum()


def _rubbish(rng: Draw) -> Any:
    return rng.choice(
        (
            None,
            True,
            0,
            1,
            -1,
            2**70,
            1.5,
            float("nan"),
            "",
            "x",
            b"\0",
            [],
            [1],
            (),
            {},
            {"a": 1},
            {1: {}},
            set(),
            object,
        )
        + (np.zeros(0), np.zeros(600, "f4"), np.array("x"), np.array([{}], object), np.float32(1), range(3), 10**400)
    )


# --- configurations -----------------------------------------------------------------------------------------------


@cache
def _words() -> tuple[list[str], list[Any]]:
    """Return the keys that a configuration may have, and values: valid ones of some keys, and rubbish."""
    parts = [registry.get(name) for registry in (compressors, memories, communicators) for name in registry]
    keys = {key for part in parts for key in fields_of(part)}
    keys |= set(make_config({"compressor": "topk"}).to_dict()) | {
        "warmup_steps",
        "coding",
        "communicator",
        "memory",
        "compressor",
    }
    names = [*compressors, *memories, *communicators, *NAMES]
    return sorted(keys), names


def _config(rng: Draw) -> bool:
    given = _table(rng, 2)
    if rng.random() < 0.9:
        given["compressor"] = rng.choice((*compressors, {"name": rng.choice(list(compressors))}))
    try:
        config = make_config(given)
        assert make_config(config.to_dict()) == config
        json.dumps(config.to_dict())
        make_plans([TensorSpec("w", (12, 25)), TensorSpec("v", (9,), "float16")], config)
    except GraceError:
        return False
    return True


def _table(rng: Draw, depth: int) -> dict[Any, Any]:
    keys, _ = _words()
    return {
        rng.choice(keys) if rng.random() < 0.95 else _key(rng): _value(rng, depth) for _ in range(rng.randint(0, 4))
    }


def _key(rng: Draw) -> Any:
    return rng.choice((None, 1, "", "name", "match", "step", "topkk", ("a",), b"x", True))


def _value(rng: Draw, depth: int) -> Any:
    kind = rng.randrange(6)
    if kind == 0 and depth:
        return _table(rng, depth - 1) | rng.choice(
            ({}, {"name": rng.choice(_words()[1])}, {"step": rng.randint(-1, 9)}, {"match": "*"})
        )
    if kind == 1 and depth:
        return [_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    if kind == 2:
        return rng.choice(_words()[1])
    if kind == 3:
        return rng.choice((0, 1, 2, 3, 7, 16, 255, 65536, -1, 2**31, 2**63, 2**64, 10**400, True, False))
    if kind == 4:
        return rng.choice(
            (0.0, 0.01, 0.5, 1.0, 2.0, -0.5, 1e-300, 1e300, float("nan"), float("inf"), np.float32(0.5), np.int64(3))
        )
    return _rubbish(rng)


# --- gradients ----------------------------------------------------------------------------------------------------

SHAPES = ((), (0,), (1,), (7,), (0, 4), (1, 1), (12, 25), (3, 1, 40), (257,), (5000,))
VALUES = (0.0, -0.0, 1.0, -2.0, 1e-45, 5e-324, 1e-30, 6e4, 3e38, 1e308, float("nan"), float("inf"), float("-inf"))


def _gradient(rng: Draw) -> bool:
    """Exchange gradients of odd shapes and values; all ranks must end with the same bits."""
    dtypes = ("float32", "float32", "float16", "bfloat16", "float64")
    specs = [TensorSpec(name, rng.choice(SHAPES), rng.choice(dtypes)) for name in "abc"[: rng.randint(1, 3)]]
    config = {
        "compressor": compressors.config_of(rng.choice(all_compressors())),
        "default_rules": rng.random() < 0.3,
        "granularity": rng.choice(("layer", "bucket", "model")),
        "index_coding": rng.choice(("int32", "delta", "golomb", "smallest")),
    }
    if rng.random() < 0.3:
        config |= {"coding": rng.choice(NAMES), "communicator": "allgather"}
    try:
        sim = grace.Simulation(RANKS, specs, config)
    except GraceError:
        return False
    ops = ops_of("numpy")
    for step in range(2):
        drawn = [{spec.name: _drawn(rng, spec, ops) for spec in specs} for _ in range(RANKS)]
        if rng.random() < 0.1:
            spec = rng.choice(specs)
            drawn[0][spec.name] = _misshapen(rng, drawn[0][spec.name])
        try:
            merged = sim.step(drawn, lr=0.1)
        except GraceError:
            return step > 0
        for spec in specs:
            one, two = (mine[spec.name] for mine in merged)
            assert (ops.dtype(one), tuple(one.shape)) == (spec.dtype, spec.shape), spec
            assert one.tobytes() == two.tobytes(), f"the ranks differ: {spec}, {config}"
    return True


def _drawn(rng: Draw, spec: TensorSpec, ops: ArrayOps) -> Any:
    numbers = np.random.default_rng(rng.getrandbits(32))
    x = numbers.standard_normal(spec.numel) * rng.choice((1.0, 1.0, 1e-30, 1e30, 0.0))
    if rng.random() < 0.5:
        x[numbers.random(spec.numel) < rng.choice((0.01, 0.5, 1.0))] = rng.choice(VALUES)
    return np.reshape(ops.cast(x, spec.dtype), spec.shape)


def _misshapen(rng: Draw, x: Any) -> Any:
    return rng.choice(
        (x[None], x.reshape(-1)[:-1], np.concatenate([x.reshape(-1)] * 2), x.astype(np.float64), x.astype(np.int32))
    )


if __name__ == "__main__":
    began = time.process_time()
    kind, first, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1
    found = run(kind, first, number)
    print(f"{found} of {number} cases had a result; {time.process_time() - began:.1f} s of processor time")
