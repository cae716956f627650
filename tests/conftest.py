"""Options and fixtures for all tests."""

from __future__ import annotations

import functools
import gc
import importlib.util
import logging
import os
import platform
import re
import subprocess
import sys
from collections import Counter

import pytest

# NumPy reads it when it is imported. Decompositions of small matrices would take fifty times as much processor time by
# two threads, which wait for each other, and other processes of the tests want the cores as well.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# What is imported and collected lives until the end. See pytest_collection_finish.
gc.disable()
# TensorFlow asks for it when it is imported; Python starts a process to know it, once.
platform.processor()

# What `pytest` leaves out if no file and no marker is named.
ELSEWHERE = ("distributed", "processes", "kernels")
# Whether this run is that one, also without words to look for (-k) and without --all.
QUICK = pytest.StashKey[bool]()
# The markers of which this run wants at least one, if its files say which tests have them.
WANTED = pytest.StashKey[set[str]]()
# The markers that no test of this run has.
UNWANTED = pytest.StashKey[set[str]]()


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run slow tests, and every pair of values")


def pytest_ignore_collect(collection_path, config):
    """Do not import files without a test for this run, which takes seconds in every worker."""
    if config.stash.get(QUICK, False) and {"kernels", "tensorflow"}.intersection(_words(collection_path.name)):
        return True
    if not collection_path.name.startswith("test_"):
        return None
    wanted = config.stash.get(WANTED, set())
    if wanted and not wanted & _said(collection_path):
        return True
    if config.stash.get(UNWANTED, set()) & _marked(collection_path):
        return True
    return None


@functools.cache
def _said(path):
    """Return the words of a file and of its path: the folder of kernels marks its tests itself."""
    return _words(f"{path} {path.read_text(encoding='utf-8')}")


@functools.cache
def _marked(path):
    """Return the markers that a file gives to all of its tests, as far as a line at its top says so."""
    found = re.search(r"^pytestmark = .*", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {"kernels"} & set(path.parts) | set(re.findall(r"pytest\.mark\.(\w+)", found[0] if found else ""))


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Without a file, a marker and a number of workers: run the tests that start no process, on all cores.

    Those of TensorFlow and of the methods of the literature are left to scripts/test.sh.
    """
    # "not a and (b or c)" wants b or c.
    wanted = set(re.findall(r"\w+", re.sub(r"\bnot \w+", "", config.option.markexpr))) - {"and", "or"}
    if wanted <= set(ELSEWHERE) and "or not" not in config.option.markexpr:
        config.stash[WANTED] = wanted
    if config.args_source != config.ArgsSource.TESTPATHS:
        return
    expression = config.option.markexpr or " and ".join(f"not {mark}" for mark in ELSEWHERE)
    if not re.search(r"\bor not\b|\bnot \(", expression):
        config.stash[UNWANTED] = set(re.findall(r"\bnot (\w+)", expression))
    if not config.getoption("--all"):
        config.stash.setdefault(UNWANTED, set()).add("slow")
    if config.option.markexpr:
        return
    # Workers get the arguments of the command line, not what is set here: so each of them sets it, too.
    config.option.markexpr = expression
    config.stash[QUICK] = not (config.option.keyword or config.getoption("--all"))
    is_worker = hasattr(config, "workerinput")
    if not is_worker and getattr(config.option, "numprocesses", 0) is None and not config.option.collectonly:
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

    marks = {item: {mark.name for mark in item.iter_markers()} for item in items}
    for item in items:
        for mark in marks[item].intersection(ELSEWHERE):
            if mark not in _said(item.path):
                raise pytest.UsageError(f"{item.nodeid}: its file must say {mark}, or -m {mark} does not read it")
    if not config.getoption("--all"):
        _leave_out(config, items, {item for item in items if "slow" in marks[item]})
    if config.stash.get(QUICK, False):
        _leave_out(config, items, {item for item in items if _is_rare(item.nodeid)})
    items[:] = ranks.grouped(items)
    # Long tests first: at the end, the other workers would wait for one.
    items.sort(key=lambda item: "first" not in marks[item])


def _leave_out(config, items, chosen):
    config.hook.pytest_deselected(items=list(chosen))
    items[:] = [item for item in items if item not in chosen]


def _is_rare(name):
    """Return whether a test is about TensorFlow or a method of the literature, as its file and its parameters say."""
    from grace import listing
    from grace.core.config.registry import compressors

    path, _, test = name.partition("::")
    words = _words(f"{path} {test.partition('[')[2]}")
    return "tensorflow" in words or any(listing.of_literature(word) for word in words.intersection(compressors))


def _words(name):
    return set(re.findall(r"[a-z0-9]+", name))


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
    # The garbage collector need not visit modules and thousands of test cases again and again. Afterwards it seldom
    # visits young objects: tracing a graph makes them by the hundred thousand.
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    gc.enable()


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

    # pytest adds its handlers to every logger that passes nothing on, six times per test, and PyTorch has forty.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True
    if "tensorflow" in sys.modules:
        import tensorflow as tf

        # As in tensorflow_worker.py: a step that waits needs a thread of its own.
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(2)
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
    start = SimulatedTransport.start

    def watched(self, collective, name):
        kind, parts = collective.kind, collective.buffers
        if kind != "broadcast" or collective.root == self.rank:
            leaving = [other for i, other in enumerate(parts) if i != self.rank] if kind == "alltoall" else parts
            mine = sent.setdefault(self.rank, {})
            mine[kind] = mine.get(kind, 0) + sum(host(self._ops, x).nbytes for x in leaving)
        return start(self, collective, name)

    monkeypatch.setattr(SimulatedTransport, "start", watched)
    return sent


@pytest.fixture
def crossed(monkeypatch):
    """Return the bytes that leave each simulated rank, in words of 4 bytes: rings for what all ranks get."""
    from grace.core.session.simulation import SimulatedTransport

    words: dict[int, float] = {}
    start = SimulatedTransport.start
    shares = {
        "alltoall": lambda at, c: sum(x.nbytes for rank, x in enumerate(c.buffers) if rank != at.rank),
        "allreduce": lambda at, c: 2 * (at.size - 1) / at.size * c.buffers[0].nbytes,
        # Each rank passes on what it gets, except the last.
        "allgather": lambda at, c: (at.size - 1) * c.buffers[0].nbytes,
        "broadcast": lambda at, c: (at.size - 1) * c.buffers[0].nbytes if at.rank == c.root else 0,
    }

    def counted(self, collective, name):
        words[self.rank] = words.get(self.rank, 0.0) + shares[collective.kind](self, collective) / 4
        return start(self, collective, name)

    monkeypatch.setattr(SimulatedTransport, "start", counted)
    return words
