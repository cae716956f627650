"""Collectives as values: routes yield them, and the step of a bucket starts them on any transport."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from fractions import Fraction
from typing import Literal, NamedTuple, TypeAlias, TypeVar, get_args

from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array

Kind: TypeAlias = Literal["allreduce", "allgather", "alltoall", "broadcast"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Reduction: TypeAlias = Literal["sum", "max"]
T = TypeVar("T")
#: The lengths of the buffers of every rank, in rank order.
Lengths: TypeAlias = Sequence[Sequence[int]]


class Collective(NamedTuple):
    """One collective on flat buffers; its result is one flat buffer.

    `buffers` holds one buffer per receiver for an alltoall, else one. `equal` says that the lengths of all ranks follow
    from those of one: all buffers of an allgather have one length, and those of an alltoall depend on the receiver
    only. The result of an allgather may then be a list of the buffers, because joining them would copy. `lengths` has
    those of the buffers of every rank, in rank order, if all ranks know them although they differ. `round` is the
    number of the round of a bucket to which the collective belongs, in a step that was announced to the transport.
    """

    kind: Kind
    buffers: tuple[Array, ...]
    op: Reduction = "sum"
    root: int = 0
    equal: bool = False
    lengths: Lengths | None = None
    round: int | None = None

    def sent_by(self, rank: int) -> tuple[Array, ...]:
        """Return the buffers that leave a rank, each counted once however many ranks receive it."""
        if self.kind == "broadcast" and rank != self.root:
            return ()
        if self.kind != "alltoall":
            return self.buffers
        return tuple({id(x): x for x in (*self.buffers[:rank], *self.buffers[rank + 1 :])}.values())


def copies(kind: Kind, size: int) -> Fraction:
    """Return how many times a byte that a rank hands to a collective leaves ranks of a ring, per rank.

    2 (size - 1) / size in an allreduce, 1 in an alltoall, whose buffers have one receiver each, else size - 1.
    """
    if kind == "alltoall":
        return Fraction(1)
    return Fraction(2 * (size - 1), size) if kind == "allreduce" else Fraction(size - 1)


#: A generator that yields the collectives of a round, which start together, gets their results in the same order, and
#: returns a result of its own.
Program: TypeAlias = Generator[list[Collective], list[Array], T]


def allreduce(x: Array, op: Reduction = "sum") -> Collective:
    """Return the collective that adds x over all ranks, or takes its maximum, element by element; may overwrite x."""
    return Collective("allreduce", (x,), op=op)


def allgather(x: Array, *, equal: bool = False, lengths: Lengths | None = None) -> Collective:
    """Return the collective that joins the buffers of all ranks, in rank order; they may differ in length.

    With `equal` they have one length, and the result may be a list of the buffers. `lengths` are theirs, if known.
    """
    return Collective("allgather", (x,), equal=equal, lengths=lengths)


def alltoall(xs: Sequence[Array], *, equal: bool = False, lengths: Lengths | None = None) -> Collective:
    """Return the collective that sends xs[i] to rank i and joins what arrives, in rank order.

    With `equal`, the lengths depend on the receiver only. `lengths` are those of all ranks, if known.
    """
    return Collective("alltoall", tuple(xs), equal=equal, lengths=lengths)


def broadcast(x: Array, root: int) -> Collective:
    """Return the collective that sends the root's x to every rank; all pass buffers of one length."""
    return Collective("broadcast", (x,), root=root)


def together(programs: Sequence[Program[T]]) -> Program[list[T]]:
    """Run programs side by side: their rounds start together. Return their results."""
    results: dict[int, T] = {}
    waiting: dict[int, list[Collective]] = {}

    def advance(index: int, arrived: list[Array] | None) -> None:
        try:
            waiting[index] = next(programs[index]) if arrived is None else programs[index].send(arrived)
        except StopIteration as end:
            results[index] = end.value

    for index in range(len(programs)):
        advance(index, None)
    while waiting:
        started, waiting = waiting, {}
        arrived = iter((yield [collective for collectives in started.values() for collective in collectives]))
        for index, collectives in started.items():
            advance(index, [next(arrived) for _ in collectives])
    return [results[index] for index in range(len(programs))]


