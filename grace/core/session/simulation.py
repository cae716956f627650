"""N ranks inside one process: the real steps over a transport that only passes arrays between objects."""

from __future__ import annotations

import itertools
import operator
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from grace.core.config.config import Config, make_config, refuse_typos
from grace.core.errors import ConfigError, StateError, StepError
from grace.core.guards.replicas import is_due
from grace.core.observe.announcement import warn
from grace.core.observe.statistics import scalars
from grace.core.ops import get_ops
from grace.core.ops.composites import ArrayOps
from grace.core.plan.plan import Plan, make_plans
from grace.core.session.exchange import Exchange
from grace.core.session.outer_setup import check_outer, check_references, fragments_of, refuse_states, with_added
from grace.core.session.start import check_auto
from grace.core.spec import Array, Payload, Ranks, TensorSpec, as_specs
from grace.core.state.checks import check_mapping, show
from grace.core.state.merge import sort_by_rank
from grace.core.state.run import Run
from grace.core.step.bucket_step import BucketStep
from grace.core.step.unit_step import UnitStep
from grace.core.transport.collectives import Collective, Kind, Program
from grace.core.transport.transport import Handle, Transport

T = TypeVar("T")


class _Network:
    """Buffers that the ranks of a process handed in, by the name of the collective."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.buffers: dict[str, dict[int, Any]] = {}
        self.taken: dict[str, int] = {}
        #: Collectives until now in which a rank has sent something, over all ranks.
        self.sends: Counter[Kind] = Counter()
        #: Seconds in which sums and joined buffers were made until now, over all ranks: the work of a real library.
        self.seconds = 0.0

    def put(self, name: str, rank: int, x: Any) -> None:
        waiting = self.buffers.setdefault(name, {})
        if rank in waiting:
            raise StepError(f"rank {rank} started the collective '{name}' twice; expected once per step.")
        waiting[rank] = x

    def drop(self) -> None:
        """Forget the collectives of a step that will not be finished."""
        self.buffers.clear()
        self.taken.clear()

    def full(self, name: str) -> bool:
        return len(self.buffers[name]) == self.size

    def take(self, name: str) -> list[Any]:
        waiting = self.buffers[name]
        if len(waiting) < self.size:
            absent = sorted(set(range(self.size)) - set(waiting))
            raise StepError(
                f"collective '{name}' would hang: ranks {absent} have not started it; start it on every rank."
            )
        result = [waiting[rank] for rank in range(self.size)]
        self.taken[name] = self.taken.get(name, 0) + 1
        if self.taken[name] == self.size:
            del self.buffers[name], self.taken[name]
        return result


@dataclass(frozen=True)
class _Simulated(Handle):
    """Collective under way; `result` makes its result from what all ranks handed in."""

    network: _Network
    name: str
    result: Callable[[list[Any]], Array]

    def arrived(self) -> bool:
        return self.network.full(self.name)

    def wait(self) -> Array:
        return self.result(self.network.take(self.name))


def reduce(ops: ArrayOps, arrays: Sequence[Array], op: str) -> Array:
    """Return the result of an allreduce of one array per rank."""
    total = arrays[0]
    for other in arrays[1:]:
        total = total + other if op == "sum" else ops.where(other > total, other, total)
    return total


class SimulatedTransport(Transport):
    """One rank's end of an exchange within the process; a wait that would hang raises StepError."""

    def __init__(self, rank: int, network: _Network, ops: ArrayOps) -> None:
        self.rank, self.size = rank, network.size
        self._network, self._ops = network, ops

    def _start(self, collective: Collective, name: str) -> Handle:
        kind, buffers = collective.kind, collective.buffers

        def result(rows: list[Any]) -> Array:
            """Return this rank's result from the buffers of all ranks."""
            if kind == "alltoall":
                # Transports join them in Python, before they travel.
                return self._ops.concat([row[self.rank] for row in rows])
            begin, given = time.perf_counter(), [x for (x,) in rows]
            if kind == "allreduce":
                made = reduce(self._ops, given, collective.op)
            else:
                made = given[collective.root] if kind == "broadcast" else self._ops.concat(given)
            self._network.seconds += time.perf_counter() - begin
            return made

        self._network.put(name, self.rank, buffers)
        self._network.sends[kind] += bool(collective.sent_by(self.rank))
        return _Simulated(self._network, name, result)


