"""The entry for MLS-Bench gives what a rank of a simulation gets, bit for bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import grace

ROOT = Path(__file__).parents[2]
SHAPE = (40, 60)
# Among them: a residual (topk), a proposal and a memory that finishes (powersgd), a memory with a gain (efsignsgd), a
# field that does not travel (randomk), a state that is learnt (dct), and one that is tuned (hardthreshold).
METHODS = [
    {"compressor": "topk", "compress_ratio": 0.02},
    {"compressor": "qsgd"},
    {"compressor": "qsgd", "norm": "l2", "bucket_size": 0},
    {"compressor": "eden", "bits": 2},
    {"compressor": "powersgd", "compress_rank": 4},
    {"compressor": "efsignsgd"},
    {"compressor": "randomk", "memory": "residual", "compress_ratio": 0.1},
    {"compressor": "dct", "compress_ratio": 0.05},
    {"compressor": "hardthreshold", "compress_ratio": 0.05},
    {"compressor": "onebit"},
    {"compressor": "uniform", "stochastic": True},
    {"compressor": "signsgd"},
    {"compressor": "none"},
]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("mls_bench", ROOT / "examples" / "mls_bench.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gradients(steps, shape=SHAPE, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(steps)]


def passed(entry, gradient, name="w"):
    return entry.decompress(*entry.compress(gradient, name))


def cases():
    """Yield every method with float32, and one with float16."""
    for config in METHODS:
        yield pytest.param(config, torch.float32, id="-".join(map(str, config.values())))
    yield pytest.param(METHODS[0], torch.float16, id="float16")


@pytest.mark.parametrize(("config", "dtype"), list(cases()))
def test_a_worker_gets_what_a_rank_gets(example, config, dtype):
    config = {**config, "seed": 42}
    entry = example.GradientCompressor(config=config)
    spec = grace.TensorSpec("w", SHAPE, str(dtype).removeprefix("torch."))
    simulation = grace.Simulation(1, [spec], config, framework="torch")
    for gradient in gradients(3, dtype=dtype):
        given = gradient.clone()
        found = passed(entry, gradient)
        assert torch.equal(found, simulation.step([{"w": gradient}])[0]["w"])
        assert (found.shape, found.dtype) == (gradient.shape, dtype)
        assert torch.equal(gradient, given)


def test_bytes_are_those_of_a_run(example):
    """With the proposal of powersgd, and without the indices of randomk, which follow from the seed."""
    for config in METHODS:
        entry = example.GradientCompressor(config=config)
        simulation = grace.Simulation(1, {"w": SHAPE}, config, framework="torch")
        (gradient,) = gradients(1)
        tensors, _ = entry.compress(gradient, "w")
        simulation.step([{"w": gradient}])
        sent = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        # Beside the header of a buffer, and its padding.
        assert abs(simulation.stats()["tensors"]["w"]["wire_bytes"] - sent) <= 32, config


def test_names_have_states_and_random_numbers_of_their_own(example):
    config = {"compressor": "topk", "compress_ratio": 0.02, "seed": 0}
    first, second = gradients(2)
    entry, alone = (example.GradientCompressor(config=config) for _ in range(2))
    passed(entry, first, "a")
    assert torch.equal(passed(entry, second, "b"), passed(alone, second, "b"))
    assert not torch.equal(passed(entry, second, "a"), passed(example.GradientCompressor(config=config), second, "a"))
    random = example.GradientCompressor(config={"compressor": "qsgd"})
    draws = [passed(random, first, name) for name in ("a", "b", "a")]
    assert not any(torch.equal(draws[i], draws[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_small_tensors_stay_dense(example):
    entry = example.GradientCompressor(config={"compressor": "signsgd"})
    for name, shape in (("layer.weight", (8, 8)), ("layer.bias", (2000,)), ("scale", ()), ("empty", (0, 5))):
        gradient = gradients(1, shape)[0]
        tensors, ctx = entry.compress(gradient, name)
        assert torch.equal(entry.decompress(tensors, ctx), gradient), name


def test_the_ratio_and_the_seed_come_from_the_benchmark(example):
    gradient = gradients(1)[0]
    topk = {"compressor": "topk"}
    assert passed(example.GradientCompressor(0.05, topk), gradient).count_nonzero() == 0.05 * gradient.numel()
    own = example.GradientCompressor(0.05, {**topk, "compress_ratio": 0.1})
    assert passed(own, gradient).count_nonzero() == 0.1 * gradient.numel()
    with torch.random.fork_rng(devices=()):
        draws = []
        for seed in (42, 123, 42):
            torch.manual_seed(seed)
            draws.append(passed(example.GradientCompressor(), gradient))
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[1])


def test_a_gradient_that_is_not_finite_shows_and_leaves_no_trace(example):
    first, second = gradients(2)
    entry, clean = (example.GradientCompressor(config={"compressor": "topk"}) for _ in range(2))
    for each in (entry, clean):
        passed(each, first)
    bad = second.clone()
    bad[3, 4] = float("nan")
    assert passed(entry, bad).isnan().any()
    assert torch.equal(passed(entry, second), passed(clean, second))


@pytest.mark.parametrize("option", [{"memory": {"name": "residual", "lr_correction": True}}, {"warmup_steps": 10}])
def test_what_the_interface_does_not_tell_is_refused(example, option):
    with pytest.raises(grace.errors.ConfigError, match="neither the learning rate nor the norm"):
        example.GradientCompressor(config={"compressor": "topk", **option})
