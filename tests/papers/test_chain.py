"""Composition of sparsifier and quantizer. Kept and dropped parts are orthogonal: errors add, contractions multiply."""

from __future__ import annotations

import json

import numpy as np
import pytest

import grace
from grace.core.compressors.qsgd import QSGD
from grace.core.compressors.topk import TopK
from grace.core.config.registry import compressors
from grace.core.errors import ConfigError, PayloadError
from grace.core.methods.capabilities import Tuning
from grace.core.ops import get_ops
from grace.testing.harness import exchange
from tests.papers.common import (
    OPS,
    bits_per_element,
    make,
    normal,
    payload,
    send,
    simulate,
    spec,
    state,
    step,
    variance,
)
from tests.support.covering import rest_slow

TOPK = {"name": "topk", "compress_ratio": 0.1}


def test_error_is_that_of_the_sparsifier_plus_that_of_the_quantizer_on_the_kept_values():
    x = normal(2000)
    kept = np.sort(np.abs(x).astype(np.float64))[-200:]
    # The exact variance of QSGD's stochastic rounding, with the 200 values in one bucket.
    s = 7
    norm = np.linalg.norm(kept)
    p = s * kept / norm % 1
    expected = np.sum(x.astype(np.float64) ** 2) - np.sum(kept**2) + np.sum((norm / s) ** 2 * p * (1 - p))
    chain = make("chain", sparsifier=TOPK, quantizer={"name": "qsgd", "quantum_num": s, "bucket_size": 0, "norm": "l2"})
    mean, margin = variance(chain, x, 200)
    assert abs(mean - expected) <= margin
    assert margin < 0.05 * expected


def test_coded_indices_and_values_of_2_bits_send_more_than_200_times_fewer_bytes():
    """docs/configuration.md: 7.5 bits for an index and 2 for a value, of 1 in 64 elements."""
    n = 1 << 20
    config = {
        "compressor": "chain",
        "sparsifier": {"name": "topk", "compress_ratio": 1 / 64},
        "quantizer": {"name": "eden", "bits": 2},
        "index_coding": "golomb",
        "communicator": "allgather",
    }
    simulation = grace.Simulation(2, {"w": (n,)}, {**config, "default_rules": False})
    simulation.step([{"w": normal(n, rank)} for rank in range(2)])
    stats = simulation.stats()
    assert stats["dense_bytes"] / stats["wire_bytes"] == pytest.approx(214, abs=1)


def test_contractions_multiply_and_equal_magnitudes_reach_them():
    chain = make("chain", sparsifier=TOPK, quantizer="efsignsgd")
    assert chain.contraction(spec(1000)) == pytest.approx(0.1 / 100)
    assert make("chain", sparsifier=TOPK, quantizer="none").contraction(spec(1000)) == 0.1
    assert make("chain", sparsifier=TOPK, quantizer="qsgd").contraction(spec(1000)) is None
    # The worst case of the scaled sign is a single nonzero value among the k kept ones: delta = 1/k.
    one = np.zeros(1000, np.float32)
    one[7] = 2.0
    assert np.sum((send(chain, one) - one) ** 2) == pytest.approx(4 * (1 - 1 / 100), rel=1e-5)


def test_topk_then_sign_is_the_mean_magnitude_of_the_kept_with_their_signs():
    x = normal(500, 1)
    expected = np.zeros(500)
    top = np.argsort(-np.abs(x))[:50]
    expected[top] = np.sign(x[top]) * np.mean(np.abs(x[top]).astype(np.float64))
    assert np.allclose(send(make("chain", sparsifier=TOPK, quantizer="efsignsgd"), x), expected, rtol=1e-6, atol=0)


def test_bytes_of_indices_codes_and_norms():
    # k = 1000 of 10000: 4 bytes per index, 5 bits per value, 2 norms of 4 bytes.
    chain = make("chain", sparsifier=TOPK, quantizer={"name": "qsgd", "quantum_num": 15})
    assert bits_per_element(chain, 10000) * 10000 / 8 == 4000 + 625 + 8
    # Indices that follow from the shared key are not sent.
    chain = make("chain", sparsifier={"name": "randomk", "compress_ratio": 0.1}, quantizer="fp16")
    assert bits_per_element(chain, 10000) * 10000 / 8 == 2000


def test_the_quantizer_draws_other_numbers_than_the_sparsifier_and_each_rank_its_own():
    """All values are equal, so only the random rounding can differ."""
    x = np.ones(4000, np.float32)
    quantizer = {"name": "qsgd", "norm": "l2"}
    chain = make("chain", sparsifier={"name": "randomk", "compress_ratio": 0.5}, quantizer=quantizer)
    a, b = exchange(chain, OPS, spec(4000), [x, x]).payloads
    assert np.array_equal(a["indices"], b["indices"])
    assert not np.array_equal(a["values/codes"], b["values/codes"])
    qsgd_alone = payload(make(**quantizer), np.ones(2000, np.float32))["codes"]
    assert not np.array_equal(qsgd_alone, a["values/codes"])


