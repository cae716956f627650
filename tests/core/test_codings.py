"""Codings of payload fields: they restore every field, come near the entropy, and never cost much."""

from __future__ import annotations

import contextlib
import functools
import itertools

import numpy as np
import pytest

import grace
from grace.core.config.config import make_config
from grace.core.config.registry import compressors
from grace.core.errors import ConfigError, IncompatibleError, PayloadError
from grace.core.ops import get_ops
from grace.core.spec import ITEMSIZE, Field, TensorSpec
from grace.core.wire import codings
from grace.core.wire.codings import CODECS, NONE, SMALLEST, Coding
from grace.core.wire.huffman import huffman_encode
from grace.core.wire.layout import GatherLayout
from grace.core.wire.rans import rans_decode, rans_encode
from grace.testing.harness import FRAMEWORKS, array, draw, exchange, host
from tests.support.covering import ALL, rest_slow
from tests.support.registered import BACKENDS, all_compressors, ops_of
from tests.support.steps import each

NAMES = (*CODECS, SMALLEST)
SPEC = TensorSpec("w", (40, 50))
every_coding = pytest.mark.parametrize("coding", NAMES)


def drawn(kind: str, n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "equal":
        return np.full(n, 7, np.uint8)
    if kind == "random":
        return rng.integers(0, 256, n).astype(np.uint8)
    return np.minimum(rng.geometric({"half": 0.5, "skewed": 0.95}[kind], n), 255).astype(np.uint8)


def field(coding: str, bits: int = 8, dtype: str = "uint8", length: int | str = "coded") -> Field:
    return Field("codes", dtype, length, coding=coding, bits=bits)


def there_and_back(ops, f, values):
    sent = codings.encode(ops, f, array(ops, values, f.dtype))
    assert ops.length(sent.data) == sent.size <= len(values) * ITEMSIZE[f.dtype]
    back = codings.decode(ops, f, sent.data, sent.size, len(values))
    assert ops.dtype(back) == f.dtype
    assert host(ops, back).tolist() == list(values)
    return host(ops, sent.data).tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
@every_coding
def test_fields_come_back_with_the_same_bytes_everywhere(coding, backend):
    ops, reference = ops_of(backend), get_ops("numpy", native=False)
    plans = [*itertools.product((1, 3, 130), ("equal", "random", "half", "skewed"), (8,))]
    plans += [(301, "half", bits) for bits in (1, 2, 3, 4, 5, 6, 7, 9)]
    for n, kind, bits in plans if "tensorflow" not in backend else plans[::4]:
        values, f = drawn(kind, n), field(coding, bits)
        assert there_and_back(ops, f, values) == there_and_back(reference, f, values), (n, kind, bits)


@every_coding
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
def test_integers_of_every_width_come_back(dtype, coding):
    rng, ops = np.random.default_rng(0), get_ops("numpy")
    most = np.iinfo(dtype).max
    small = np.rint(rng.standard_normal(500) * 0.4).astype(dtype)
    wide = rng.integers(-most, most, 70, dtype)
    sizes = [len(there_and_back(ops, field(coding, dtype=dtype), values)) for values in (small, wide)]
    assert sizes[0] < 0.8 * small.nbytes
    assert sizes[1] == wide.nbytes, "what a coding would make longer travels as it is"


@pytest.mark.parametrize("coding", rest_slow(NAMES, 1))
def test_fields_come_back_in_a_graph(coding):
    tf = pytest.importorskip("tensorflow")
    for native in (True, False):
        ops, f = get_ops("tensorflow", native=native), field(coding, 3)

        @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.uint8)])
        def back(given, ops=ops, f=f):
            sent = codings.encode(ops, f, given)
            data = tf.concat([sent.data, sent.data], 0)[: sent.size]
            return codings.decode(ops, f, data, sent.size, ops.length(given))

        for kind in ("equal", "random", "half")[:: 1 if native else 2]:
            given = drawn(kind, 90)
            assert back(tf.constant(given)).numpy().tolist() == given.tolist()


