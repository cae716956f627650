"""The TensorFlow operation: in eager mode, in graphs and branches, with values known only at run time, and misused."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.codecs.levels import bucket_norms, dequantize_sum, quantize_packed
from grace.core.codecs.signs import binarize
from grace.core.errors import PayloadError
from grace.core.ops import get_ops, native, serves
from grace.core.ops.base import packed_size
from grace.core.spec import Key
from grace.testing.harness import SMALLEST, array, host, same
from tests.kernels import ops_of

N = 200001


@pytest.fixture(scope="module", autouse=True)
def ops():
    return ops_of("tensorflow")


@pytest.fixture(scope="module")
def tf():
    return pytest.importorskip("tensorflow")


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(0).standard_normal(N).astype(np.float32)


def in_graph(tf, body, *arrays):
    return tf.function(body, autograph=False)(*arrays)


def test_a_graph_knows_the_lengths(tf, ops, x):
    def body(x):
        bits, values = binarize(ops, x, 0.0), ops.select(x, 1.0, True)[0]
        assert bits.shape == [packed_size(N, 1)]
        assert values.shape == [None]
        return bits, values

    bits, values = in_graph(tf, body, tf.constant(x))
    assert same(host(ops, bits), np.packbits(x >= 0, bitorder="little"))
    assert same(host(ops, values), x[np.abs(x) > 1])


def test_lengths_and_keys_may_be_known_only_when_the_graph_runs(tf, ops, x):
    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.float32), tf.TensorSpec([], tf.int64)])
    def body(x, step):
        key = Key(2**64 - 5, step, 1)
        scale = bucket_norms(ops, x, 512, "max")
        codes = quantize_packed(ops, x, scale, 512, 7, 4, key)
        return codes, dequantize_sum(ops, [codes], [scale], 512, 7, 4, ops.length(x)), ops.uniform(ops.length(x), key)

    numpy = get_ops("numpy", native=False)
    for n, step in ((N, 3), (17, 4), (0, 5)):
        codes, values, noise = body(tf.constant(x[:n]), tf.constant(step, tf.int64))
        key = Key(2**64 - 5, step, 1)
        scale = bucket_norms(numpy, x[:n], 512, "max")
        wanted = quantize_packed(numpy, x[:n], scale, 512, 7, 4, key)
        assert same(host(ops, codes), wanted)
        assert same(host(ops, values), dequantize_sum(numpy, [wanted], [scale], 512, 7, 4, n))
        assert same(host(ops, noise), numpy.uniform(n, key))


def test_branches_and_loops(tf, ops, x):
    def body(x, way):
        for _ in range(2):
            x = tf.cond(way > 5, lambda x=x: ops.weighted_sum(x, 1, x, 1), lambda x=x: ops.weighted_sum(x, 1, x, 2))
            assert x.shape == [N]
        x = tf.switch_case(way, [lambda: ops.weighted_sum(x, 2, x, 3), lambda: x])
        return ops.while_loop(lambda x: ops.max_abs(x) < 1e6, lambda x: ops.weighted_sum(x, 5, x, 5), x)

    wanted = x + x * 2
    wanted = wanted + wanted * 2
    wanted = wanted * 2 + wanted * 3
    while np.abs(wanted).max() < 1e6:
        wanted = wanted * 5 + wanted * 5
    assert same(host(ops, in_graph(tf, body, tf.constant(x), tf.constant(0))), wanted)


def test_a_graph_calls_python_whenever_it_runs(tf, ops):
    graph = tf.function(lambda n: 2 * ops.computed(lambda n: 7**n % 10 - 5, n))
    assert [int(graph(tf.constant(n, tf.int64))) for n in range(4)] == [-8, 4, 8, -4]
    assert ops.computed(lambda n: n - 2, 1) == -1


def test_what_others_hold_is_not_changed(tf, ops, x):
    variable, given = tf.Variable(x), tf.constant(x)
    view, indices, wanted = given.numpy(), tf.constant([1, 5]), x.copy()
    wanted[[1, 5]] = 9
    calls = {
        "eager": lambda: ops.put_(given, indices, 9.0),
        "a variable, eager": lambda: ops.put_(variable.read_value(), indices, 9.0),
        "an argument": lambda: in_graph(tf, lambda x: ops.put_(x, indices, 9.0), given),
        "what a graph captures": lambda: in_graph(tf, lambda: ops.put_(given, indices, 9.0)),
        "a variable": lambda: in_graph(tf, lambda: ops.put_(variable.read_value(), indices, 9.0)),
        "a part": lambda: in_graph(tf, lambda: ops.put_(variable.read_value()[0:], indices, 9.0)),
        "a result": lambda: in_graph(
            tf, lambda x: (y := ops.weighted_sum(x, 1, x, 0), ops.put_(y, indices, 9.0), y)[1], given
        ),
        "read again": lambda: in_graph(tf, lambda x: (ops.put_(x, indices, 7.0), ops.put_(x, indices, 9.0))[1], given),
    }
    for name, call in calls.items():
        assert same(host(ops, call()), wanted), name
        assert same(host(ops, given), x), name
        assert same(view, x), name
        assert same(variable.numpy(), x), name


def test_what_consumes_an_array_waits_for_its_readers(tf, ops, x):
    """Otherwise readers could still hold the array, and it would be copied."""

    def body(x, captured):
        y = ops.weighted_sum(x, 1, x, 1)
        read = ops.gather(y, tf.constant([3, 5]))
        changed = ops.put_(y, tf.constant([3]), 0.0)
        assert read.op in changed.op.control_inputs
        return read, changed, tf.cond(read[0] < 1e9, lambda: ops.put_(captured, tf.constant([3]), 0.0), lambda: changed)

    read, changed, other = in_graph(tf, body, tf.constant(x), tf.constant(x))
    wanted = x + x
    assert same(host(ops, read), wanted[[3, 5]])
    wanted[3] = 0
    assert same(host(ops, changed), wanted)
    assert same(host(ops, other)[4:], x[4:])


def test_denormals_are_kept_on_every_thread(tf, ops):
    """TensorFlow's threads would flush denormals to zero."""
    n, smallest = 1 << 20, SMALLEST["float32"]
    x = array(ops, np.full(n, 2 * smallest), "float32")
    wanted = np.full(n, 4 * smallest, np.float32)
    assert same(host(ops, ops.weighted_sum(x, 1, x, 1)), wanted)
    assert same(host(ops, in_graph(tf, lambda x: ops.weighted_sum(x, 1, x, 1), x)), wanted)