def test_ranks_with_different_indices_are_added():
    xs = [normal(300, seed) for seed in range(3)]
    chain = make("chain", sparsifier=TOPK, quantizer="none")
    expected = np.zeros(300)
    for x in xs:
        top = np.argsort(-np.abs(x))[:30]
        expected[top] += x[top].astype(np.float64) / 3
    assert np.allclose(step(simulate(3, (300,), chain), xs), expected, rtol=1e-6, atol=1e-7)


def test_memory_keeps_the_rounding_of_kept_values_and_all_of_the_others():
    x = normal(300)
    chain = make("chain", sparsifier=TOPK, quantizer="efsignsgd")
    sim = simulate(1, (300,), chain, "residual")
    applied = step(sim, [x])
    assert np.count_nonzero(applied) == 30
    assert np.allclose(state(sim, 0), x - applied, rtol=0, atol=1e-6)
    assert np.abs(state(sim, 0)[applied != 0]).max() > 0.01, "the rounding of the kept values is remembered"


def test_momentum_is_masked_where_values_were_kept():
    x = normal(300)
    sim = simulate(1, (300,), make("chain", sparsifier=TOPK, quantizer="qsgd"), "dgc")
    applied = step(sim, [x])
    kept = np.abs(x) >= np.sort(np.abs(x))[-30]
    assert not applied[~kept].any()
    assert np.array_equal(state(sim, 0, "momentum"), np.where(kept, 0, x))


# --- configuration --------------------------------------------------------------------------------------------------


def test_parts_are_given_by_name_by_table_or_ready():
    expected = make("chain")
    assert expected == compressors.get("chain")(TopK(), QSGD())
    assert expected == make("chain", sparsifier="topk", quantizer={"name": "qsgd"})
    assert expected == make("chain", sparsifier=TopK(), quantizer=QSGD())
    assert hash(expected) == hash(make("chain", sparsifier="topk"))
    assert make("chain", quantizer=QSGD(15)).quantizer == QSGD(quantum_num=15)


def test_tables_survive_json_and_the_flat_configuration():
    tables = {"sparsifier": {"name": "topk", "compress_ratio": 0.02}, "quantizer": {"name": "qsgd", "quantum_num": 15}}
    inside = grace.make_config({"compressor": {"name": "chain", **tables}})
    beside = grace.make_config({"compressor": "chain", **tables})
    assert inside == beside
    assert inside.method.compressor == make("chain", sparsifier=TopK(0.02), quantizer=QSGD(15))
    assert grace.make_config(json.loads(json.dumps(inside.to_dict()))) == inside
    assert grace.make_config({"compressor": "chain", "sparsifier": "topk", "quantizer": "qsgd"}) == grace.make_config(
        {"compressor": "chain"}
    )
    described = compressors.config_of(make("chain"))
    assert described["sparsifier"] == {"name": "topk", "compress_ratio": 0.01}
    assert compressors.make(described) == make("chain")


@pytest.mark.parametrize("name", ["qsgd", "powersgd", "chain", {"name": "randomk", "scaled": True}])
def test_sparsifiers_that_cannot_be_chained_are_refused_with_the_valid_ones(name):
    with pytest.raises(ConfigError, match=r"cannot be its sparsifier: .*Valid sparsifiers: .*randomk.*threshold.*topk"):
        make("chain", sparsifier=name)


# Sparsifiers whose number of values depends on the data, and quantizers that need not know it.
COUNTED = [{"name": "threshold", "threshold": 1.0}, "dgc", "sidco", "gaussiank", {"name": "sdagc", "alpha": 1.0}]
ANY_LENGTH = ["qsgd", "nuqsgd", "blockwise", "fp16", "bf16", "none"]


