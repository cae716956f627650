"""Sparse allreduce: sparse payloads are added by index ranges, and the largest sums come back."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from grace.core.config.registry import communicators
from grace.core.methods.capabilities import ratio_of
from grace.core.methods.communicator import Communicator, Route, merging_obstacle
from grace.core.methods.compressor import Compressor, keep_count, sparsifies
from grace.core.methods.memory import Memory, keeps_nothing
from grace.core.ops.composites import ArrayOps
from grace.core.plan.unit import Unit
from grace.core.spec import Array, Field, Payload, Ranks, TensorSpec
from grace.core.step.bucket_step import BucketStep
from grace.core.transport import collectives
from grace.core.transport.collectives import Program
from grace.core.wire.layout import GatherLayout, Received

_EXAMPLE = TensorSpec("example", (1024,))
# Magnitudes are counted by their exponent and two more bits. The counts take 2,048 words. Units of fewer entries do
# without: a rank may send 6 k words, and the entries take 4 k of them.
_BINS, _SHIFT = 1024, 21
_COUNTED_FROM = 2048
# For methods whose options do not say which share of the elements they send.
_USUAL_RATIO = 0.01


@communicators.register("sparse_allreduce")
@dataclass(frozen=True)
class SparseAllreduce(Communicator):
    r"""Sparse sums by index ranges: the largest sums come back, and the bytes do not grow with the number of ranks.

    Formula: s = \textstyle\sum_i C(x_i), \quad g = \mathrm{top}_k(s) / n

    With `reduction="split"` each rank adds the entries of one index range, and about k sums come back, k being the mean
    number of entries that a rank sends. The ranges are chosen in every step so that each holds about equally many
    entries. If a rank sends 2,048 entries or more of a unit, these are the k largest of all sums: the ranks count the
    sums of each magnitude (exponent and two more bits), to find where the k-th largest lies; of that magnitude, all
    ranks keep the same share. Smaller units skip the counts: each rank keeps the largest k / N of its range, which are
    not the largest of all.

    If the entries of all ranks are distributed alike, a rank sends on average 4 k (N - 1) / N words of entries, 2,048
    (N - 1) / N of counts if there are any, and up to 20 N of ranges, headers and rounding. This is at most 6 k (N - 1)
    / N words if k is at least 20 N.

    With "union" all sums come back, and a range that is more than half full travels without indices. With "tree", ranks
    add their entries pairwise in log2(N) rounds. Only the k largest go on to the next round, and the last rank sends
    the result to all: O(k log N) words.

    Entries that are dropped on the way return to the memory of a rank that held them. So with error feedback nothing is
    lost.

    Reference: Li and Hoefler, "Near-optimal sparse allreduce for distributed deep learning" (Ok-Topk, "split"), PPoPP
    2022; Renggli et al., "SparCML: high-performance sparse communication for machine learning" ("union"), SC 2019; Shi
    et al., "A distributed synchronous SGD algorithm with global top-k sparsification for low bandwidth networks"
    (gTop-k, "tree"), ICDCS 2019.
    """

    any_length: ClassVar[bool] = True

    reduction: Literal["split", "union", "tree"] = "split"

    def obstacle(self, compressor: Compressor) -> str | None:
        if not sparsifies(compressor):
            return "its payload is not a list of exact values and their indices"
        if any(not f.wire for f in compressor.wire(_EXAMPLE)):
            return "all ranks send the same indices, and the values can be added"
        return None

    def memory_obstacle(self, memory: Memory) -> str | None:
        if apart := merging_obstacle(memory):
            return apart
        if "full" in memory.needs:
            return "sends whole gradients in full rounds; this communicator carries only entries"
        if memory.across_ranks == "joint":
            return "must receive the mean of what all ranks have sent; this communicator drops a part of it"
        return None

    def route(self, units: Sequence[Unit], ranks: Ranks, checksum: bool = False) -> Route:
        fields = [_entries(unit, self.reduction) for unit in units]
        # The number of entries is known at run time only.
        layout = GatherLayout([unit.spec for unit in units], fields, [unit.guarded for unit in units], checksum)
        run = {"split": _split, "union": _union, "tree": _tree}[self.reduction]
        return Route(layout.nbytes, layout.fixed, functools.partial(_without_rests, run, layout), remembers=True)


def _entries(unit: Unit, reduction: str) -> tuple[Field, ...]:
    fields = {f.name: f for f in unit.fields}
    # A whole range of sums has no indices.
    values = fields["values"]._replace(length="sums" if reduction == "union" else "entries")
    return values, fields["indices"]._replace(length="entries")


def _is_counted(unit: Unit) -> bool:
    """Return whether the ranks count magnitudes to find the k-th largest sum of a unit."""
    length = next(f.length for f in unit.fields if f.name == "indices")
    if isinstance(length, str):
        ratio = ratio_of(unit.compressor) or _USUAL_RATIO
        length = keep_count(ratio, unit.spec.numel)
    return length >= _COUNTED_FROM


def _without_rests(
    run: Callable[[GatherLayout, BucketStep], Program[Received]], layout: GatherLayout, bucket: BucketStep
) -> Program[Received]:
    """Run a reduction in which a rank that contributes nothing has no entries."""
    for step in bucket.steps:
        if step.rests:
            step.payload, step.sends_nothing = {name: x[:0] for name, x in step.payload.items()}, True
    return (yield from run(layout, bucket))


def _split(layout: GatherLayout, bucket: BucketStep) -> Program[Received]:
    ops, size = bucket.ops, bucket.size
    ranges = yield from _ranges(bucket)
    sums, arrived = yield from _added(layout, bucket, ranges)
    counts = [_counts(ops, s["values"]) for s, step in zip(sums, bucket.steps, strict=True) if _is_counted(step.unit)]
    totals: Array = None
    if counts:
        (totals,) = yield [collectives.allreduce(ops.concat(counts))]
    kept, number = [], 0
    for entries, (_, sent), step in zip(sums, ranges, bucket.steps, strict=True):
        most = (sent + (size - 1)) // size
        if _is_counted(step.unit):
            share = _share(ops, counts[number], totals[number * _BINS : (number + 1) * _BINS], most)
            number += 1
        else:
            share = (most + (size - 1)) // size
        kept.append(_largest(ops, entries, ops.size(ops.cast(share, "int32"))))
    received = yield from _gathered(layout, bucket, kept, arrived)
    for step, payloads in zip(bucket.steps, received.payloads, strict=True):
        if keeps_nothing(step.unit.memory):
            step.remember()
            continue
        # What does not come back stays in the memory: the others' entries of this index have been dropped, too.
        back = _among(ops, step.payload["indices"], ops.concat([payload["indices"] for payload in payloads]))
        step.remember(_chosen(ops, step.payload, back))
    return received


def _union(layout: GatherLayout, bucket: BucketStep) -> Program[Received]:
    ops = bucket.ops
    for step in bucket.steps:
        step.remember()
    ranges = yield from _ranges(bucket)
    sums, arrived = yield from _added(layout, bucket, ranges)
    sent = []
    for entries, (edges, _) in zip(sums, ranges, strict=True):
        low, width = _bounds(ops, edges, bucket.rank)
        values, indices = entries["values"], entries["indices"]

        def whole(values: Array = values, indices: Array = indices, low: Any = low, width: Any = width) -> list[Array]:
            return [ops.sparse_sum([values], [indices - low], width), indices[:0]]

        # An entry takes two words.
        is_full = 2 * ops.length(values) > width
        values, indices = _either(ops, is_full, whole, functools.partial(list, (values, indices)))
        sent.append({"values": values, "indices": indices})
    received = yield from _gathered(layout, bucket, sent, arrived)
    for payloads, (edges, _) in zip(received.payloads, ranges, strict=True):
        for rank, payload in enumerate(payloads):
            values, indices = payload["values"], payload["indices"]
            low, _ = _bounds(ops, edges, rank)

            def every(values: Array = values, low: Any = low) -> list[Array]:
                return [ops.arange(ops.length(values), "int32") + low]

            is_full = ops.length(values) != ops.length(indices)
            (payload["indices"],) = _either(ops, is_full, every, functools.partial(list, (indices,)))
    return received


def _tree(layout: GatherLayout, bucket: BucketStep) -> Program[Received]:
    ops, rank, size = bucket.ops, bucket.rank, bucket.size
    sums, flags = bucket.payloads, bucket.flags
    nothing, in_step = ops.zeros(0, "uint8"), []
    dropped: list[list[Payload]] = [[] for _ in sums]
    for gap in (1 << i for i in range((size - 1).bit_length())):
        buffers = [nothing] * size
        if rank % (2 * gap) == gap:
            buffers[rank - gap] = layout.encode(ops, sums, flags, bucket.stamp)
        (data,) = yield [collectives.alltoall(buffers)]
        if rank % (2 * gap) == 0 and rank + gap < size:
            row = layout.decode(ops, data, 1, bucket.stamp)
            in_step += row.in_step
            flags = [_any(ops, theirs, mine) for mine, theirs in zip(flags, row.flags, strict=True)]
            for i, (mine, (theirs,)) in enumerate(zip(sums, row.payloads, strict=True)):
                both = _nonzero(ops, _sum(ops, [mine, theirs], bucket.steps[i].unit.spec.numel))
                most = ops.length(mine["indices"]), ops.length(theirs["indices"])
                # The larger number of the two.
                sums[i] = _largest(ops, both, most[0] + most[1] - ops.min_size(*most))
                goes_on = _among(ops, both["indices"], sums[i]["indices"])
                dropped[i].append(_chosen(ops, both, ~goes_on))
    (data,) = yield [collectives.allgather(layout.encode(ops, sums, flags, bucket.stamp) if rank == 0 else nothing)]
    received = layout.decode(ops, data, 1, bucket.stamp)
    for step, lost in zip(bucket.steps, dropped, strict=True):
        sent, x = step.payload, step.x
        # A memory that feeds back what the mean lacks keeps what was dropped without further ado.
        if not keeps_nothing(step.unit.memory) and step.unit.memory.feeds_back != "mean":
            # All that this rank has sent is on its way, except what it has dropped itself, of its own and of others.
            x = ops.put_(x, sent["indices"], 0.0)
            for entries in lost:
                x = ops.scatter_add_(x, entries["indices"], entries["values"])
                sent = _chosen(ops, sent, ~_among(ops, sent["indices"], entries["indices"]))
        step.remember(sent, x)
    return received._replace(in_step=[*in_step, *received.in_step])


def _ranges(bucket: BucketStep) -> Program[list[tuple[Array, Array]]]:
    """Return for each unit the edges of the ranks' index ranges, and the number of entries that all ranks send.

    Each rank proposes ranges that hold equally many of its own entries. Their means are taken.
    """
    ops, size, proposals = bucket.ops, bucket.size, []
    for step in bucket.steps:
        indices, numel = step.payload["indices"], step.unit.spec.numel
        inner = ops.cast(ops.arange(size - 1, "int64") + 1, "float64") * (ops.count(indices) / size)
        # A rank without entries finds the end only.
        edges = ops.gather(ops.concat([indices, ops.full(1, numel, "int32")]), ops.cast(inner, "int32"))
        proposals += [ops.cast(edges, "int64"), ops.full(1, ops.length(indices), "int64")]
    (sums,) = yield [collectives.allreduce(ops.concat(proposals))]
    ranges = []
    for i, step in enumerate(bucket.steps):
        row = sums[i * size : (i + 1) * size]
        ends = ops.full(1, 0, "int64"), row[: size - 1] // size, ops.full(1, step.unit.spec.numel, "int64")
        ranges.append((ops.cast(ops.concat(ends), "int32"), row[size - 1]))
    return ranges


def _bounds(ops: ArrayOps, edges: Array, rank: int) -> tuple[Any, Any]:
    """Return the first index of a rank's range, and how many it has."""
    low = ops.size(edges[rank])
    return low, ops.size(edges[rank + 1]) - low


