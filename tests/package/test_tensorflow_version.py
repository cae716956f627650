"""A library of TensorFlow's operation that does not fit is reported, and the reference code is used."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from grace.core.ops import get_ops, native, serves
from tests.support import keras_alone

keras_alone.load()
tf = pytest.importorskip("tensorflow")
native_tensorflow = pytest.importorskip("grace.backends.native_tensorflow")

LIBRARY = native_tensorflow.library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the kernels for TensorFlow were not built")
REBUILD = "run in the source folder of grace: pip install --no-build-isolation --no-deps ."


@pytest.fixture
def library(monkeypatch, tmp_path):
    """Return a function that puts an edited copy of the library in place of the real one."""

    def replace(*edits: bytes) -> None:
        contents = Path(LIBRARY).read_bytes()
        for old, new in zip(edits[::2], edits[1::2], strict=True):
            assert old in contents
            assert len(old) == len(new)
            contents = contents.replace(old, new)
        path = tmp_path / "_tensorflow_ops.so"
        path.write_bytes(contents)
        monkeypatch.setattr(native_tensorflow, "library", lambda: str(path))

    monkeypatch.delenv("GRACE_NATIVE", raising=False)
    caches = native_tensorflow.fault, native_tensorflow.operation
    for cache in caches:
        cache.cache_clear()
    yield replace
    for cache in caches:
        cache.cache_clear()


def installed() -> bytes:
    return tf.__version__.encode()


def other() -> bytes:
    """Return another version, with as many characters as the installed one."""
    return b"1" + installed()[1:]


def test_the_library_records_the_version_that_it_was_built_for():
    assert native_tensorflow.built_for(LIBRARY) == tf.__version__
    assert native_tensorflow.fault() is None


def test_another_version_is_reported_once_and_the_reference_code_is_used(library, caplog):
    library(b"for TensorFlow " + installed(), b"for TensorFlow " + other())
    with caplog.at_level(logging.WARNING, logger="grace"):
        ops = get_ops("tensorflow")
        get_ops("tensorflow")
    assert type(ops).__name__ == "TensorflowOps"
    values, indices = ops.sparsify(tf.constant(np.arange(9.0)), 2)
    assert (values.numpy().tolist(), indices.numpy().tolist()) == ([7, 8], [7, 8])
    reason = f"built for TensorFlow {other().decode()}, but {tf.__version__} is installed"
    assert caplog.messages == [
        f"the kernels for TensorFlow are not used: they were {reason}. To build the kernels, {REBUILD}"
    ]
    # The line that `grace doctor` prints.
    assert native_tensorflow.describe() == f"{reason}: the reference implementation is used. {native.REBUILD}"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"\x7fELF", b"\x7fNOT", "ELF"),
        (b"_ZNK10tensorflow8OpKernel", b"_ZNK10tensorflow8OpKernex", "undefined symbol"),
    ],
    ids=["damaged", "undefined symbol"],
)
def test_a_library_that_does_not_load_is_reported(library, caplog, old, new, said):
    library(old, new)
    with caplog.at_level(logging.WARNING, logger="grace"):
        assert type(get_ops("tensorflow")).__name__ == "TensorflowOps"
    (message,) = caplog.messages
    reason = f"built for TensorFlow {tf.__version__} and cannot be loaded"
    assert message.startswith(f"the kernels for TensorFlow are not used: they were {reason}. To build the kernels, ")
    assert said in message.partition(" TensorFlow says: ")[2]
    assert native_tensorflow.describe().startswith(f"{reason}: the reference implementation is used")


def test_a_file_without_a_record_that_does_not_load_is_reported(library, caplog):
    library(b"grace: built for TensorFlow", b"grace: built for Whatever__", b"\x7fELF", b"\x7fNOT")
    with caplog.at_level(logging.WARNING, logger="grace"):
        assert not serves("tensorflow", "cpu")
    assert "built for TensorFlow of an unknown version and cannot be loaded" in caplog.text
