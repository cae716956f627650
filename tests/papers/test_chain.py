"""Composition of sparsifier and quantizer. Kept and dropped parts are orthogonal: errors add, contractions multiply."""

from __future__ import annotations

import json

import numpy as np
import pytest

import grace
from grace.core.compressors.qsgd import QSGD
from grace.core.compressors.topk import TopK
from grace.core.methods.capabilities import Tuning
from grace.core.values.errors import ConfigError
from grace.core.values.registry import compressors
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


@pytest.mark.parametrize("name", ["dgc", "threshold", "qsgd", "powersgd", "chain", {"name": "randomk", "scaled": True}])
def test_sparsifiers_that_cannot_be_chained_are_refused_with_the_valid_ones(name):
    with pytest.raises(ConfigError, match=r"cannot be its sparsifier: .*Valid sparsifiers: .*randomk.*topk") as error:
        make("chain", sparsifier=name)
    assert "threshold" not in str(error.value).split("Valid")[1]


def test_sparsifiers_that_are_tuned_across_tensors_cannot_be_chained(monkeypatch):
    class Tuned(TopK, Tuning):
        init = tally = retune = None

    monkeypatch.setitem(compressors._classes, "tuned", Tuned)
    with pytest.raises(ConfigError, match="cannot be its sparsifier: it tunes a value across all tensors"):
        make("chain", sparsifier="tuned")


@pytest.mark.parametrize("name", ["signsgd", "powersgd", "topk", "chain"])
def test_quantizers_that_cannot_be_chained_are_refused_with_the_valid_ones(name):
    with pytest.raises(ConfigError, match=r"cannot be its quantizer: .*Valid quantizers: .*onebit, qsgd") as error:
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
