"""One rank that runs the scenarios of grace.mpi, and these scenarios."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import grace
from grace import mpi
from grace.advice import advise, probe
from grace.advice.candidates import Risk
from grace.core.compressors.topk import TopK
from grace.core.config.registry import About, communicators, compressors
from grace.core.guards import agreement, waiting
from grace.core.memories.residual import Residual
from grace.core.ops import get_ops
from grace.core.plan.plan import make_plan
from grace.core.spec import HALF_DTYPES, ITEMSIZE, Ranks
from grace.core.transport.collectives import copies, sum_halves
from grace.core.transport.transport import Handle
from grace.testing.harness import array, run_program, same
from grace.testing.transport_contract import run_transport_contract
from tests.support import cases, half_precision, nodes, registered, steps
from tests.support.promises import TENSORS, Run, gradients, joined, kept
from tests.support.rank import serve
from tests.support.records import Records

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()
DTYPES = {name: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in ITEMSIZE}


def outcome(call: Any) -> str:
    """Return the error of a call as text, empty if there is none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def make_exchange(tensors: Any, config: Any, **options: Any) -> mpi.MPIExchange:
    """Return an exchange, which compares states before every second step unless the configuration says else."""
    if isinstance(config, dict):
        config = {"check_replicas": 2, **config}
    return mpi.MPIExchange(tensors, config, **options)


def digest(merged: dict[str, np.ndarray]) -> str:
    return hashlib.sha256(b"".join(merged[name].tobytes() for name in sorted(merged))).hexdigest()


COMPRESSORS = {registered.name(compressor): compressor for compressor in registered.all_compressors()}
STEPS = 3


def _config(row: dict[str, Any]) -> grace.Config:
    """Return the configuration of a row. The ranks compare their states before the last step."""
    name = row["compressor"]
    if name not in COMPRESSORS:
        parts = grace.make_config(cases.config_of({"method": name, **row})).method
        return steps.config(parts, check_replicas=2, **steps.CUTS[row["cut"]])
    parts = registered.default_method(COMPRESSORS[name])
    if row["communicator"] != "default":
        parts = grace.Method(parts.compressor, parts.memory, communicators.make(cases.communicator_of(row)))
    return steps.config(parts, check_replicas=2, **steps.CUTS.get(row["cut"], {}))


def _gradients(step: int, rank: int) -> dict[str, np.ndarray]:
    ops = get_ops("numpy")
    return {s.name: array(ops, steps.gradient(s, step, rank), s.dtype).reshape(s.shape) for s in steps.MIXED}