def entropy(symbols: np.ndarray) -> float:
    share = np.unique(symbols, return_counts=True)[1] / len(symbols)
    return float(-(share * np.log2(share)).sum())


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
def test_huffman_is_within_a_bit_of_the_entropy_and_rans_within_2_percent(rate):
    """Huffman, 1952: H <= mean length < H + 1. A range coder has no such loss: at 0.9, H is half a bit."""
    ops, n = get_ops("numpy"), 200_000
    symbols = np.minimum(np.random.default_rng(1).geometric(rate, n), 31).astype(np.uint8)
    for values, bits, count in ((symbols, 8, n), (host(ops, ops.pack(array(ops, symbols, "int64"), 5)), 5, n)):
        least = entropy(symbols)
        huffman, rans = (8 * len(encode(ops, values, bits)) / count for encode in (huffman_encode, rans_encode))
        assert least < huffman < least + 1
        assert least < rans < 1.02 * least
        assert rans < huffman or least > 1


def test_huffman_is_the_best_prefix_code():
    """For Fibonacci's numbers the best code has words of 1, 2, ..., which the limit of 12 bits cuts short."""
    ops = get_ops("numpy")
    for counts, expected in (
        ((1, 1, 2, 3, 5, 8), (5, 5, 4, 3, 2, 1)),
        ((1, 1, 1, 1), (2, 2, 2, 2)),
        ((1,), (1,)),
        ((5, 9), (1, 1)),
    ):
        data = np.repeat(np.arange(len(counts)), counts).astype(np.uint8)
        for native in (True, False):
            coded = huffman_encode(get_ops("numpy", native=native), data, 8)
            assert ops.unpack(coded[:128], 4, 256)[: len(counts)].tolist() == list(expected)
    fibonacci = [1, 1]
    while len(fibonacci) < 17:
        fibonacci.append(sum(fibonacci[-2:]))
    data = np.repeat(np.arange(17), fibonacci).astype(np.uint8)
    coded = [huffman_encode(get_ops("numpy", native=native), data, 8) for native in (True, False)]
    lengths = ops.unpack(coded[0][:128], 4, 256)[:17]
    assert lengths.max() == 12
    assert (0.5 ** lengths.astype(float)).sum() == 1
    assert coded[0].tobytes() == coded[1].tobytes()


def test_sizes_are_those_of_the_formulas():
    ops = get_ops("numpy")
    zeros = np.zeros(1000, np.uint8)

    def size(coding, values):
        return codings.encode(ops, field(coding), values).size

    assert size("run_length", zeros) == 1 + 2 * 4, "runs of 255 bytes at most"
    assert size("run_length", np.array([3, 3, 3, 4, 3, 3, 3, 3], np.uint8)) == 1 + 2 + 1 + 2
    assert size("huffman", zeros) == 128 + 125, "a bit per symbol"
    assert size("rans", zeros) == 32 + 2 + 4 * 4, "no bit per symbol"
    # 8 planes of 8 blocks of 16 bytes; a symbol that is one higher sets a bit of the second plane.
    assert size("bitshuffle", zeros) == 1 + 8
    one = zeros.copy()
    one[500] = 1
    assert size("bitshuffle", one) == 1 + 8 + 16
    assert size(SMALLEST, zeros) == 1 + 9


@functools.cache
def payloads(compressor):
    """Return the fields of a compressor and a payload of it, in NumPy."""
    ex = exchange(compressor, get_ops("numpy"), SPEC, [draw(SPEC, 1)], step=3)
    return compressor.wire(SPEC), ex.payloads[0]