def _added(
    layout: GatherLayout, bucket: BucketStep, ranges: Sequence[tuple[Array, Array]]
) -> Program[tuple[list[Payload], Received]]:
    """Send all entries to the ranks of their ranges; return the sums of this rank's range, and what has arrived."""
    ops, sent = bucket.ops, []
    for payload, (edges, _) in zip(bucket.payloads, ranges, strict=True):
        before = ops.search_sorted(payload["indices"], edges - 1)
        cuts = [ops.size(before[i]) for i in range(bucket.size + 1)]
        sent.append([{key: x[a:b] for key, x in payload.items()} for a, b in itertools.pairwise(cuts)])
    flags, size, stamp = bucket.flags, bucket.size, bucket.stamp
    buffers = [layout.encode(ops, [pieces[i] for pieces in sent], flags, stamp) for i in range(size)]
    (data,) = yield [collectives.alltoall(buffers)]
    arrived = layout.decode(ops, data, size, stamp)
    sums = []
    for payloads, (edges, _) in zip(arrived.payloads, ranges, strict=True):
        low, width = _bounds(ops, edges, bucket.rank)
        near = [{**payload, "indices": payload["indices"] - low} for payload in payloads]
        entries = _nonzero(ops, _sum(ops, near, width))
        sums.append({**entries, "indices": entries["indices"] + low})
    return sums, arrived


