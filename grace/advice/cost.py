"""The cost of a configuration's exchange: its codec, measured in this process, and the collectives of its buckets."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence, Set
from functools import lru_cache
from typing import Any, NamedTuple

from grace.advice.kept import Kept, ago
from grace.advice.model import Bucket, Round, Scope
from grace.bench.framework import Framework
from grace.core.communicators.hierarchical import Hierarchical
from grace.core.config.config import Config, Method
from grace.core.config.registry import communicators
from grace.core.errors import ConfigError
from grace.core.methods.communicator import Communicator
from grace.core.plan import plan as plans
from grace.core.plan.unit import Assignment, Unit
from grace.core.session.simulation import Simulation, poll_all
from grace.core.spec import Array, Ranks, TensorSpec
from grace.core.transport.collectives import Kind

# The numbers that describe a codec.
FIGURES = 6
# Elements of the measured steps, whose difference gives the cost per element.
SIZES = (1 << 13, 1 << 20)
# Up to the first number of ranks, all of them are simulated. The cost on more goes on as from the first to the second.
RANKS = (4, 8)
REPETITIONS = (30, 4)
# What default rules do not leave as it is.
_MATRIX = TensorSpec("x", (1024, 128))
# Payloads have as many bytes on more nodes, and a plan for thousands of them would have as many shards.
_NODES = 2
# Bytes of DDP's buckets: the first one, and all others.
DDP_BYTES = (1 << 20, 25 << 20)


class Cost(NamedTuple):
    """Seconds of a core: `fixed` per unit, and `element` per element."""

    fixed: float
    element: float

    def seconds(self, units: float, numel: int) -> float:
        """Return the seconds for so many units with so many elements in all."""
        return units * self.fixed + numel * self.element


class Codec(NamedTuple):
    """The work of a rank before its payload leaves and after the others arrive, and bytes per element of a payload.

    `error` is |m - mean|^2 / |mean|^2 of the mean m that the ranks get in a first step, on normal gradients.
    """

    before: Cost
    after: Cost
    bytes: float
    error: float

    @property
    def whole(self) -> Cost:
        """The work before and after."""
        return Cost(*map(sum, zip(self.before, self.after, strict=True)))

    def faster(self, factor: float) -> Codec:
        """Return the codec on a device on which it runs so many times as fast."""
        before, after = (Cost(*(seconds / factor for seconds in part)) for part in (self.before, self.after))
        return self._replace(before=before, after=after)


class Codecs:
    """The costs of codecs in this process, each measured when it is first asked for, with gradients of a framework.

    The times are those of this machine, with the threads that the framework has. What is `kept` is not measured again.
    """

    def __init__(self, framework: Framework, sizes: tuple[int, int] = SIZES, kept: Kept | None = None) -> None:
        self._framework, self._sizes, self._kept = framework, sizes, kept
        self._known: dict[tuple[Config, int], Codec] = {}
        #: How many codecs were measured by this object.
        self.measured = 0
        #: When the others were measured, in seconds since the epoch.
        self.before: list[float] = []

    @property
    def when(self) -> str:
        """The time of the measurements, in words."""
        if not self.before:
            return "measured now"
        then = ago(time.time() - min(self.before))
        if not self.measured:
            return f"measured {then}"
        return f"{self.measured} of {self.measured + len(self.before)} measured now, and the others up to {then}"

    def of(self, config: Config, ranks: Ranks) -> Codec:
        """Return the work of a rank for its part of a step: codec, feedback, route, and Python per tensor.

        Beyond the most ranks that are simulated, times grow as between the last two, at most in proportion. With the
        communicator hierarchical, a rank has a share of what the nodes exchange.
        """
        inner = _in_place_of_nodes(config, lambda found: found.between or communicators.make("auto"))
        if inner == config or ranks.local_size == 1:
            return self._beyond(inner, ranks.size)
        two = self._measured(inner, 2)
        pairs = self._measured(_in_place_of_nodes(config, lambda found: dataclasses.replace(found, local_size=2)), 4)
        # In two nodes of two ranks, a rank has half of the exchange of two.
        fixed = max(0.0, pairs.after.fixed - two.whole.fixed)
        element = max(0.0, pairs.after.element - two.whole.element / 2)
        if ranks.size > ranks.local_size:
            nodes = self._beyond(inner, ranks.size // ranks.local_size).whole
            fixed, element = fixed + nodes.fixed, element + nodes.element / ranks.local_size
        return Codec(pairs.before, Cost(fixed, element), two.bytes, pairs.error)

    def _beyond(self, config: Config, ranks: int) -> Codec:
        few, many = RANKS
        if ranks <= few:
            return self._measured(config, ranks)
        low, high = self._measured(config, few), self._measured(config, many)
        # Sums come as one payload. Of two_shot there are as many shards as ranks, but no more elements. What differs
        # there between few ranks and many is mostly noise, which must not grow with the ranks.
        law = law_of(communicator_of(_MATRIX, config, Ranks(ranks)))
        reach = {"allreduce": (many, many), "two_shot": (ranks, many)}.get(law, (ranks, ranks))

        def beyond(a: Cost, b: Cost) -> Cost:
            return Cost(*(grown(x, y, RANKS, min(n, ranks)) for x, y, n in zip(a, b, reach, strict=True)))

        return Codec(beyond(low.before, high.before), beyond(low.after, high.after), low.bytes, low.error)

    def _measured(self, config: Config, ranks: int) -> Codec:
        if (config, ranks) not in self._known:
            self._known[config, ranks] = self._before(config, ranks) or self._now(config, ranks)
        return self._known[config, ranks]

    def _before(self, config: Config, ranks: int) -> Codec | None:
        """Return a codec that was kept."""
        found = None if self._kept is None else self._kept.get(config, ranks)
        if found is None:
            return None
        (*costs, nbytes, error), at = found
        self.before.append(at)
        return Codec(Cost(*costs[:2]), Cost(*costs[2:]), nbytes, error)

    def _now(self, config: Config, ranks: int) -> Codec:
        """Measure a codec, and keep it."""
        small, large = self._sizes
        (fewer, *_), (more, nbytes, error) = (
            self._steps(config, ranks, *each) for each in zip(self._sizes, REPETITIONS, strict=True)
        )
        slopes = [max(0.0, (y - x) / (large - small)) for x, y in zip(fewer, more, strict=True)]
        before, after = (Cost(max(0.0, x - small * slope), slope) for x, slope in zip(fewer, slopes, strict=True))
        self.measured += 1
        if self._kept is not None:
            self._kept.put(config, ranks, [*before, *after, nbytes, error])
        return Codec(before, after, nbytes, error)

    def _steps(self, config: Config, ranks: int, numel: int, repetitions: int) -> tuple[list[float], float, float]:
        """Return seconds per rank before and after payloads travel, bytes per element, and the error, of a tensor."""
        import numpy as np

        # A matrix, because default rules leave vectors as they are.
        shape = (numel // 128, 128)
        simulation = Simulation(ranks, {"x": shape}, config, framework=self._framework.name)
        draws = np.random.default_rng(0)
        drawn = [draws.standard_normal(shape, np.float32) for _ in range(ranks)]
        gradients = [self._framework.load(x) for x in drawn]
        exact = sum(x.astype(np.float64) for x in drawn) / ranks
        merged = self._framework.on_host(simulation.step([{"x": x} for x in gradients], lr=1.0)[0]["x"])
        error = float(np.sum((merged - exact) ** 2) / np.sum(exact**2))
        found = [_timed(simulation, gradients) for _ in range(repetitions)]
        # Other programs only add to a time.
        seconds = [min(part) / ranks for part in zip(*found, strict=True)]
        return seconds, simulation.stats()["tensors"]["x"]["wire_bytes"] / numel, error


def grown(low: float, high: float, measured: tuple[int, int], ranks: int) -> float:
    """Return the seconds on so many ranks from those on two smaller numbers of ranks.

    They grow as between these two, at least not at all and at most in proportion.
    """
    few, many = measured
    return low + min(max(0.0, high - low) * (ranks - few) / (many - few), low * (ranks / few - 1))


def _timed(simulation: Simulation, gradients: Sequence[Array]) -> tuple[float, float]:
    """Take a step; return the seconds of all ranks until their payloads are ready, and those of the rest.

    What the simulated network does is left out: it joins and sums on each rank what a library does on the way.
    """
    moments = [time.perf_counter() - simulation.network.seconds]
    for run, gradient in zip(simulation.runs, gradients, strict=True):
        run.current.ready("x", gradient, 1.0)
    moments.append(time.perf_counter() - simulation.network.seconds)
    poll_all(simulation.runs)
    outcomes = [run.current.finish() for run in simulation.runs]
    for run, outcome in zip(simulation.runs, outcomes, strict=True):
        run.commit(outcome)
    moments.append(time.perf_counter() - simulation.network.seconds)
    begin, ready, end = moments
    return ready - begin, end - ready


def buckets(
    specs: Sequence[TensorSpec], config: Config, ranks: Ranks, codec: Codec, ready: Mapping[str, float]
) -> list[Bucket]:
    """Return the buckets that the tensors have with a configuration on so many ranks.

    `ready` has the seconds after which each gradient is there. Raises ConfigError for a communicator of which the model
    does not know what it sends, and for a `local_size` of hierarchical that is not that of the ranks.
    """
    layout = _layout(tuple(specs), config)
    carried = {spec.name: communicator_of(spec, config, ranks) for spec in layout.kinds}
    if unknown := sorted({law_of(each) for each in carried.values()} - LAWS.keys()):
        raise ConfigError(f"the cost model does not know the communicator {unknown[0]}; it knows {', '.join(LAWS)}.")
    nodes = [each for each in carried.values() if isinstance(each, Hierarchical)]
    local_size = nodes[0].ranks_per_node(ranks) if nodes else 1
    if nodes and local_size != ranks.local_size:
        raise ConfigError(
            f"communicator hierarchical: expected local_size {ranks.local_size}, the ranks on a node here, received "
            f"{local_size}; leave it out."
        )
    planned = Ranks(_NODES * local_size, local_size)
    plan = _plan(tuple(specs), config, planned)
    # DDP passes gradients on bucket by bucket.
    passed = {spec.name: at for group, at in _ddp_groups(specs, ready) for spec in group}

    def of_units(bucket: plans.Bucket, item: Assignment) -> tuple[float, float, tuple[Round, ...], float]:
        nbytes = float(sum(unit.spec.nbytes for unit in bucket.units))
        if item.dense:
            # The biases and norms, which travel together.
            return 0.0, 0.0, (Round("allreduce", nbytes),), nbytes
        # Planned for fewer ranks, a bucket may have another communicator.
        communicator = carried[layout.kind_of[item.spec.name]]
        units = exchanged_units(bucket, communicator)
        sent = sum(_payload(unit, codec) * share(unit, planned) for unit in units)
        # Of two_shot, each rank has a shard.
        count = sum(1 / planned.size if unit.onward else share(unit, planned) for unit in units)
        numel = sum(unit.spec.numel for unit in units)
        before, after = (part.seconds(count, numel) for part in (codec.before, codec.after))
        return before, after, rounds_of(bucket, communicator, sent, ranks), nbytes

    found = []
    # Most buckets of a large model are alike.
    known: dict[Any, tuple[float, float, tuple[Round, ...], float]] = {}
    for bucket in plan.buckets:
        at = max(passed[piece.tensor] for unit in bucket.units for piece in unit.pieces)
        item = plan.assignment_of[bucket.units[0].pieces[0].tensor]
        kind = tuple((layout.kind_of[unit.pieces[0].tensor], unit.spec.shape) for unit in bucket.units)
        if kind not in known:
            known[kind] = of_units(bucket, item)
        found.append(Bucket(at, *known[kind]))
    return found + dense_buckets(specs, {item.spec.name for item in plan.delegated}, ready)


class _Layout(NamedTuple):
    """The first tensor of each kind, which differ in more than their names, and the name of the one of each tensor."""

    kinds: list[TensorSpec]
    kind_of: dict[str, str]


@lru_cache(maxsize=32)
def _layout(specs: tuple[TensorSpec, ...], config: Config) -> _Layout:
    firsts: dict[Any, TensorSpec] = {}
    kind_of = {}
    for spec in specs:
        kind_of[spec.name] = firsts.setdefault((dataclasses.replace(spec, name=""), config.rule_for(spec)), spec).name
    return _Layout(list(firsts.values()), kind_of)


@lru_cache(maxsize=32)
def _plan(specs: tuple[TensorSpec, ...], config: Config, ranks: Ranks) -> plans.Plan:
    # The same for all numbers of nodes.
    return plans.make_plan(specs, config, ranks=ranks, delegate=lambda item: item.dense)


def exchanged_units(bucket: plans.Bucket, communicator: Communicator) -> list[Unit]:
    """Return the units that all ranks exchange, or with hierarchical the nodes."""
    of_nodes = isinstance(communicator, Hierarchical)
    return [unit.onward if of_nodes and unit.onward else unit for unit in bucket.units]


def share(unit: Unit, ranks: Ranks) -> float:
    """Return the part of the ranks that exchange a unit."""
    return 1.0 if unit.owners is None else len(unit.owners) / ranks.size


def bytes_within(bucket: plans.Bucket, communicator: Communicator) -> float:
    """Return the bytes of a bucket that a rank sends to the ranks of its node, of which it keeps its own part."""
    if not isinstance(communicator, Hierarchical):
        return 0.0
    return float(sum(unit.spec.nbytes if unit.wire_bytes is None else unit.wire_bytes for unit in bucket.units))


def rounds_of(bucket: plans.Bucket, communicator: Communicator, sent: float, ranks: Ranks) -> tuple[Round, ...]:
    """Return the rounds of a bucket of which a rank sends so many bytes of payloads and proposals.

    With hierarchical these are those for other nodes. LAWS must have the communicator.
    """
    units = exchanged_units(bucket, communicator)
    dense, proposed = float(sum(u.spec.nbytes for u in units)), float(sum(u.negotiated_bytes for u in units))
    if not isinstance(communicator, Hierarchical):
        law = law_of(communicator)
        if any(unit.half_sum for unit in units):
            # Two ranks swap 16-bit floats, and more of them add slices.
            law = "allgather" if ranks.size == 2 else "two_shot"
        return _rounds(law, sent - proposed, proposed, dense, ranks.size, "all")
    local_size, within = communicator.ranks_per_node(ranks), bytes_within(bucket, communicator)
    if local_size == ranks.size:
        return _rounds(law_of(bucket.units[0].communicator), within, 0.0, dense, ranks.size, "all")
    own, proposed, dense = within / local_size, proposed / local_size, dense / local_size
    nodes = ranks.size // local_size
    between = _rounds(law_of(communicator), sent - proposed, proposed, dense, nodes, "nodes")
    return (Round("alltoall", within - own, "node"), *between, Round("allgather", own, "node"))


def _rounds(law: str, payload: float, proposed: float, dense: float, ranks: int, scope: Scope) -> tuple[Round, ...]:
    rounds = tuple(Round(*each, scope) for each in LAWS[law](payload, ranks, dense))
    # Proposals are summed in a round of their own, before anything is compressed.
    return (Round("allreduce", proposed, scope), *rounds) if proposed else rounds


def law_of(communicator: Communicator) -> str:
    """Return the name under which LAWS has what a communicator sends, with hierarchical between nodes."""
    if isinstance(communicator, Hierarchical) and communicator.between is not None:
        communicator = communicator.between
    return communicator.external_name or communicators.name_of(communicator)


def ddp_buckets(specs: Sequence[TensorSpec], ready: Mapping[str, float]) -> list[Bucket]:
    """Return the buckets of plain DistributedDataParallel, which reduces gradients as they are.

    `ready` has the seconds after which each gradient is there.
    """
    return dense_buckets(specs, {spec.name for spec in specs}, ready)


def dense_buckets(specs: Sequence[TensorSpec], dense: Set[str], ready: Mapping[str, float]) -> list[Bucket]:
    """Return the buckets of DistributedDataParallel whose `dense` tensors it reduces as they are.

    Of a bucket in which others are compressed, each of them has an allreduce of its own.
    """
    found = []
    for group, at in _ddp_groups(specs, ready):
        left = [spec for spec in group if spec.name in dense]
        if left:
            count = 1 if len(left) == len(group) else len(left)
            nbytes = float(sum(spec.nbytes for spec in left))
            found.append(Bucket(at, 0.0, 0.0, (Round("allreduce", nbytes, count=count),), nbytes))
    return found


def _ddp_groups(specs: Sequence[TensorSpec], ready: Mapping[str, float]) -> list[tuple[list[TensorSpec], float]]:
    """Return the tensors of each bucket of DistributedDataParallel, and when the last of them is ready."""
    found: list[tuple[list[TensorSpec], float]] = []
    waiting: list[TensorSpec] = []
    for spec in sorted(specs, key=lambda spec: ready[spec.name]):
        waiting.append(spec)
        if sum(each.nbytes for each in waiting) >= DDP_BYTES[bool(found)]:
            found.append((waiting, ready[spec.name]))
            waiting = []
    if waiting:
        found.append((waiting, ready[waiting[-1].name]))
    return found


def _payload(unit: Unit, codec: Codec) -> float:
    sent = unit.expected_bytes
    return unit.spec.numel * codec.bytes if sent is None else float(sent)


def communicator_of(spec: TensorSpec, config: Config, ranks: Ranks) -> Communicator:
    """Return the communicator of a tensor with a configuration on so many ranks."""
    rule = config.rule_for(spec)
    item = Assignment(spec, rule.method if rule else config.method, index_coding=config.index_coding)
    return item.method.communicator.resolve(item, ranks)[0]


def _in_place_of_nodes(config: Config, other: Callable[[Hierarchical], Communicator]) -> Config:
    """Return a configuration with other communicators in place of hierarchical."""

    def changed(method: Method) -> Method:
        found = method.communicator
        return dataclasses.replace(method, communicator=other(found)) if isinstance(found, Hierarchical) else method

    rules = tuple(dataclasses.replace(rule, method=changed(rule.method)) for rule in config.rules)
    return dataclasses.replace(config, method=changed(config.method), rules=rules)


# What each rank hands to the collectives of a bucket, by the communicator: kinds and bytes, from the bytes of its
# payload, the number of ranks, and the bytes of its gradients.
LAWS: dict[str, Callable[[float, int, float], list[tuple[Kind, float]]]] = {
    "allreduce": lambda payload, n, dense: [("allreduce", payload)],
    "allgather": lambda payload, n, dense: [("allgather", payload)],
    "broadcast": lambda payload, n, dense: [("allgather", payload)],
    "reduce_scatter": lambda payload, n, dense: [("alltoall", payload * (n - 1) / n)],
    "two_shot": lambda payload, n, dense: [("alltoall", payload * (n - 1) / n), ("allgather", payload / n)],
    "sparse_allreduce": lambda payload, n, dense: [
        ("alltoall", payload * (n - 1) / n),
        ("allgather", min(n * payload, dense) / n),
    ],
}
