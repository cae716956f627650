"""The calls of kernels fit the declarations in C++, and kernels refuse all others."""

from __future__ import annotations

import importlib
import re
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from grace.core.ops import get_ops, native
from tests.kernels import cases, needs_kernels

pytestmark = needs_kernels
ALIKE = {"T": {"float32", "float64"}}
# NumPy has no bfloat16: the integers of the same bits stand for it.
NAMES = {"uint16": "bfloat16"}


class Input(NamedTuple):
    name: str
    dtype: str
    dtypes: set[str]
    may_be_missing: bool
    per_rank: bool


class Signature(NamedTuple):
    inputs: list[Input]
    integers: list[str]
    numbers: list[str]
    outputs: list[set[str]]


class Recorded(NamedTuple):
    inputs: list[np.ndarray]
    integers: list[int]
    numbers: list[float]
    consumes: bool
    results: list[np.ndarray]


def dtypes_of(text: str) -> set[str]:
    return set().union(*(ALIKE.get(dtype, {dtype}) for dtype in re.sub(r"\[.*\]", "", text).split("/")))


def parse(signature: str) -> Signature:
    """Return the parts of a signature: "inputs; integers; numbers -> outputs", as kernels.h explains them."""
    given, _, outputs = signature.partition(" -> ")
    parts = [[item.strip() for item in part.split(",") if item.strip()] for part in given.split(";")]
    arrays, integers, numbers = (*parts, [], [])[:3]
    inputs = []
    for item in arrays:
        name, dtype = item.strip("[]").split()
        plain = dtype.removesuffix("...")
        inputs.append(Input(name, plain, dtypes_of(plain), item[0] == "[", dtype != plain))
    spelled = [name for item in integers for name in (["seed", "step", "stream", "rank"] if item == "key" else [item])]
    found = [] if outputs.endswith("_") else [dtypes_of(item.strip()) for item in outputs.split(",")]
    return Signature(inputs, spelled, numbers, found)


def declared() -> dict[str, Signature]:
    return {name: parse(text) for name, text in native.module.kernels().items()}


def arrays_of(signature: Signature, call: Recorded) -> list[Input]:
    """Return what the signature says of each array of a call."""
    lists = [one for one in signature.inputs if one.per_rank]
    single = [one for one in signature.inputs if not one.per_rank and not one.may_be_missing]
    ranks = (
        call.integers[signature.integers.index("ranks")]
        if "ranks" in signature.integers
        else (len(call.inputs) - len(single)) // max(1, len(lists))
    )
    has_all = len(call.inputs) > len(single) + ranks * len(lists)
    found = []
    for one in signature.inputs:
        found += [one] * (ranks if one.per_rank else int(has_all or not one.may_be_missing))
    return found


@cache
def recorded() -> dict[str, list[Recorded]]:
    """Return the calls of every kernel by the cases, on NumPy arrays."""
    calls: dict[str, list[Recorded]] = {}

    class Recorder:
        CorruptPayload = native.module.CorruptPayload

        def run(self, kernel, inputs, integers, numbers, consumes, *others):
            copies = [np.array(x) for x in inputs]
            results = native.module.run(kernel, inputs, integers, numbers, consumes, *others)
            calls.setdefault(kernel, []).append(Recorded(copies, [*integers], [*numbers], consumes, results))
            return results

    module = importlib.import_module("grace.core.ops.native_numpy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "module", Recorder())
        for name in cases.CASES:
            for dtype in native.FLOATS:
                cases.results(name, cases.Given(get_ops("numpy", native=True), 65, dtype))
    return calls


def test_every_call_fits_its_signature():
    assert recorded().keys() == declared().keys(), "every kernel is run by a case"
    for kernel, signature in declared().items():
        seen = [set() for _ in signature.inputs]
        for call in recorded()[kernel]:
            what = arrays_of(signature, call)
            assert len(call.inputs) == len(what), kernel
            names = [NAMES.get(x.dtype.name, x.dtype.name) for x in call.inputs]
            for one, name in zip(what, names, strict=True):
                assert name in one.dtypes, (kernel, one.name)
                seen[signature.inputs.index(one)].add(name)
            assert (len(call.integers), len(call.numbers)) == (len(signature.integers), len(signature.numbers)), kernel
            assert call.consumes == what[0].name.endswith("_") if what else not call.consumes
            # A condition, which the kernel writes as one uint8, comes back as a bool.
            judged = ["uint8" if isinstance(x, bool) else x.dtype.name for x in call.results]
            results = [NAMES.get(name, name) for name in judged]
            if not call.consumes:
                assert len(results) == len(signature.outputs)
                assert all(name in dtypes for name, dtypes in zip(results, signature.outputs, strict=True)), kernel
        assert seen == [one.dtypes for one in signature.inputs], f"{kernel}: a dtype that no case uses"


def refused(kernel: str, call: Recorded, error: type[Exception] | tuple[type[Exception], ...], match: str) -> None:
    with pytest.raises(error, match=match):
        native.module.run(kernel, call.inputs, call.integers, call.numbers, call.consumes, 1, None)


@pytest.mark.parametrize("kernel", native.module.kernels() if native.module else [])
def test_a_call_that_does_not_fit_is_refused(kernel):
    signature = declared()[kernel]
    # The last call without arrays that may be missing; the arrays of cases before may be empty.
    call = next(c for c in reversed(recorded()[kernel]) if not any(i.may_be_missing for i in arrays_of(signature, c)))
    what = arrays_of(signature, call)
    flags = np.zeros(1, bool)
    refused(kernel, call._replace(inputs=[*call.inputs, flags]), (TypeError, ValueError), "expected")
    refused(kernel, call._replace(integers=[*call.integers, 1]), ValueError, "integers")
    refused(kernel, call._replace(numbers=[*call.numbers, 1.0]), ValueError, "numbers")
    if call.integers:
        refused(kernel, call._replace(integers=call.integers[:-1]), ValueError, "integer")
    if call.numbers:
        refused(kernel, call._replace(numbers=call.numbers[:-1]), ValueError, "number")
    if call.inputs and ("ranks" in signature.integers or not any(one.per_rank for one in what)):
        refused(kernel, call._replace(inputs=call.inputs[:-1]), ValueError, "arrays")
    for i, x in enumerate(call.inputs):
        other = call.inputs.copy()
        other[i] = np.zeros(x.size, bool)
        refused(kernel, call._replace(inputs=other), TypeError, "received bool")
        if what[i].dtype == "T" and sum(one.dtype == "T" for one in what) > 1:
            other[i] = np.zeros(x.size, "float32" if x.dtype == "float64" else "float64")
            refused(kernel, call._replace(inputs=other), TypeError, "expected float")
