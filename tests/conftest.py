"""Options and fixtures for all tests."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
from collections import Counter

import pytest

# What `pytest` leaves out if no file and no marker is named.
ELSEWHERE = ("distributed", "processes", "kernels")


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run slow tests, and full products in place of few cases")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Without a file, a marker and a number of workers: run the tests that start no process, on all cores."""
    if config.args_source != config.ArgsSource.TESTPATHS or hasattr(config, "workerinput"):
        return
    if not config.option.markexpr:
        config.option.markexpr = " and ".join(f"not {mark}" for mark in ELSEWHERE)
        if getattr(config.option, "numprocesses", 0) is None and not config.option.collectonly:
            config.option.numprocesses = "auto"


def pytest_configure(config):
    # covering.py reads it when it is imported, here and in processes that tests start. So nothing of tests is imported
    # above.
    if config.getoption("--all"):
        os.environ["GRACE_TEST_ALL"] = "1"
    from tests.support import covering

    assert covering.ALL or not config.getoption("--all"), "covering.py was imported before --all was known"


def pytest_collection_modifyitems(config, items):
    from tests.support import ranks

    if not config.getoption("--all"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Let no test start a process that does not say so by a marker."""

    def refuse(*_, **__):
        raise AssertionError(f"{item.nodeid} starts a process: mark it by pytest.mark.processes or distributed")

    with pytest.MonkeyPatch.context() as patch:
        if not any(item.get_closest_marker(mark) for mark in ELSEWHERE):
            patch.setattr(subprocess.Popen, "__init__", refuse)
            patch.setattr(os, "fork", refuse)
        return (yield)


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
