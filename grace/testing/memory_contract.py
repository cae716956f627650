"""The contract that every memory must fulfil."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from grace.core.config.registry import compressors, memories
from grace.core.errors import IncompatibleError
from grace.core.methods import fusions
from grace.core.methods.compressor import Compressor, sparsifies
from grace.core.methods.memory import Memory
from grace.core.ops import get_ops
from grace.core.ops.composites import ArrayOps
from grace.core.ops.numpy_ops import NumpyOps
from grace.core.session.simulation import deliver, negotiate
from grace.core.spec import Array, State, TensorSpec
from grace.core.state.states import first_memory, initial
from grace.core.step.unit_step import UnitStep
from grace.testing.harness import FRAMEWORKS, SEED, array, draw, exchange, host, registered, same, unfused, unit_of
from grace.testing.poison import PoisonOps

Snapshot = dict[str, "np.ndarray[Any, Any]"]


class MemoryContract:
    """Tests that every memory must pass. Derive a test class and override the fixture `memory`.

    The test methods take their fixtures as plain arguments. So they can also be called directly, on a broken memory.
    """

    #: The tensor of the tests.
    spec: ClassVar[TensorSpec] = TensorSpec("t", (24, 40))

    @pytest.fixture
    def memory(self) -> Memory:
        """Return the memory under test."""
        raise pytest.UsageError("override the fixture 'memory' of MemoryContract")

    @pytest.fixture(params=FRAMEWORKS)
    def ops(self, request: pytest.FixtureRequest) -> ArrayOps:
        """Return the array operations under test, for every installed framework."""
        return get_ops(request.param)

    def served(self, memory: Memory) -> Iterator[Compressor]:
        """Yield every registered compressor that works with the memory."""
        found = False
        for compressor in registered():
            try:
                memory.check(compressor)
            except IncompatibleError:
                continue
            found = True
            yield compressor
        assert found, f"{memory} works with no registered compressor"

    def start(self, memory: Memory, ops: ArrayOps) -> State:
        """Return the state before the first step, as it is stored."""
        return first_memory(unit_of(next(iter(self.served(memory))), memory, self.spec), ops, 0)

    def step(
        self,
        memory: Memory,
        compressor: Compressor,
        ops: ArrayOps,
        state: State,
        x: Array,
        step: int,
        *,
        over: bool = False,
    ) -> tuple[Array, State]:
        """Run one step of one rank, at a learning rate that falls. Return the gradient and the new state.

        With `over`, kernels may write over the state.
        """
        unit = unit_of(compressor, memory, self.spec)
        states = {**initial(unit, ops, SEED, 0), "memory": state}
        begun = UnitStep(unit, states, ops, seed=SEED, step=step, rank=0, size=1, rollback=not over, owned=over)
        begun.begin(x, 0.1 / (step + 1))
        negotiate([begun])
        ((payloads, flags),) = deliver([begun])
        begun.remember()
        merged, factor, states, _ = begun.conclude(payloads, flags)
        return (merged if factor == 1 else ops.scale_(merged, factor)), states["memory"]

    def run(
        self, memory: Memory, compressor: Compressor, ops: ArrayOps, steps: int = 3, *, over: bool = False
    ) -> list[Snapshot]:
        """Run some steps. Return copies of the gradient and the state after each of them."""
        state, snapshots = self.start(memory, ops), []
        for step in range(steps):
            gradient = array(ops, draw(self.spec, step), self.spec.work_dtype)
            merged, state = self.step(memory, compressor, ops, state, gradient, step, over=over)
            snapshots.append({"gradient": host(ops, merged), **{k: host(ops, v) for k, v in state.items()}})
        return snapshots

    def test_configuration_survives_json(self, memory: Memory) -> None:
        assert memories.make(json.loads(json.dumps(memories.config_of(memory)))) == memory

    def test_state_starts_at_zero(self, memory: Memory, ops: ArrayOps) -> None:
        state = self.start(memory, ops)
        assert state or not memory.feeds_back
        assert not any(host(ops, value).any() for value in state.values())

    def test_state_keeps_its_form(self, memory: Memory, ops: ArrayOps) -> None:
        before = {k: (v.shape, ops.dtype(v)) for k, v in self.start(memory, ops).items()}
        for compressor in self.served(memory):
            for snapshot in self.run(memory, compressor, ops):
                del snapshot["gradient"]
                assert {k: v.shape for k, v in snapshot.items()} == {k: tuple(s) for k, (s, _) in before.items()}
                assert {k: str(v.dtype) for k, v in snapshot.items()} == {k: d for k, (_, d) in before.items()}

    def test_state_of_the_last_step_is_never_changed(self, memory: Memory, ops: ArrayOps) -> None:
        for compressor in self.served(memory):
            state: State = self.start(memory, ops)
            for step in range(3):
                old = {k: host(ops, v) for k, v in state.items()}
                gradient = array(ops, draw(self.spec, step), self.spec.work_dtype)
                _, new = self.step(memory, compressor, ops, state, gradient, step)
                assert all(same(host(ops, state[k]), old[k]) for k in old), compressor
                state = new

    def test_a_state_that_is_written_over_gives_the_same_result(self, memory: Memory, ops: ArrayOps) -> None:
        """It is what `overwrites` promises."""
        assert set(fusions.overwritten(memory)) <= set(self.start(memory, ops))
        for compressor in self.served(memory) if fusions.overwritten(memory) else ():
            apart, over = (self.run(memory, compressor, ops, over=over) for over in (False, True))
            for a, b in zip(apart, over, strict=True):
                assert all(same(a[name], b[name]) for name in a), compressor

    def test_the_gradient_is_only_read(self, memory: Memory, ops: ArrayOps) -> None:
        """The framework owns the gradient's buffer, and the backward pass may still need it."""
        for compressor in self.served(memory):
            state: State = self.start(memory, ops)
            for step in range(2):
                gradient = array(ops, draw(self.spec, step), self.spec.work_dtype)
                _, state = self.step(memory, compressor, ops, state, gradient, step)
                assert same(host(ops, gradient), draw(self.spec, step)), compressor

    def test_the_state_shares_nothing_with_what_the_optimizer_gets(self, memory: Memory, ops: ArrayOps) -> None:
        """The merged gradient may lie in the optimizer's buffer, which changes."""
        if not ops.eager:
            return
        for compressor in self.served(memory):
            state: State = self.start(memory, ops)
            for step in range(2):
                given = array(ops, draw(self.spec, step), self.spec.work_dtype)
                gradient, state = self.step(memory, compressor, ops, state, given, step)
                kept = {k: host(ops, v) for k, v in state.items()}
                ops.place(gradient, 0, ops.full(self.spec.numel, 1e3, self.spec.work_dtype), 1.0)
                assert all(same(host(ops, state[k]), kept[k]) for k in kept), compressor

    def test_what_is_told_of_finite_gradients_is_right(self, memory: Memory, ops: ArrayOps) -> None:
        compressor = next(iter(self.served(memory)))
        for bad in (0.0, np.nan, np.inf, -np.inf):
            for place in (0, self.spec.numel // 2, self.spec.numel - 1):
                gradient = draw(self.spec, 1)
                gradient[place] += bad
                at = exchange(compressor, ops, self.spec, [draw(self.spec, 1)]).sites[0]
                at = at._replace(lr=ops.full(1, 0.1, "float64")[0])
                state = memory.init(self.spec, ops)
                # Clipping divides by an infinite norm, and NumPy warns about it.
                with np.errstate(invalid="ignore"):
                    x, _, finite = memory.compensate(array(ops, gradient, self.spec.work_dtype), state, at)
                if finite is not None:
                    assert bool(finite) == bool(np.isfinite(host(ops, x)).all()), (bad, place)

    def test_fusions_give_what_the_steps_give(self, memory: Memory, ops: ArrayOps) -> None:
        """An equal compressor of another class has none."""
        for compressor in self.served(memory):
            of_both = (
                *(fusions.compress_sum, fusions.compress_feedback),
                *(fusions.propose_sum, fusions.merge_finish),
            )
            if any(fusion.find(compressor, memory) for fusion in of_both):
                fused, apart = (self.run(memory, each, ops) for each in (compressor, unfused(compressor)))
                for a, b in zip(fused, apart, strict=True):
                    assert all(same(a[name], b[name]) for name in a), compressor

    def test_finish_is_declared(self, memory: Memory, ops: ArrayOps) -> None:
        """A memory that wraps another one may define it, and do nothing in it."""
        if type(memory).finish is Memory.finish:
            assert "mean" not in memory.needs
        elif "mean" not in memory.needs:
            at = exchange(next(iter(self.served(memory))), ops, self.spec, [draw(self.spec, 1)]).sites[0]
            state, mean = memory.init(self.spec, ops), array(ops, draw(self.spec, 2), self.spec.work_dtype)
            merged, after = memory.finish(mean, state, at)
            # In a graph, what goes through a function is another tensor.
            assert same(host(ops, merged), host(ops, mean))
            assert list(after) == list(state)
            assert all(same(host(ops, after[key]), host(ops, state[key])) for key in state)

    def test_zero_gradients_leave_nothing_behind(self, memory: Memory, ops: ArrayOps) -> None:
        """A sparsifier sends nothing of a zero gradient. So the memory must stay at zero."""
        for compressor in self.served(memory):
            if not sparsifies(compressor):
                continue
            state = self.start(memory, ops)
            for step in range(2):
                gradient = ops.zeros(self.spec.numel, self.spec.work_dtype)
                merged, state = self.step(memory, compressor, ops, state, gradient, step)
                assert not host(ops, merged).any()
                assert not any(host(ops, v).any() for name, v in state.items() if name not in ("lr", "known"))

    def test_nothing_is_used_after_it_was_consumed(self, memory: Memory) -> None:
        for compressor in self.served(memory):
            plain, poisoned = (self.run(memory, compressor, ops) for ops in (NumpyOps(), PoisonOps()))
            for a, b in zip(plain, poisoned, strict=True):
                assert all(same(a[name], b[name]) for name in a), compressor

    def test_incompatible_compressors_are_told_what_serves_them(self, memory: Memory) -> None:
        for name in compressors:
            try:
                memory.check(compressors.example(name))
            except IncompatibleError as error:
                message = str(error)
                assert any(valid in message.partition("Valid memories")[2] for valid in memories), message
