"""Composites of the table: a reference body for every framework, and a body by kernels where it serves."""

from __future__ import annotations

import numpy as np
import pytest

import grace
from grace.core.errors import ConfigError
from grace.core.ops import get_ops, native, table
from grace.testing.harness import FRAMEWORKS, array, host


@pytest.fixture
def halved(monkeypatch):
    """Provide a composite of an outside package; the table forgets it after the test."""
    monkeypatch.setattr(table, "composites", {**table.composites})

    @grace.composite(one_graph=True)
    def halved(ops, x, times=1):
        """Return x / 2^times."""
        return x * ops.cast(0.5**times, ops.dtype(x))

    return halved


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_reference_body_serves_every_framework(halved, framework):
    for kernels in (False, None):
        ops = get_ops(framework, native=kernels)
        for times in (1, 3):
            assert host(ops, halved(ops, array(ops, [2, 3], "float32"), times=times)).tolist() == [
                2 / 2**times,
                3 / 2**times,
            ]


def test_one_graph_is_traced_once_per_signature(halved):
    ops = type(get_ops("tensorflow", native=False))() if "tensorflow" in FRAMEWORKS else pytest.skip("no TensorFlow")
    for values in ([1.0, 2.0], [3.0, 4.0], [5.0]):
        halved(ops, array(ops, values, "float32"))
    assert [body for body, _ in ops._graphs] == [halved.body] * 2


@pytest.mark.skipif(native.module is None, reason="the kernels were not built")
def test_kernels_run_where_they_serve_and_the_reference_elsewhere(halved):
    served = []

    @halved.kernel()
    def _(ops, x, times=1):
        served.append(ops.dtype(x))
        if ops.floating(x) != "float32":
            return None
        return ops.run("weighted_sum", [x, x], (), [0.5**times, 0.0], outputs=["float32"], lengths=[ops.length(x)])[0]

    ops, reference = get_ops("numpy", native=True), get_ops("numpy", native=False)
    for dtype in native.FLOATS:
        x = np.arange(5).astype(dtype)
        assert np.array_equal(halved(ops, x, times=2), halved(reference, x, times=2))
    assert served == ["float32", "float64"]


def test_names_are_given_once(halved):
    def halved(ops, x):
        return x

    with pytest.raises(ConfigError, match=r"composite name 'halved' is taken by tests.core.test_composites; choose"):
        grace.composite()(halved)


def test_a_composite_keeps_the_name_and_the_text_of_its_body(halved):
    assert (halved.name, halved.module, halved.__doc__) == ("halved", __name__, "Return x / 2^times.")
    assert table.composites["halved"] is halved
