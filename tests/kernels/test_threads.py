"""Kernels called from several threads, with several threads each, across a fork, and their memory."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from grace.core.codecs.levels import bucket_norms, dequantize_sum, quantize_packed
from grace.core.codecs.signs import binarize_means, binary_sum
from grace.core.compressors.natural import natural_encode, natural_sum
from grace.core.compressors.threelc import ternary_encode
from grace.core.ops import get_ops, native
from grace.core.spec import Key
from tests.kernels import needs_kernels

pytestmark = needs_kernels
N = 300_000


def with_threads(threads):
    """Return NumPy's kernels with this number of threads."""
    ops = type(get_ops("numpy", native=True))()
    ops._threads = threads
    return ops


def step(ops, seed, n=N):
    """Run the local work of a step with several methods. Return the results as bytes."""
    x = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    key = Key(seed, 3)
    norms = bucket_norms(ops, x, 512, "max")
    codes = quantize_packed(ops, x, norms, 512, 127, 8, key)
    values, indices = ops.sparsify(x, n // 100)
    powers, base, _ = natural_encode(ops, x, key, True)
    bits, means = binarize_means(ops, x, 0.0)
    # Numbers of every size, so that another order of the sums shows in their last bits.
    matrix = (x**9).astype(np.float64)[: n // 300 * 300]
    column_bits, column_means = binarize_means(ops, matrix, 0.0, 300)
    results = [
        dequantize_sum(ops, [codes, codes], [norms, norms], 512, 127, 8, n),
        ops.sparse_sum([values], [indices], n, x.copy()),
        natural_sum(ops, [powers], [base], n, "float32", True),
        binary_sum(ops, [bits], [means], n),
        column_bits,
        column_means,
        binary_sum(ops, [column_bits], [column_means], matrix.size, columns=300),
        ternary_encode(ops, x, np.array([1.0], np.float32)),
        *ops.select(x, 2.0, strict=True),
        ops.words(n, key),
    ]
    return b"".join(r.tobytes() for r in results)


@pytest.mark.parametrize("threads", [1, 3, 16])
def test_many_buckets_at_once_give_what_one_after_the_other_gives(threads):
    serial = [step(with_threads(1), seed) for seed in range(8)]
    ops = with_threads(threads)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(2):
            assert list(pool.map(lambda seed: step(ops, seed), range(8))) == serial


def test_the_interpreter_goes_on_while_a_kernel_runs():
    ops, ticks, done = with_threads(1), [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(1e-4)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        begin = time.perf_counter()
        ops.words(20_000_000, Key(1, 2))
        end = time.perf_counter()
    finally:
        done.set()
        thread.join()
    assert sum(begin < t < end for t in ticks) >= 3


def test_an_error_in_one_thread_is_that_of_its_call_only():
    ops, bad = with_threads(4), np.array([N], np.int32)
    x = np.zeros(N, np.float32)

    def call(i):
        if i % 2:
            with pytest.raises(ValueError, match=f"received {N}"):
                ops.gather(x, bad)
            return None
        return float(ops.max_abs(x + i))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(call, range(40))) == [None if i % 2 else float(i) for i in range(40)]


def in_child(seed, queue):
    queue.put(step(with_threads(3), seed))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_kernels_though_others_were_running():
    wanted, stop = step(with_threads(1), 0), threading.Event()
    with_threads(3).words(N, Key(1, 2))

    def work():
        while not stop.is_set():
            step(with_threads(2), 1, 70_000)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    try:
        context = multiprocessing.get_context("fork")
        for _ in range(5):
            queue = context.SimpleQueue()
            child = context.Process(target=in_child, args=(0, queue))
            child.start()
            # A child that hangs never writes.
            assert queue._reader.poll(60), "the forked process hangs"
            assert queue.get() == wanted
            child.join(60)
            assert child.exitcode == 0
    finally:
        stop.set()
        for worker in workers:
            worker.join()


def test_results_outlive_everything_else():
    ops = with_threads(2)
    kept = [ops.words(n, Key(1, 2))[2:] for n in (10, 1000, 600_000)]
    values, indices = ops.select(np.ones(100_000, np.float32), 0.5, strict=True)
    del values
    gc.collect()
    for _ in range(5):
        ops.words(600_000, Key(2, 2))
    reference = get_ops("numpy", native=False)
    for x in kept:
        assert x.tolist() == reference.words(x.size + 2, Key(1, 2))[2:].tolist()
    assert indices.tolist() == list(range(100_000))
    # Release the arrays in another thread.
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    assert not kept


def resident():
    """Return the resident memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer keeps what was freed")
def test_memory_does_not_grow_over_steps():
    ops = with_threads(3)

    def some(first):
        for seed in range(first, first + 500):
            step(ops, seed, 5000 + seed % 97)

    some(0)
    gc.collect()
    kept, held = native.module.kept_bytes(), resident()
    some(500)
    gc.collect()
    assert native.module.kept_bytes() <= kept + (1 << 20)
    assert resident() <= held + (16 << 20)


def test_kept_memory_is_no_more_than_was_in_use_at_once():
    ops, size = with_threads(1), 8 << 20
    for _ in range(50):
        ops.words(size // 8, Key(1, 2))
    before = native.module.kept_bytes()
    many = [ops.words(size // 8, Key(1, 2)) for _ in range(8)]
    assert native.module.kept_bytes() <= before
    del many
    gc.collect()
    after = native.module.kept_bytes()
    assert after <= before + 8 * (size + (4 << 20))
    # Kept blocks are reused.
    again = [ops.words(size // 8, Key(1, 2)) for _ in range(8)]
    assert native.module.kept_bytes() <= after - 7 * size
    assert len(again) == 8


@pytest.mark.parametrize(("text", "threads"), [("", 1), ("3", 3), ("4,2", 4), (" 2 ", 2), ("many", 1)])
def test_the_number_of_threads_is_read_as_openmp_reads_it(monkeypatch, text, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert type(get_ops("numpy", native=True))()._threads == threads
