"""Yu et al., "Ultrafast error-bounded lossy compression for scientific datasets" (SZx), HPDC 2022: bound and format."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.errors import ConfigError, PayloadError
from grace.core.ops import get_ops
from grace.testing.harness import FRAMEWORKS, exchange, host
from tests.papers.common import OPS, make, normal, payload, send, simulate, spec, step
from tests.support.composite_results import leading_bits

BOUNDS = [0.9, 0.3, 2**-5, 0.01, 2**-12, 1e-4, 2**-20]


def values(dtype: str) -> np.ndarray:
    """Return blocks of every kind: zeros, equal numbers, smooth and rough ones, and numbers of every size."""
    rng = np.random.default_rng(0)
    rough, smooth = rng.standard_normal(700), 1 + 1e-3 * np.sin(np.arange(300) / 30)
    sizes = rng.uniform(-1, 1, 700) * 2.0 ** rng.uniform(-140, 2, 700)
    return np.concatenate([rough, np.zeros(256), np.full(130, -0.7), smooth, sizes, [5.0, -5.0]]).astype(dtype)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("block", [4, 128])
def test_no_error_exceeds_the_bound(bound, dtype, block):
    for scale in (1.0, 1e-30, 1e30):
        x = values(dtype) * np.dtype(dtype).type(scale)
        compressor = make("szx", error_bound=bound, block_size=block)
        ex = exchange(compressor, OPS, spec(len(x), dtype=dtype), [x])
        got = compressor.decompress(ex.payloads[0], ex.sites[0]).astype(np.float64)
        assert np.abs(got - x.astype(np.float64)).max() <= bound * float(np.abs(x).max())


@pytest.mark.parametrize("bound", BOUNDS)
def test_the_format_is_that_of_a_plain_reading(bound):
    x = values("float32")
    x[np.abs(x) < 2.0**-50] = 0
    block = 32
    sent = payload(make("szx", error_bound=bound, block_size=block), x)
    arrays, _ = leading_bits(x / np.abs(x).max(), bound, block)
    for name, array in zip(("middles", "lengths", "leads", "bytes"), arrays, strict=True):
        assert sent[name].tolist() == array.tolist()


def test_a_block_of_nearly_equal_elements_is_its_middle():
    x = np.concatenate([np.linspace(0.5, 0.52, 128), [1.0], np.zeros(127)]).astype(np.float32)
    sent = payload(make("szx", error_bound=0.02), x)
    assert sent["lengths"][0] == 0
    assert sent["middles"][0] == pytest.approx(0.51)
    # The second block has codes of its elements, and the first none.
    assert len(sent["leads"]) == 128 * 2 // 8
    assert np.allclose(send(make("szx", error_bound=0.02), x)[:128], 0.51)


def test_smooth_data_take_fewer_bytes_than_rough_ones():
    """Leading bytes of neighbours are equal, and whole blocks are constant."""
    smooth, rough = np.sin(np.arange(4096) / 200).astype(np.float32), normal(4096)
    sizes = [sum(field.nbytes for field in payload(make("szx"), x).values()) for x in (smooth, rough)]
    assert sizes[0] < 0.5 * sizes[1]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_framework_sends_the_same_bytes(framework):
    x, compressor = values("float32"), make("szx", error_bound=1e-3)
    expected = payload(compressor, x)
    ops = get_ops(framework)
    ex = exchange(compressor, ops, spec(len(x)), [x])
    for name, field in expected.items():
        assert np.array_equal(host(ops, ex.payloads[0][name]), field), name
    assert np.array_equal(
        host(ops, compressor.decompress(ex.payloads[0], ex.sites[0])), send(compressor, x).astype("f4")
    )


@pytest.mark.parametrize("field", ["leads", "bytes"])
def test_a_payload_of_another_length_is_refused(field):
    x, compressor = normal(300), make("szx")
    ex = exchange(compressor, OPS, spec(300), [x])
    damaged = {**ex.payloads[0], field: ex.payloads[0][field][:-1]}
    with pytest.raises(PayloadError, match=r"szx: expected .* the payload is damaged"):
        compressor.decompress(damaged, ex.sites[0])


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_error_feedback_sends_what_the_bound_left_out(ranks):
    given, bound = [normal(1000, seed) for seed in range(ranks)], 2**-5
    simulation, total = simulate(ranks, (1000,), make("szx"), "residual"), np.zeros(1000)
    for _ in range(10):
        total += step(simulation, given)
    # What was not sent is the residual of one step: the bound of the gradient with the residual before it.
    most = max(np.abs(x).max() for x in given) * bound / (1 - bound)
    assert np.abs(total - 10 * np.mean(given, axis=0)).max() <= most


@pytest.mark.parametrize(
    ("options", "said"),
    [({"error_bound": 1.0}, "error_bound"), ({"error_bound": 2**-21}, "error_bound"), ({"block_size": 6}, "multiple")],
)
def test_options_out_of_range_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        make("szx", **options)
