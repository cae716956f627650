"""Options and fixtures for all tests."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections import Counter

import pytest


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run full products of test cases in place of covering arrays")


def pytest_configure(config):
    # covering.py reads it when it is imported, here and in processes that tests start. So nothing of tests is imported
    # above.
    if config.getoption("--all"):
        os.environ["GRACE_TEST_ALL"] = "1"
    from tests.support import covering

    assert covering.ALL or not config.getoption("--all"), "covering.py was imported before --all was known"


def pytest_collection_modifyitems(items):
    from tests.support import ranks

    items[:] = ranks.grouped(items)
    # Long tests first: at the end, the other workers would wait for one.
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


# The table of times that scripts/test.sh prints. Tests that start pytest add nothing to it.
_times = os.environ.pop("GRACE_TEST_TIMES", None)
_seconds: Counter[str] = Counter()


def pytest_runtest_logreport(report):
    _seconds[report.nodeid.partition("::")[0].rpartition("/")[0]] += report.duration


def pytest_sessionfinish(session):
    """Add the seconds of each folder to the table; what several workers do at the same time counts once."""
    if _times is not None:
        workers = session.config.getoption("numprocesses", None) or 1
        with open(_times, "a", encoding="utf-8") as table:
            table.writelines(f"{seconds / workers:.0f}\t  {folder}\n" for folder, seconds in sorted(_seconds.items()))


@pytest.fixture(autouse=True, scope="session")
def last_pool_stopped():
    """Ranks that serve several tests end with the last of them."""
    yield
    from tests.support import ranks

    ranks.end()


def pytest_collection_finish():
    # The garbage collector need not visit thousands of test cases again and again: they live until the end.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give neighbouring tests, which share graphs and fixtures, to one worker. Idle workers take tests from others."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getvalue("dist") == "load" else None


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Use one thread. The tests' arrays are tiny, and more threads would only wait for each other."""
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
    """Record the bytes passed to the transport, by rank and collective. Nothing else leaves a simulated rank."""
    from grace.core.session.simulation import SimulatedTransport
    from grace.testing.harness import host

    sent: dict[int, dict[str, int]] = {}

    def spy(kind):
        original = getattr(SimulatedTransport, kind)

        def call(self, x, **options):
            if options.get("root", self.rank) == self.rank:
                leaving = [other for i, other in enumerate(x) if i != self.rank] if kind == "alltoall" else [x]
                mine = sent.setdefault(self.rank, {})
                mine[kind] = mine.get(kind, 0) + sum(host(self._ops, x).nbytes for x in leaving)
            return original(self, x, **options)

        monkeypatch.setattr(SimulatedTransport, kind, call)

    for kind in ("allreduce", "allgather", "alltoall", "broadcast"):
        spy(kind)
    return sent


@pytest.fixture
def crossed(monkeypatch):
    """Return the bytes that leave each simulated rank, in words of 4 bytes: rings for what all ranks get."""
    from grace.core.session.simulation import SimulatedTransport

    words: dict[int, float] = {}

    def count(name, share):
        original = getattr(SimulatedTransport, name)

        def counted(self, x, **options):
            words[self.rank] = words.get(self.rank, 0.0) + share(self, x, **options) / 4
            return original(self, x, **options)

        monkeypatch.setattr(SimulatedTransport, name, counted)

    count("alltoall", lambda at, xs, **_: sum(x.nbytes for rank, x in enumerate(xs) if rank != at.rank))
    count("allreduce", lambda at, x, **_: 2 * (at.size - 1) / at.size * x.nbytes)
    # Each rank passes on what it gets, except the last.
    count("allgather", lambda at, x, **_: (at.size - 1) * x.nbytes)
    count("broadcast", lambda at, x, root, **_: (at.size - 1) * x.nbytes if at.rank == root else 0)
    return words