def _gathered(
    layout: GatherLayout, bucket: BucketStep, sent: Sequence[Payload], arrived: Received
) -> Program[Received]:
    """Bring every rank's entries to all ranks, with the flags of what has arrived at it."""
    flags = [_any(bucket.ops, theirs) for theirs in arrived.flags]
    (data,) = yield [collectives.allgather(layout.encode(bucket.ops, sent, flags, bucket.stamp))]
    received = layout.decode(bucket.ops, data, bucket.size, bucket.stamp)
    return received._replace(in_step=[*arrived.in_step, *received.in_step])


def _sum(ops: ArrayOps, payloads: Sequence[Payload], n: Any) -> Array:
    values, indices = ([payload[name] for payload in payloads] for name in ("values", "indices"))
    return ops.sparse_sum(values, indices, n)


def _nonzero(ops: ArrayOps, x: Array) -> Payload:
    indices = ops.nonzero(x != 0)
    return {"values": ops.gather(x, indices), "indices": indices}


def _largest(ops: ArrayOps, entries: Payload, count: Any) -> Payload:
    top = ops.top_indices(entries["values"], ops.min_size(count, ops.length(entries["values"])))
    return {key: ops.gather(x, top) for key, x in entries.items()}


def _chosen(ops: ArrayOps, entries: Payload, condition: Array) -> Payload:
    places = ops.nonzero(condition)
    return {key: ops.gather(x, places) for key, x in entries.items()}


