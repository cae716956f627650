"""Whatever happens in a run, all ranks get the same bits, and what was applied and what is held is what was given.

Each case draws a configuration, a number of ranks, and what happens in each step: ranks that have no gradient for a
tensor, tensors that rest, steps that are undone, other methods, checkpoints.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from grace import Simulation
from grace.core.config.config import make_config
from grace.core.config.registry import compressors, memories
from grace.core.errors import ConfigError, GraceWarning, IncompatibleError
from grace.core.session.simulation import poll_all
from grace.core.spec import HALF_DTYPES
from grace.testing.communicator_contract import residuals
from grace.testing.harness import EPS, same
from tests.support.covering import ALL

CASES = 1000 if ALL else 40
STEPS = 6
TENSORS = {"matrix": (24, 40), "vector": (700,), "scalar": (), "long": (3, 1500), "empty": (0, 4)}
# Memories that feed back all that was not applied.
FEEDING = ("residual", "efsignsgd", "powersgd")


def drawn(random, memory=None):
    """Return a valid configuration that uses each part of a method sooner or later."""
    while True:
        compressor = random.choice([*compressors])
        reduction = random.choice(["split", "union", "tree"])
        between = random.choice(["two_shot", "allgather", {"name": "sparse_allreduce", "reduction": reduction}, "auto"])
        communicator = [
            "auto",
            "allgather",
            "allreduce",
            "two_shot",
            {"name": "two_shot", "second": random.choice(["none", "qsgd", "topk"])},
            {"name": "two_shot", "shard_memory": "residual"},
            {"name": "sparse_allreduce", "reduction": reduction},
            {"name": "hierarchical", "local_size": int(random.integers(1, 3)), "between": between},
        ][random.integers(8)]
        config = {
            "compressor": compressor,
            **compressors.required(compressor),
            "communicator": communicator,
            "default_rules": False,
            "granularity": str(random.choice(["bucket", "layer", "model"])),
            "bucket_bytes": int(random.choice([0, 6000, 1 << 20])),
            "rollback": bool(random.random() < 0.8),
        }
        chosen = memory or random.choice(["", "residual", *memories])
        if chosen:
            config["memory"] = str(chosen)
        try:
            # A default option such as `momentum` may belong to the default memory only.
            return make_config(config)
        except (ConfigError, IncompatibleError):
            continue


def simulated(random):
    while True:
        config, size = drawn(random, random.choice([None, *FEEDING])), int(random.integers(1, 6))
        try:
            return config, Simulation(size, TENSORS, config)
        except (ConfigError, IncompatibleError):
            continue


def feeds_back_everything(plan) -> bool:
    """Return whether residuals hold all that a plan does not apply, if sums on the way are exact."""
    for unit in plan.units:
        name = memories.name_of(unit.memory)
        if not unit.compressor.averages or name not in FEEDING:
            return False
        for onward in unit.chain:
            exact = compressors.name_of(onward.compressor) == "none" or unit.memory.feeds_back == "mean"
            if memories.name_of(onward.memory) not in FEEDING and not exact:
                return False
    return True


def precision(plan) -> float:
    half = [f.dtype for unit in plan.stateful.values() if unit.half_sum for f in unit.fields]
    return max((EPS[dtype] for dtype in half if dtype in HALF_DTYPES), default=1e-5)


class Run:
    """A run with what was given and applied so far, by tensor."""

    def __init__(self, number):
        self.random = np.random.default_rng(number)
        self.config, self.sim = simulated(self.random)
        self.missing = {name: np.zeros(shape) for name, shape in TENSORS.items()}
        self.exact, self.eps = True, 0.0
        self.scale = 0.0
        self.log = [f"case {number}: {self.sim.size} ranks, {self.config}"]

    def step(self):
        random, sim = self.random, self.sim
        resting = {name for name in TENSORS if random.random() < 0.1}
        unused = {(name, rank) for name in TENSORS for rank in range(sim.size) if random.random() < 0.2}
        unused = {each for each in unused if each[0] not in resting}
        nowhere = {name for name in TENSORS if all((name, rank) in unused for rank in range(sim.size))}
        self.log.append(f"resting {resting}, unused {unused}")
        for rank, run in enumerate(sim.runs):
            for name, shape in TENSORS.items():
                if name in resting:
                    run.current.rest(name, 0.1)
                    continue
                x = random.standard_normal(shape).astype(np.float32) * ((name, rank) not in unused)
                x = np.asarray(x, np.float32)
                second = x if sim.plan.period and not run.current.full else None
                run.current.ready(name, x, 0.1, second, unused=(name, rank) in unused)
                self.missing[name] = self.missing[name] + x.astype(np.float64) / sim.size
        poll_all(sim.runs)
        merged = [run.finish(unused=nowhere) for run in sim.runs]
        for other in merged[1:]:
            assert all(same(merged[0][name], other[name]) for name in TENSORS), self.log
        for name in TENSORS:
            if name in resting:
                # They are zeros, unless the method adds noise of its own.
                assert np.isfinite(merged[0][name]).all()
            elif name not in nowhere:
                self.missing[name] = self.missing[name] - merged[0][name]

    def undo(self):
        """Take a step that nobody applies, and go back to the states before it."""
        before = [run.savepoint for run in self.sim.runs]
        missing = dict(self.missing)
        self.step()
        if not self.config.rollback:
            self.exact = False
        for run, snapshot in zip(self.sim.runs, before, strict=True):
            run.put_back(snapshot)
        self.missing = missing

    def put_back(self):
        """Take a step of which the gradients of one tensor are thrown away."""
        if not self.config.rollback:
            return
        name = str(self.random.choice([*TENSORS]))
        before = [run.savepoint for run in self.sim.runs]
        missing = self.missing[name]
        self.step()
        for run, snapshot in zip(self.sim.runs, before, strict=True):
            run.put_back(snapshot, [name])
        self.missing[name] = missing

    def change(self):
        for _ in range(20):
            other = drawn(self.random, self.random.choice(FEEDING)).to_dict()
            options = {key: other[key] for key in ("compressor", "memory", "communicator")}
            try:
                self.sim.change(**options)
            except (ConfigError, IncompatibleError):
                continue
            self.log.append(f"changed to {options}")
            return

    def save_and_load(self):
        states = self.sim.state_dict()
        fresh = Simulation(self.sim.size, TENSORS, self.sim.config)
        fresh.load_state_dict(states)
        self.sim = fresh

    def check(self):
        self.exact = self.exact and feeds_back_everything(self.sim.plan)
        self.eps = max(self.eps, precision(self.sim.plan))
        if not self.exact:
            return
        for name, held in residuals(self.sim).items():
            self.scale = max(self.scale, 3 + np.abs(held).max(initial=0.0))
            off = np.abs(held - self.missing[name]).max(initial=0.0)
            assert off <= 10 * self.eps * self.scale, (name, off, self.log)


@pytest.mark.parametrize("number", range(CASES))
def test_nothing_is_lost_and_ranks_agree(number):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraceWarning)
        run = Run(number)
        for _ in range(STEPS):
            happens = run.random.choice(["step", "step", "undo", "put_back", "change", "save_and_load"])
            run.log.append(happens)
            getattr(run, happens)()
            run.step()
            run.check()
