"""Plan from tensors and rules to buckets, made once before the first step."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

from grace.core.config.config import Config, Method, dense_method
from grace.core.config.registry import communicators, compressors, memories
from grace.core.errors import ConfigError, IncompatibleError
from grace.core.methods.communicator import Communicator, Route
from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import Merging, holds_residual
from grace.core.observe.table import align
from grace.core.plan.unit import Assignment, Piece, Unit, cut, fuse, offsets, whole
from grace.core.spec import ONE_RANK, Ranks, TensorSpec
from grace.core.wire.codings import PLAIN


@dataclass(frozen=True)
class Bucket:
    """Units that share one wire buffer and one collective per phase."""

    name: str
    units: tuple[Unit, ...]
    route: Route

    @property
    def nbytes(self) -> int:
        """Bytes per step and rank, with header and padding, and with every run-time length taken as zero."""
        return self.route.nbytes + sum(unit.negotiated_bytes for unit in self.units)


@dataclass(frozen=True)
class Plan:
    """Plan for every tensor: the buckets in the order in which gradients become ready, and the rest.

    `exchanged` are the tensors that grace exchanges, in this order; `delegated` are those left to the caller.
    `warnings` are about settings that are valid but probably not intended. With `cycle`, the plans of a schedule begin
    again after so many steps. `full` is the plan of full rounds, if some memories then send their input as it is.
    """

    buckets: tuple[Bucket, ...]
    exchanged: tuple[Assignment, ...]
    delegated: tuple[Assignment, ...]
    warnings: tuple[str, ...] = ()
    cycle: int = 0
    full: Plan | None = None

    @cached_property
    def period(self) -> int:
        """The number of steps from one full round to the next on average; 0 if no memory needs a second gradient.

        Of several memories, the smallest number holds.
        """
        memories_of_tensors = (item.memory for item in self.exchanged)
        return min((memory.period for memory in memories_of_tensors if "reference" in memory.needs), default=0)

    def is_full(self, seed: int, step: Any) -> bool:
        """Return whether a step is a full round: step 0, and each later one with probability 1 / `period`."""
        if not self.period:
            return False
        drawn = hashlib.blake2b(f"{seed}/full round {step}".encode(), digest_size=8).digest()
        return step == 0 or int.from_bytes(drawn, "little") % self.period == 0

    @cached_property
    def units(self) -> list[Unit]:
        """Units of all buckets; each is compressed as one."""
        return [unit for bucket in self.buckets for unit in bucket.units]

    @property
    def shards(self) -> bool:
        """True if units depend on the number of ranks."""
        return any(unit.onward is not None for unit in self.units)

    @cached_property
    def digest(self) -> str:
        """A digest of the buckets and units, from which kinds and lengths of all collectives of fixed length follow."""
        buckets = [
            (
                bucket.name,
                bucket.nbytes,
                bucket.route.fixed,
                [
                    (unit.spec.name, unit.spec.dtype, type(unit.compressor).__name__, type(unit.communicator).__name__)
                    for unit in bucket.units
                ],
            )
            for bucket in self.buckets
        ]
        return hashlib.blake2b(repr(buckets).encode(), digest_size=8).hexdigest()

    @cached_property
    def stateful(self) -> dict[str, Unit]:
        """Everything that has states, by name: the units, and those with which their means are sent on."""
        onward = (other for unit in self.units for other in unit.chain)
        return {unit.spec.name: unit for unit in (*self.units, *onward)}

    @cached_property
    def assignment_of(self) -> dict[str, Assignment]:
        """The assignment of each tensor that grace exchanges, by the name of the tensor."""
        return {item.spec.name: item for item in self.exchanged}

    @cached_property
    def bucket_of(self) -> dict[str, Bucket]:
        """The bucket of each unit, by the name of the unit."""
        return {unit.spec.name: bucket for bucket in self.buckets for unit in bucket.units}

    @cached_property
    def needing_norm(self) -> frozenset[str]:
        """The tensors whose memories need the norm of all their gradients together."""
        return frozenset(item.spec.name for item in self.exchanged if "norm" in item.memory.needs)

    @cached_property
    def places(self) -> dict[str, list[tuple[Unit, int, Piece]]]:
        """Places of each tensor, in element order: the unit, the offset in it, and the piece of the tensor there."""
        found: dict[str, list[tuple[Unit, int, Piece]]] = {item.spec.name: [] for item in self.exchanged}
        for unit in self.units:
            for piece, offset in offsets(unit):
                found[piece.tensor].append((unit, offset, piece))
        for places in found.values():
            places.sort(key=lambda place: place[2].start)
        return found

    @property
    def notes(self) -> list[str]:
        """Advice of the compressors in use."""
        used = dict.fromkeys(unit.compressor for unit in self.units)
        return [f"{compressor}: {text}" for compressor in used if (text := compressor.advice)]

    @property
    def assignments(self) -> list[Assignment]:
        """Every tensor of the plan."""
        return [*self.exchanged, *self.delegated]

    @property
    def holding(self) -> frozenset[str]:
        """Tensors of which a rank may hold a residual: of its own gradient, or of a mean that it owns."""
        own = (item.spec.name for item in self.assignments if holds_residual(item.memory))
        of_means = (
            piece.tensor
            for unit in self.units
            if any(holds_residual(other.memory) for other in unit.chain)
            for piece in unit.pieces
        )
        return frozenset((*own, *of_means))

    def windows(self, rank: int) -> dict[str, tuple[int, int]]:
        """Return by tensor the range of the elements whose mean a rank gets: the first, and the end."""
        if rank not in self._windows:
            self._windows[rank] = windows = {}
            for tensor, places in self.places.items():
                pieces = [piece for unit, _, piece in places if unit.is_merged_by(rank)]
                windows[tensor] = (pieces[0].start, pieces[-1].stop) if pieces else (0, 0)
        return self._windows[rank]

    @cached_property
    def _windows(self) -> dict[int, dict[str, tuple[int, int]]]:
        return {}

    def only(self, tensors: Collection[str]) -> Plan:
        """Return the part of the plan with these tensors, which share no bucket with others, and all warnings."""
        return Plan(
            tuple(bucket for bucket in self.buckets if bucket.units[0].pieces[0].tensor in tensors),
            tuple(item for item in self.exchanged if item.spec.name in tensors),
            tuple(item for item in self.delegated if item.spec.name in tensors),
            self.warnings,
            self.cycle,
        )

    def check_ranks(self, size: int) -> None:
        """Raise IncompatibleError if the payloads of `size` ranks cannot be merged."""
        for item in self.assignments:
            item.compressor.check_ranks(size)

    @property
    def dense_bytes(self) -> int:
        """Bytes of all gradients, which a rank would send in a step without compression."""
        return sum(item.spec.nbytes for item in self.assignments)

    @property
    def wire_bytes(self) -> int:
        """Bytes that a rank sends in a step, with every run-time length taken as zero."""
        return sum(b.nbytes for b in self.buckets) + sum(item.spec.nbytes for item in self.delegated)

    @property
    def fixed(self) -> bool:
        """True if no length depends on the data."""
        return all(bucket.route.fixed for bucket in self.buckets)

    def bytes_of(self, item: Assignment) -> int | None:
        """Return a tensor's bytes per step, its share of its units by elements; None if they depend on the data.

        The shares of all tensors of a unit add up to the bytes of the unit.
        """
        if item.spec.name not in self.places:
            return item.spec.nbytes
        total = 0
        for unit, offset, piece in self.places[item.spec.name]:
            if unit.wire_bytes is None:
                return None
            total += share(unit.wire_bytes, unit, offset, piece)
        return total

    def report(self) -> str:
        """Return a table: per tensor method, memory, collective, bytes per step, codings, and why it stays dense."""
        rows = [("tensor", "shape", "compressor", "memory", "collective", "dense bytes", "wire bytes", "why")]
        for item in sorted(self.assignments, key=lambda p: p.spec.name):
            spec, wire = item.spec, self.bytes_of(item)
            coded = ", ".join(f"{f.name} by {f.coding}" for f in item.fields if f.wire and f.coding not in PLAIN)
            rows.append(
                (
                    spec.name,
                    "x".join(map(str, spec.shape)) or "scalar",
                    compressors.name_of(item.compressor),
                    memories.name_of(item.memory),
                    item.communicator.external_name or communicators.name_of(item.communicator),
                    f"{spec.nbytes:,}",
                    f"by data ({coded})" if coded else "by data" if wire is None else f"{wire:,}",
                    item.reason,
                )
            )
        lines = align(rows, right=(5, 6))
        more = "" if self.fixed else " plus what the data select"
        lines.append(
            f"{len(self.exchanged)} tensors as {len(self.units)} units in {len(self.buckets)} buckets, and "
            f"{len(self.delegated)} left to the framework's own allreduce: {self.dense_bytes:,} bytes dense, "
            f"{self.wire_bytes:,} on the wire per rank and step{more}"
        )
        if self.period:
            sent = "" if self.full is None else f", which sends {self.full.wire_bytes:,} bytes"
            lines.append(f"one in {self.period} steps, on average, is a full round{sent}")
        lines += [f"note: {text}" for text in self.notes]
        lines += [f"warning: {text}" for text in self.warnings]
        return "\n".join(lines)


def join(plans: Sequence[Plan]) -> Plan:
    """Return the plans of several modules as one."""
    if len(plans) == 1:
        return plans[0]
    return Plan(
        tuple(bucket for plan in plans for bucket in plan.buckets),
        tuple(item for plan in plans for item in plan.exchanged),
        tuple(item for plan in plans for item in plan.delegated),
        tuple(dict.fromkeys(text for plan in plans for text in plan.warnings)),
        plans[0].cycle,
    )


class Modules(NamedTuple):
    """The module of each tensor, for a framework that exchanges a model module by module."""

    of: Mapping[str, str]
    # What the framework's sharding requires, in place of the communicators of the configuration.
    communicator: Communicator | None = None

    @property
    def members(self) -> dict[str, set[str]]:
        """The tensors of each module."""
        found: dict[str, set[str]] = {}
        for tensor, module in self.of.items():
            found.setdefault(module, set()).add(tensor)
        return found


def share(total: int, unit: Unit, offset: int, piece: Piece) -> int:
    """Return the part of a unit's `total` for its piece at `offset`; the parts of all pieces add up to the total."""
    n = unit.spec.numel
    if not n:
        return total if piece == unit.pieces[0] else 0
    return total * (offset + piece.numel) // n - total * offset // n


