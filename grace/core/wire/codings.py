"""Codings of payload fields: a stage behind any method, chosen per field by the option `coding`.

Fields of integers without `below` travel as bytes, which a coding makes fewer:

    huffman     Huffman's code of the symbols (`grace.core.wire.huffman`)
    rans        range asymmetric numeral systems, near the entropy (`grace.core.wire.rans`)
    run_length  runs of the most frequent byte (`grace.core.wire.runs`)
    bitshuffle  bit planes without zero blocks, as FZ-GPU does it (`grace.core.wire.shuffle`)
    smallest    the shortest of all, for each field and step, after a byte with its number

The symbols of huffman and rans are packed codes that straddle bytes, or bytes; those of bitshuffle are packed codes.
Integers of 16 and 32 bits travel byte plane by byte plane.

A word of the header holds the number of bytes that travel. Where a coding would not make a field shorter, the field
travels as it is, and its own number of bytes says so.

Fields with `below` are ascending indices, which have codings of their own (`grace.core.wire.indices`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from grace.core.errors import ConfigError, PayloadError, nearest
from grace.core.ops.composites import ArrayOps
from grace.core.spec import ITEMSIZE, Array, Field, Payload
from grace.core.wire import indices
from grace.core.wire.huffman import huffman_decode, huffman_encode
from grace.core.wire.rans import rans_decode, rans_encode
from grace.core.wire.runs import run_length_decode, run_length_encode
from grace.core.wire.shuffle import bitshuffle_decode, bitshuffle_encode
from grace.core.wire.symbols import as_size, number, symbol_bits


class Codec(NamedTuple):
    """Pair of functions: one codes bytes, given the width of their codes; one decodes, given the number of bytes."""

    encode: Callable[[ArrayOps, Array, int], Array]
    decode: Callable[[ArrayOps, Array, int, Any], Array]


CODECS: Mapping[str, Codec] = {
    "huffman": Codec(
        lambda ops, data, bits: huffman_encode(ops, data, symbol_bits(bits)),
        lambda ops, data, bits, n: huffman_decode(ops, data, symbol_bits(bits), n),
    ),
    "rans": Codec(
        lambda ops, data, bits: rans_encode(ops, data, symbol_bits(bits)),
        lambda ops, data, bits, n: rans_decode(ops, data, symbol_bits(bits), n),
    ),
    "run_length": Codec(
        lambda ops, data, bits: run_length_encode(ops, data),
        lambda ops, data, bits, n: run_length_decode(ops, data, n),
    ),
    "bitshuffle": Codec(
        lambda ops, data, bits: bitshuffle_encode(ops, data, min(bits, 8)),
        lambda ops, data, bits, n: bitshuffle_decode(ops, data, min(bits, 8), n),
    ),
}
NONE, SMALLEST = "none", "smallest"
# What travels as it is.
PLAIN = (NONE, "int32")
NAMES = tuple(dict.fromkeys((NONE, *CODECS, *indices.CODINGS)))
# A field of fewer bytes would save less than its word of the header costs.
LEAST_BYTES = 64
# A damaged header may ask for this many bytes per byte that is there: rans sends at least 16 per 16,384 symbols.
MOST_BYTES_PER_BYTE = 1024
# Longer fields are not coded: their bits would not count in int32, in which TensorFlow counts.
MOST_BYTES = 1 << 27


def valid(field: Field) -> tuple[str, ...]:
    """Return the codings of fields of this kind."""
    if field.below is not None:
        return indices.CODINGS
    return (*CODECS, SMALLEST) if field.dtype in ("uint8", "int8", "int16", "int32") else ()


def suits(coding: str, field: Field) -> bool:
    """Return whether a coding can code a field, and may make it shorter."""
    if field.below is None and isinstance(field.length, int):
        return coding in valid(field) and LEAST_BYTES <= field.length * ITEMSIZE[field.dtype] <= MOST_BYTES
    return coding in valid(field)


@dataclass(frozen=True)
class Coding:
    """Choice of codings: `every` for each field that it suits, unless `fields` names another by the field's name."""

    every: str = NONE
    fields: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return self != AS_IT_IS

    def of(self, field: Field) -> str | None:
        """Return the coding of a field; None if nothing is said about it."""
        named = dict(self.fields).get(field.name)
        if named is not None:
            return named if field.wire and suits(named, field) else NONE
        return self.every if field.wire and suits(self.every, field) else None

    def check(self, fields: Sequence[Field], compressor: object) -> None:
        """Raise ConfigError if it names a field that the compressor does not send, or none that it could code."""
        sent = {field.name: field for field in fields if field.wire}
        for name, coding in self.fields:
            if name not in sent:
                raise ConfigError(f"coding: {compressor} sends no field '{name}'.{nearest(name, sent)}")
            able = valid(sent[name])
            if coding != NONE and coding not in able:
                raise ConfigError(
                    f"coding: '{coding}' cannot code the field '{name}' of {compressor}. "
                    + (f"Valid: {', '.join((NONE, *able))}." if able else f"Leave '{name}' out: no coding can.")
                )
        if self.every != NONE and not any(self.every in valid(field) for field in sent.values()):
            raise ConfigError(
                f"coding: '{self.every}' suits no field of {compressor}, which sends "
                f"{', '.join(f'{f.name} ({f.dtype})' for f in sent.values()) or 'none'}. Fields of integers have the "
                f"codings {', '.join(CODECS)}, and ascending indices {', '.join(indices.CODINGS)}."
            )

    def to_config(self) -> str | dict[str, str]:
        """Return what `make_coding` takes: a name, or a table with the key `every` for the rest."""
        if not self.fields:
            return self.every
        return dict(self.fields) if self.every == NONE else {"every": self.every, **dict(self.fields)}