@every_coding
def test_every_method_gets_its_payload_back(coding):
    ops, coded = get_ops("numpy"), 0
    for compressor in all_compressors():
        if compressor.unfit(SPEC):
            continue
        plain, payload = payloads(compressor)
        fields = [f if (name := Coding(coding).of(f)) is None else f._replace(coding=name) for f in plain]
        if fields == list(plain):
            continue
        coded += 1
        layout = GatherLayout([SPEC], [fields], [False])
        buffer = layout.encode(ops, [payload], [False], 3)
        raw = GatherLayout([SPEC], [plain], [False]).encode(ops, [payload], [False], 3)
        words = 4 * sum(f.coding not in codings.PLAIN for f in fields)
        assert len(buffer) <= len(raw) + words + 16, compressor
        back = layout.decode(ops, buffer, 1, 3).payloads[0][0]
        for f in fields:
            if f.wire:
                assert np.array_equal(back[f.name], payload[f.name]), (compressor, f)
    assert coded > 15


# Eager TensorFlow takes ten times as long, and graphs of coded steps are in test_graphs.py.
@each(
    lambda row: ALL or row["framework"] != "tensorflow" or row["communicator"] == "allgather",
    framework=FRAMEWORKS,
    communicator=["allgather", "two_shot", "hierarchical"],
)
def test_training_is_the_same_with_fewer_bytes(framework, communicator):
    place = {"name": communicator, **({"local_size": 2} if communicator == "hierarchical" else {})}
    for name, coding in (("terngrad", "huffman"), ("qsgd", "rans"), ("qsgd", SMALLEST)):
        config = {"compressor": name, "communicator": place, "default_rules": False, "checksum": True}
        config |= {"quantum_num": 3} if name == "qsgd" else {}
        sims = [
            grace.Simulation(4, {"w": (64, 65)}, {**config, "coding": c}, framework=framework) for c in (NONE, coding)
        ]
        ops = get_ops(framework)
        for step in range(2):
            rng = np.random.default_rng(step)
            grads = [{"w": array(ops, rng.standard_normal((64, 65)) ** 3, "float32")} for _ in range(4)]
            merged = [sim.step(grads) for sim in sims]
            for one, two in zip(*merged, strict=True):
                assert host(ops, one["w"]).tobytes() == host(ops, two["w"]).tobytes()
        sent = [sum(run.stats()["wire_bytes"] for run in sim.runs) for sim in sims]
        # Within a node, the mean travels as it is.
        assert sent[1] < (0.995 if communicator == "hierarchical" else 0.8) * sent[0], (name, sent)


def test_statistics_count_the_coded_bytes():
    sims = [
        grace.Simulation(2, {"w": (60, 50)}, {"compressor": "terngrad", "communicator": "allgather", "coding": c})
        for c in (NONE, "rans")
    ]
    rng = np.random.default_rng(0)
    grads = [{"w": (rng.standard_normal((60, 50)) ** 3).astype(np.float32)} for _ in "xy"]
    for sim in sims:
        sim.step(grads)
    plain, coded = (sim.runs[0].stats() for sim in sims)
    assert plain["tensors"]["w"]["wire_bytes"] == 4 + 750
    # The buffer has a word for the coded bytes, and is padded to 16.
    assert 0 <= coded["wire_bytes"] - coded["tensors"]["w"]["wire_bytes"] < 8 + 8 + 4 + 16
    assert sims[1].plan.assignments[0].wire_bytes is None
    assert sims[0].plan.assignments[0].wire_bytes == 754


# --- configuration ------------------------------------------------------------------------------------------------


def chosen(config, shape=(60, 50)):
    """Return the coding of each field that is coded."""
    plan = grace.Simulation(2, {"w": shape}, {"default_rules": False, **config}).plan
    return {f.name: f.coding for f in plan.units[0].fields if f.coding not in codings.PLAIN}


