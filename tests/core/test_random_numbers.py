"""Random numbers are a pure function of (key, counter) and equal the published values, on every framework."""

from __future__ import annotations

import random as python_random

import numpy as np
import pytest

from grace.core.ops import get_ops
from grace.core.ops.random import philox, words
from grace.core.spec import Key, TensorSpec
from grace.testing.harness import FRAMEWORKS, array, exchange, host, same
from tests.support import registered
from tests.support.registered import every_framework

# Random123, file tests/kat_vectors, "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def numbers(text):
    return [int(word, 16) for word in text.split()]


@every_framework
@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_numbers(framework, counter, key, result):
    ops = get_ops(framework)
    lanes = philox(ops, tuple(array(ops, [c], "int64") for c in numbers(counter)), tuple(numbers(key)))
    assert [int(lane[0]) for lane in lanes] == numbers(result)


def test_every_philox_answer_differs_from_the_others():
    """Blocks are independent: different counters share a word no more often than by chance."""
    drawn = host(get_ops("numpy"), words(get_ops("numpy"), 40_000, Key(1, 0)))
    # 40,000 of 2^32 words: 0.19 equal pairs are expected, and 10 or more have a probability below 1e-12.
    assert len(set(drawn.tolist())) > 40_000 - 10


def test_words_follow_the_documented_counter():
    """The counter is (block, step, stream, rank), the key is (low, high) of the seed."""
    ops, key = get_ops("numpy"), Key(0x0123456789ABCDEF, 7, 3)
    drawn = words(ops, 10, key, stream=5).tolist()
    for block in range(3):
        counter = tuple(array(ops, [c], "int64") for c in (block, 7, 5, 3))
        expected = [int(lane[0]) for lane in philox(ops, counter, (0x89ABCDEF, 0x01234567))]
        assert drawn[4 * block : 4 * block + 4] == expected[: len(drawn) - 4 * block]


@pytest.mark.parametrize("n", [0, 1, 4, 5, 1000])
def test_frameworks_draw_the_same_bits(n):
    key = Key(2**64 - 1, 11, 2)
    backends = [get_ops(framework) for framework in FRAMEWORKS]
    one, *others = (host(ops, ops.uniform(n, key)) for ops in backends)
    assert all(same(one, other) for other in others)
    for k in {0, min(1, n), n // 2, n}:
        drawn = [host(ops, ops.sample(n, k, key)) for ops in backends]
        assert str(drawn[0].dtype) == "int32"
        assert all(same(drawn[0], other) for other in drawn[1:])
        assert len(set(drawn[0].tolist())) == k
        assert all(0 <= i < n for i in drawn[0].tolist())


@every_framework
@pytest.mark.parametrize("step", [2**31, 2**32 - 1, 2**32, 2**32 + 5, 2**40])
def test_kernels_and_reference_draw_the_same_bits_at_every_step(framework, step):
    """Only the lower 32 bits of the step enter the counter."""
    drawn = []
    for native in (False, None):
        ops = get_ops(framework, native=native)
        drawn += [
            [host(ops, x) for x in (ops.words(9, key), ops.uniform(9, key), ops.sample(100, 9, key))]
            for key in (Key(7, step), Key(7, step % 2**32))
        ]
    assert all(same(a, b) for other in drawn[1:] for a, b in zip(drawn[0], other, strict=True))


@pytest.mark.parametrize("compressor", registered.params([c for c in registered.all_compressors() if not c.multiplies]))
def test_methods_send_the_same_with_and_without_kernels_from_step_2_to_the_32_on(compressor):
    spec, xs = TensorSpec("w", (30, 20)), np.random.default_rng(0).standard_normal((2, 600)).astype(np.float32)
    sent = [exchange(compressor, get_ops("numpy", native=native), spec, xs, step=2**32 + 5) for native in (False, None)]
    for one, other in zip(*(ex.payloads for ex in sent), strict=True):
        assert all(same(host(sent[0].ops, one[field]), host(sent[1].ops, other[field])) for field in one)


def test_a_shorter_draw_is_the_beginning_of_a_longer():
    ops = get_ops("numpy")
    assert np.array_equal(ops.uniform(7, Key(1, 2)), ops.uniform(100, Key(1, 2))[:7])


def test_uniform_numbers_are_uniform():
    u = get_ops("numpy").uniform(1_000_000, Key(9, 9))
    assert u.dtype == np.float32
    assert 0 <= u.min() < 1e-5
    assert 1 - 1e-5 < u.max() < 1
    # Multiples of 2^-24, which float32 represents exactly.
    assert np.array_equal(u.astype(np.float64) * 2**24 % 1, np.zeros(len(u)))
    counts = np.bincount((u * 256).astype(int), minlength=256)
    chi = np.sum((counts - 1e6 / 256) ** 2) / (1e6 / 256)
    # Chi-square with 255 degrees of freedom, 5 standard deviations.
    assert abs(chi - 255) < 5 * np.sqrt(2 * 255)
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 5e-3


@pytest.mark.parametrize(
    "other", [Key(1, 1), Key(2, 0), Key(1, 0, 1), Key(1 + 2**32, 0)], ids=["step", "seed", "rank", "high seed"]
)
def test_every_part_of_the_key_matters(other):
    ops = get_ops("numpy")
    a, b = ops.uniform(1000, Key(1, 0)), ops.uniform(1000, other)
    assert np.mean(a == b) < 0.01
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.2
    assert ops.sample(1000, 100, Key(1, 0)).tolist() != ops.sample(1000, 100, other).tolist()


def test_streams_of_one_key_differ():
    ops = get_ops("numpy")
    assert ops.uniform(100, Key(1, 0), stream=0).tolist() != ops.uniform(100, Key(1, 0), stream=1).tolist()
    assert ops.sample(100, 50, Key(1, 0), stream=0).tolist() != ops.sample(100, 50, Key(1, 0), stream=1).tolist()


@pytest.mark.parametrize("n", [1, 2, 3, 5, 31, 32, 33, 1000])
def test_a_sample_of_all_is_a_permutation(n):
    drawn = get_ops("numpy").sample(n, n, Key(3, 4))
    assert sorted(drawn.tolist()) == list(range(n))
    if n > 30:
        assert drawn.tolist() != list(range(n))


def test_derived_seeds_are_the_same_on_every_machine():
    """The seed is blake2b of "seed/name", little-endian. It must never change, or old runs cannot be repeated."""
    assert Key.derive(0, "layer.weight") == 0x637A9E69BDE150B9
    names = ["a", "b", "a.weight", "weight"]
    assert len({Key.derive(seed, name) for seed in (0, 1) for name in names}) == 8
    assert all(0 <= Key.derive(2**62, name) < 2**64 for name in names)


@every_framework
def test_no_global_generator_is_touched(framework):
    import torch

    ops = get_ops(framework)
    before = np.random.get_state()[1].tolist(), python_random.getstate(), torch.get_rng_state().tolist()
    ops.uniform(100, Key(1, 0))
    ops.sample(100, 10, Key(1, 0))
    assert (np.random.get_state()[1].tolist(), python_random.getstate(), torch.get_rng_state().tolist()) == before