def make_plan(
    specs: Sequence[TensorSpec],
    config: Config,
    *,
    ranks: Ranks = ONE_RANK,
    prefix: str = "grace",
    delegate: Callable[[Assignment], bool] = lambda item: False,
    holding: frozenset[str] = frozenset(),
    modules: Modules | None = None,
) -> Plan:
    """Return a plan for `ranks` that gives every tensor its method, its units and its bucket.

    A bucket holds tensors of one communicator and device, dense tensors apart, in reverse order of `specs` (the order
    in which the backward pass finishes them). `config.granularity`, `config.bucket_bytes` and `config.split_bytes`
    decide how much goes into one bucket, and which of it is compressed as one. Tensors for which `delegate(item)` holds
    are left to the caller, except dense vectors beside compressed tensors: together they take one collective. Tensors
    in `holding` carry a residual of an earlier plan, which is sent once if the memory of their method holds none. With
    `modules`, tensors of different modules share no bucket, and tensors are delegated only if all of them are.
    Raises ConfigError if two tensors have one name, IncompatibleError if a communicator cannot serve a memory.
    """
    model_numel = sum(spec.numel for spec in specs if not spec.rounds)
    items = [
        _assign(dataclasses.replace(spec, model_numel=model_numel), config, ranks, spec.name in holding, modules)
        for spec in specs
    ]
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise ConfigError(f"two tensors are called '{spec.name}'; give every tensor its own name.")
        seen.add(spec.name)
    compresses = not all(item.dense for item in items)
    delegated = [item for item in items if delegate(item) and not (compresses and (modules or _rides(item)))]
    left = {item.spec.name for item in delegated}
    exchanged = [item for item in reversed(items) if item.spec.name not in left]
    for item in exchanged:
        if item.spec.complex:
            raise item.spec.not_exchanged()
    groups: dict[tuple[Communicator, str, bool, str], list[list[Unit]]] = {}
    # What the last bucket of each group has already, as `_size_of` counts it.
    filled: dict[object, int] = {}
    for item in exchanged:
        module = modules.of[item.spec.name] if modules else ""
        # What is not summed on the way may share a buffer with dense tensors.
        brought = bool(item.communicator.external_name)
        kind = item.communicator, item.spec.device, item.dense and not brought, module
        group = groups.setdefault(kind, [])
        # A piece of a tensor may belong to few of the ranks that own parts of it.
        cuts = config.granularity == "bucket" and config.split_bytes > 0 and not brought
        for unit in cut(item, config.split_bytes) if cuts else [whole(item)]:
            if not group or _is_full(filled[kind], unit, config):
                group.append([])
                filled[kind] = 0
            group[-1].append(unit)
            filled[kind] += _size_of(unit, config)
    position = {item.spec.name: i for i, item in enumerate(exchanged)}
    # Sort by the last tensor to be ready: ranks wait for buckets in this order, so the first should be ready first.
    members = sorted(
        (m for group in groups.values() for m in group),
        key=lambda m: (position[m[-1].pieces[0].tensor], m[-1].pieces[0].start),
    )
    buckets: list[Bucket] = []
    made: list[Unit] = []
    for index, bucket in enumerate(members):
        communicator = bucket[0].communicator
        alike = bucket[0].dense and not communicator.external_name
        units = fuse(bucket) if config.granularity != "layer" or alike else bucket
        units = list(communicator.divide(units, ranks, made))
        made += units
        route = communicator.route(units, ranks, config.checksum)
        buckets.append(Bucket(f"{prefix}/{index}", tuple(units), route))
    _check_units(unit.spec.name for unit in made)
    warnings = (*_warnings(items, config), *_lost_means(made), *_swollen(made))
    plan = Plan(tuple(buckets), tuple(exchanged), tuple(delegated), warnings)
    if not any("full" in unit.memory.needs for unit in made):
        return plan
    return dataclasses.replace(plan, full=_full(plan, ranks, config.checksum))