GATHERED = {"communicator": "allgather"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"compressor": "qsgd", "coding": "rans"}, {"codes": "rans"}),
        ({"compressor": "qsgd", "coding": {"codes": "huffman"}}, {"codes": "huffman"}),
        ({"compressor": "topk", "coding": "golomb"}, {"indices": "golomb"}),
        ({"compressor": "topk", "coding": {"indices": "delta"}}, {"indices": "delta"}),
        ({"compressor": "topk", "index_coding": "golomb", "coding": {"indices": "bitmap"}}, {"indices": "bitmap"}),
        ({"compressor": "topk", "index_coding": "golomb"}, {"indices": "golomb"}),
        ({"compressor": "topk", "index_coding": "golomb", "coding": {"indices": "none"}}, {}),
        (
            {"compressor": "wangni", "coding": {"every": "smallest", "signed": "rans"}},
            {"indices": "smallest", "signed": "rans"},
        ),
        ({"compressor": "sketchml", "coding": {"every": "rans", "keys": "none"}}, {"widths": "rans", "sketch": "rans"}),
        ({"compressor": "natural", "clipped": True, "coding": "huffman"}, {"codes": "huffman"}),
    ],
)
def test_codings_are_chosen_by_field(config, expected):
    config = {**GATHERED, **config}
    assert chosen(config) == expected
    made = make_config(config)
    assert make_config(made.to_dict()) == made


def test_the_report_names_the_codings():
    shapes = {"w": (60, 50)}
    config = {"compressor": "qsgd", "default_rules": False, **GATHERED}
    reports = [grace.Simulation(2, shapes, {**config, "coding": c}).plan.report() for c in (NONE, "rans")]
    assert ["by data (codes by rans)" in report for report in reports] == [False, True]


def test_rules_and_stages_choose_codings():
    config = make_config(
        {
            "compressor": "topk",
            "coding": "golomb",
            **GATHERED,
            "default_rules": False,
            "rules": [{"match": "a", "compressor": "qsgd", "coding": "huffman", **GATHERED}],
            "schedule": [{"step": 5, "compress_ratio": 0.5}, {"step": 9, "coding": "bitmap"}],
        }
    )
    plan = grace.Simulation(2, {"a": (60, 50), "b": (60, 50)}, config).plan
    found = {u.pieces[0].tensor: [f.coding for f in u.fields] for u in plan.units}
    assert found == {"a": [NONE, "huffman"], "b": [NONE, "golomb"]}
    assert [stage.method.coding.every for _, stage in config.stages] == ["golomb", "golomb", "bitmap"]
    assert make_config(config.to_dict()) == config


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"compressor": "qsgd", "coding": "hufman"}, ConfigError, "unknown coding 'hufman'. Did you mean 'huffman'"),
        ({"compressor": "qsgd", "coding": 3}, ConfigError, "expected a name, or a table"),
        (
            {"compressor": "qsgd", "coding": {"code": "rans"}},
            ConfigError,
            "sends no field 'code'. Did you mean 'codes'",
        ),
        ({"compressor": "qsgd", "coding": {"norms": "rans"}}, ConfigError, "Leave 'norms' out"),
        ({"compressor": "qsgd", "coding": {"codes": "golomb"}}, ConfigError, "cannot code the field 'codes'.*huffman"),
        ({"compressor": "topk", "coding": "rans"}, ConfigError, r"suits no field of .*values \(float32\)"),
        (
            {"compressor": "randomk", "memory": "none", "coding": "rans"},
            IncompatibleError,
            "Allreduce.* adds payloads on the way",
        ),
        ({"compressor": "qsgd", "coding": "rans", "communicator": "allreduce"}, IncompatibleError, "QSGD"),
        ({"compressor": "topk", "coding": "golomb", "communicator": "broadcast"}, IncompatibleError, "other lengths"),
    ],
)
def test_unsuitable_codings_are_refused(config, error, text):
    with pytest.raises(error, match=text):
        chosen(config)


# --- damaged payloads ---------------------------------------------------------------------------------------------


def refused(ops, f, data, size, n):
    with pytest.raises(PayloadError, match="the payload is damaged"):
        codings.decode(ops, f, array(ops, data, "uint8"), size, n)


