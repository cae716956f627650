"""The kernels on a GPU give the bytes of the CPU's kernels, on any stream, without waiting.

benchmarks/README.md lists the commands, including those for compute-sanitizer.
"""

from __future__ import annotations

import threading

import pytest

from grace.core.config.registry import compressors
from grace.core.errors import PayloadError
from grace.core.ops import get_ops, native, serves
from tests import golden
from tests.core.test_contracts import REORDERED
from tests.kernels import cases
from tests.kernels.gpu import differences, needs_gpu, plans, torch

pytestmark = needs_gpu
# From this size on, a stretch contains several tiles, and blocks run their loops more than once.
LARGE = 9_000_001


@pytest.fixture
def ops():
    return get_ops("torch", "cuda", native=True)


def test_the_kernels_serve_this_device():
    assert serves("torch", "cuda"), "the kernels were built without CUDA, or not for this device: `grace doctor`"


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("dtype", native.FLOATS)
@pytest.mark.parametrize("name", cases.CASES)
def test_same_bytes_as_on_the_cpu(ops, name, dtype, size):
    plan = plans() if size == "small" else [(200001, "normal", 0), (LARGE, "normal", 1), (LARGE, "ties", 2)]
    assert not list(differences(name, ops, get_ops("torch", native=True), dtype, plan))


@pytest.mark.parametrize("name", golden.cases())
def test_methods_send_the_stored_bytes(ops, name):
    compressor = golden.cases()[name]
    if compressors.name_of(compressor) in REORDERED:
        pytest.skip("its matrix products differ in the last bits between libraries")
    assert golden.encode(compressor, ops).hex() == golden.read(name).hex()


def test_work_follows_the_current_stream(ops):
    """Results on a stream with long-running earlier work are correct, although nothing waits for it."""
    x = torch.randn(1 << 22, device="cuda")
    wanted = ops.weighted_sum(x * 3, 0.5, x, 2.0).cpu()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        made = x * 3
        found = ops.weighted_sum(made, 0.5, x, 2.0)
        assert not stream.query(), "the host waited for the stream"
    stream.synchronize()
    assert torch.equal(found.cpu(), wanted)


def test_several_streams_at_once(ops):
    xs = [torch.randn(300_001 + i, device="cuda") for i in range(8)]
    wanted = [tuple(part.cpu() for part in ops.sparsify(x, 3000)) for x in xs]
    torch.cuda.synchronize()
    failed = []

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                found = tuple(part.cpu() for part in ops.sparsify(xs[i], 3000))
                if not all(map(torch.equal, found, wanted[i])):
                    failed.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_bad_index_is_told_by_the_next_kernel(ops):
    x = torch.zeros(10, device="cuda")
    indices = torch.tensor([1, 2**31 - 1, -7], dtype=torch.int32, device="cuda")
    found = ops.sparse_sum([torch.ones(3, device="cuda")], [indices], 10)
    torch.cuda.synchronize()
    with pytest.raises(PayloadError, match="met a damaged payload"):
        ops.max_abs(x)
    assert found.tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert float(ops.max_abs(x)) == 0


def test_arrays_elsewhere_are_refused(ops):
    with pytest.raises(TypeError, match="expected CUDA device"):
        ops.max_abs(torch.zeros(3))
    with pytest.raises(TypeError, match="expected main memory"):
        get_ops("torch", native=True).max_abs(torch.zeros(3, device="cuda"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one CUDA device")
def test_another_device_than_the_current_one(ops):
    other = get_ops("torch", "cuda:1", native=True)
    x = torch.randn(1000)
    assert torch.equal(other.sparsify(x.to("cuda:1"), 10)[1].cpu(), ops.sparsify(x.to("cuda:0"), 10)[1].cpu())
    assert torch.cuda.current_device() == 0
