"""The kernels give the bytes of the reference implementation, for every operation, dtype, size and alignment."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from grace.core.config.registry import compressors
from grace.core.ops import get_ops, native
from grace.core.ops.composites import ArrayOps
from grace.core.ops.table import composites
from grace.testing.harness import FRAMEWORKS
from tests.kernels import cases, needs_kernels, ops_of
from tests.kernels.__main__ import digests
from tests.support.covering import ALL

pytestmark = needs_kernels


def differences(name, framework, dtype, *given):
    """Return for each result of a case the difference between kernels and reference, None if they agree."""

    def results(framework, native):
        n, kind, seed = given
        return cases.results(name, cases.Given(get_ops(framework, native=native), n, dtype, kind, seed))

    got, wanted = results(framework, True), results("numpy" if framework == "tensorflow" else framework, False)
    found = [cases.difference(*pair) for pair in zip(got, wanted, strict=True)]
    if framework == "tensorflow" and any(found):
        # Operations without a kernel run in TensorFlow, which flushes denormals to zero. The kernels give NumPy's
        # bytes.
        own = [cases.difference(*pair) for pair in zip(got, results(framework, False), strict=True)]
        found = [difference and own[i] for i, difference in enumerate(found)]
    return found


@pytest.mark.parametrize("dtype", native.FLOATS)
@pytest.mark.parametrize("name", cases.CASES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_same_bytes(framework, name, dtype):
    ops_of(framework)
    for n, kind, seed in cases.plans(dtype) if framework == "numpy" else cases.few(dtype):
        for i, difference in enumerate(differences(name, framework, dtype, n, kind, seed)):
            assert difference is None, f"{kind}, n = {n}, seed {seed}, result {i}: {difference}"


def test_a_difference_is_seen():
    x = np.array([0.0, 1.0, np.nan], np.float32)
    assert cases.difference(x, x.copy()) is None
    assert "first at 0" in cases.difference(np.array([-0.0, 1.0, np.nan], np.float32), x)
    assert "float64" in cases.difference(x.astype(np.float64), x)
    assert "[2]" in cases.difference(x[:2], x)
    sums = cases.Loose(np.array([1.0]), 1.0)
    assert cases.difference(cases.Loose(np.array([1.0 + 1e-14]), 1.0), sums) is None
    assert "within" in cases.difference(cases.Loose(np.array([1.0 + 1e-9]), 1.0), sums)


def test_every_operation_has_a_case():
    assert list(compressors), "the table is filled when the methods are imported"
    by_kernels = {name for name, made in composites.items() if made.by_kernels is not None}
    other = {name for name, made in vars(native.Native).items() if inspect.isfunction(made)}
    helpers = {"compute", "run", "floating", "kind", "thin", "total", "next_above", "key_integers", "noise_integers"}
    shared = {name for name in other | vars(ArrayOps).keys() if name[0] != "_"} - helpers
    assert set(cases.CASES) == by_kernels | shared - {"products"}


def test_every_kernel_is_run_by_a_case(monkeypatch):
    module, run = importlib.import_module("grace.core.ops.native_numpy"), set()

    class Recorder:
        CorruptPayload = native.module.CorruptPayload

        def run(self, kernel, *arguments):
            run.add(kernel)
            return native.module.run(kernel, *arguments)

    monkeypatch.setattr(module, "module", Recorder())
    for name in cases.CASES:
        cases.results(name, cases.Given(get_ops("numpy", native=True), 65, "float32"))
    assert run == set(native.module.kernels())


@pytest.mark.parametrize("kind", ["normal", "equal", "sorted", "ties", "denormal", "zeros", *cases.BROKEN])
@pytest.mark.parametrize("dtype", native.FLOATS)
@pytest.mark.parametrize("n", [10, 300, 40000, 200001])
def test_top_k_is_k_distinct_indices_whatever_the_numbers(n, dtype, kind):
    ops = get_ops("numpy", native=True)
    x = cases.values_of(kind, n, dtype, 0)
    for k in {0, 1, n // 100, n // 10, n // 3, n - 1, n}:
        values, indices = ops.sparsify(x, k)
        assert values.size == indices.size == k
        assert (np.diff(indices) > 0).all()
        assert not k or 0 <= indices[0] <= indices[-1] < n
        assert cases.difference(values, x[indices]) is None
        if kind not in cases.BROKEN and k < n:
            left = np.delete(np.abs(x), indices)
            assert k == 0 or np.abs(values).min() >= left.max()


def test_top_k_where_the_sample_misleads():
    """All large elements are exactly at, or exactly between, the positions of a regular sample."""
    ops, reference = get_ops("numpy", native=True), get_ops("numpy", native=False)
    n, rng = 1 << 18, np.random.default_rng(0)
    for start, step in ((0, 512), (1, 512), (0, 4), (7, 64)):
        x = rng.standard_normal(n).astype(np.float32) * 1e-3
        x[start::step] += 5.0
        for k in (n // 1000, n // step // 2, n // step, n // step + 1, n // 5):
            assert all(map(np.array_equal, ops.sparsify(x, k), reference.sparsify(x, k)))


@pytest.mark.parametrize("dtype", native.FLOATS)
@pytest.mark.parametrize("few", [0, 1, 300, 2000, 2001, 5000])
def test_top_k_where_few_elements_differ_from_zero(few, dtype):
    """As in gradients of embeddings; zeros from the start of the array fill the rest."""
    ops, reference = get_ops("numpy", native=True), get_ops("numpy", native=False)
    rng, n = np.random.default_rng(few), 200_001
    x = np.where(np.arange(n) % 2, 0.0, -0.0).astype(dtype)
    at = rng.choice(n, few, replace=False)
    x[at] = rng.standard_normal(few)
    x[at[::3]] = cases.SMALLEST[dtype]
    for k in (1, 200, 2000, n // 5):
        for found, expected in zip(ops.sparsify(x, k), reference.sparsify(x, k), strict=True):
            assert cases.difference(found, expected) is None
    # Neither the numbers nor the zeros are enough, so NaN is chosen, too.
    x[n // 10 :] = np.nan
    values, indices = ops.sparsify(x, n // 5)
    assert (np.diff(indices) > 0).all()
    assert cases.difference(values, x[indices]) is None


def other_process(half, **environment):
    """Run `python -m tests.kernels` with other kernels and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels", half],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


# The instruction sets, each a superset of the one before.
ORDER = ["baseline", "avx2", "avx512"]


@pytest.mark.first
@pytest.mark.parametrize(("isa", "half"), [("baseline", "even"), ("avx2", "odd"), ("avx512", "even")])
def test_every_instruction_set_gives_the_same_bytes(isa, half):
    """Every instruction set and four threads give the same bytes."""
    best = native.module.isa()
    if ORDER.index(isa) > ORDER.index(best):
        pytest.skip(f"this processor has no {isa}; its best is {best}")
    if isa == best and not ALL:
        pytest.skip(f"{isa} is what all other tests run, and test_sanitizers.py with four threads: add --all")
    there = other_process(half, GRACE_ISA=isa, OMP_NUM_THREADS="4")
    assert there["isa"] == isa
    assert there["digests"] == digests(half)