def among(group: Sequence[int], program: Program[T], ops: ArrayOps, rank: int, size: int) -> Program[T]:
    """Run a program among the ranks of a group, of which this rank is one; return its result.

    All ranks must run such a program at the same time, each in its own group, and all programs must have the same
    rounds. What they yield becomes alltoalls of all ranks that send nothing to other groups, because not every
    transport has collectives of some ranks only.
    """
    arrived: list[Array] | None = None
    while True:
        try:
            collectives = next(program) if arrived is None else program.send(arrived)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        arrived = yield from together([_in_group(c, group, ops, rank, size) for c in collectives])


def _in_group(collective: Collective, group: Sequence[int], ops: ArrayOps, rank: int, size: int) -> Program[Array]:
    """Do what a collective of the group does, by alltoalls of all ranks."""
    x, *_ = collective.buffers
    nothing = ops.zeros(0, ops.dtype(x))

    def trade(buffers: Sequence[Array]) -> Program[Array]:
        every = [nothing] * size
        for other, buffer in zip(group, buffers, strict=True):
            every[other] = buffer
        (received,) = yield [alltoall(every)]
        return received

    count = len(group)
    if collective.kind == "alltoall":
        return (yield from trade(collective.buffers))
    if collective.kind == "allgather":
        return (yield from trade([x] * count))
    if collective.kind == "broadcast":
        is_root = group[collective.root] == rank
        return ops.reshape((yield from trade([x if is_root else nothing] * count)), (ops.length(x),))
    n, mine = ops.length(x), group.index(rank)
    ends = [n * i // count for i in range(count + 1)]
    rows = yield from trade([x[ends[i] : ends[i + 1]] for i in range(count)])
    rows = ops.reshape(rows, (count, ends[mine + 1] - ends[mine]))
    part = ops.sum(rows, axis=0) if collective.op == "sum" else ops.max(rows, axis=0)
    return ops.reshape((yield from trade([part] * count)), (n,))


def sum_halves(ops: ArrayOps, x: Array, rank: int, size: int, factor: float) -> Program[Array]:
    """Add 16-bit floats of all ranks in float32, in rank order; multiply by the factor and round once.

    Some libraries cannot add them, or only one of the two dtypes; others add them one by one in software. Two ranks
    exchange their buffers. More ranks exchange slices, add these and gather the sums. Either way a rank sends about as
    many bytes as in a ring allreduce, 2 (size - 1) / size of x.
    """
    if size == 1:
        (x,) = yield [allreduce(x)]
        return x
    n, dtype = ops.length(x), ops.dtype(x)
    if size == 2:
        (both,) = yield [allgather(ops.to_bytes(x), equal=True)]
        if isinstance(both, list):
            return ops.half_sum([ops.from_bytes(each, dtype) for each in both], factor)
        both = ops.from_bytes(both, dtype)
        return ops.half_sum([both[:n], both[n:]], factor)
    # Slices of one length, the last of which may be filled up: so all lengths follow from that of x.
    length = -(-n // size)
    ends = [min(n, length * i) for i in range(size + 1)]
    slices = [ops.to_bytes(x[start:stop]) for start, stop in itertools.pairwise(ends)]
    (rows,) = yield [alltoall(slices, equal=True)]
    # A graph does not know the length.
    mine = ends[rank + 1] - ends[rank]
    known = ops.reshape(ops.from_bytes(rows, dtype), (size * mine,))
    total = ops.half_sum([known[i * mine : (i + 1) * mine] for i in range(size)], factor)
    if mine < length:
        total = ops.concat([total, ops.zeros(length - mine, dtype)])
    (sums,) = yield [allgather(ops.to_bytes(total), equal=True)]
    if isinstance(sums, list):
        sums = ops.concat(sums)
    return ops.reshape(ops.from_bytes(sums, dtype), (length * size,))[:n]
