"""Stored payloads of every method. The byte format of a name never changes. `python -m tests.golden` adds new ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from grace.core.config.registry import compressors
from grace.core.methods.compressor import Compressor
from grace.core.ops import get_ops
from grace.core.ops.composites import ArrayOps
from grace.core.spec import TensorSpec
from grace.core.wire.layout import GatherLayout
from grace.testing.harness import Exchange, exchange, host
from tests.support import registered

FOLDER = Path(__file__).parent
STEP = 3
NUMEL = 391
SHAPE = (17, 23)
# Methods that treat tensors of other shapes in another way: columns have means of their own from 64 rows on.
SHAPES = {"onebit": (78, 5)}


def cases() -> dict[str, Compressor]:
    """Return every compressor with stored bytes, by the name of its file."""
    return {registered.name(compressor): compressor for compressor in registered.all_compressors()}


def spec(compressor: Compressor) -> TensorSpec:
    """Return the tensor of a compressor's stored bytes."""
    return TensorSpec("layer.weight", SHAPES.get(compressors.name_of(compressor), SHAPE))


def gradient() -> np.ndarray:
    """Return 391 numbers of different sizes, computed by a formula, so that no generator or file can change them."""
    i = np.arange(NUMEL)
    values = ((i * 7919 + 104729) % 1009 - 504) / 128.0
    return (values * 2.0 ** -(i % 11)).astype(np.float32)


def made(compressor: Compressor, ops: ArrayOps) -> Exchange:
    """Compress the fixed gradient, or its beginning, with a fixed key."""
    tensor = spec(compressor)
    return exchange(compressor, ops, tensor, [gradient()[: tensor.numel]], step=STEP)


def encode(compressor: Compressor, ops: ArrayOps) -> bytes:
    """Return the wire buffer of the fixed gradient."""
    layout = GatherLayout([spec(compressor)], [compressor.wire(spec(compressor))], [True])
    return bytes(host(ops, layout.encode(ops, made(compressor, ops).payloads, [False], STEP)))


def path(name: str) -> Path:
    """Return the file with the bytes of a case."""
    return FOLDER / f"{name}.json"


def write(again: Sequence[str] = ()) -> list[str]:
    """Store the bytes of new cases, and of those named, made with NumPy. Remove files without a case.

    Other files stay: with another BLAS, matrix products may differ in the last bits. Returns the changes.
    """
    changed = []
    for name, compressor in cases().items():
        if not path(name).exists() or name in again:
            data, shape = encode(compressor, get_ops("numpy")), list(spec(compressor).shape)
            text = json.dumps({"tensor": shape, "bytes": len(data), "hex": data.hex()}, indent=1) + "\n"
            path(name).write_text(text, encoding="utf-8")
            changed.append(name)
    for file in FOLDER.glob("*.json"):
        if file.stem not in cases() and not file.name.startswith("."):
            file.unlink()
            changed.append(f"{file.stem} (removed)")
    return changed


def read(name: str) -> bytes:
    """Return the stored bytes of a case. Raises FileNotFoundError, because a missing file must fail the test."""
    stored = json.loads(path(name).read_text(encoding="utf-8"))
    data = bytes.fromhex(stored["hex"])
    assert len(data) == stored["bytes"]
    return data