def run_programs(programs: Sequence[Program[T]], transports: Sequence[Transport], name: str) -> list[T]:
    """Run the programs of several ranks in lock step, each over its transport, and return their results; blocks."""
    results: dict[int, T] = {}
    arrived: list[list[Array] | None] = [None for _ in programs]
    for number in itertools.count():
        started: list[list[Handle]] = []
        for i, (program, transport, given) in enumerate(zip(programs, transports, arrived, strict=True)):
            try:
                collectives = next(program) if given is None else program.send(given)
            except StopIteration as end:
                results[i] = end.value
                continue
            started.append([transport.start(c, f"{name}/{number}.{j}") for j, c in enumerate(collectives)])
        if results:
            break
        arrived = [[handle.wait() for handle in handles] for handles in started]
    return [results[i] for i in range(len(programs))]


class Delivered(NamedTuple):
    """Payloads that a rank merges for one unit, one per rank or one sum, and the flags of a guarded unit."""

    payloads: list[Payload]
    flags: list[Array]


def negotiate(steps: Sequence[UnitStep]) -> None:
    """Combine the proposals of all ranks, and compress with the result. `steps` are those of one unit, begun.

    The communicator must not cut the unit.
    """
    if steps[0].proposal is not None:
        _run_in_lock_step([bucket.negotiate() for bucket in _buckets(steps)], steps[0].site.ops)


def deliver(steps: Sequence[UnitStep]) -> list[Delivered]:
    """Carry the compressed payloads of one unit's step on all ranks; return what arrives at each rank.

    The communicator must not cut the unit.
    """
    received = _run_in_lock_step([bucket.route.run(bucket) for bucket in _buckets(steps)], steps[0].site.ops)
    return [Delivered(r.payloads[0], r.flags[0]) for r in received]


def _buckets(steps: Sequence[UnitStep]) -> list[BucketStep]:
    """Return the bucket of each rank that holds one unit only."""
    unit, ranks = steps[0].unit, Ranks(len(steps))
    (divided,) = unit.communicator.divide([unit], ranks)
    route = unit.communicator.route([divided], ranks)
    return [
        BucketStep(route, at.ops, rank=at.rank, size=at.size, mean=True, stamp=at.key.step, steps=[step])
        for step in steps
        for at in [step.site]
    ]


def _run_in_lock_step(programs: Sequence[Program[T]], ops: ArrayOps) -> list[T]:
    network = _Network(len(programs))
    transports = [SimulatedTransport(rank, network, ops) for rank in range(len(programs))]
    return run_programs(programs, transports, "unit")


def poll_all(runs: Sequence[Run]) -> None:
    """Run all rounds of the steps of runs that share an exchange; no rank waits for a round that another lacks."""
    advanced = True
    while advanced:
        # Every run takes its turn.
        advanced = any(list(map(Run.poll, runs)))


