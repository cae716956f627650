"""Every method gives its stored bytes, on every framework."""

from __future__ import annotations

import numpy as np
import pytest

from grace.core.config.registry import compressors
from grace.core.wire.layout import GatherLayout
from grace.testing.harness import host
from tests import golden
from tests.core.test_contracts import REORDERED
from tests.support.registered import BACKENDS, ops_of

CASES = golden.cases()
# NumPy has every configuration, and the other frameworks have the defaults of every method; the rest with --all.
ONLY_NUMPY = [name for name in CASES if name not in compressors]


def marks(name, backend=None):
    return [pytest.mark.slow] if name in ONLY_NUMPY and (backend is None or "numpy" not in backend) else []


def decode(compressor, ops, data):
    """Decode stored bytes. Fields that are not sent are drawn again."""
    spec = golden.spec(compressor)
    layout = GatherLayout([spec], [compressor.wire(spec)], [True])
    buffer = ops.cast(np.frombuffer(data, np.uint8).copy(), "uint8")
    payloads, flags, in_step = layout.decode(ops, buffer, 1, golden.STEP)
    ex = golden.made(compressor, ops)
    assert not bool(flags[0][0])
    assert bool(in_step[0])
    return host(ops, compressor.decompress({**ex.payloads[0], **payloads[0][0]}, ex.sites[0]))


@pytest.mark.parametrize(
    ("name", "backend"),
    [pytest.param(name, backend, marks=marks(name, backend)) for name in CASES for backend in BACKENDS],
)
def test_payloads_are_the_stored_bytes(name, backend):
    compressor, stored, ops = CASES[name], golden.read(name), ops_of(backend)
    if compressors.name_of(compressor) in REORDERED:
        # Matrix products may differ in the last bits, even between two builds of one library.
        ex = golden.made(compressor, ops)
        today = host(ops, compressor.decompress(ex.payloads[0], ex.sites[0]))
        assert len(golden.encode(compressor, ops)) == len(stored)
        assert np.allclose(decode(compressor, ops, stored), today, rtol=0, atol=1e-5)
        return
    assert golden.encode(compressor, ops).hex() == stored.hex()


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in CASES])
def test_stored_bytes_decode_to_the_same_on_every_framework(name):
    compressor, stored = CASES[name], golden.read(name)
    one, *others = (decode(compressor, ops_of(backend), stored) for backend in BACKENDS)
    atol = 1e-5 if compressors.name_of(compressor) in REORDERED else 0.0
    assert all(np.allclose(one, other, rtol=0, atol=atol) for other in others)


def test_no_file_is_stored_for_nothing():
    assert {file.stem for file in golden.FOLDER.glob("*.json")} == set(CASES)


def test_a_missing_file_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError):
        golden.read("topk")
    assert not list(tmp_path.iterdir())


def test_the_fixed_gradient_is_what_it_was():
    x = golden.gradient()
    assert (x.dtype, x.shape) == (np.float32, (391,))
    assert x[:4].tolist() == [2.328125, 0.56640625, -0.015625, -0.1572265625]
    assert float(x.astype(np.float64).sum()) == -0.02545928955078125
