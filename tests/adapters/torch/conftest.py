"""Fixtures of the tests of the PyTorch adapter."""

from __future__ import annotations

import pytest


@pytest.fixture
def alone():
    """Make a process group of this process alone."""
    distributed = pytest.importorskip("torch").distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