class Simulation(Exchange):
    """`size` ranks that train in lock step inside one process, with the numerics of a real run.

    `tensors` has the shapes of float32 tensors by name, or a `TensorSpec` for each. `config` is what `make_config`
    takes, and `options` are further keys of it. `framework` names the kind of the arrays: "numpy", "torch",
    "tensorflow", or a backend of your own. `average=False` leaves sums undivided. With `outer` in the configuration,
    the ranks exchange the changes of their weights: call `begin` once, and `step` with the weights of all ranks.
    Raises ConfigError for fewer than one rank, and the errors of `make_config`.

    >>> import numpy as np
    >>> sim = Simulation(2, {"w": (64, 32)}, {"compressor": "topk", "compress_ratio": 0.01})
    >>> gradients = [{"w": np.full((64, 32), float(rank), np.float32)} for rank in range(2)]
    >>> merged = sim.step(gradients)
    >>> bool((merged[0]["w"] == merged[1]["w"]).all())
    True
    """

    called = "Simulation"
    takes_references = True

    def __init__(
        self,
        size: int,
        tensors: Mapping[str, tuple[int, ...]] | Sequence[TensorSpec],
        config: Config | Mapping[str, Any] | str,
        *,
        framework: str = "numpy",
        average: bool = True,
        **options: Any,
    ) -> None:
        if not hasattr(size, "__index__") or operator.index(size) < 1:
            raise ConfigError(f"Simulation: expected at least 1 rank, received {size!r}.")
        size = operator.index(size)
        refuse_typos(options, type(self), "Simulation")
        made = make_config(config, **options)
        check_outer(made, "Simulation", average=average, size=size)
        refuse_states(made, "Simulation")
        check_references(made, "Simulation", self.takes_references)
        check_auto(made, "Simulation", False)
        specs = with_added(made, as_specs(tensors))
        modules = fragments_of(made, specs)
        stages = make_plans(specs, made, ranks=Ranks(size), modules=modules)
        self.network = _Network(size)

        def ops(device: str) -> ArrayOps:
            return get_ops(framework, device)

        transports = [SimulatedTransport(rank, self.network, ops("cpu")) for rank in range(size)]
        members = modules and modules.members
        runs = [
            Run(stages, ops, t, seed=made.seed, average=average, rollback=made.rollback, modules=members)
            for t in transports
        ]
        super().__init__(made, specs, runs, ops, ranks=Ranks(size), world=[(rank, size) for rank in range(size)])
        self.announce(stages)

    def step(
        self,
        gradients: Sequence[Mapping[str, Array]],
        lr: float | None = None,
        references: Sequence[Mapping[str, Array]] | None = None,
    ) -> list[dict[str, Array]]:
        """Exchange one gradient per tensor and rank, which are only read; return the merged gradients per rank.

        `lr` is the learning rate with which they will be applied, for memories that correct for it. `references` has
        the gradients of the same batches at other weights, for memories that need them; none if `full_round`. Raises
        StepError for a missing or unknown gradient, another shape or dtype, or a missing learning rate or reference. A
        step that fails leaves all states as they were; with `rollback = false`, memories start from zero.

        With `outer`, it takes the weights of all ranks after an inner step, and returns those to go on with: other ones
        for tensors that synced.
        """
        if self.outers:
            return self._step_outer(gradients, lr)
        if is_due(self.run.completed, self.config.check_replicas):
            self.check_replicas()
        try:
            for run, mine, others in zip(self.runs, gradients, references or [{}] * self.size, strict=True):
                for name, gradient in mine.items():
                    run.current.ready(name, gradient, lr, others.get(name))
            poll_all(self.runs)
            outcomes = [run.current.finish() for run in self.runs]
        except BaseException:
            for run in self.runs:
                run.discard()
            self.network.drop()
            raise
        for run, outcome in zip(self.runs, outcomes, strict=True):
            run.commit(outcome)
        return [outcome.merged for outcome in outcomes]

    def begin(self, weights: Mapping[str, Array]) -> None:
        """Start outer steps with these weights on all ranks. Raises StepError if one is missing or does not fit."""
        for outer in self.outers:
            outer.begin(weights)

    def _step_outer(self, weights: Sequence[Mapping[str, Array]], lr: float | None) -> list[dict[str, Array]]:
        before = [outer.state for outer in self.outers]
        if self.outers[0].syncs_next and is_due(self.run.completed, self.config.check_replicas):
            self.check_replicas()
        try:
            for outer, mine in zip(self.outers, weights, strict=True):
                outer.send(mine, lr=lr)
            for outer in self.outers:
                outer.poll()
            poll_all(self.runs)
            outcomes = [outer.finish(mine) for outer, mine in zip(self.outers, weights, strict=True)]
        except BaseException:
            for outer, run, state in zip(self.outers, self.runs, before, strict=True):
                run.discard()
                outer.restore(state)
            self.network.drop()
            raise
        new = [o.reshape(o.commit(done)) if done else {} for o, done in zip(self.outers, outcomes, strict=True)]
        return [{**mine, **synced} for mine, synced in zip(weights, new, strict=True)]

    def stats(self, rank: int = 0) -> dict[str, Any]:
        """Return the statistics of a rank in the last step; see `grace.core.session.exchange.Exchange.stats`."""
        return self._stats(self.runs[rank])

    def scalars(self, rank: int = 0) -> dict[str, float]:
        """Return the main numbers of a rank in the last step; see `grace.core.session.exchange.Exchange.scalars`."""
        return scalars(self.stats(rank))

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the states of all ranks: the key "ranks" has a list with one mapping per rank."""
        return {"ranks": [self._saved(run) for run in self.runs]}

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> bool:
        """Load a result of `state_dict`, or a list with the states of all ranks of any run.

        See `grace.core.session.exchange.Exchange.load_state_dict`.
        """
        self._check_idle("load_state_dict")
        ranks = state if isinstance(state, list) else check_mapping(state, "the state of a simulation").get("ranks")
        if not isinstance(ranks, Sequence) or not ranks:
            raise StateError(
                f"checkpoint, ranks: expected a list with one state per rank, received {show(ranks)}; load what "
                "Simulation.state_dict() has returned."
            )
        alone = ranks is not state and len(ranks) == self.size
        given = ranks if alone else [sort_by_rank(ranks)] * self.size
        with self._all_or_nothing():
            loaded = [self._load(e, rank, mine) for rank, (e, mine) in enumerate(zip(self.runs, given, strict=True))]
        notice = next((text for _, text in loaded if text), "")
        if notice:
            self._warn(notice)
        return all(exact for exact, _ in loaded)

    def announce(self, stages: Sequence[tuple[int, Plan]], step: int | None = None) -> None:
        """Log the warnings of the plans; a simulation sends nothing that a user should know of."""
        warn((text for _, plan in stages for text in plan.warnings), self.warned)

    def _gather(self, mine: Sequence[Any], purpose: str, what: str) -> list[Any]:
        return list(mine)