def test_a_corrupt_payload_is_named_in_both_modes(tf, ops):
    values, indices = tf.constant([1.0, 2.0]), tf.constant([0, 10])
    with pytest.raises(PayloadError, match=r"sparse_sum: expected indices from 0 to 9, received 10\. The payload is"):
        ops.sparse_sum([values], [indices], 10)
    for n in (10, tf.constant(10)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="PayloadError: kernel sparse_sum: expected indices"):
            in_graph(tf, lambda v, i, n=n: ops.sparse_sum([v], [i], n), values, indices)
    with pytest.raises(tf.errors.InvalidArgumentError, match="PayloadError: kernel unpack: array 0: expected 4 elem"):
        in_graph(tf, lambda data: ops.unpack(data, 3, 10), tf.constant([1, 2, 3], tf.uint8))


@pytest.mark.parametrize(
    ("kernel", "dtypes", "options", "error", "text"),
    [
        ("absent", ["float32"], {}, ValueError, "there is no kernel 'absent'"),
        ("max_abs", ["string"], {}, TypeError, "this dtype"),
        ("max_abs", ["int32"], {}, TypeError, "expected float32 or float64, received int32"),
        ("max_abs", [], {}, ValueError, "expected 1 arrays"),
        ("max_abs", ["float32"], {"outputs": ["float64"]}, TypeError, "received float32 as result 0"),
        ("max_abs", ["float32"], {"outputs": ["float32", "float32"]}, ValueError, "expected 2 results, received 1"),
        ("put", ["float32", "int32"], {"numbers": [1.0]}, ValueError, "read-only"),
        ("put", [], {"consumes": True}, ValueError, "no array to be changed"),
        ("sparse_sum", ["float32"], {}, ValueError, "sparse_sum"),
        ("words", [], {"integers": [-1, 0, 0, 0, 0]}, ValueError, "expected a length from 0"),
    ],
)
def test_wrong_calls(tf, ops, kernel, dtypes, options, error, text):
    arrays = [tf.constant(["a"]) if dtype == "string" else tf.zeros([3], dtype) for dtype in dtypes]
    options = {"outputs": ["float32"], **options}
    with pytest.raises(error, match=text):
        ops.run(kernel, arrays, **options)
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=text):
        in_graph(tf, lambda: ops.run(kernel, arrays, lengths=[None] * len(options["outputs"]), **options))


def test_a_length_that_a_graph_was_promised_is_held(tf, ops):
    with pytest.raises(tf.errors.InvalidArgumentError, match="max_abs: expected 2 elements as result 0, received 1"):
        in_graph(tf, lambda x: ops.run("max_abs", [x], outputs=["float32"], lengths=[2]), tf.zeros([3]))


def test_the_library_of_another_tensorflow_is_not_used(tf, monkeypatch, tmp_path, caplog):
    from grace.backends import native_tensorflow

    library = tmp_path / "other.so"
    library.write_bytes(b"not a library")
    monkeypatch.setattr(native_tensorflow, "library", lambda: str(library))
    native_tensorflow.operation.cache_clear()
    native_tensorflow.fault.cache_clear()
    try:
        assert not serves("tensorflow", "cpu")
        assert "the kernels for TensorFlow are not used" in caplog.text
        assert not isinstance(get_ops("tensorflow"), native.Native)
    finally:
        monkeypatch.undo()
        native_tensorflow.operation.cache_clear()
        native_tensorflow.fault.cache_clear()
    assert serves("tensorflow", "cpu")
    assert not serves("tensorflow", "gpu")
