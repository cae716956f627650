"""The library that an optimizer takes, in one process: none is really initialized."""

from __future__ import annotations

import sys
import types

import pytest
import torch

import grace.torch
from grace.core.errors import ConfigError
from grace.torch.distributed import library as over_torch
from grace.torch.horovod import library as over_horovod


class ChosenError(Exception):
    """The end of a call that has chosen a library."""


@pytest.fixture
def initialize(monkeypatch):
    """Return a function that makes libraries look initialized, or not, and ends calls that choose one."""

    def initialize(*, horovod, distributed):
        module = types.SimpleNamespace(is_initialized=lambda: horovod)
        monkeypatch.setitem(sys.modules, "horovod.torch", module)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: distributed)
        for where, name in ((over_horovod, "Horovod"), (over_torch, "TorchDistributed")):

            def choose(*_, name=name):
                raise ChosenError(name)

            monkeypatch.setattr(where, name, choose)

    return initialize


def wrap(**arguments):
    weight = torch.nn.Parameter(torch.zeros(8))
    return grace.torch.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), compressor="none", **arguments)


@pytest.mark.parametrize(
    ("horovod", "distributed", "backend", "chosen"),
    [
        (True, False, None, "Horovod"),
        (False, True, None, "TorchDistributed"),
        (True, True, None, "Horovod"),
        (True, True, "horovod", "Horovod"),
        (True, True, "torch", "TorchDistributed"),
    ],
)
def test_the_library_is_the_initialized_one_unless_backend_names_it(initialize, horovod, distributed, backend, chosen):
    initialize(horovod=horovod, distributed=distributed)
    with pytest.raises(ChosenError, match=f"^{chosen}$"):
        wrap(backend=backend)


def test_without_an_initialized_library_the_error_names_both(initialize, monkeypatch):
    initialize(horovod=False, distributed=False)
    expected = r"neither Horovod nor torch.distributed is initialized; call hvd.init\(\) or"
    with pytest.raises(ConfigError, match=expected):
        wrap()
    # A script over torch.distributed does not import Horovod.
    monkeypatch.delitem(sys.modules, "horovod.torch")
    with pytest.raises(ConfigError, match=expected):
        wrap()


def test_an_unknown_backend_is_refused(initialize):
    initialize(horovod=True, distributed=True)
    with pytest.raises(ConfigError, match="'backend' must be 'horovod' or 'torch', received 'gloo'"):
        wrap(backend="gloo")


@pytest.mark.parametrize(("backend", "library"), [("horovod", "Horovod"), ("torch", "torch.distributed")])
def test_a_backend_that_is_not_initialized_is_refused(backend, library):
    with pytest.raises(ConfigError, match=f"{library} is not initialized; call"):
        wrap(backend=backend)


def test_the_ranks_of_the_other_library_are_refused(initialize):
    initialize(horovod=True, distributed=True)
    with pytest.raises(ConfigError, match="'process_set' belongs to Horovod; pass a process group"):
        wrap(backend="torch", process_set=object())
    with pytest.raises(ConfigError, match=r"'process_group' belongs to torch\.distributed; pass a process set"):
        wrap(process_group=object())
