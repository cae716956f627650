"""From tensors and rules to buckets, once, before the first step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from grace.core.communicator import Communicator
from grace.core.compressor import Compressor
from grace.core.config import Config, Parts, change_config, dense_parts
from grace.core.errors import ConfigError
from grace.core.memory import Memory
from grace.core.registry import communicators, compressors, memories
from grace.core.spec import HALF_DTYPES, Field, TensorSpec
from grace.core.wire import Layout, payload_bytes


@dataclass(frozen=True)
class Part:
    """One tensor, the parts that serve it, and why if they are not the configuration's own."""

    spec: TensorSpec
    parts: Parts
    reason: str = ""
    index_coding: str = "int32"

    @property
    def compressor(self) -> Compressor:
        """What makes its payload."""
        return self.parts.compressor

    @property
    def memory(self) -> Memory:
        """What remembers its error."""
        return self.parts.memory

    @property
    def communicator(self) -> Communicator:
        """How its payload travels."""
        return self.parts.communicator

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """Fields of its payload."""
        coding = self.index_coding if self.communicator.any_length else "int32"
        return tuple(
            f if f.below is None or not f.wire else f._replace(coding=coding) for f in self.compressor.wire(self.spec)
        )

    @cached_property
    def agreement(self) -> tuple[Field, ...]:
        """What its ranks settle before they compress."""
        return self.compressor.agreement(self.spec)

    @cached_property
    def settled_bytes(self) -> int:
        """Bytes per step of what its ranks settle first."""
        return payload_bytes(self.agreement) or 0

    @property
    def wire_bytes(self) -> int | None:
        """Bytes per step of its fields and of what it settles first; None if they depend on the data."""
        fields = payload_bytes(self.fields)
        return None if fields is None else fields + self.settled_bytes

    @cached_property
    def dense(self) -> bool:
        """Whether the gradient is summed as it is, without memory."""
        return self.parts == dense_parts()

    @property
    def holds(self) -> bool:
        """Whether its memory may hold a residual, which a change of the plan must not lose."""
        return self.memory.feeds_back or memories.name_of(self.memory) == "leftover"

    @cached_property
    def guarded(self) -> bool:
        """Whether NaN and infinity must be announced by a flag, because the payload or a memory would lose them."""
        return not (self.compressor.carries_nonfinite and self.memory.stateless)

    @cached_property
    def half_sum(self) -> bool:
        """Whether the payload is summed in 16 bits, so that it is averaged on the way and not divided afterwards."""
        return self.communicator.sums and any(f.dtype in HALF_DTYPES for f in self.fields)


@dataclass(frozen=True)
class Bucket:
    """Tensors that share one wire buffer and one collective per phase."""

    name: str
    parts: tuple[Part, ...]
    communicator: Communicator
    layout: Layout

    @property
    def nbytes(self) -> int:
        """Bytes per step and rank, with header and padding, and with every run-time length taken as zero."""
        return self.layout.nbytes + sum(part.settled_bytes for part in self.parts)