@pytest.mark.parametrize("sparsifier", COUNTED, ids=str)
@pytest.mark.parametrize("quantizer", ["qsgd", "none"])
def test_values_of_any_number_are_quantized(sparsifier, quantizer):
    """The kept values are those of the sparsifier; only their rounding is added."""
    x = normal(3000)
    kept = payload(compressors.make(sparsifier), x)
    chain = make("chain", sparsifier=sparsifier, quantizer=quantizer)
    sent = payload(chain, x)
    assert np.array_equal(sent["indices"], kept["indices"])
    found = send(chain, x)[kept["indices"]]
    if quantizer == "none":
        assert np.array_equal(found, kept["values"])
    else:
        # A value moves by less than one level, and a bucket of 512 values has its own scale.
        largest = [np.abs(kept["values"][start : start + 512]).max() for start in range(0, len(found), 512)]
        assert (np.abs(found - kept["values"]) < np.repeat(largest, 512)[: len(found)] / 127 * 1.001).all()
        assert len(sent["values/norms"]) == -(-len(found) // 512)
        assert len(sent["values/codes"]) == len(found)


@pytest.mark.parametrize("quantizer", ANY_LENGTH)
def test_no_value_at_all_can_be_sent(quantizer):
    chain = make("chain", sparsifier={"name": "threshold", "threshold": 100.0}, quantizer=quantizer)
    assert not send(chain, normal(300)).any()


def test_the_error_of_values_of_any_number_adds_up():
    x = normal(2000)
    sparsifier = {"name": "threshold", "threshold": 1.0}
    chain = make("chain", sparsifier=sparsifier, quantizer={"name": "qsgd", "quantum_num": 3})
    dropped = float(np.sum(x[np.abs(x) <= 1.0].astype(np.float64) ** 2))
    kept = payload(compressors.make(sparsifier), x)["values"]
    rounded, other = variance(make("qsgd", quantum_num=3), kept, 100)
    mean, margin = variance(chain, x, 100)
    assert abs(mean - dropped - rounded) < margin + other


@pytest.mark.parametrize("name", ["efsignsgd", "terngrad", "alq", {"name": "qsgd", "bucket_size": 0}])
def test_quantizers_that_need_the_number_of_values_are_refused_with_those_that_do_not(name):
    with pytest.raises(ConfigError, match=r"must know it before; .* need not: bf16, .*none, nuqsgd, qsgd"):
        make("chain", sparsifier={"name": "threshold", "threshold": 1.0}, quantizer=name)
    make("chain", sparsifier="topk", quantizer=name)


@pytest.mark.parametrize("name", rest_slow(ANY_LENGTH, 2))
@pytest.mark.parametrize("native", [None, False], ids=["kernels", "reference"])
def test_a_graph_of_tensorflow_sends_the_same_values_of_any_number(name, native):
    tf = pytest.importorskip("tensorflow")
    chain, ops = (
        make("chain", sparsifier={"name": "threshold", "threshold": 1.0}, quantizer=name),
        get_ops("tensorflow", native=native),
    )
    xs = [normal(700), 0.9 * normal(700, 1)]
    site = exchange(chain, OPS, spec(700), xs[:1]).sites[0]

    @tf.function(input_signature=[tf.TensorSpec((700,), tf.float32)], autograph=False)
    def both(x):
        sent = chain.compress(x, site._replace(ops=ops))
        return sent, chain.merge([sent, sent], site._replace(ops=ops))

    for x in xs:
        expected = chain.compress(x, site)
        sent, merged = both(tf.constant(x))
        assert all(np.array_equal(sent[field].numpy(), expected[field]) for field in expected)
        assert np.array_equal(merged.numpy(), chain.merge([expected, expected], site))


def test_values_that_are_fewer_than_their_indices_are_refused():
    x = normal(3000)
    chain = make("chain", sparsifier={"name": "threshold", "threshold": 1.0}, quantizer="qsgd")
    made = exchange(chain, OPS, spec(3000), [x])
    damaged = {**made.payloads[0], "values/codes": made.payloads[0]["values/codes"][:-1]}
    with pytest.raises(PayloadError, match="expected codes for as many values as indices"):
        chain.decompress(damaged, made.sites[0])


def test_every_method_of_any_length_is_tested():
    names = [name for name in compressors if name != "chain" and compressors.example(name).of_any_length]
    assert names == sorted(ANY_LENGTH)


def test_sparsifiers_that_are_tuned_across_tensors_cannot_be_chained(monkeypatch):
    class Tuned(TopK, Tuning):
        init = tally = retune = None

    monkeypatch.setitem(compressors._classes, "tuned", Tuned)
    with pytest.raises(ConfigError, match="cannot be its sparsifier: it tunes a value across all tensors"):
        make("chain", sparsifier="tuned")


@pytest.mark.parametrize("name", ["signsgd", "powersgd", "topk", "chain"])
def test_quantizers_that_cannot_be_chained_are_refused_with_the_valid_ones(name):
    with pytest.raises(ConfigError, match=r"cannot be its quantizer: .*Valid quantizers: .*onebit, qcs, qsgd") as error:
        make("chain", quantizer=name)
    assert "signsgd" not in str(error.value).split("Valid")[1].replace("efsignsgd", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsifier": "tpok"}, "unknown compressor 'tpok'.*'topk'"),
        ({"sparsifier": {"name": "topk", "ratio": 1.0}}, "compressor 'topk' has no option 'ratio'"),
        ({"sparsifier": {"compress_ratio": 1.0}}, "table with the key 'name'"),
        ({"quantizer": 3}, "option 'quantizer': expected Compressor, received 3"),
        ({"quantizer": QSGD}, "option 'quantizer': expected Compressor"),
    ],
)
def test_mistakes_inside_the_tables_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        make("chain", **options)


def test_flat_options_of_an_inner_part_are_not_guessed():
    with pytest.raises(ConfigError, match="'compress_ratio' is no option of compressor 'chain'"):
        grace.make_config({"compressor": "chain", "compress_ratio": 0.1})
