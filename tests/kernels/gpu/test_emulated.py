"""The GPU kernels, run by an emulator on the CPU, give the bytes of the CPU's kernels for every operation and method.

The emulator checks that all threads of a block arrive at its barriers, and all threads of a warp at its exchanges. It
does not model device memory, streams, or threads that run concurrently.
"""

from __future__ import annotations

import pytest

from grace.core.codecs.rotation import shared_rotated_sum
from grace.core.codecs.signs import binary_sum, majority
from grace.core.compressors.inceptionn import precision_encode, precision_sum
from grace.core.compressors.threelc import ternary_encode, ternary_sum
from grace.core.config.registry import compressors
from grace.core.errors import PayloadError
from grace.core.ops import get_ops, native
from grace.core.spec import Key
from grace.core.wire.codings import CODECS
from tests import golden
from tests.core.test_contracts import REORDERED
from tests.kernels import cases, needs_kernels
from tests.kernels.gpu import differences, plans, torch
from tests.kernels.gpu.emulated import EmulatedOps, module

pytestmark = [needs_kernels, pytest.mark.first]


@pytest.fixture(autouse=True, scope="module")
def built():
    return module()


# The sources are templates of the dtype.
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", cases.CASES)
def test_same_bytes_as_on_the_cpu(name, dtype):
    assert not list(differences(name, EmulatedOps(), get_ops("torch", native=True), dtype, list(plans())))


@pytest.mark.parametrize("seed", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_the_order_of_threads_changes_nothing(monkeypatch, seed):
    """Another order of threads and blocks reveals a missing barrier, or a sum in the order of threads."""
    monkeypatch.setenv("GRACE_EMULATED_ORDER", seed)
    plan = [(65, "normal", 0), (9001, "ties", 1)]
    for name in cases.CASES:
        assert not list(differences(name, EmulatedOps(), get_ops("torch", native=True), "float32", plan)), name


def test_every_kernel_has_a_body_for_gpus():
    ops = EmulatedOps()
    for name in cases.CASES:
        cases.results(name, cases.Given(ops, 9, "float32"))
    # On GPUs, the frameworks' own libraries compute matrix products, and their operations code fields.
    others = {"thin_product", "sub_product", "power_product", "sum_power_product", "project"}
    others |= {"gap_facts", "encode_gaps", "decode_gaps"}
    others |= {f"{name}_{way}" for name in CODECS for way in ("encode", "decode")}
    assert ops.started | others == set(module().kernels()) == set(native.module.kernels())


@pytest.mark.parametrize("name", golden.cases())
def test_methods_send_the_stored_bytes(name):
    compressor = golden.cases()[name]
    if compressors.name_of(compressor) in REORDERED:
        pytest.skip("its matrix products differ in the last bits between libraries")
    assert golden.encode(compressor, EmulatedOps()).hex() == golden.read(name).hex()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_payloads_of_more_ranks_than_one_kernel_takes(ranks):
    ops, reference = EmulatedOps(), get_ops("torch", native=True)
    bits = [torch.randint(0, 256, (125,), dtype=torch.uint8) for _ in range(ranks)]
    levels = [torch.randn(2) for _ in range(ranks)]
    assert torch.equal(majority(ops, bits, 1000, "float64"), majority(reference, bits, 1000, "float64"))
    for onto in (None, torch.randn(1000)):
        one, other = (
            binary_sum(o, bits, levels, 1000, None if onto is None else onto.clone()) for o in (ops, reference)
        )
        assert torch.equal(one, other)
    levels = [torch.randn(50) for _ in range(ranks)]
    one, other = (binary_sum(o, bits, levels, 1000, columns=25) for o in (ops, reference))
    assert torch.equal(one, other)
    codes = [torch.randint(0, 256, (128,), dtype=torch.uint8) for _ in range(ranks)]
    scales = [torch.randn(8) for _ in range(ranks)]
    one, other = (
        shared_rotated_sum(o, codes, scales, torch.tensor([-1.0, 1.0]), 128, 1000, Key(1, 2), torch.ones(1000))
        for o in (ops, reference)
    )
    assert torch.equal(one, other)


def test_a_bad_index_is_left_out_and_told_by_the_next_kernel():
    ops, x = EmulatedOps(), torch.zeros(10)
    for bad in (10, -1, 2**31 - 1):
        indices = torch.tensor([1, bad, 3], dtype=torch.int32)
        for call in (
            lambda i: ops.gather(x, i),
            lambda i: ops.put_(x.clone(), i, 1.0),
            lambda i: ops.scatter_add_(x.clone(), i, torch.ones(3)),
            lambda i: ops.sparse_sum([torch.ones(3)], [i], 10),
        ):
            call(indices)
            with pytest.raises(PayloadError, match="ran before on CUDA device 0 met a damaged payload"):
                ops.max_abs(x)
            assert float(ops.max_abs(x)) == 0
    assert ops.sparse_sum([torch.ones(3)], [indices], 10).tolist() == [0, 1, 0, 1, 0, 0, 0, 0, 0, 0]
    with pytest.raises(PayloadError):
        ops.max_abs(x)


def test_codes_of_another_length_are_told_by_the_next_kernel():
    ops = EmulatedOps()
    x = torch.randn(1000)
    code = ternary_encode(ops, x, torch.tensor([0.5]))
    one = torch.ones(1)
    full, words, small, tags = precision_encode(ops, x, one, 2.0**-10, 5, 0)
    for damaged in (code[:-1], torch.cat([code, code]), code[:0], torch.full((40,), 255, dtype=torch.uint8)):
        ternary_sum(ops, [damaged], [torch.tensor([1.0])], 1000)
        with pytest.raises(PayloadError):
            ops.max_abs(x)
    for damaged in (
        (full[:-1], words, small, tags),
        (full, words[:0], small, tags),
        (full, words, torch.cat([small] * 2), tags),
    ):
        precision_sum(ops, [damaged], [one], 5, 0, 1000)
        with pytest.raises(PayloadError):
            ops.max_abs(x)


def test_a_fault_of_the_caller_is_told_at_once():
    ops = EmulatedOps()
    with pytest.raises(ValueError, match="expected k <= n"):
        ops.run("sample", [], [3, 4, 0, 0, 0, 0], outputs=["int32"])
    with pytest.raises(TypeError, match="expected int32, received int64"):
        ops.put_(torch.zeros(3), torch.tensor([1]), 1.0)
    with pytest.raises(TypeError, match="another device"):
        module().run_on_gpu("max_abs", [torch.utils.dlpack.to_dlpack(torch.zeros(3))], [], [], 1, 0, print)