def _full(plan: Plan, ranks: Ranks, checksum: bool) -> Plan:
    """Return the plan of full rounds: of the same units, those whose memory asks for it are not compressed."""
    dense, buckets = dense_method().compressor, []
    for bucket in plan.buckets:
        units = [
            dataclasses.replace(unit, method=dataclasses.replace(unit.method, compressor=dense))
            if "full" in unit.memory.needs
            else unit
            for unit in bucket.units
        ]
        buckets.append(Bucket(bucket.name, tuple(units), units[0].communicator.route(units, ranks, checksum)))
    return dataclasses.replace(plan, buckets=tuple(buckets))


def _check_units(names: Iterable[str]) -> None:
    """Raise ConfigError if two units have one name: states, random numbers and collectives are found by it."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(
                f"the tensor name '{name}' is also the name of a unit, as grace calls pieces of other tensors; give "
                "the tensor a name without '[start:stop]'."
            )
        seen.add(name)


def _rides(item: Assignment) -> bool:
    """Return whether a dense tensor shares a collective with others like it: the many small biases and norms."""
    spec = item.spec
    # Sums of float16 take a program of their own; bfloat16 travels as float32.
    alone = spec.sparse or spec.complex or spec.dtype == "float16"
    return item.dense and spec.ndim <= 1 and spec.numel < 65536 and not alone


def _size_of(unit: Unit, config: Config) -> int:
    """Return what a unit adds to its bucket: elements of a whole model, else bytes."""
    return unit.spec.numel if config.granularity == "model" else unit.spec.nbytes


def _is_full(filled: int, unit: Unit, config: Config) -> bool:
    """Return whether a bucket in which `filled` is taken has no room for another unit."""
    size = filled + _size_of(unit, config)
    if config.granularity == "model":
        # int32 indices reach this far.
        return size >= 2**31
    if unit.communicator.external_name:
        # Few collectives matter more where nothing else travels while the framework waits for them.
        return filled >= config.bucket_bytes
    return size > config.bucket_bytes


def _warnings(items: Sequence[Assignment], config: Config) -> tuple[str, ...]:
    """Return warnings about settings that are valid but probably not intended."""
    used = [config.rule_for(item.spec) for item in items]
    texts = [
        f"{rule.reason} (match {', '.join(rule.match)}) fits no tensor; check its conditions against the names above"
        for rule in config.rules
        if not any(rule is other for other in used)
    ]
    texts += [text for item in items if (text := _harm(config, item.method, item.spec))]
    bare = [item.spec.name for item in items if item.communicator.adds or item.proposed]
    if config.checksum and bare:
        more = f" and {len(bare) - 8} more" if len(bare) > 8 else ""
        texts.append(
            f"checksum = true does not cover what is summed on the way: {len(bare)} of {len(items)} tensors "
            f"({', '.join(bare[:8])}{more}), whole or in part"
        )
    return tuple(dict.fromkeys(texts))


def _harm(config: Config, method: Method, spec: TensorSpec | None = None) -> str | None:
    """Return the reason why the memory harms the method, without `spec` only what holds for every tensor."""
    c, memory = method.compressor, memories.name_of(method.memory)
    if not method.memory.feeds_back:
        # What is not sent may stay in the weights.
        lost = None if config.outer is not None and config.outer.local_error else _loses(method)
        return f"{lost}; leave 'memory' out, or set it to '{c.default_memory}'" if lost else None
    if c.nonfinite == "carried":
        return None
    why = c.harmed_by_feedback
    # Methods that are published with error feedback are trusted to converge with it.
    if why is None and spec is not None and memory != c.default_memory and c.contraction(spec) is None:
        why = "its error can exceed its input, so the residual may grow without bound"
    return why and (
        f"memory '{memory}' applies error feedback to {c}, which harms it: {why} (GRACE, Table I and section V-B); "
        "use memory 'none'"
    )


def _loses(method: Method) -> str | None:
    """Return what is lost without error feedback, if the compressor has it by default."""
    # A joint memory sends differences from what was sent before, so what is missing is in the next one.
    keeps = method.memory.feeds_back or method.memory.across_ranks == "joint" or isinstance(method.memory, Merging)
    if keeps or not memories.make(method.compressor.default_memory).feeds_back or _must_name(type(method.compressor)):
        return None
    return f"{method.compressor} drops a part of what it compresses, and without error feedback this is lost for good"


@cache
def _must_name(cls: type[Compressor]) -> bool:
    """Return whether a configuration must name the memory of these compressors, so that whoever did has decided."""
    return any(compressors.get(name) is cls and "memory" in compressors.required(name) for name in compressors)


def _lost_means(units: Sequence[Unit]) -> list[str]:
    """Return warnings about owners of means that lose what they do not send."""
    methods = dict.fromkeys(other.method for unit in units for other in unit.chain)
    return [f"owners of means: {lost}; leave 'shard_memory' out" for m in methods if (lost := _loses(m))]


def _swollen(units: Sequence[Unit]) -> list[str]:
    """Return warnings about compressors whose payloads are larger than the gradients."""
    found: dict[Compressor, list[tuple[int, Unit]]] = {}
    for unit in units:
        sent = unit.expected_bytes
        # A header of some bytes swells a short vector, and no option of the method changes that.
        if not unit.dense and unit.spec.numel >= 1024 and sent is not None and sent > unit.spec.nbytes:
            found.setdefault(unit.compressor, []).append((sent, unit))
    return [
        f"{compressor} sends more than the gradient has, {units[0][0]:,} instead of {units[0][1].spec.nbytes:,} bytes "
        f"for '{units[0][1].pieces[0].tensor}'; choose options that send less, or compressor 'none'"
        for compressor, units in found.items()
    ]


def early_warnings(config: Config) -> tuple[str, ...]:
    """Return the part of `Plan.warnings` that follows from the configuration alone, before the tensors are known."""
    methods = [stage.method for _, stage in config.stages] + [rule.method for rule in config.rules]
    return tuple(dict.fromkeys(text for m in methods if (text := _harm(config, m))))


def make_plans(
    specs: Sequence[TensorSpec],
    config: Config,
    *,
    ranks: Ranks = ONE_RANK,
    prefix: str = "grace",
    delegate: Callable[[Assignment], bool] = lambda item: False,
    holding: frozenset[str] = frozenset(),
    modules: Modules | None = None,
) -> list[tuple[int, Plan]]:
    """Return the plan of every stage of the schedule with its first step; see `make_plan`."""
    plans: list[tuple[int, Plan]] = []
    for step, stage in config.stages:
        holding = holding.union(*(plan.holding for _, plan in plans))
        name = f"{prefix}.stage{len(plans)}" if plans else prefix
        plan = make_plan(specs, stage, ranks=ranks, prefix=name, delegate=delegate, holding=holding, modules=modules)
        plans.append((step, dataclasses.replace(plan, cycle=config.outer.dense_every) if config.outer else plan))
    return plans


def next_plan(
    specs: Sequence[TensorSpec],
    config: Config,
    before: Plan,
    *,
    ranks: Ranks,
    prefix: str,
    delegate: Callable[[Assignment], bool] = lambda item: False,
    modules: Modules | None = None,
) -> Plan:
    """Return the plan of a configuration that follows another plan and keeps all of its residuals."""
    return make_plan(
        specs, config, ranks=ranks, prefix=prefix, delegate=delegate, holding=before.holding, modules=modules
    )


def _assign(spec: TensorSpec, config: Config, ranks: Ranks, holding: bool, modules: Modules | None) -> Assignment:
    rule = config.rule_for(spec)
    method = rule.method if rule else config.method
    unfit = "complex numbers stay dense" if spec.complex else method.compressor.unfit(spec)
    if spec.rounds:
        unfit = "accompanies the weights, and its mean stays dense"
    if unfit:
        method = dense_method()
    brought = modules.communicator if modules else None
    if brought:
        communicator, why = brought, ""
        if obstacle := brought.obstacle(method.compressor):
            raise IncompatibleError(
                f"parameters that are sharded over the ranks cannot be exchanged by {method.compressor}: {obstacle}. "
                "Use a compressor that works element by element or block by block, such as eightbit, qsgd or topk, or "
                "let a rule name one for these tensors."
            )
    else:
        item = Assignment(spec, method, index_coding=config.index_coding)
        communicator, why = method.communicator.resolve(item, ranks)
    method = dataclasses.replace(method, communicator=communicator)
    if isinstance(method.memory, Merging):
        method = dataclasses.replace(method, memory=method.memory.for_ranks(ranks.size))
    if brought and (obstacle := brought.memory_obstacle(method.memory)):
        raise IncompatibleError(
            f"parameters that are sharded over the ranks cannot be exchanged with {method.memory}: it {obstacle}. "
            "Valid memories: residual, none."
        )
    method.check_memory()
    if holding and ("reference" in method.memory.needs or isinstance(method.memory, Merging)):
        raise IncompatibleError(
            f"tensor '{spec.name}' carries a residual of an earlier method, and {method.memory} would take it for a "
            "part of the gradient. Train with this memory from the start."
        )
    if holding and not holds_residual(method.memory):
        method = dataclasses.replace(method, memory=memories.make({"name": "leftover", "then": method.memory}))
    method.coding.check(method.compressor.wire(spec), method.compressor)
    if modules and "norm" in method.memory.needs:
        raise IncompatibleError(
            "the modules of a sharded model, and the fragments of outer steps, are exchanged one by one, and "
            f"{method.memory} needs the norm of all their gradients. "
            'Leave clipping_norm = "all" out.'
        )
    reasons = unfit or (rule.reason if rule else ""), why
    return Assignment(spec, method, "; ".join(filter(None, reasons)), config.index_coding, holding)