@dataclass(frozen=True)
class Plan:
    """What happens to every tensor: the buckets in the order in which gradients become ready, and the rest."""

    buckets: tuple[Bucket, ...]
    delegated: tuple[Part, ...]
    warnings: tuple[str, ...] = ()

    @property
    def engine_parts(self) -> list[Part]:
        """Every tensor that the engine exchanges."""
        return [part for bucket in self.buckets for part in bucket.parts]

    @property
    def parts(self) -> list[Part]:
        """Every tensor of the plan."""
        return [*self.engine_parts, *self.delegated]

    def report(self) -> str:
        """A table: per tensor the method, memory, collective and bytes per step, and why a tensor stays dense."""
        rows = [("tensor", "shape", "compressor", "memory", "collective", "dense bytes", "wire bytes", "why")]
        wire_total = sum(b.nbytes for b in self.buckets) + sum(part.spec.nbytes for part in self.delegated)
        dense_total, open_ended = 0, False
        for part in sorted(self.parts, key=lambda p: p.spec.name):
            spec, wire = part.spec, part.wire_bytes
            dense_total += spec.nbytes
            open_ended |= wire is None
            rows.append(
                (
                    spec.name,
                    "x".join(map(str, spec.shape)) or "scalar",
                    compressors.name_of(part.compressor),
                    memories.name_of(part.memory),
                    communicators.name_of(part.communicator),
                    f"{spec.nbytes:,}",
                    "by data" if wire is None else f"{wire:,}",
                    part.reason,
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(
                c.rjust(w) if 5 <= i <= 6 else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        more = " plus what the data select" if open_ended else ""
        lines.append(
            f"{len(rows) - 1} tensors in {len(self.buckets)} buckets and {len(self.delegated)} uncompressed: "
            f"{dense_total:,} bytes dense, {wire_total:,} on the wire per rank and step{more}"
        )
        lines += [f"warning: {text}" for text in self.warnings]
        return "\n".join(line.rstrip() for line in lines)


def make_plan(
    specs: Sequence[TensorSpec],
    config: Config,
    *,
    prefix: str = "grace",
    delegate: Callable[[Part], bool] = lambda part: False,
    holding: frozenset[str] = frozenset(),
) -> Plan:
    """Give every tensor its parts and its bucket.

    Buckets hold tensors of one communicator and device, dense ones apart, in reverse order of `specs` (the order in
    which the backward pass finishes them), up to `config.bucket_bytes` of dense gradients. Tensors for which
    `delegate(part)` holds are left to the caller. Those in `holding` come with a residual of an earlier plan, which
    their parts then send once where they have no memory. Raises ConfigError if two tensors have one name.
    """
    model_numel = sum(spec.numel for spec in specs)
    parts = [
        _make_part(dataclasses.replace(spec, model_numel=model_numel), config, spec.name in holding) for spec in specs
    ]
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise ConfigError(f"two tensors are called '{spec.name}'; names must be unique.")
        seen.add(spec.name)
    groups: dict[tuple[Communicator, str, bool], list[list[Part]]] = {}
    for part in reversed(parts):
        if delegate(part):
            continue
        group = groups.setdefault((part.communicator, part.spec.device, part.dense), [])
        if not group or sum(p.spec.nbytes for p in group[-1]) + part.spec.nbytes > config.bucket_bytes:
            group.append([])
        group[-1].append(part)
    position = {part.spec.name: i for i, part in enumerate(parts)}
    members = sorted((m for group in groups.values() for m in group), key=lambda m: -position[m[0].spec.name])
    buckets = []
    for index, bucket in enumerate(members):
        communicator = bucket[0].communicator
        layout = communicator.layout([p.spec for p in bucket], [p.fields for p in bucket], [p.guarded for p in bucket])
        buckets.append(Bucket(f"{prefix}/{index}", tuple(bucket), communicator, layout))
    return Plan(tuple(buckets), tuple(part for part in parts if delegate(part)), _warnings(parts, config))


def _warnings(parts: Sequence[Part], config: Config) -> tuple[str, ...]:
    """What is allowed and yet hardly meant."""
    used = [config.rule_for(part.spec) for part in parts]
    texts = [
        f"{rule.reason} (match {', '.join(rule.match)}) fits no tensor; compare its conditions with the names above"
        for rule in config.rules
        if not any(rule is other for other in used)
    ]
    texts += [text for part in parts if (text := _harm(part.parts, part.spec))]
    return tuple(dict.fromkeys(texts))


def _harm(parts: Parts, spec: TensorSpec | None = None) -> str | None:
    """Why error feedback does the method no good; what depends on the tensor only where one is given."""
    c, memory = parts.compressor, memories.name_of(parts.memory)
    if not parts.memory.feeds_back or c.carries_nonfinite:
        return None
    why = c.harmed_by_feedback
    # Methods that are published with error feedback are trusted to converge with it.
    if why is None and spec is not None and memory != c.default_memory and c.contraction(spec) is None:
        why = "its error can exceed what it was given, so the residual may grow without bound"
    return why and (
        f"memory '{memory}' feeds errors back into {c}: {why} (GRACE, Table I and section V-B); use memory 'none'"
    )


def early_warnings(config: Config) -> tuple[str, ...]:
    """What `Plan.warnings` will say of the parts of the configuration, as far as it is known before the tensors."""
    parts = [stage.parts for _, stage in config.stages] + [rule.parts for rule in config.rules]
    return tuple(dict.fromkeys(text for p in parts if (text := _harm(p))))


def make_plans(
    specs: Sequence[TensorSpec],
    config: Config,
    *,
    prefix: str = "grace",
    delegate: Callable[[Part], bool] = lambda part: False,
) -> list[tuple[int, Plan]]:
    """The plan of every stage of the schedule, and the step with which it begins; see `make_plan`."""
    plans: list[tuple[int, Plan]] = []
    for step, stage in config.stages:
        holding = frozenset(part.spec.name for _, plan in plans for part in plan.parts if part.holds)
        name = f"{prefix}.stage{len(plans)}" if plans else prefix
        plans.append((step, make_plan(specs, stage, prefix=name, delegate=delegate, holding=holding)))
    return plans


def change_plan(
    specs: Sequence[TensorSpec],
    config: Config,
    plan: Plan,
    changes: Mapping[str, Any],
    *,
    prefix: str,
    delegate: Callable[[Part], bool] = lambda part: False,
) -> tuple[Config, Plan]:
    """The configuration with other options or parts in mid-run, and its plan, which loses no residual of `plan`.

    Raises what `make_config` raises for them; ConfigError where a schedule would undo the change.
    """
    config = change_config(config, changes)
    return config, next_plan(specs, config, plan, prefix=prefix, delegate=delegate)


def next_plan(
    specs: Sequence[TensorSpec],
    config: Config,
    before: Plan,
    *,
    prefix: str,
    delegate: Callable[[Part], bool] = lambda part: False,
) -> Plan:
    """The plan of a configuration that follows another plan, of which it loses no residual."""
    holding = frozenset(part.spec.name for part in before.parts if part.holds)
    return make_plan(specs, config, prefix=prefix, delegate=delegate, holding=holding)


def _make_part(spec: TensorSpec, config: Config, holding: bool) -> Part:
    rule = config.rule_for(spec)
    parts = rule.parts if rule else config.parts
    unfit = parts.compressor.unfit(spec)
    if unfit:
        parts = dense_parts()
    if holding and parts.memory.stateless:
        parts = dataclasses.replace(parts, memory=memories.make("leftover"))
    return Part(spec, parts, unfit or (rule.reason if rule else ""), config.index_coding)
