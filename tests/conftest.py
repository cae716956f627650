"""What all tests share."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The arrays of the tests are tiny: more threads would only wait for each other."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def traffic(monkeypatch):
    """By rank and collective the bytes that were handed to the transport, which is all that leaves a simulated rank."""
    from grace.core.simulate import SimulatedTransport
    from grace.testing.harness import host

    sent: dict[int, dict[str, int]] = {}

    def spy(kind):
        original = getattr(SimulatedTransport, kind)

        def call(self, x, **options):
            if options.get("root", self.rank) == self.rank:
                mine = sent.setdefault(self.rank, {})
                mine[kind] = mine.get(kind, 0) + host(self._ops, x).nbytes
            return original(self, x, **options)

        monkeypatch.setattr(SimulatedTransport, kind, call)

    for kind in ("allreduce", "allgather", "broadcast"):
        spy(kind)
    return sent
