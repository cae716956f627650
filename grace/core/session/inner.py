"""`InnerSteps`: the steps of an optimizer on its own rank, and the syncs between them, in every eager framework."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from grace.core.config.outer import OuterSteps
from grace.core.config.recommended import Optimizer
from grace.core.session.comparisons import Comparisons
from grace.core.session.outer import OuterRun
from grace.core.session.outer_setup import check_inner, rounds_of_states
from grace.core.spec import Array, TensorSpec
from grace.core.state.rollback import Rollback
from grace.core.transport.transport import Transport


class InnerOptimizer(Protocol):
    """An optimizer and its model as a framework has them; `name` is that of a parameter which trains.

    Arrays share memory with those of the framework.
    """

    #: The optimizer as the recommendations see it.
    used: Optimizer

    def weights(self) -> Mapping[str, Array]:
        """Return the weights by name."""

    def gradients(self) -> Mapping[str, Array]:
        """Return the gradients by name, where there is one."""

    def rates(self) -> Mapping[str, float]:
        """Return the learning rates by name."""

    def frozen_names(self) -> Collection[str]:
        """Return the names of what was frozen during the run: it keeps its weight and its residual."""

    def states(self, name: str) -> Mapping[str, Array]:
        """Return what the optimizer keeps of a parameter, by key; nothing before its first step."""

    def first_states(self, name: str, where: str) -> Mapping[str, Array]:
        """Return what it keeps after a first step. Raises ConfigError if that cannot be found out."""

    def restart(self, name: str) -> None:
        """Forget what the optimizer keeps of a parameter."""

    def buffers(self) -> Mapping[str, Array]:
        """Return the buffers of the model that can sync, by their names."""

    def spec(self, name: str, x: Array) -> TensorSpec:
        """Return the spec of an array."""

    def write(self, x: Array, new: Array) -> None:
        """Write flat values to an array."""


class InnerSteps:
    """The inner steps of an optimizer, and the syncs at which its weights, states and buffers become common.

    `specs` has the states and buffers that sync. A front end calls `begin` once the run is there, and `before`, `ready`
    and `after` in each inner step. Raises ConfigError for an optimizer or states of it that cannot sync.
    """

    def __init__(self, outer: OuterSteps, inner: InnerOptimizer, transport: Transport, where: str) -> None:
        check_inner(outer, inner.used, where)
        self._outer, self._inner, self._transport = outer, inner, transport
        # The parameter and the key of each state that syncs, by the name that the state has in the run.
        self._states: dict[str, tuple[str, str]] = {}
        self.specs: list[TensorSpec] = []
        if outer.state not in ("local", "reset"):
            found = {(n, key): x for n in inner.weights() for key, x in inner.first_states(n, where).items()}
            rounds = rounds_of_states(outer, [key for _, key in found], inner.used.name, where)
            for (name, key), x in found.items():
                if key in rounds:
                    spec = inner.spec(f"{key} of {name}", x)
                    self._states[spec.name] = name, key
                    self.specs.append(dataclasses.replace(spec, rounds=rounds[key]))
        buffers = {} if outer.buffers == "local" else inner.buffers()
        self._buffers = list(buffers)
        self.specs += [dataclasses.replace(inner.spec(name, x), rounds=1) for name, x in buffers.items()]

    def begin(self, run: OuterRun, rollback: Rollback, comparisons: Comparisons) -> None:
        """Start with the weights of now."""
        self.run, self._rollback, self._comparisons = run, rollback, comparisons
        self.restart()

    def restart(self) -> None:
        """Start again with the weights of now."""
        self.run.begin(self._tensors_to_send())

    def before(self) -> None:
        """Begin an inner step. Raises StepError if a part of the last one has failed."""
        self._rollback.check()
        self.run.before(self._inner.weights())

    def ready(self, loss: Any = None) -> None:
        """Correct the gradients of an inner step, and note its loss if periods follow that and it is known."""
        if loss is not None and self._outer.adapt == "loss":
            self.run.note_loss(float(loss))
        if self._outer.variates:
            gradients = self._inner.gradients()
            for name, new in self.run.correct(gradients).items():
                self._inner.write(gradients[name], new)

    def after(self) -> None:
        """Count an inner step, and sync what is due."""
        inner, outer, run = self._inner, self._outer, self.run
        with self._rollback.attempt():
            if run.syncs_next:
                self._rollback.keep()
            arrays = self._tensors_to_send()
            run.send(arrays, inner.frozen_names(), inner.rates() if outer.variates else None)
            if not run.is_due:
                return
            self._comparisons.finish()
            new = run.receive(arrays)
            self._write(new)
            for name in inner.weights() if outer.state == "reset" else ():
                if name in new:
                    inner.restart(name)
            self._rollback.release()

    def forget(self) -> None:
        """Return to the weights after the last sync of each parameter, and to the inner step of the last one."""
        self._write(self.run.drop())

    def _existing(self) -> dict[str, Array]:
        """Return all that syncs and exists now."""
        found, buffers = dict(self._inner.weights()), self._inner.buffers()
        for name, (parameter, key) in self._states.items():
            x = self._inner.states(parameter).get(key)
            if x is not None:
                found[name] = x
        return found | {name: buffers[name] for name in self._buffers}

    def _tensors_to_send(self) -> dict[str, Array]:
        """Return what this rank hands to a sync; zeros for a parameter that has had no gradient yet."""
        found, first = self._existing(), self._transport.rank == 0
        if self._outer.buffers == "first":
            # A mean that only the first rank contributes to is the buffer of the first rank.
            found |= {name: found[name] * (self._transport.size * first) for name in self._buffers}
        return {name: self.run.zeros(name) for name in self._states if name not in found} | found

    def _write(self, new: Mapping[str, Array]) -> None:
        present = self._existing()
        for name, x in new.items():
            if name in present:
                self._inner.write(present[name], x)