def _among(ops: ArrayOps, indices: Array, others: Array) -> Array:
    """Return for every index whether it is among the others, which are ascending."""
    padded = ops.concat([ops.full(1, -1, "int32"), others])
    return ops.gather(padded, ops.search_sorted(padded, indices) - 1) == indices


def _any(ops: ArrayOps, flags: Sequence[Array], bad: Array = False) -> Array:
    for flag in flags:
        bad = ops.bit_or(bad, flag)
    return bad


def _either(ops: ArrayOps, condition: Any, a: Callable[[], list[Array]], b: Callable[[], list[Array]]) -> list[Array]:
    """Return a() if the condition holds, which a traced graph knows only at run time."""
    if isinstance(condition, bool):
        return a() if condition else b()
    return list(ops.choose(condition, a, b))


def _counts(ops: ArrayOps, values: Array) -> Array:
    """Return how many values there are of each magnitude: of every exponent and its next two bits."""
    magnitudes = ops.cast(ops.clip(ops.abs(values), 0.0, 3e38), "float32")
    bins = ops.shift_right(ops.from_bytes(ops.to_bytes(magnitudes), "int32"), _SHIFT)
    return ops.cast(ops.segment_sum(ops.full(ops.length(values), 1, "float64"), bins, _BINS), "int32")


def _share(ops: ArrayOps, counts: Array, total: Array, most: Array) -> Array:
    """Return how many of its sums a rank keeps, so that all ranks keep the `most` largest of all sums.

    The sums in bins above that of the smallest one are all kept. Of the sums in this bin, each rank keeps the same
    share.
    """
    counts, total = ops.cast(counts, "int64"), ops.cast(total, "int64")
    mine, every = ops.sum(counts) - ops.cumsum(counts), ops.sum(total) - ops.cumsum(total)
    reached = ops.sum(ops.cast(every + total >= most, "int64"))
    last = ops.reshape(ops.where(reached > 0, reached - 1, 0), (1,))
    here, mine, total, every = (ops.gather(x, last)[0] for x in (counts, mine, total, every))
    part = here * (most - every) // ops.where(total > 0, total, 1)
    return ops.where(reached > 0, mine + part, ops.sum(counts))