# Every field as it is.
AS_IT_IS = Coding()


def make_coding(given: Any, where: str) -> Coding:
    """Return the coding that a configuration names. Raises ConfigError for unknown names and other types."""
    if isinstance(given, Coding):
        return given
    if isinstance(given, str):
        given = {"every": given}
    if not isinstance(given, Mapping) or not all(isinstance(item, str) for pair in given.items() for item in pair):
        raise ConfigError(
            f"{where}, 'coding': expected a name, or a table of names by field such as {{'codes': 'huffman'}}, "
            f"received {given!r}."
        )
    for coding in given.values():
        if coding not in NAMES:
            raise ConfigError(f"{where}: unknown coding '{coding}'.{nearest(coding, NAMES)}")
    fields = tuple((name, coding) for name, coding in given.items() if name != "every")
    return Coding(given.get("every", NONE), fields)


class Coded(NamedTuple):
    """Field as it travels: its bytes, their number, its elements, and the word of the header."""

    data: Array
    size: Any
    length: Any
    word: Any


def encode(ops: ArrayOps, field: Field, array: Array) -> Coded:
    """Return a field as its coding sends it."""
    length = ops.length(array)
    if field.below is not None:
        word = indices.choose(ops, array, field.below, field.coding)
        size = indices.size(ops, word, length, field.below)
        return Coded(indices.encode(ops, array, word, field.below), size, length, word)
    plain = _planes(ops, ops.to_bytes(array), ITEMSIZE[field.dtype])
    raw = ops.length(plain)
    whole = size = number(ops, raw)
    data = plain
    for form in _forms(ops, field, plain):
        there = number(ops, ops.length(form))
        shorter = ops.bit_and(there < size, whole <= MOST_BYTES)
        data, size = _either(ops, shorter, form, data), ops.where(shorter, there, size)
    sent = as_size(ops, size)
    return Coded(data, sent, length, sent)


def _forms(ops: ArrayOps, field: Field, plain: Array) -> list[Array]:
    """Return the coded forms of which the shortest travels, if it is shorter than the bytes themselves."""
    if field.coding != SMALLEST:
        return [CODECS[field.coding].encode(ops, plain, field.bits)]
    forms = [codec.encode(ops, plain, field.bits) for codec in CODECS.values()]
    return [ops.concat([ops.full(1, i, "uint8"), form]) for i, form in enumerate(forms)]


def _either(ops: ArrayOps, condition: Array, a: Array, b: Array) -> Array:
    """Return a if the 0-d condition holds, else b."""
    return ops.choose(condition, lambda: a, lambda: b)


def _planes(ops: ArrayOps, data: Array, width: int) -> Array:
    """Return the bytes of integers of `width` bytes, plane by plane: the lowest bytes of all first."""
    if width == 1:
        return data
    return ops.reshape(ops.transpose(ops.reshape(data, (-1, width))), (-1,))


def decode(ops: ArrayOps, field: Field, data: Array, size: Any, length: Any) -> Array:
    """Return the elements of a field without `below` from its `size` bytes. Raises PayloadError if they are damaged."""
    width = ITEMSIZE[field.dtype]
    raw = length * width
    shorter = number(ops, size) < number(ops, raw)
    plain = ops.choose(shorter, lambda: _decode(ops, field, data, raw), lambda: data)
    if width > 1:
        plain = ops.reshape(ops.transpose(ops.reshape(plain, (width, -1))), (-1,))
    return ops.from_bytes(plain, field.dtype)


def _decode(ops: ArrayOps, field: Field, data: Array, raw: Any) -> Array:
    if field.coding != SMALLEST:
        return CODECS[field.coding].decode(ops, data, field.bits, raw)
    codecs = list(CODECS.values())
    error = PayloadError(
        f"field '{field.name}': expected a coding from 0 to {len(codecs) - 1}, received another; "
        "the payload is damaged."
    )
    data = ops.require(number(ops, ops.length(data)) >= 1, error, data)
    tag = ops.cast(data[0], "int64")
    data = ops.require(tag < len(codecs), error, data)

    def from_number(i: int) -> Array:
        if i == len(codecs) - 1:
            return codecs[i].decode(ops, data[1:], field.bits, raw)
        return ops.choose(
            tag == i, lambda: codecs[i].decode(ops, data[1:], field.bits, raw), lambda: from_number(i + 1)
        )

    return from_number(0)


def coded(ops: ArrayOps, fields: Sequence[Field], payload: Payload) -> Payload:
    """Return a payload with its coded fields as they travel, if they are not so already."""
    chosen = [f for f in fields if f.wire and f.coding not in PLAIN and not isinstance(payload[f.name], Coded)]
    return {**payload, **{f.name: encode(ops, f, payload[f.name]) for f in chosen}} if chosen else payload
