"""Horvath and Richtarik, "A better alternative to error feedback", ICLR 2021: the induced compressor."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.errors import ConfigError
from tests.papers.common import make, normal, payload, send, variance
from tests.papers.test_two_shot import distances, top

N, RATIO = 400, 0.1
TOPK = {"name": "topk", "compress_ratio": RATIO}
RANDOMK = {"name": "randomk", "compress_ratio": 0.25, "scaled": True}


def test_what_is_sent_is_both():
    """C1(x) + C2(x - C1(x)), with the coordinates that random-k draws and multiplies by d / k."""
    x = normal(N)
    sent, kept = payload(make("induced", sparsifier=TOPK, quantizer=RANDOMK), x), top(RATIO)(x)
    expected, drawn = kept.astype(np.float64), sent["rest/indices"]
    assert len(set(drawn.tolist())) == N // 4
    expected[drawn] += 4 * (x - kept)[drawn].astype(np.float64)
    assert np.allclose(send(make("induced", sparsifier=TOPK, quantizer=RANDOMK), x), expected, rtol=1e-6)


@pytest.mark.parametrize("quantizer", [RANDOMK, {"name": "qsgd", "quantum_num": 1}, "natural"])
def test_it_is_unbiased(quantizer):
    """Lemma 3, though top-k is not."""
    x, compressor = normal(N), make("induced", sparsifier=TOPK, quantizer=quantizer)
    errors = np.array([send(compressor, x, step=step) - x for step in range(600)])
    # The square of the mean error falls with the number of trials, as that of an unbiased one does.
    assert np.sum(errors.mean(axis=0) ** 2) <= 1.5 * np.sum(errors.var(axis=0)) / len(errors)
    assert np.sum(errors.var(axis=0)) > 0.01


def test_its_variance_is_that_of_the_rest():
    """Theorem 3: E|C(x) - x|^2 <= omega (1 - delta) |x|^2; with random-k it is omega |x - C1(x)|^2."""
    x = normal(N).astype(np.float32) ** 3
    rest = np.sum((x - top(RATIO)(x)).astype(np.float64) ** 2)
    mean, margin = variance(make("induced", sparsifier=TOPK, quantizer=RANDOMK), x, 600)
    assert abs(mean - 3 * rest) <= margin
    whole = np.sum(x.astype(np.float64) ** 2)
    assert 3 * rest <= 3 * (1 - RATIO) * whole
    # Heavy tails: most of the norm arrives exactly.
    assert mean < 0.3 * variance(make(**RANDOMK), x, 600)[0]


def test_it_comes_nearer_to_the_optimum_than_its_parts():
    """Section 5, without a memory: top-k alone is biased, random-k alone has more variance."""
    induced = {"name": "induced", "sparsifier": {**TOPK, "compress_ratio": 0.3}, "quantizer": RANDOMK}
    found = {}
    for name, compressor in (("both", induced), ("topk", induced["sparsifier"]), ("randomk", RANDOMK)):
        config = {"compressor": compressor, "memory": "none", "communicator": "allgather"}
        found[name] = np.mean(distances(config, 60)[30:])
    assert found["both"] < 0.7 * min(found["topk"], found["randomk"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantizer": "topk"}, "'topk' cannot be its quantizer: it is not unbiased"),
        ({"sparsifier": "scalecom"}, "'scalecom' cannot be its sparsifier"),
        ({"sparsifier": "qsgd"}, "'qsgd' cannot be its sparsifier: it does not send exact values"),
    ],
)
def test_methods_without_the_property_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make("induced", **options)
