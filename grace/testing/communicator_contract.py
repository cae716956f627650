"""The contract that every communicator must fulfil."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from grace.core.config.config import Config, Method
from grace.core.config.registry import compressors, memories
from grace.core.errors import GraceWarning, IncompatibleError
from grace.core.methods.communicator import Communicator
from grace.core.methods.memory import keeps_nothing
from grace.core.ops import get_ops
from grace.core.plan.unit import Assignment, Unit
from grace.core.session.simulation import Simulation
from grace.core.spec import HALF_DTYPES, Ranks, TensorSpec
from grace.core.state.carry import iterate_chain
from grace.core.state.stored import widen
from grace.testing.harness import EPS, host, registered, same

Gradients = list[dict[str, "np.ndarray[Any, Any]"]]


class CommunicatorContract:
    """Tests that every communicator must pass. Derive a test class and override the fixture `communicator`.

    They run simulations of some numbers of ranks with every registered compressor that the communicator accepts. The
    test methods take their fixtures as plain arguments. So they can also be called directly, on a broken communicator.

    They promise that

    - all ranks get the same bits;
    - the result is right for every compressor. What is applied and what all ranks hold back is what was given, if the
      ranks, and the owners of means, feed their errors back. So the result is the mean of what the ranks sent, less
      what was dropped on the way, and that is held. If the ranks vote, the majority wins. What is sent exactly is
      averaged as it is;
    - as many bytes are sent as predicted;
    - NaN on one rank reaches all ranks, and no state.
    """

    #: The numbers of ranks.
    sizes: ClassVar[tuple[int, ...]] = (1, 2, 3, 5)
    #: The tensors of the tests.
    specs: ClassVar[tuple[TensorSpec, ...]] = (
        TensorSpec("long", (3, 1100)),
        TensorSpec("short", (131,)),
        TensorSpec("empty", (0, 4)),
        TensorSpec("double", (16, 90), "float64"),
    )

    @pytest.fixture
    def communicator(self) -> Communicator:
        """Return the communicator under test."""
        raise pytest.UsageError("override the fixture 'communicator' of CommunicatorContract")

    @pytest.fixture(params=sizes)
    def size(self, request: pytest.FixtureRequest) -> int:
        """Return the number of ranks."""
        return int(request.param)

    def served(self, communicator: Communicator, size: int) -> Iterator[Method]:
        """Yield every registered compressor that works with the communicator, with its default memory."""
        found = False
        for compressor in registered():
            try:
                compressor.check_ranks(size)
                yield Method(compressor, memories.make(compressor.default_memory), communicator)
            except IncompatibleError:
                continue
            found = True
        assert found, f"{communicator} works with no registered compressor"

    def fed_back(self, communicator: Communicator, size: int) -> Iterator[Method]:
        """Yield the same compressors with the memory `residual`, except those of a vote.

        The owners of means feed their errors back as well, also where they would not do so by default.
        """
        residual = memories.make("residual")
        for method in self.served(communicator, size):
            if not method.compressor.averages:
                continue
            if method.memory == residual:
                yield method
            else:
                fed = dataclasses.replace(method, memory=residual)
                resolved, _ = communicator.resolve(Assignment(self.specs[0], fed), Ranks(size))
                yield dataclasses.replace(fed, communicator=_with_owners_that_hold(resolved))

    def simulation(self, method: Method, size: int) -> Simulation:
        """Return a simulation in which tensors are joined and cut."""
        config = Config(method, default_rules=False, bucket_bytes=6000, split_bytes=6000)
        return Simulation(size, self.specs, config)

    def gradients(self, size: int, step: int) -> Gradients:
        """Return the gradients of all ranks."""
        given: Gradients = []
        for rank in range(size):
            random = np.random.default_rng((step, rank))
            given.append({spec.name: random.standard_normal(spec.shape).astype(spec.dtype) for spec in self.specs})
        return given

    def test_all_ranks_get_the_same_bits(self, communicator: Communicator, size: int) -> None:
        for method in self.served(communicator, size):
            simulation = self.simulation(method, size)
            for step in range(2):
                first, *others = simulation.step(self.gradients(size, step), lr=0.1)
                for other in others:
                    assert all(same(first[name], other[name]) for name in first), method.compressor

    def test_what_is_sent_exactly_is_averaged(self, communicator: Communicator, size: int) -> None:
        exact = [compressors.make("none"), compressors.make({"name": "threshold", "threshold": 0.0})]
        accepted = 0
        for compressor in exact:
            try:
                method = Method(compressor, memories.make("none"), communicator)
            except IncompatibleError:
                continue
            accepted += 1
            given = self.gradients(size, 0)
            merged = self.simulation(method, size).step(given, lr=0.1)[0]
            for spec in self.specs:
                mean = sum(mine[spec.name].astype(np.float64) for mine in given) / size
                assert np.allclose(merged[spec.name], mean, rtol=1e-5, atol=1e-6), (compressor, spec.name)
        assert accepted, f"{communicator} takes neither 'none' nor 'threshold'"

    def test_what_is_applied_and_what_is_held_is_what_was_given(self, communicator: Communicator, size: int) -> None:
        for method in self.fed_back(communicator, size):
            with warnings.catch_warnings():
                # Some methods should not be trained like this.
                warnings.simplefilter("ignore", GraceWarning)
                simulation = self.simulation(method, size)
            # 16-bit sums are rounded once.
            half = [f.dtype for unit in simulation.plan.stateful.values() if unit.half_sum for f in unit.fields]
            eps = max((EPS[dtype] for dtype in half if dtype in HALF_DTYPES), default=1e-5)
            total = {spec.name: np.zeros(spec.shape) for spec in self.specs}
            for step in range(2):
                given = self.gradients(size, step)
                applied = simulation.step(given, lr=0.1)[0]
                for name in total:
                    total[name] += sum(mine[name].astype(np.float64) for mine in given) / size - applied[name]
            for name, held in residuals(simulation).items():
                # Two gradients with a standard deviation of 1 were given.
                scale = 3 + np.abs(held).max(initial=0.0)
                assert np.abs(held - total[name]).max(initial=0.0) <= eps * scale, (method.compressor, name)

    def test_the_majority_wins_a_vote(self, communicator: Communicator, size: int) -> None:
        """Its gradients are also the larger ones: some communicators average before the vote, or in place of it."""
        for method in self.served(communicator, size):
            if method.compressor.averages:
                continue
            mine = self.gradients(1, 0)[0]
            against = {name: -x / 2 for name, x in mine.items()}
            few = (size - 1) // 2
            merged = self.simulation(method, size).step([against] * few + [mine] * (size - few), lr=0.1)[0]
            alone = self.simulation(method, 1).step([mine], lr=0.1)[0]
            for name, x in mine.items():
                mean = x * (1 - 1.5 * few / size)
                right = np.array_equal(merged[name], alone[name]) or np.allclose(merged[name], mean)
                assert right, (method.compressor, name)

    def test_bytes_are_as_predicted(self, communicator: Communicator, size: int) -> None:
        """On average over the ranks, if they do not depend on the data."""
        for method in self.served(communicator, size):
            simulation = self.simulation(method, size)
            if not all(bucket.route.fixed for bucket in simulation.plan.buckets):
                continue
            simulation.step(self.gradients(size, 0), lr=0.1)
            predicted = sum(bucket.nbytes for bucket in simulation.plan.buckets)
            sent = [run.stats()["wire_bytes"] for run in simulation.runs]
            assert abs(np.mean(sent) - predicted) <= len(simulation.plan.buckets), method.compressor

    def test_a_bad_gradient_reaches_all_ranks_and_no_state(self, communicator: Communicator, size: int) -> None:
        for method in self.served(communicator, size):
            simulation = self.simulation(method, size)
            simulation.step(self.gradients(size, 0), lr=0.1)
            before = states(simulation)
            given = self.gradients(size, 1)
            given[-1]["long"][1, 7] = np.nan
            for merged in simulation.step(given, lr=0.1):
                assert np.isnan(merged["long"][1, 7]), method.compressor
                # A tensor in a unit of its own stays as it is.
                assert np.isfinite(merged["short"]).all() or any(
                    {"long", "short"} <= {piece.tensor for piece in unit.pieces} for unit in simulation.plan.units
                ), method.compressor
            after = states(simulation)
            for name, unit in simulation.plan.stateful.items():
                if any(p.tensor == "long" and p.start <= 1107 < p.stop for p in unit.pieces):
                    changed = [key for key in before if key[1] == name and not same(before[key], after[key])]
                    assert not changed, (method.compressor, changed)
            assert all(np.isfinite(x).all() for x in after.values()), method.compressor


def _with_owners_that_hold(communicator: Communicator) -> Communicator:
    """Return the communicator with error feedback for every mean that an owner sends on."""
    kind = type(communicator)

    def divide(self: Any, units: Sequence[Unit], ranks: Ranks, earlier: Sequence[Unit] = ()) -> list[Unit]:
        return [_holding(unit) for unit in kind.divide(self, units, ranks, earlier)]

    options = {f.name: getattr(communicator, f.name) for f in dataclasses.fields(communicator)}
    held: Communicator = type(kind.__name__, (kind,), {"divide": divide})(**options)
    return held


def _holding(unit: Unit) -> Unit:
    onward = unit.onward
    if onward is None:
        return unit
    if keeps_nothing(onward.memory):
        method = dataclasses.replace(onward.method, memory=memories.make("residual"))
        onward = dataclasses.replace(onward, method=method)
    return dataclasses.replace(unit, onward=_holding(onward))


def residuals(simulation: Simulation) -> dict[str, np.ndarray[Any, Any]]:
    """Return what all ranks of a simulation hold back of the mean, by tensor, in units of the gradient."""
    size = len(simulation.runs)
    total = {item.spec.name: np.zeros(item.spec.numel) for item in simulation.plan.assignments}
    # In units of the gradient, and how many ranks hold a part of the mean.
    scales = {unit.spec.name: unit.memory.residual_scale * size for unit in simulation.plan.units}
    for unit in simulation.plan.units:
        for onward, scale in iterate_chain(unit):
            scales[onward.spec.name] = scale * len(onward.owners or ())
    for run in simulation.runs:
        for name, unit in simulation.plan.stateful.items():
            held = {key: host(get_ops("numpy"), x) for key, x in run.units[name]["memory"].items()}
            if "residual" not in held:
                continue
            mine, start = widen(unit, held, get_ops("numpy"))["residual"].astype(np.float64), 0
            mine /= scales[name]
            for piece in unit.pieces:
                total[piece.tensor][piece.start : piece.stop] += mine[start : start + piece.numel]
                start += piece.numel
    shapes = {item.spec.name: item.spec.shape for item in simulation.plan.assignments}
    return {name: x.reshape(shapes[name]) for name, x in total.items()}


def states(simulation: Simulation) -> dict[tuple[int, str, str, str], np.ndarray[Any, Any]]:
    """Return copies of all states of a simulation, by rank, unit, component and field."""
    return {
        (rank, name, kind, key): np.array(value)
        for rank, run in enumerate(simulation.runs)
        for name, kinds in run.units.items()
        for kind, state in kinds.items()
        for key, value in state.items()
    }
