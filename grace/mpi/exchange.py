"""Exchange of NumPy gradients between processes over MPI, without a framework."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from grace.core.exchange.engine import Engine
from grace.core.exchange.transport import TIMEOUT
from grace.core.guards.agreement import agree, check_steps, formats
from grace.core.guards.replicas import SUMMARY_BYTES, compare, digest, is_due, shared_states
from grace.core.ops import get_ops
from grace.core.values.config import Config, make_config
from grace.core.values.errors import StepError
from grace.core.values.plan import Plan, make_plans
from grace.core.values.spec import Array, TensorSpec
from grace.mpi.transport import MPITransport

logger = logging.getLogger("grace")

# Rank and size among all processes; they give the files of several communicators different names.
_WORLD = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


class MPIExchange:
    """One rank's part in an exchange of NumPy gradients; like `grace.Simulation`, but with real processes.

    A call with one gradient per tensor, which is only read, returns the merged gradients, equal on all ranks. `tensors`
    and `config` are as for `grace.Simulation`. All ranks of `comm` must create the exchange and call it equally often.
    `average=False` leaves sums undivided.

        exchange = MPIExchange({"w": (64, 32)}, {"compressor": "topk", "compress_ratio": 0.01})
        w -= lr * exchange({"w": gradient})["w"]

    Raises the rank's own ConfigError or IncompatibleError, and MismatchError on every rank if ranks differ.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[int, ...]] | Sequence[TensorSpec],
        config: Config | Mapping[str, Any] | str,
        *,
        comm: Any = MPI.COMM_WORLD,
        average: bool = True,
    ) -> None:
        failure: Exception | None = None
        description: dict[str, Any] = {}
        timeout = TIMEOUT
        try:
            self.config = make_config(config)
            timeout = self.config.timeout
        except Exception as error:
            failure = error
        self.transport = MPITransport(comm, timeout=timeout)
        self.rank, self.size = self.transport.rank, self.transport.size
        try:
            if failure is not None:
                raise failure
            specs = [TensorSpec(n, tuple(s)) for n, s in tensors.items()] if isinstance(tensors, Mapping) else tensors
            (_, plan), *later = make_plans(specs, self.config, ranks=self.transport.ranks)
            ops = functools.partial(get_ops, "numpy")
            self.engine = Engine(
                plan,
                ops,
                self.transport,
                seed=self.config.seed,
                average=average,
                later=later,
            )
            self.engine.times.start_as_told(*_WORLD)
            description = {
                "configuration": self.config.to_dict(),
                "average": average,
                "tensors": {spec.name: [list(spec.shape), spec.dtype] for spec in specs},
                "formats": formats([plan, *(stage for _, stage in later)], ops),
            }
        except Exception as error:
            # The other ranks must learn of it, or they would wait for this rank below.
            failure = error
        try:
            agree(
                description,
                failure,
                lambda mine: self.transport.gather_objects(mine, "grace/agree"),
                "grace.mpi.MPIExchange",
            )
        except Exception:
            # All ranks get here, or none.
            self.transport.close()
            raise
        if self.rank == 0:
            for text in self.plan.warnings:
                logger.warning("%s", text)

    @property
    def plan(self) -> Plan:
        """Plan of the next step."""
        return self.engine.plan

    def __call__(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Exchange one gradient per tensor and return the merged gradients.

        Raises StepError before anything is sent if a gradient is missing, unknown or of another shape or dtype.
        """
        shapes = {item.spec.name: item.spec.shape for item in self.plan.assignments}
        given = {name: tuple(gradient.shape) for name, gradient in gradients.items()}
        if given != shapes:
            raise StepError(
                f"step {self.engine.step}: expected gradients of the shapes {shapes}, received {given}; "
                "pass one gradient per tensor of the plan."
            )
        dtypes = {item.spec.name: item.spec.dtype for item in self.plan.assignments}
        for name, gradient in gradients.items():
            if str(gradient.dtype) != dtypes[name]:
                raise StepError(
                    f"step {self.engine.step}: expected a gradient of {dtypes[name]} for tensor '{name}', received "
                    f"{gradient.dtype}; convert it on every rank, or create the exchange with TensorSpec(name, shape, "
                    "dtype)."
                )
        if is_due(self.engine.step, self.config.check_replicas):
            self.check_replicas()
        before = self.engine.snapshot()
        try:
            # All ranks start their collectives in the order of the plan.
            for item in self.plan.assignments:
                self.engine.ready(item.spec.name, gradients[item.spec.name])
            return self.engine.finish()
        except BaseException:
            self.engine.restore(before)
            raise

    def check_replicas(self, weights: Mapping[str, Array] | None = None) -> None:
        """Compare the weights, if given, and the shared states of all ranks; all ranks must call it between two steps.

        The option `check_replicas` compares the states every so many steps. The exchange does not know the weights.
        Raises MismatchError, which names the first tensor that differs, on every rank.
        """
        arrays = {**(weights or {}), **shared_states(self.engine.snapshot())}
        transport = self.transport

        def exchange(mine: bytes) -> list[bytes]:
            everyone = transport.allgather(np.frombuffer(mine, np.uint8), name="grace/replicas").wait().tobytes()
            return [everyone[i : i + SUMMARY_BYTES] for i in range(0, len(everyone), SUMMARY_BYTES)]

        compare(
            {name: digest(get_ops("numpy"), x) for name, x in arrays.items()},
            exchange,
            lambda mine: transport.gather_objects(mine, "grace/replicas in detail"),
            f"before step {self.engine.step}",
        )

    def discard(self) -> None:
        """Drop a call that failed on some ranks or on all; every rank must call it instead of the exchange.

        A call that fails leaves residuals and all other states as they were before it. This method drops what it has
        started, waits for the other ranks for up to twice the `timeout` of the configuration, and lets the exchange go
        on. Raises MismatchError on every rank if the call has succeeded on some of them: then load a checkpoint.
        """
        self.transport.discard()
        check_steps(self.transport.gather_objects(int(self.engine.step), "grace/discard"))

    def stats(self) -> dict[str, Any]:
        """Return what the last call sent; see `grace.core.exchange.engine.Engine.stats`."""
        return self.engine.stats()

    def start_timeline(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace of all further steps; see `grace.core.observe.timeline.Times.start`."""
        self.engine.times.start(path, *_WORLD)

    def stop_timeline(self) -> None:
        """Stop the timeline."""
        self.engine.times.stop()

    def state_dict(self) -> dict[str, Any]:
        """Return the step and states of this rank; every rank must save its own."""
        return self.engine.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Load a result of `state_dict` of this rank; see `grace.core.exchange.engine.Engine.load_state_dict`."""
        return self.engine.load_state_dict(state, lambda saved, current: np.array(saved, current.dtype))

    def close(self) -> None:
        """Free the MPI resources of the exchange, on all ranks."""
        self.transport.close()
