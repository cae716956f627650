"""Exchange of NumPy gradients between processes over MPI, without a framework."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from mpi4py import MPI

from grace.core.config.config import Config
from grace.core.errors import StepError
from grace.core.guards.replicas import is_due
from grace.core.ops import get_ops
from grace.core.session.exchange import Exchange
from grace.core.session.outer_setup import refuse_states
from grace.core.session.start import Request, open_session
from grace.core.spec import Array, TensorSpec, as_specs
from grace.core.state.rollback import Rollback
from grace.core.step.step import check_lr
from grace.mpi.transport import MPITransport

# Rank and size among all processes; they give the files of several communicators different names.
_WORLD = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


class MPIExchange(Exchange):
    """One rank's part in an exchange of NumPy gradients; like `grace.Simulation`, but with real processes.

    A call with one gradient per tensor, which is only read, returns the merged gradients, equal on all ranks.
    `tensors`, `config` and `options` are as for `grace.Simulation`. All ranks of `comm` must create the exchange and
    call it equally often. `average=False` leaves sums undivided. With `outer` in the configuration, call `begin` with
    the weights at the start, and the exchange with the weights after every inner step.

        exchange = MPIExchange({"w": (64, 32)}, {"compressor": "topk", "compress_ratio": 0.01})
        w -= lr * exchange({"w": gradient})["w"]

    Raises the rank's own ConfigError or IncompatibleError, and MismatchError on every rank if ranks differ.
    """

    called = "MPIExchange"
    takes_references = True
    watches = True

    def __init__(
        self,
        tensors: Mapping[str, tuple[int, ...]] | Sequence[TensorSpec],
        config: Config | Mapping[str, Any] | str,
        *,
        comm: Any = MPI.COMM_WORLD,
        average: bool = True,
        **options: Any,
    ) -> None:
        request = Request(config, options, type(self), "grace.mpi.MPIExchange")
        self.transport: MPITransport = MPITransport(comm, timeout=request.timeout)
        ops = functools.partial(get_ops, "numpy")
        try:
            with open_session(request, self.transport, world=_WORLD) as session:
                refuse_states(session.config, request.where)
                session.local["average"] = average
                run = session.begin(as_specs(tensors), ops, average=average, outer=True, references=True, auto=True)
        except Exception:
            # All ranks get here, or none.
            self.transport.close()
            raise
        super().__init__(**session.arguments)
        self.rollback = Rollback(run, self.transport.discard, self.called)
        self.rollback.forget = self._forget
        self.announce(run.stages)

    def __call__(
        self,
        gradients: Mapping[str, Array],
        lr: float | None = None,
        references: Mapping[str, Array] | None = None,
    ) -> dict[str, Array]:
        """Exchange one gradient per tensor and return the merged gradients.

        `lr` is the learning rate with which they will be applied, for memories that correct for it. `references` has
        the gradients of the same batch at other weights, for memories that need them; none if `full_round`. Raises
        StepError before anything is sent if a gradient is missing, unknown or of another shape or dtype, or if the
        learning rate or a reference is missing.

        With `outer`, it takes the weights after an inner step, and returns those to go on with: other ones for tensors
        that synced.
        """
        if self.outers:
            return self._step_outer(gradients, lr)
        shapes = {item.spec.name: item.spec.shape for item in self.plan.assignments}
        given = {name: tuple(gradient.shape) for name, gradient in gradients.items()}
        if given != shapes:
            raise StepError(
                f"step {self.run.step}: expected gradients of the shapes {shapes}, received {given}; "
                "pass one gradient per tensor of the plan."
            )
        dtypes = {item.spec.name: item.spec.dtype for item in self.plan.assignments}
        for name, gradient in gradients.items():
            if str(gradient.dtype) != dtypes[name]:
                raise StepError(
                    f"step {self.run.step}: expected a gradient of {dtypes[name]} for tensor '{name}', received "
                    f"{gradient.dtype}; convert it on every rank, or create the exchange with TensorSpec(name, shape, "
                    "dtype)."
                )
        others = references or {}
        for item in self.plan.assignments:
            check_lr(item, lr)
            self.run.current.check_reference(item, others.get(item.spec.name))
        if is_due(self.run.completed, self.config.check_replicas):
            self.check_replicas()
        self.step_begins()
        try:
            # All ranks start their collectives in the order of the plan.
            for item in self.plan.assignments:
                name = item.spec.name
                self.note_gradient(name, gradients[name])
                self.run.current.ready(name, gradients[name], lr, others.get(name))
            merged = self.run.finish()
            self.step_ends()
            return merged
        except BaseException:
            self.run.discard()
            raise

    def begin(self, weights: Mapping[str, Array]) -> None:
        """Start outer steps with these weights, equal on all ranks. Raises StepError if one is missing or unfit."""
        for outer in self.outers:
            outer.begin(weights)

    def _step_outer(self, weights: Mapping[str, Array], lr: float | None) -> dict[str, Array]:
        (outer,) = self.outers
        before = outer.state
        if outer.syncs_next and is_due(self.run.completed, self.config.check_replicas):
            self.check_replicas()
        try:
            outer.send(weights, lr=lr)
            return {**weights, **outer.reshape(outer.receive(weights))}
        except BaseException:
            self.run.discard()
            outer.restore(before)
            raise

    def _forget(self) -> None:
        """Send again what was on its way and was dropped."""
        for outer in self.outers:
            outer.restore(outer.now)

    def check_replicas(self, weights: Mapping[str, Array] | None = None) -> None:
        """Compare the weights, if given, and the shared states of all ranks; all ranks must call it between two steps.

        The option `check_replicas` compares the states every so many steps. The exchange does not know the weights.
        Raises MismatchError, which names the first tensor that differs, on every rank.
        """
        self._compare(weights or {})

    def discard(self) -> None:
        """Drop a call that failed on some ranks or on all; every rank must call it instead of the exchange.

        A call that fails leaves residuals and all other states as they were before it; with `rollback = false`, its
        memories start from zero. This method drops what it has started, waits for the other ranks for up to twice the
        `timeout` of the configuration, and lets the exchange go on. Raises MismatchError on every rank if the call has
        succeeded on some of them: then load a checkpoint.
        """
        self.rollback.discard()

    def close(self) -> None:
        """Free the MPI resources of the exchange, on all ranks."""
        self.transport.close()
