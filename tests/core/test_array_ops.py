"""All backends give the same bits on ordinary input. The contract of the operations checks the results themselves."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import numpy as np
import pytest

from grace.core.codecs.signs import majority
from grace.core.config.registry import compressors
from grace.core.ops import get_ops
from grace.core.ops.composites import ArrayOps
from grace.core.ops.table import composites
from grace.core.spec import Key
from grace.testing.harness import EPS, FRAMEWORKS, array, flushed_below, host, same
from grace.testing.traced import traced_ops
from tests.support import composite_results
from tests.support.covering import ALL
from tests.support.registered import BACKENDS, ops_of

N = 1003
KEY = Key(77, 5)
CALLS = {
    "abs": lambda ops, x, y: ops.abs(x),
    "floor": lambda ops, x, y: ops.floor(x * 10),
    "sqrt": lambda ops, x, y: ops.sqrt(ops.abs(x)),
    "where": lambda ops, x, y: ops.where(x > y, x, y),
    "clip": lambda ops, x, y: ops.clip(x, -0.5, 0.7),
    "sum": lambda ops, x, y: ops.sum(x),
    "max": lambda ops, x, y: ops.max(x),
    "min": lambda ops, x, y: ops.min(x),
    "norm": lambda ops, x, y: ops.norm(x),
    "top_indices": lambda ops, x, y: ops.top_indices(x, 100),
    "nonzero": lambda ops, x, y: ops.nonzero(x > 0.5),
    "gather": lambda ops, x, y: ops.gather(x, ops.top_indices(y, 10)),
    "put_": lambda ops, x, y: ops.put_(x + 0, ops.top_indices(y, 10), 3.0),
    "scatter_add_": lambda ops, x, y: ops.scatter_add_(x + 0, ops.top_indices(y, 10), y[:10]),
    "add_": lambda ops, x, y: ops.add_(x + 0, y),
    "sub_": lambda ops, x, y: ops.sub_(x + 0, y),
    "scale_": lambda ops, x, y: ops.scale_(x + 0, 1 / 3),
    "quantize": lambda ops, x, y: ops.quantize(x, ops.norm(x), 127, KEY),
    "dequantize": lambda ops, x, y: ops.dequantize(ops.quantize(x, ops.norm(x), 7, KEY), ops.norm(x), 7, "float32"),
    "sparsify": lambda ops, x, y: ops.concat(list(ops.sparsify(x, 50))[:1]),
    "desparsify": lambda ops, x, y: ops.desparsify(*ops.sparsify(x, 50), N),
    "uniform": lambda ops, x, y: ops.uniform(N, KEY),
    "sample": lambda ops, x, y: ops.sample(N, 100, KEY),
    "divide": lambda ops, x, y: x / ops.cast(127, ops.dtype(x)),
    "scale twice": lambda ops, x, y: ops.scale_(ops.scale_(x + 0, 1 / 3), 10.0),
    "cast to half": lambda ops, x, y: ops.cast(x, "float16"),
    "cast to bfloat16": lambda ops, x, y: ops.cast(x, "bfloat16"),
    "cast to int": lambda ops, x, y: ops.cast(x * 100, "int64"),
    "to_bytes": lambda ops, x, y: ops.to_bytes(x),
}
# Operations that may differ in the last bit, with the reason. No payload may depend on them.
LAST_BIT = {
    ("sqrt", "float64"): "PyTorch's library does not always round correctly, and there is nothing wider",
    ("sum", "float64"): "there is nothing wider to sum in, so the order shows",
    ("norm", "float64"): "there is nothing wider to sum in, so the order shows",
}


def in_graph(call):
    """Run the call as a TensorFlow graph."""
    tf = pytest.importorskip("tensorflow")
    return lambda ops, x, y: tf.function(lambda x, y: call(ops, x, y), autograph=False)(x, y)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", [*BACKENDS[1:], "graph"])
def test_backends_agree_bit_for_bit(backend, name, dtype):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, N)).astype(dtype)
    call, results = CALLS[name], []
    for of, run in (("numpy", call), ("tensorflow", in_graph(call)) if backend == "graph" else (backend, call)):
        ops = ops_of(of)
        results.append(host(ops, run(ops, array(ops, x, dtype), array(ops, y, dtype))))
    if (name, dtype) in LAST_BIT:
        assert np.allclose(*results, rtol=2 * EPS[dtype], atol=0)
    else:
        assert same(*results)


@pytest.mark.parametrize("name", ["divide", "scale twice"])
def test_the_optimizer_of_graphs_computes_with_numbers_unless_they_are_hidden(name, monkeypatch):
    """If this fails, TensorFlow no longer rewrites them, and hiding can be removed."""
    module = pytest.importorskip("grace.backends.tensorflow_ops")
    monkeypatch.setattr(module, "_opaque", lambda x: x)
    ops = module.TensorflowOps()
    x, y = (array(ops, v, "float32") for v in np.random.default_rng(0).standard_normal((2, N)))
    eager, graph = (host(ops, call(ops, x, y)) for call in (CALLS[name], in_graph(CALLS[name])))
    assert not same(eager, graph)


def test_a_composite_is_one_graph_per_signature_and_keeps_no_array():
    ops = pytest.importorskip("grace.backends.tensorflow_ops").TensorflowOps()

    def votes(ranks):
        return [array(ops, np.full(2, rank), "uint8") for rank in range(ranks)]

    def graphs(*args, **options):
        majority(ops, *args, **options)
        return sum(signature[0] is majority.body for signature in ops._graphs)

    first = votes(2)
    alive = weakref.ref(first[0])
    assert (graphs(first, 9, "float32"), graphs(votes(2), 9, "float32")) == (1, 1)
    assert (graphs(votes(3), 9, "float32"), graphs(votes(2), 9, dtype="float64")) == (2, 3)
    del first
    gc.collect()
    assert alive() is None


def test_denormals_count_as_zeros_in_tensorflow_only():
    """The contracts allow flushed denormals and detect them by a sum. This checks which frameworks need it."""
    flushed = {"numpy": 0.0, "torch": 0.0, "tensorflow": 2.0**-126}
    assert {f: flushed_below(get_ops(f), "float32") for f in FRAMEWORKS} == {f: flushed[f] for f in FRAMEWORKS}


@pytest.mark.parametrize("bits", range(1, 17))
def test_packed_bytes_agree(bits):
    for n in (0, 1, 7, 8, 1003):
        check_packing(bits, n)


def check_packing(bits, n):
    codes = np.random.default_rng(bits).integers(0, 2**bits, n)
    packed = [host(ops, ops.pack(array(ops, codes, "int64"), bits)) for ops in map(ops_of, BACKENDS)]
    assert all(same(packed[0], other) for other in packed[1:])
    reference = ArrayOps.pack(ops_of("numpy-reference"), codes, bits)
    assert packed[0].tolist() == reference.tolist(), "an override must be the reference body, only faster"


def given(ops, value):
    """Return a value of a case with its arrays converted to a framework."""
    if isinstance(value, np.ndarray):
        data = ops.cast(value.copy().reshape(-1).view(np.uint8), "uint8")
        return ops.reshape(ops.from_bytes(data, value.dtype.name), value.shape)
    if isinstance(value, dict):
        return {name: given(ops, v) for name, v in value.items()}
    return type(value)(given(ops, v) for v in value) if type(value) in (list, tuple) else value


def check_composite(ops, call):
    function = partial(composites[call.name], ops) if call.name in composites else getattr(ops, call.name)
    results = function(*given(ops, call.args), **given(ops, call.options))
    results = results if isinstance(results, (list, tuple)) else [results]
    # Conditions have no bytes, and some are Python bools.
    conditions = [isinstance(r, bool) or ops.dtype(r) == "bool" for r in results]
    results = [
        host(ops, ops.cast(r, "uint8")) > 0 if c else host(ops, r) for r, c in zip(results, conditions, strict=True)
    ]
    assert len(results) == len(call.expected), (call.name, call.args)
    for result, expected in zip(results, call.expected, strict=True):
        assert result.dtype == expected.dtype, (call.name, call.args)
        # 0 and -0 count as equal.
        assert np.array_equal(result, expected, equal_nan=expected.dtype.kind == "f"), call


@pytest.mark.parametrize("name", composite_results.CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_composites_equal_plain_numpy(backend, name):
    plans = [*((n, "float32") for n in composite_results.SIZES), (9, "float64"), (1000, "float64")]
    # Their sizes matter to NumPy's kernels, which are those of the other frameworks.
    for n, dtype in plans if ALL or backend.startswith("numpy") else [plans[0], plans[4], plans[-1]]:
        for call in composite_results.CASES[name](n, dtype):
            check_composite(ops_of(backend), call)


# The graphs of test_graphs.py run them in every method.
@pytest.mark.slow
@pytest.mark.skipif("tensorflow" not in FRAMEWORKS, reason="TensorFlow is not installed")
@pytest.mark.parametrize("name", composite_results.CASES)
def test_composites_in_graphs_equal_plain_numpy(name):
    ops = traced_ops()
    for call in composite_results.CASES[name](9, "float32"):
        check_composite(ops, call)


def test_every_composite_has_a_case():
    tested = {call.name for make in composite_results.CASES.values() for call in make(9, "float32")}
    assert list(compressors), "the table is filled when the methods are imported"
    own = {name for name, made in composites.items() if made.module.startswith("grace.")}
    made = own | {name for name in vars(ArrayOps) if not name.startswith("_")} - {"compute"}
    elsewhere = {
        "uniform",
        "sample",
        "quantize",
        "dequantize",
        "sparsify",
        "pack",
        "unpack",
        "orthogonalize",
        # tests/papers/test_fedqcs.py
        "recover_sparse",
    }
    assert tested | elsewhere == made


@pytest.mark.parametrize("backend", BACKENDS)
def test_float64_becomes_float16_by_way_of_float32(backend):
    """A little above the middle of two float16: float32 rounds it to the middle, and a tie goes to the even number."""
    ops = ops_of(backend)
    x = array(ops, [1 + 2**-11 + 2**-40], "float64")
    assert host(ops, ops.cast(x, "float16")).tolist() == [1.0]


def test_an_expanded_scalar_has_bytes():
    """The gradient of a sum over one element is a view with stride 0, which counts as contiguous."""
    import torch

    ops = get_ops("torch")
    x = torch.ones(()).expand(1)
    assert x.stride() == (0,)
    assert host(ops, ops.to_bytes(x)).tolist() == [0, 0, 128, 63]


def test_one_object_per_framework_and_device():
    assert get_ops("torch", "cpu") is get_ops("torch", "cpu")
