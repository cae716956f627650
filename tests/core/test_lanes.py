"""Rounds over transports with lanes, which match the collectives of a lane by the order of the calls."""

from __future__ import annotations

import threading
import time
from collections import defaultdict

import numpy as np
import pytest

import grace
from grace.core.ops import get_ops
from grace.core.plan.plan import Modules, make_plan, make_plans
from grace.core.session.simulation import SimulatedTransport, _Network
from grace.core.spec import Ranks, TensorSpec
from grace.core.state.run import Run

SPECS = {name: (30, 20 + i) for i, name in enumerate("abcdef")}


class _Slow:
    """A collective that arrives some time after all ranks have started it."""

    def __init__(self, handle, network, delay):
        self.handle, self.network, self.until = handle, network, time.monotonic() + delay

    def arrived(self):
        with self.network.lock:
            return self.handle.arrived() and time.monotonic() >= self.until

    def wait(self):
        end = time.monotonic() + 30
        while not self.arrived():
            assert time.monotonic() < end, "a rank waits for a round that another never starts"
            time.sleep(1e-4)
        with self.network.lock:
            return self.handle.wait()


class _InLanes(SimulatedTransport):
    """A rank's end of a network in which names match, but which notes the order in each lane."""

    def __init__(self, rank, network, lanes, delays):
        super().__init__(rank, network, get_ops("numpy"))
        self.lanes, self.order = lanes, defaultdict(list)
        self._delays, self._rng = delays, np.random.default_rng(rank)

    def start(self, collective, name):
        self.order[min(collective.round, self.lanes - 1)].append(name)
        with self._network.lock:
            return _Slow(super().start(collective, name), self._network, self._rng.choice(self._delays))


def _runs(config, ranks, lanes, delays=(0.0,), modules=None):
    """Return the runs of all ranks; a backward pass begins with the last parameter, and so does their plan."""
    config = grace.make_config({**config, "bucket_bytes": 1, "default_rules": False})
    stages = make_plans([TensorSpec(*item) for item in SPECS.items()], config, ranks=Ranks(ranks), modules=modules)
    network = _Network(ranks)
    network.lock = threading.RLock()
    return [
        Run(
            stages,
            lambda device: get_ops("numpy", device),
            _InLanes(rank, network, lanes, delays),
            modules=modules and modules.members,
        )
        for rank in range(ranks)
    ]


def _trained(runs, steps=2):
    """Train ranks in threads that are not equally far, and return their merged gradients."""
    merged, errors = [[] for _ in runs], []

    def train(rank):
        rng = np.random.default_rng((rank, 1))
        try:
            for _ in range(steps):
                for name, shape in reversed(SPECS.items()):
                    runs[rank].current.ready(name, rng.standard_normal(shape, np.float32))
                    time.sleep(rng.choice([0, 2e-3]))
                merged[rank].append(runs[rank].finish())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return merged


CONFIGS = {
    "two rounds": {"compressor": "qsgd", "communicator": "two_shot"},
    "one and two rounds": {
        "compressor": "topk",
        "rules": [{"match": "[ace]", "compressor": "qsgd", "communicator": "two_shot"}],
    },
    "three rounds": {"compressor": "topk", "communicator": "sparse_allreduce"},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_all_ranks_start_the_rounds_of_a_lane_in_one_order(config, ranks, lanes):
    runs = _runs(config, ranks, lanes, delays=(0.0, 1e-3, 5e-3))
    first, *others = _trained(runs)
    started = runs[0].transport.order
    assert sum(map(len, started.values())) > 2 * len(SPECS)
    assert all(run.transport.order == started for run in runs)
    for theirs in others:
        assert all(np.array_equal(a[n], b[n]) for a, b in zip(first, theirs, strict=True) for n in SPECS)


@pytest.mark.parametrize(("lanes", "early"), [(1, 0), (2, len(SPECS) - 1), (3, len(SPECS) - 1)])
def test_the_pass_starts_later_rounds_that_have_a_lane(lanes, early):
    runs = _runs(CONFIGS["two rounds"], 2, lanes)
    for name, shape in reversed(SPECS.items()):
        for run in runs:
            run.current.ready(name, np.ones(shape, np.float32))
    assert len(runs[0].transport.order[1]) == early


def test_a_step_that_is_not_the_first_leaves_later_rounds_to_its_end():
    """The steps of modules share a transport. In each lane, the rounds of the one that began first come first."""
    modules = Modules({name: "second" if name in "abc" else "first" for name in SPECS})
    runs = _runs(CONFIGS["two rounds"], 2, 2, modules=modules)
    for name, shape in reversed(SPECS.items()):
        for run in runs:
            run.current_of(modules.of[name]).ready(name, np.ones(shape, np.float32))
    for run in runs:
        run.poll()
        assert len(run.transport.order[0]) == 6
        assert len(run.transport.order[1]) == 3


@pytest.mark.parametrize(
    "other",
    [
        {"compressor": "blockwise"},
        {"quantum_num": 7},
        {"communicator": "allgather"},
        {"coding": "huffman"},
        {"bucket_bytes": 1},
        {"rules": [{"match": "a", "compressor": "none"}]},
    ],
)
def test_ranks_with_plans_that_send_other_lengths_announce_other_steps(other):
    def digest(config):
        specs = [TensorSpec(*item) for item in SPECS.items()]
        return make_plan(specs, grace.make_config(config), ranks=Ranks(2)).digest

    config = {**CONFIGS["two rounds"], "default_rules": False}
    assert digest(config) == digest(config)
    assert digest(config) != digest({**config, **other})
