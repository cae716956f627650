"""Two shots: a compressed reduce-scatter, then a compressed allgather."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from grace.core.communicators.allgather import Allgather
from grace.core.config.config import Method
from grace.core.config.registry import communicators, memories
from grace.core.errors import IncompatibleError
from grace.core.methods.capabilities import Stateful, proposed_fields
from grace.core.methods.communicator import Communicator, Route, merging_obstacle
from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import Memory
from grace.core.plan.unit import Unit, layout_of, shards
from grace.core.spec import Array, Ranks, TensorSpec
from grace.core.step.bucket_step import BucketStep
from grace.core.transport import collectives
from grace.core.transport.collectives import Program
from grace.core.wire.layout import GatherLayout, Received, decode_rows

_EXAMPLE = TensorSpec("example", (32, 32))


@communicators.register("two_shot")
@dataclass(frozen=True)
class TwoShot(Communicator):
    r"""Compressed reduce-scatter, then compressed allgather: the bytes do not grow with the number of ranks.

    Formula: m_j = \mathrm{mean}_i\, C(x_{ij}), \quad g_j = C'(m_j)

    Every unit is cut into one shard per rank; if its compressor or memory needs whole tensors, one rank owns all of it.
    The largest of a bucket go first, each to the rank that owns the least so far. The ranks trade their compressed
    shards; the owner of shard j averages what it gets, compresses the mean m_j again by C' and sends it to all ranks. A
    rank sends 2 (N - 1) / N payloads. With gathering, every rank receives N - 1 payloads. What C' drops stays with the
    owner, in `shard_memory`, and is added to the mean of the next step.

    `second` is C': by default the compressor itself; "none" sends the mean as it is. `shard_memory` is by default
    error feedback if C' has it by default, else none. The memory `dore` has its own. With the memory `powersgd` it is
    none: the ranks feed back what the merged gradient lacks, and C' is a part of this. A `shard_memory` that corrects
    for the learning rate needs a memory that does so too. Raises IncompatibleError for one that changes the merged
    gradient, which no owner of a mean does.

    Reference: Tang et al., "DoubleSqueeze: parallel stochastic gradient descent with double-pass error-compensated
    compression", ICML 2019; Zheng et al., "Communication-efficient distributed blockwise momentum SGD with
    error-feedback" (dist-EF-SGD, by the memory `residual` with `lr_correction` at both ends), NeurIPS 2019; Sattler et
    al., "Robust and communication-efficient federated learning from non-IID data" (STC, by a chain of topk and
    efsignsgd), 2019; Liu et al., "A double residual compression algorithm for efficient distributed learning" (DORE, by
    the memory `dore`), AISTATS 2020; Tang et al., "1-bit Adam" (by efsignsgd and the memory `shared_momentum`), ICML
    2021.
    """

    any_length: ClassVar[bool] = True

    second: Compressor | None = None
    shard_memory: Memory | None = None

    def __post_init__(self) -> None:
        there = self.shard_memory
        if there is None:
            return
        if "tensor" in there.needs or "norm" in there.needs:
            raise IncompatibleError(
                f"communicator 'two_shot': shard_memory {there} needs the norm of whole tensors or of all gradients, "
                "and the owner of a shard knows neither. Valid: residual, none."
            )
        if "mean" in there.needs or there.across_ranks == "joint" or there.gain != 1:
            raise IncompatibleError(
                f"communicator 'two_shot': shard_memory {there} changes the gradient after it was merged, and the "
                "owner of a shard sends it on before. Valid: residual, none."
            )

    def obstacle(self, compressor: Compressor) -> str | None:
        second = self.second or compressor
        if compressor.flat and not second.flat:
            return "the compressor of the mean needs a whole tensor, and shards are parts of tensors"
        return _why_not_first(compressor) or why_not_second(second)

    def memory_obstacle(self, memory: Memory) -> str | None:
        if apart := merging_obstacle(memory):
            return apart
        if "full" in memory.needs:
            return "sends whole gradients in full rounds; this communicator would compress them on their way back"
        if memory.across_ranks == "joint" and memory.at_owner is None:
            return "must receive the mean of what all ranks have sent; this communicator compresses it again"
        if memory.at_owner is not None and self.shard_memory is not None:
            return (
                f"brings the memory that the owner of a shard needs, while shard_memory names {self.shard_memory}: "
                "leave shard_memory out"
            )
        if self.shard_memory is not None and self.shard_memory.feeds_back and memory.feeds_back == "mean":
            return (
                f"feeds back what the merged gradient lacks, and shard_memory {self.shard_memory} would feed back a "
                "part of it again: leave shard_memory out"
            )
        if self.shard_memory is not None and "lr" in self.shard_memory.needs and "lr" not in memory.needs:
            # Tensors are joined unless their memory needs the learning rate, and a unit has only one.
            return (
                f"does not correct for the learning rate, while shard_memory {self.shard_memory} does: "
                'set memory = { name = "residual", lr_correction = true } as well'
            )
        return None

    def divide(self, units: Sequence[Unit], ranks: Ranks, earlier: Sequence[Unit] = ()) -> list[Unit]:
        divided, owners = [], _owners_of_whole(units, ranks.size, earlier)
        for unit in units:
            # A compressor or memory that needs the whole tensor keeps it: one rank owns all of it.
            parts = shards(unit, ranks.size) if unit.flat else [unit]
            for number, shard in enumerate(parts, owners.get(unit.spec.name, _first_owner(unit))):
                divided.append(dataclasses.replace(shard, onward=self._onward(shard, (number % ranks.size,))))
        return divided

    def _onward(self, shard: Unit, owners: tuple[int, ...]) -> Unit:
        second = self.second or shard.compressor
        # Such a memory feeds back what the owner drops as well.
        feeds_back = memories.make(second.default_memory).feeds_back and shard.memory.feeds_back != "mean"
        usual = memories.make("residual" if feeds_back else "none")
        memory = shard.memory.at_owner or self.shard_memory or usual
        spec = dataclasses.replace(shard.spec, name=f"mean of {shard.spec.name}", dtype=shard.spec.work_dtype)
        method = Method(second, memory, Allgather(), shard.method.coding)
        return dataclasses.replace(shard, spec=spec, method=method, owners=owners)

    def route(self, units: Sequence[Unit], ranks: Ranks, checksum: bool = False) -> Route:
        size = ranks.size
        owned: list[list[int]] = [[] for _ in range(size)]
        for index, unit in enumerate(units):
            assert unit.onward is not None
            assert unit.onward.owners is not None
            owned[unit.onward.owners[0]].append(index)
        first: list[GatherLayout] = []
        second: list[GatherLayout] = []
        for indices in owned:
            mine = [units[i] for i in indices]
            onward = [unit.onward for unit in mine if unit.onward is not None]
            # The flags of the first shot travel on in the second one.
            guarded = [a.guarded or b.guarded for a, b in zip(mine, onward, strict=True)]
            first.append(layout_of(mine, checksum, guarded))
            second.append(layout_of(onward, checksum, guarded))
        to_owners = (size - 1) * sum(layout.nbytes for layout in first)
        return Route(
            (to_owners + sum(layout.nbytes for layout in second)) // size,
            all(layout.fixed for layout in (*first, *second)),
            functools.partial(_two_shots, owned, first, second),
        )


def _first_owner(unit: Unit) -> int:
    """Return a number to count owners from: units with fewer parts than there are ranks do not all begin with 0."""
    return zlib.crc32(unit.spec.name.encode())


def _owners_of_whole(units: Sequence[Unit], size: int, earlier: Sequence[Unit]) -> dict[str, int]:
    """Return the owners of the units that stay whole: the largest goes first, to the rank that owns the least."""
    owned, owners = [0] * size, dict[str, int]()
    for unit in earlier:
        for rank in (unit.onward and unit.onward.owners) or ():
            owned[rank] += unit.spec.numel
    for unit in sorted((unit for unit in units if not unit.flat), key=lambda unit: -unit.spec.numel):
        first = _first_owner(unit)
        rank = min((number % size for number in range(first, first + size)), key=owned.__getitem__)
        owned[rank] += unit.spec.numel
        owners[unit.spec.name] = rank
    return owners


def _two_shots(
    owned: Sequence[Sequence[int]],
    first: Sequence[GatherLayout],
    second: Sequence[GatherLayout],
    bucket: BucketStep,
) -> Program[Received]:
    """Run both shots; `owned` holds the indices of each owner's units in the bucket."""
    ops, stamp = bucket.ops, bucket.stamp
    fixed = all(layout.fixed for layout in first) and not bucket.absent
    shots = encode_shards(first, owned, bucket)
    (data,) = yield [collectives.alltoall(shots, equal=fixed, lengths=bucket.lengths(first))]
    arrived = bucket.decode(first[bucket.rank], data, owned[bucket.rank])
    onward = []
    for i, theirs, bad in zip(owned[bucket.rank], arrived.payloads, arrived.flags, strict=True):
        step = bucket.steps[i].onward
        assert step is not None
        step.begin(bucket.steps[i].merged(theirs), bucket.steps[i].lr, flags=bad)
        onward.append(step)
    buffer = second[bucket.rank].encode(ops, [step.coded for step in onward], [step.bad for step in onward], stamp)
    for step in onward:
        step.remember()
    for every in bucket.steps:
        every.take_mean_from(every.onward)
    equal = len({layout.nbytes for layout in second}) == 1 and all(layout.fixed for layout in second)
    (data,) = yield [collectives.allgather(buffer, equal=equal)]
    return by_unit(decode_rows(ops, data, second, stamp), owned, arrived.in_step)