def exchanges(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Some steps of every method, on all kinds of tensors, by MPI and simulated.

    Every rank gets the same results, so that each simulates only some of the exchanges, of all ranks.
    """
    results: dict[str, Any] = {}
    for number, row in enumerate(rows):
        label, config = f"{row['compressor']}/{row['communicator']}/{row['cut']}", _config(row)
        plan = make_plan(steps.MIXED, config, ranks=Ranks(SIZE))
        refused = outcome(lambda p=plan: [item.compressor.check_ranks(SIZE) for item in p.assignments])
        if refused:
            results[label] = {"refused": refused, "exchange": outcome(lambda c=config: make_exchange(steps.MIXED, c))}
            continue
        exchange = make_exchange(steps.MIXED, config)
        sent = spy(exchange.transport)
        merged, lengths = [], []
        for step in range(STEPS):
            sent.clear()
            merged.append(exchange(_gradients(step, RANK)))
            lengths.append([sum(sent), exchange.stats()["wire_bytes"]])
        results[label] = {
            "digests": [digest(m) for m in merged],
            "bytes": lengths,
            "summed": any(p.communicator.adds or p.proposed for p in exchange.plan.assignments),
        }
        if number % SIZE == RANK:
            results[label] |= _simulated(config, exchange.plan.assignments, merged)
        exchange.close()
    return results


def _simulated(config: grace.Config, parts: Any, merged: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    """Return the differences between the simulated steps and the results of this rank."""
    simulation = grace.Simulation(SIZE, steps.MIXED, config)
    equal, worst, lengths = True, {"wide": 0.0, "half": 0.0, "half sum": 0.0}, []
    for step, mine in enumerate(merged):
        expected = simulation.step([_gradients(step, rank) for rank in range(SIZE)])[RANK]
        lengths.append([simulation.runs[RANK].stats()["wire_bytes"]] * 2)
        for item in parts:
            name, theirs = item.spec.name, expected[item.spec.name]
            equal = equal and same(mine[name], theirs)
            size = float(np.abs(theirs.astype(np.float64)).max(initial=1e-30))
            difference = np.abs(mine[name].astype(np.float64) - theirs.astype(np.float64)).max(initial=0.0)
            width = "half" if item.spec.dtype in HALF_DTYPES else "wide"
            width = "half sum" if item.half_sum else width
            worst[width] = max(worst[width], float(difference) / size)
    return {"equal": equal, "worst": worst, "simulated bytes": lengths}


def spy(transport: mpi.MPITransport) -> list[int]:
    """Record the bytes of every array passed to a collective from now on, except for comparisons of replicas."""
    sent: list[int] = []
    start = transport.start

    def watched(collective: Any, name: str) -> Any:
        if not name.endswith("/replicas"):
            parts = collective.buffers
            leaving = parts if collective.kind != "alltoall" else [*parts[:RANK], *parts[RANK + 1 :]]
            # Only one of the broadcasts sends the rank's own data.
            mine = collective.kind != "broadcast" or collective.root == RANK
            sent.append(sum(part.nbytes for part in leaving) if mine else 0)
        return start(collective, name)

    transport.start = watched
    return sent


def reductions() -> dict[str, Any]:
    """Compare sums and maxima of every dtype and of unusual lengths with float64."""
    transport, results = mpi.MPITransport(), {}
    for name, dtype in DTYPES.items():
        for n in (0, 1, 5, 1000):
            everyone = [np.random.default_rng((n, rank)).integers(-8, 9, n) for rank in range(SIZE)]
            floats = name.startswith(("float", "bfloat"))
            # Values whose sums need more than 8 bits of mantissa.
            given = [(x / 7 if floats else abs(x)).astype(dtype) for x in everyone]
            wide = np.stack([x.astype(np.float64) for x in given])
            total = _total(transport, given[RANK].copy())
            # There is no maximum of 16-bit floats.
            known = given[RANK].astype(np.float32 if name in HALF_DTYPES else dtype)
            largest = transport.allreduce(known, op="max", name="m").wait()
            results[f"{name}/{n}"] = {
                "sum": bool((total == wide.sum(axis=0).astype(dtype)).all()),
                "close": bool(np.allclose(total.astype(np.float64), wide.sum(axis=0), rtol=1e-6, atol=1e-6)),
                "max": bool((largest == wide.max(axis=0).astype(known.dtype)).all()),
                "dtypes": [total.dtype == dtype, largest.dtype == known.dtype],
                "digest": hashlib.sha256(total.tobytes()).hexdigest(),
            }
    # Rounding after every addition would lose these: 1 + 2^-11 is 1 in float16, and 1 + 2^-8 is 1 in bfloat16.
    for name, small in (("float16", 2.0**-11), ("bfloat16", 2.0**-8)):
        x = np.full(3, 1.0 if RANK == 0 else small, DTYPES[name])
        results[f"{name} rounds once"] = _total(transport, x).astype(float).tolist()
    x = np.full(3, 60000.0, np.float16)
    results["overflow"] = bool(np.isinf(_total(transport, x)).all())
    return results


def _total(transport: Any, x: np.ndarray) -> np.ndarray:
    if x.dtype.name in HALF_DTYPES:
        return run_program(sum_halves(get_ops("numpy"), x, RANK, SIZE, 1.0), transport, "halves")
    return transport.allreduce(x, op="sum", name="s").wait()


def transport_contract() -> list[str]:
    """Run the contract of transports with the one of this rank. Return the names of its tests."""
    return run_transport_contract(mpi.MPITransport(), get_ops("numpy"))


def ranks_of_nodes() -> dict[str, Any]:
    """Return the ranks on a node that the transport finds here, and on other nodes, where an exchange needs them."""
    results: dict[str, Any] = {"here": mpi.MPITransport().local_size}
    config = {"compressor": "topk", "communicator": "hierarchical", "default_rules": False}
    for placed in nodes.FOUND[SIZE]:
        with mock.patch.object(MPI, "Get_processor_name", lambda mine=placed[RANK]: mine):
            found = mpi.MPITransport().local_size
            results[placed] = {"local_size": found, "error": outcome(lambda: mpi.MPIExchange({"w": (40, 32)}, config))}
    return results


def half_sums() -> dict[str, Any]:
    """Compute sums and means of 16-bit floats."""
    transport = mpi.MPITransport()

    def reduce(x: np.ndarray, op: str, name: str) -> Callable[[], np.ndarray]:
        program = sum_halves(get_ops("numpy"), x, RANK, SIZE, 1 / SIZE if op == "mean" else 1.0)
        return lambda: run_program(program, transport, name)

    return half_precision.reductions(reduce, list(range(SIZE)), RANK)


def lengths() -> dict[str, Any]:
    """Gather buffers whose lengths only their ranks know, some of them empty."""
    transport, results = mpi.MPITransport(), {}
    for name, dtype in DTYPES.items():
        for label, length in {"rank": RANK, "reversed": SIZE - 1 - RANK, "none": 0, "one": 7 * (RANK == 1)}.items():
            got = transport.allgather(np.full(length, RANK, dtype), name="g").wait()
            everyone = {
                "rank": list(range(SIZE)),
                "reversed": list(range(SIZE - 1, -1, -1)),
                "none": [0] * SIZE,
                "one": [7 * (rank == 1) for rank in range(SIZE)],
            }[label]
            expected = [rank for rank, n in enumerate(everyone) for _ in range(n)]
            results[f"{name}/{label}"] = got.astype(int).tolist() == expected and got.dtype == dtype
    # Every second element, so the array is not contiguous.
    strided = np.arange(10, dtype=np.float32)[::2] + RANK
    got = transport.allgather(np.repeat(strided, 2)[::2], name="strided").wait()
    results["strided"] = got.tolist() == [float(2 * i + rank) for rank in range(SIZE) for i in range(5)]
    for root in range(SIZE):
        for n in (0, 3):
            got = transport.broadcast(np.full(n, RANK, np.int32), root=root, name="b").wait()
            results[f"broadcast/{root}/{n}"] = got.tolist() == [root] * n
    # Only rank 0's gradient reaches this threshold, and no gradient in the second step.
    config = {"compressor": "threshold", "threshold": 1.0, "memory": "none", "default_rules": False}
    exchange = make_exchange({"w": (50,)}, config, average=False)
    for step, large in enumerate((True, False, True)):
        mine = RANK == 0 and large
        merged = exchange({"w": np.full(50, 2.0 if mine else 0.01, np.float32)})["w"]
        results[f"threshold/{step}"] = merged.tolist() == [2.0 * large] * 50
        results[f"bytes/{step}"] = exchange.stats()["tensors"]["w"]["wire_bytes"] == 50 * 8 * mine
    return {label: bool(value) for label, value in results.items()}


def waiting_orders() -> dict[str, Any]:
    """Start many collectives. The ranks wait for them in different orders."""
    transport = mpi.MPITransport()
    handles = {}
    for i in range(12):
        x = np.full(i + 1, RANK + i, [np.float16, np.float32, np.uint8][i % 3])
        if i % 4 == 3:
            handles[i] = transport.allgather(x[: RANK + 1], name=str(i))
        else:
            handles[i] = transport.allreduce(x, op="sum", name=str(i))
    order = list(handles)
    np.random.default_rng(RANK).shuffle(order)
    got = {i: handles[i].wait().astype(float).tolist() for i in order}
    sums = {i: [float(sum(rank + i for rank in range(SIZE)))] * (i + 1) for i in range(12)}
    gathered = {i: [float(rank + i) for rank in range(SIZE) for _ in range(min(rank + 1, i + 1))] for i in range(12)}
    return {str(i): got[i] == (gathered if i % 4 == 3 else sums)[i] for i in range(12)}


def differing_calls() -> dict[str, Any]:
    """Start different collectives on the ranks. All ranks get an error, and again at the next call."""
    last = RANK == SIZE - 1
    x = np.zeros(4, np.float32)
    calls = {
        "order": lambda t: [t.allreduce(x, op="sum", name=n) for n in (["b", "a"] if last else ["a", "b"])],
        "kind": lambda t: [t.allgather(x, name="a") if last else t.allreduce(x, op="sum", name="a")],
        "length": lambda t: [t.allreduce(x[: 2 if last else 4], op="sum", name="a")],
        "dtype": lambda t: [t.allgather(x.astype(np.int32) if last else x, name="a")],
        "operation": lambda t: [t.allreduce(x, op="max" if last else "sum", name="a")],
        "root": lambda t: [t.broadcast(x, root=1 if last else 0, name="a")],
        "one more": lambda t: [t.allreduce(x, op="sum", name="a"), *([t.allgather(x, name="c")] if last else [])],
    }
    results = {}
    for label, call in calls.items():
        transport = mpi.MPITransport()
        handles: list[Any] = []
        errors = [outcome(lambda c=call, t=transport, h=handles: h.extend(c(t)))]
        errors += [outcome(handle.wait) for handle in handles]
        if label == "one more":
            # The other ranks continue with another collective.
            errors += [outcome(lambda t=transport: t.allreduce(x, op="sum", name="d").wait())] if not last else []
        errors.append(outcome(lambda t=transport: t.allgather(x, name="afterwards")))
        results[label] = [error for error in errors if error]
    return results


def stalled() -> dict[str, Any]:
    """Delay one rank. The waiting ranks log a warning and then continue."""
    with Records() as records, mock.patch.object(waiting, "WARN_SECONDS", 0.2):
        if RANK == 1:
            time.sleep(0.7)
        transport = mpi.MPITransport()
        if RANK == 1:
            time.sleep(0.7)
        total = transport.allreduce(np.ones(1, np.float32), op="sum", name="late").wait()
    return {"total": float(total[0]), "messages": records.texts}


def different_configurations() -> dict[str, Any]:
    """Give one rank another configuration. Return the error of this rank for each case."""
    last = RANK == SIZE - 1
    shapes, topk = {"w": (40, 40), "v": (30,)}, {"compressor": "topk", "compress_ratio": 0.1}
    makes = {
        "option": lambda: make_exchange(shapes, {**topk, "compress_ratio": 0.2 if last else 0.1}),
        "method": lambda: make_exchange(shapes, {"compressor": "randomk" if last else "topk", "memory": "residual"}),
        "seed": lambda: make_exchange(shapes, {**topk, "seed": 1 if last else 0}),
        "shape": lambda: make_exchange({"w": (40, 41 if last else 40), "v": (30,)}, topk),
        "order": lambda: make_exchange(dict(reversed(shapes.items())) if last else shapes, topk),
        "average": lambda: make_exchange(shapes, topk, average=not last),
        "invalid": lambda: make_exchange(shapes, {**topk, "compress_ratio": 2.0 if last else 0.1}),
        "none": lambda: make_exchange(shapes, topk),
    }
    found = {label: outcome(make) for label, make in makes.items()}
    with pytest.MonkeyPatch.context() as patch:
        if last:
            patch.setattr(agreement, "WIRE_FORMAT", 0)
        found["wire format"] = outcome(lambda: mpi.MPIExchange(shapes, topk))
        patch.undo()
        if last:
            patch.setattr(compressors, "about", lambda name: About(payload_format=1 + (name == "signsgd")))
        found["format"] = outcome(lambda: make_exchange(shapes, {"compressor": "signsgd"}))
        patch.undo()
        if last:
            patch.setenv("GRACE_NATIVE", "0")
        for name in ("topk", "powersgd"):
            found[f"kernels, {name}"] = outcome(lambda n=name: make_exchange(shapes, {"compressor": n}))
    return found


def wrong_gradients() -> dict[str, Any]:
    """Pass wrong gradients on one rank. They are refused before anything is sent, and the next call works."""
    exchange = make_exchange({"w": (40, 40), "v": (30,)}, {"compressor": "topk", "default_rules": False})
    good = {"v": np.full(30, float(RANK), np.float32), "w": np.ones((40, 40), np.float32)}
    bad = {"missing": {"w": good["w"]}, "shape": {**good, "v": np.ones(31, np.float32)}, "unknown": {**good, "x": None}}
    bad["unknown"]["x"] = good["v"]
    bad["dtype"] = {**good, "v": np.ones(30, np.int32)}
    errors = {label: outcome(lambda g=g: exchange(g)) for label, g in bad.items()} if RANK == 0 else {}
    merged = exchange(good if RANK else dict(reversed(good.items())))
    exchange.close()
    return {
        "errors": errors,
        "digest": digest(merged),
        "closed": outcome(lambda: exchange(good)),
        "step": exchange.run.step,
    }


def learning_rates() -> dict[str, Any]:
    """Exchange at learning rates that change, by MPI and simulated, and leave the rate out once."""
    corrected = {"name": "residual", "lr_correction": True}
    config = {
        "compressor": {"name": "topk", "compress_ratio": 0.1},
        "memory": corrected,
        "communicator": {"name": "two_shot", "shard_memory": corrected},
        "default_rules": False,
    }
    exchange, simulation = make_exchange(TENSORS, config), grace.Simulation(SIZE, TENSORS, config)
    error = outcome(lambda: exchange(gradients(0, RANK)))
    merged = []
    for number, lr in enumerate([0.1, 0.1, 0.02, 0.5, 0.01]):
        mine = exchange(gradients(number, RANK), lr)
        merged.append(mine)
        expected = simulation.step([gradients(number, rank) for rank in range(SIZE)], lr)[RANK]
        assert all(np.allclose(mine[name], x, atol=1e-6) for name, x in expected.items()), number
    exchange.close()
    return {"error": error, "digests": [digest(m) for m in merged]}


def second_gradients() -> dict[str, Any]:
    """Exchange with second gradients, by MPI and simulated, and leave them out once."""
    config = {"compressor": "qsgd", "memory": {"name": "marina", "period": 3}, "default_rules": False}
    exchange, simulation = make_exchange(TENSORS, config), grace.Simulation(SIZE, TENSORS, config)
    merged, kinds, errors = [], [], []
    for number in range(6):
        full = exchange.full_round
        others = None if full else [gradients(100 + number, rank) for rank in range(SIZE)]
        if not full:
            errors.append(outcome(functools.partial(exchange, gradients(number, RANK))))
        mine = exchange(gradients(number, RANK), references=others and others[RANK])
        expected = simulation.step([gradients(number, rank) for rank in range(SIZE)], references=others)[RANK]
        assert all(np.allclose(mine[name], x, atol=1e-6) for name, x in expected.items()), number
        merged.append(mine)
        kinds.append(full)
    exchange.close()
    return {"errors": errors, "kinds": kinds, "digests": [digest(m) for m in merged]}


def scheduled() -> dict[str, Any]:
    """Return the method of every step of a schedule."""
    config = {"compressor": "none", "default_rules": False, "schedule": [{"step": 2, "compressor": "topk"}]}
    exchange = make_exchange({"w": (40, 50)}, config)
    methods = []
    for _ in range(3):
        exchange({"w": np.full((40, 50), RANK + 1.0, np.float32)})
        methods.append(exchange.stats()["tensors"]["w"]["compressor"])
    exchange.close()
    return {"methods": methods}


def resume() -> dict[str, Any]:
    """Run six steps, and three steps that are saved and continued by another exchange."""
    spec, results = {"w": (30, 20)}, {}
    config = {"compressor": "topk", "compress_ratio": 0.05, "default_rules": False}

    def run(exchange: mpi.MPIExchange, numbers: range) -> str:
        return "".join(
            digest(exchange({"w": np.random.default_rng((n, RANK)).normal(size=(30, 20)).astype(np.float32)}))
            for n in numbers
        )

    whole = run(make_exchange(spec, config), range(6))
    first = make_exchange(spec, config)
    begun = run(first, range(3))
    second = make_exchange(spec, config)
    results["mine"] = second.load_state_dict(first.state_dict())
    results["equal"] = begun + run(second, range(3, 6)) == whole
    # Only rank 0 loads: the stamps of the step differ.
    third = make_exchange(spec, config)
    if RANK == 0:
        third.load_state_dict(first.state_dict())
    results["partly"] = outcome(lambda: run(third, range(1)))
    return results


def outer_steps() -> dict[str, Any]:
    """Compare outer steps with a simulation; fail with a pending exchange, and resume from a checkpoint."""
    spec, results = {"w": (30, 20), "v": (40,), "b": ()}, {}
    config = {"compressor": "topk", "compress_ratio": 0.05, "default_rules": False, "communicator": "two_shot"}
    outer = {"every": 4, "lr": 0.7, "momentum": 0.9, "nesterov": True, "fragments": 2, "delay": 1, "alpha": 0.25}

    def inner(weights: Any, step: int, rank: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng((step, rank))
        return {k: w - np.float32(0.1) * (w - rng.normal(size=w.shape).astype(np.float32)) for k, w in weights.items()}

    start = {name: np.ones(shape, np.float32) for name, shape in spec.items()}
    exchange, simulation = make_exchange(spec, config, outer=outer), grace.Simulation(SIZE, spec, config, outer=outer)
    everyone = [start] * SIZE
    for each in (exchange, simulation):
        each.begin(start)
    mine, off, saved = start, [], []
    for step in range(9):
        saved.append((mine, exchange.state_dict()))
        if step == 4:
            # The first fragment, sent after two steps of this period, is applied with a share of the own weights.
            wrong = {**inner(mine, step, RANK), **({"v": np.zeros(3, np.float32)} if RANK == SIZE - 1 else {})}
            error = outcome(lambda w=wrong: exchange(w)) if RANK == SIZE - 1 else ""
            exchange.discard()
            results["error"] = error if RANK == SIZE - 1 else "shape (40,)"
        mine = exchange(inner(mine, step, RANK))
        everyone = simulation.step([inner(w, step, rank) for rank, w in enumerate(everyone)])
        off.append(digest(mine) != digest(everyone[RANK]))
    results["off"] = off
    results["resumed"] = []
    for begun, (weights, state) in enumerate(saved):
        other = make_exchange(spec, config, outer=outer)
        other.load_state_dict(state)
        for step in range(begun, 9):
            weights = other(inner(weights, step, RANK))
        results["resumed"].append(digest(weights) != digest(mine))
        other.close()
    results["missing"] = outcome(lambda: exchange({"w": mine["w"]}))
    return results


def outer_participation() -> dict[str, Any]:
    """Let a part of the ranks contribute; compare weights and bytes with a simulation of all ranks."""
    spec, results = {"w": (30, 20), "v": (40,), "b": ()}, {}
    start = {name: np.ones(shape, np.float32) for name, shape in spec.items()}
    half = {"every": 2, "participation": 0.5}
    cases = {"allgather": {**half, "delay": 1}, "two_shot": half, "broadcast": {**half, "delay": 1}}
    # Each rank decides itself.
    cases["relevance"] = {"every": 1, "relevance": 0.5}
    for name, outer in cases.items():
        communicator = "allgather" if name == "relevance" else name
        config = {"compressor": "qsgd", "default_rules": False, "communicator": communicator}
        exchange, simulation = (
            make_exchange(spec, config, outer=outer),
            grace.Simulation(SIZE, spec, config, outer=outer),
        )
        for each in (exchange, simulation):
            each.begin(start)
        everyone, off, sent = [start] * SIZE, [], []
        for step in range(9):
            rngs = [np.random.default_rng((step, rank)) for rank in range(SIZE)]
            moved = [
                {k: w + rng.normal(size=w.shape).astype(np.float32) for k, w in x.items()}
                for rng, x in zip(rngs, everyone, strict=True)
            ]
            mine, everyone = exchange(moved[RANK]), simulation.step(moved)
            off.append(digest(mine) != digest(everyone[RANK]))
            sent.append([each["wire_bytes"] for each in (exchange.stats(), simulation.stats(RANK))])
        results[name] = {"off": off, "sent": sent}
        exchange.close()
    return results


def replicas() -> dict[str, Any]:
    """Compare shared states every second step and weights by hand, and change each of them on the last rank."""
    tensors = {"w": (20, 10)}
    config = {"compressor": "powersgd", "default_rules": False}
    exchange = make_exchange(tensors, config)
    weights = {"w": np.ones(tensors["w"], np.float32)}
    results: dict[str, Any] = {"equal": outcome(lambda: [exchange(weights) for _ in range(4)])}
    results["weights"] = outcome(lambda: exchange.check_replicas(weights))
    if RANK == SIZE - 1:
        weights["w"][3, 3] = 2.0
    results["other weights"] = outcome(lambda: exchange.check_replicas(weights))
    if RANK == SIZE - 1:
        exchange.run.units["w"]["compressor"]["q"][0] += 1
    results["states"] = outcome(lambda: exchange(weights))
    exchange.close()
    return results


def discarded() -> dict[str, Any]:
    """Fail or skip calls on rank 1, drop them on all ranks, and compare with a run without them."""
    spec, last = {"w": (30, 20), "v": (40, 20)}, SIZE - 1 == RANK
    config = {
        "compressor": "topk",
        "compress_ratio": 0.05,
        "default_rules": False,
        "bucket_bytes": 0,
        # Not before step 2, in which ranks wait for the gradients of others.
        "check_replicas": 3,
    }

    def given(step: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng((step, RANK))
        return {name: rng.normal(size=shape).astype(np.float32) for name, shape in spec.items()}

    def run(exchange: mpi.MPIExchange, numbers: range) -> str:
        return "".join(digest(exchange(given(number))) for number in numbers)

    whole, results = run(make_exchange(spec, config), range(4)), {}
    real = Residual.terms, TopK.merge
    for label, method in {"compress": "terms", "merge": "merge", "skipped": "", "limit": ""}.items():
        exchange = make_exchange(spec, {**config, "timeout": 1 if label == "limit" else 60})
        begun, calls = run(exchange, range(2)), []

        def fail(*arguments: Any, m: str = method, c: list[int] = calls) -> Any:
            c.append(1)
            if len(c) == 2 and (last or m == "merge"):
                raise ZeroDivisionError("for this test")
            return real[m == "merge"](*arguments)

        owner = TopK if method == "merge" else Residual
        method_fails = mock.patch.object(owner, method or "terms", fail if method else real[0])
        with method_fails, mock.patch.object(mpi.transport, "NOTES_SECONDS", 0.5):
            skips = not method and last
            error = "" if skips else outcome(lambda e=exchange: e(given(9)))
        if label == "limit":
            # The others shall learn by the limit alone.
            time.sleep(1.5 * skips)
        exchange.discard()
        results[label] = {"error": error, "equal": begun + run(exchange, range(2, 4)) == whole}
    # Ranks that time out in it, one after another, meet as soon as all call it.
    exchange, alone = make_exchange(spec, {**config, "timeout": 1}), []
    begun = run(exchange, range(2))
    for ranks in ((0, SIZE - 1), (SIZE - 1, SIZE - 1)) if SIZE > 1 else ():
        for rank in ranks:
            WORLD.Barrier()
            if rank == RANK:
                # No other rank comes.
                with mock.patch.object(exchange.transport, "timeout", 0.1):
                    alone += [outcome(exchange.discard), outcome(lambda: exchange(given(9)))]
        WORLD.Barrier()
        exchange.discard()
    results["alone"] = {"error": alone, "equal": begun + run(exchange, range(2, 4)) == whole}
    without, zero = make_exchange(spec, {**config, "rollback": False}), True
    for skips in (False, last):
        run(without, range(2))
        fails = mock.patch.object(TopK, "merge", side_effect=ZeroDivisionError("for this test"))
        with fails, mock.patch.object(mpi.transport, "NOTES_SECONDS", 0.5):
            error = "" if skips else outcome(lambda: without(given(9)))
        without.discard()
        zero &= all(not x.any() for state in without.run.memories().values() for x in state.values())
    run(without, range(2))
    results["without roll-back"] = {"error": error, "equal": zero}
    # The last rank has one step less.
    if last:
        exchange.load_state_dict({**exchange.state_dict(), "step": 3})
    results["parted"] = {"error": outcome(exchange.discard), "equal": True}
    return results


def communicators_apart() -> dict[str, Any]:
    """Run two exchanges within separate communicators, in opposite orders on even and odd ranks."""
    half = WORLD.Split(RANK % 2, RANK)
    mine = make_exchange({"w": (20,)}, {"compressor": "none"}, comm=half)
    both = make_exchange({"w": (20,)}, {"compressor": "none"})
    x = np.full(20, float(RANK), np.float32)
    apart, together = mine({"w": x})["w"], both({"w": x})["w"]
    return {"apart": float(apart[0]), "together": float(together[0]), "sizes": [mine.size, both.size]}


def timeline() -> dict[str, Any]:
    """Write timelines by GRACE_TIMELINE and by a call, and try a path that rank 1 cannot write."""
    config = {"compressor": "powersgd", "default_rules": False}
    gradients = {"w": np.ones((20, 10), np.float32)}
    with tempfile.TemporaryDirectory() as folder:
        with mock.patch.dict(os.environ, GRACE_TIMELINE=f"{folder}/told.json"):
            exchange = make_exchange({"w": (20, 10)}, config)
        exchange(gradients)
        results: dict[str, Any] = {"stats": exchange.stats()}
        exchange.start_timeline(f"{folder}/by hand.json")
        exchange(gradients)
        exchange.stop_timeline()
        exchange(gradients)
        for name in ("told", "by hand"):
            results[name] = json.loads(Path(f"{folder}/{name}.rank{RANK}.json").read_text())
        path = f"{folder}/nowhere/trace.json" if RANK == 1 else ""
        with mock.patch.dict(os.environ, GRACE_TIMELINE=path):
            results["refused"] = outcome(lambda: make_exchange({"w": (20, 10)}, config))
    return results


def chosen_by_auto() -> dict[str, Any]:
    """Train with "auto" over a link that falls from 10 Gbit/s to 100 Mbit/s, and let another method replace it."""
    shapes = {"w": (128, 256), "v": (300, 200)}
    config = {"compressor": "auto", "check_replicas": 0}
    exchange, link, link_free = mpi.MPIExchange(shapes, config), [1.25e9], [0.0]
    start = exchange.transport._start

    class Late(Handle):
        """A collective that takes its time on the link: it arrives when all before it have."""

        def __init__(self, handle: Handle, nbytes: float) -> None:
            self._handle = handle
            self._due = link_free[0] = max(time.monotonic(), link_free[0]) + 2e-5 + nbytes / link[0]

        def wait(self) -> Any:
            time.sleep(max(0.0, self._due - time.monotonic()))
            return self._handle.wait()

    def late(collective: Any, name: str) -> Handle:
        nbytes = sum(x.nbytes for x in collective.sent_by(RANK)) * float(copies(collective.kind, SIZE))
        return Late(start(collective, name), nbytes)

    # A method with error feedback, so that something could be lost; the study does not call it safe.
    safe = [{"compressor": name} for name in ("none", "topk")]
    risk = mock.patch.object(advise, "risk_of", lambda change, *_: Risk(3 * (change not in safe), "a test"))
    quick = mock.patch.object(probe, "SECONDS", 0.02)
    methods, lost = [], dict.fromkeys(shapes, 0.0)
    rng = np.random.default_rng(RANK)
    with mock.patch.object(exchange.transport, "_start", late), risk, quick:
        for step in range(85):
            if step == 30:
                link[0] = 12.5e6
            if step == 80:
                advised = {"change ends it": exchange.stats()["auto"]["compressor"]}
                exchange.change(compressor="none")
            mine = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
            # The backward pass.
            time.sleep(0.02)
            merged = exchange(mine)
            methods.append(compressors.name_of(exchange.config.method.compressor))
            for name in shapes:
                lost[name] = lost[name] + SIZE * merged[name].astype(np.float64) - WORLD.allreduce(mine[name] * 1.0)
        for _ in range(5):
            advice = exchange.advise(steps=3)
            exchange(mine)
    exchange.close()
    return {
        "methods": methods,
        "lost": max(float(np.abs(x).max()) for x in lost.values()),
        "auto": exchange.config.auto,
        "advice": {"sentence": advice and advice.sentence, **advised},
    }


def promises() -> dict[str, str]:
    """Return the errors of the promises that every exchange keeps."""

    def make(config: dict[str, Any]) -> Run:
        exchange = make_exchange(TENSORS, config)
        return Run(exchange, lambda number: joined(exchange(gradients(number, RANK))))

    return kept(make)


if __name__ == "__main__":
    serve(RANK, [sys.modules[__name__]])