@pytest.mark.parametrize("backend", ["numpy", "numpy-reference", "torch-reference"])
@pytest.mark.parametrize("coding", CODECS)
def test_damaged_codes_are_refused(coding, backend):
    ops, n, f = ops_of(backend), 900, field(coding)
    good = host(ops, codings.encode(ops, f, array(ops, drawn("skewed", n), "uint8")).data)
    cut = good[:-1]
    refused(ops, f, cut, len(cut), n)
    refused(ops, f, good[:1], 1, n)
    refused(ops, f, np.append(good, [1]), len(good) + 1, n)
    # Another number of bytes than was coded.
    refused(ops, f, good, len(good), n + 200)
    first = np.append(255 - good[:200], good[200:])
    refused(ops, f, first, len(first), n)


@pytest.mark.parametrize("backend", ["numpy", "numpy-reference"])
def test_rans_notices_words_and_states_that_do_not_fit(backend):
    """The states return to their start with the last word, and not before or after it."""
    ops, n = ops_of(backend), 900
    values = drawn("half", n)
    good = rans_encode(ops, values, 8)
    head = 32 + 2 * len(np.unique(values))
    words = ops.unpack(good[head:], 16, (len(good) - head) // 2)

    def decoded(words):
        return rans_decode(ops, np.concatenate([good[:head], ops.pack(words, 16)]), 8, n)

    assert np.array_equal(decoded(words), values)
    other = words.copy()
    other[0] ^= 1
    for bad in (np.append(words, 0), words[:-1], other):
        with pytest.raises(PayloadError, match=r"rans: .* the payload is damaged"):
            decoded(bad)


@pytest.mark.parametrize("backend", ["numpy", "numpy-reference"])
def test_damaged_bytes_end_in_a_result_or_a_payload_error(backend):
    ops, n = ops_of(backend), 200
    rng = np.random.default_rng(0)
    results = 0
    for coding in NAMES:
        f = field(coding, 5)
        good = host(ops, codings.encode(ops, f, array(ops, drawn("skewed", n), "uint8")).data)
        for _ in range(40):
            bad = good.copy()
            bad[rng.integers(0, len(bad), 2)] = rng.integers(0, 256, 2)
            with contextlib.suppress(PayloadError):
                assert ops.length(codings.decode(ops, f, bad, len(bad), n)) == n
                results += 1
    assert results < 150


def test_an_unknown_number_of_a_coding_is_refused():
    ops, f = get_ops("numpy"), field(SMALLEST)
    good = codings.encode(ops, f, np.zeros(500, np.uint8)).data
    for tag in (len(CODECS), 255):
        refused(ops, f, np.append(tag, good[1:]), len(good), 500)


@pytest.mark.parametrize("backend", BACKENDS)
def test_headers_cannot_ask_for_much_memory(backend):
    """A count of elements is bounded by the bytes that are there."""
    ops = ops_of(backend)
    f = Field("codes", "int16", "coded", coding="rans")
    layout = GatherLayout([SPEC], [[f]], [False])
    payload = {"codes": array(ops, np.arange(400) % 3, "int16")}
    good = host(ops, layout.encode(ops, [payload], [False], 3))
    at = layout._counts_offset // 4
    size = int(good.view(np.int32)[at + 1])
    assert size < 800
    for count, length, text in (
        (2**31 - 1, size, "at most 1024 bytes of 'codes' per coded byte"),
        (2**30, 2**31 - 1, "as many elements as its header says"),
        (512 * size + 512, size, "at most 1024 bytes of 'codes' per coded byte"),
        (size // 2 - 1, size, "and at least as many"),
        (400, -1, "lengths from 0 on"),
        (400, 10**6, "as many elements as its header says"),
        (-1, size, "lengths from 0 on"),
    ):
        words = good.view(np.int32).copy()
        words[at], words[at + 1] = count, length
        with pytest.raises(PayloadError, match=text):
            layout.decode(ops, array(ops, words.view(np.uint8), "uint8"), 1, 3)


def test_every_registered_method_with_integers_can_be_coded():
    """The option of the documentation, by name."""
    assert {compressors.name_of(c) for c in all_compressors() if any(codings.valid(f) for f in c.wire(SPEC))} > {
        "qsgd",
        "terngrad",
        "3lc",
        "natural",
        "topk",
    }