def encode_shards(layouts: Sequence[GatherLayout], owned: Sequence[Sequence[int]], bucket: BucketStep) -> list[Array]:
    """Return this rank's buffers for each owner of shards; `owned` holds the indices of its units in the bucket."""
    return [bucket.encode(layout, indices) for layout, indices in zip(layouts, owned, strict=True)]


def by_unit(rows: Sequence[Received], owned: Sequence[Sequence[int]], in_step: Sequence[Array]) -> Received:
    """Return what the owners have sent in the order of the units; `owned` holds the indices of each owner's units."""
    count = sum(map(len, owned))
    received = Received([[] for _ in range(count)], [[] for _ in range(count)], list(in_step))
    for indices, row in zip(owned, rows, strict=True):
        for i, theirs, bad in zip(indices, row.payloads, row.flags, strict=True):
            received.payloads[i].extend(theirs)
            received.flags[i].extend(bad)
        received.in_step.extend(row.in_step)
    return received


def keeps_state(compressor: Compressor) -> bool:
    """Return whether it learns with its options, or tunes a value across tensors."""
    return isinstance(compressor, Stateful) and compressor.keeps_state


def _why_not_first(compressor: Compressor) -> str | None:
    if compressor.summable:
        return "its payloads can be added, so that they need not be compressed a second time"
    if keeps_state(compressor):
        return "it learns from the payloads of all ranks, and these come only to the owner of a shard"
    return None


def why_not_second(compressor: Compressor) -> str | None:
    """Return the reason why it cannot compress a mean that one rank owns; None if it can."""
    if proposed_fields(compressor, _EXAMPLE):
        return "the compressor of the mean negotiates, and the owner of a shard is alone"
    if any(not f.wire for f in compressor.wire(_EXAMPLE)):
        return "the compressor of the mean keeps a field on the rank that other ranks do not know"
    if keeps_state(compressor):
        return "the compressor of the mean learns from the payloads of all ranks"
    return None
