"""The contracts reject wrong implementations: every property has a mutant, and every mutant fails its property."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from grace.core.config.registry import communicators as communicator_registry
from grace.core.config.registry import compressors, memories
from grace.core.errors import PayloadError, StepError
from grace.core.ops import get_ops
from grace.testing import CommunicatorContract, CompressorContract, MemoryContract, OpsContract, TransportContract
from tests.mutants import array_ops, communicators, methods

CONTRACTS = [
    (CompressorContract, methods.COMPRESSORS),
    (MemoryContract, methods.MEMORIES),
    (OpsContract, array_ops.OPS),
    (CommunicatorContract, communicators.COMMUNICATORS),
    (TransportContract, communicators.TRANSPORTS),
]
# A mutant may also cause an error in the code that runs the test. This rejects it as well.
REJECTED = (AssertionError, pytest.fail.Exception, PayloadError, StepError, np.exceptions.AxisError)


def params(pairs):
    return [
        pytest.param(test, part, id=f"{(part if isinstance(part, type) else type(part)).__name__}-{test}")
        for test, part in pairs
    ]


def run(contract, test, part, **extra):
    """Call one test of a contract on a part, with the fixtures that it names."""
    method = getattr(contract(), test)
    wanted = set(inspect.signature(method).parameters)
    method(**{name: value for name, value in {**extra, **part}.items() if name in wanted})


@pytest.fixture
def registered(monkeypatch):
    """Register a mutant for one test, because the contract may ask for its configuration."""
    for registry in (compressors, memories):
        list(registry)

    def register(registry, part):
        monkeypatch.setitem(registry._classes, "mutant", type(part))

    return register


@pytest.mark.parametrize(("test", "part"), params(methods.COMPRESSORS))
def test_compressor_contract_rejects(test, part, registered):
    registered(compressors, part)
    with pytest.raises(REJECTED):
        run(CompressorContract, test, {"compressor": part}, ops=get_ops("numpy"))


@pytest.mark.parametrize(("test", "part"), params(communicators.COMMUNICATORS))
def test_communicator_contract_rejects(test, part, monkeypatch):
    list(communicator_registry)
    monkeypatch.setitem(communicator_registry._classes, "mutant", type(part))
    with pytest.raises(REJECTED):
        run(CommunicatorContract, test, {"communicator": part}, size=3)


@pytest.mark.parametrize(("test", "part"), params(communicators.TRANSPORTS))
def test_transport_contract_rejects(test, part):
    with pytest.raises(REJECTED):
        run(TransportContract, test, {"transports": communicators.ranks_of(part)}, ops=get_ops("numpy"))


@pytest.mark.parametrize(("test", "part"), params(methods.MEMORIES))
def test_memory_contract_rejects(test, part, registered):
    registered(memories, part)
    with pytest.raises(REJECTED):
        run(MemoryContract, test, {"memory": part}, ops=get_ops("numpy"))


@pytest.mark.parametrize(("test", "part"), params(array_ops.OPS))
def test_ops_contract_rejects(test, part):
    with pytest.raises(REJECTED):
        run(OpsContract, test, {"ops": part})


def test_ops_contract_rejects_operations_of_tensorflow():
    pytest.importorskip("tensorflow")
    from tests.mutants.tensorflow_ops import OPS

    survived = []
    for test, mutant in OPS.items():
        try:
            run(OpsContract, test, {"ops": mutant()})
        except REJECTED:
            continue
        survived.append(mutant)
    assert not survived


@pytest.mark.parametrize(("contract", "pairs"), CONTRACTS, ids=lambda value: getattr(value, "__name__", ""))
def test_every_property_has_a_mutant(contract, pairs):
    properties = {name for name in dir(contract) if name.startswith("test_")}
    assert properties == {test for test, _ in pairs}
