"""Hierarchy of nodes: little or no compression within a node, compression between nodes."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from grace.core.communicators.two_shot import by_unit, encode_shards, keeps_state, why_not_second
from grace.core.config.config import Method
from grace.core.config.registry import communicators, compressors, memories
from grace.core.errors import ConfigError
from grace.core.methods.communicator import Communicator, Route, merging_obstacle
from grace.core.methods.compressor import Compressor, usual_communicator
from grace.core.methods.memory import Memory
from grace.core.plan.unit import Assignment, Unit, empty_shard, layout_of, shards
from grace.core.spec import Array, Ranks, TensorSpec
from grace.core.step.bucket_step import BucketStep
from grace.core.step.unit_step import UnitStep
from grace.core.transport import collectives
from grace.core.transport.collectives import Collective, Program, among
from grace.core.wire.layout import GatherLayout, Received, decode_rows

_EMPTY = TensorSpec("empty", (0,))


@communicators.register("hierarchical")
@dataclass(frozen=True)
class Hierarchical(Communicator):
    r"""Uncompressed within a node, compressed between nodes.

    Formula: m_j = \mathrm{mean}_{i \in \mathrm{node}}\, x_{ij}, \quad g_j = \mathrm{mean}_\mathrm{nodes}\, C(m_j)

    Every unit is cut into one shard per rank of a node. The ranks of a node trade their shards uncompressed; the rank
    that gets shard j averages it, adds its residual and compresses it. The ranks of all nodes that have shard j
    exchange it by the communicator `between`. Then each passes the result on within its node. So the slow links between
    nodes carry only compressed shards, and each link carries as much as if its node were a single rank.

    `between` is by default `auto`. `within` compresses within a node: "none", "fp16", or another compressor that needs
    no error feedback. `local_size` is the number of ranks on a node; by default it comes from the launcher. Ranks must
    be numbered node by node. With one node, only `within` compresses.

    Reference: Shi et al., "Towards scalable distributed training of deep learning on public cloud clusters"
    (HiTopKComm, by topk), MLSys 2021; Wang et al., "ZeRO++: extremely efficient collective communication for giant
    model training" (two hops, by qsgd on both), 2023.
    """

    any_length: ClassVar[bool] = True

    between: Communicator | None = None
    within: Compressor | None = None
    local_size: int | None = None

    def __post_init__(self) -> None:
        if self.local_size is not None and self.local_size < 1:
            raise ConfigError(
                "communicator hierarchical: local_size must be the number of ranks on a node, at least 1; received "
                f"{self.local_size!r}."
            )
        if isinstance(self.between, Hierarchical):
            raise ConfigError("communicator hierarchical: between cannot be hierarchical itself; name another one.")

    def obstacle(self, compressor: Compressor) -> str | None:
        return _why_not_between(compressor) or _why_not_within(self._within) or self._between.obstacle(compressor)

    def memory_obstacle(self, memory: Memory) -> str | None:
        if "norm" in memory.needs:
            return (
                "limits the norm of all gradients of a rank; this communicator compresses the mean of a node, shard by "
                'shard. Set clipping_norm = "tensor"'
            )
        if apart := merging_obstacle(memory):
            return apart
        if "reference" in memory.needs:
            return "takes two gradients of a rank; this communicator compresses the mean of a node"
        return self._between.memory_obstacle(memory)

    def resolve(self, item: Assignment, ranks: Ranks) -> tuple[Communicator, str]:
        local_size = self.ranks_per_node(ranks)
        # What a rank exchanges between nodes: the largest of the shards.
        shard = dataclasses.replace(item.spec, shape=(-(-item.spec.numel // local_size),)) if item.flat else item.spec
        between, why = self._between.resolve(dataclasses.replace(item, spec=shard), Ranks(ranks.size // local_size))
        if local_size == 1:
            return between, why
        return dataclasses.replace(self, between=between), why and f"between nodes, {why}"

    @property
    def _between(self) -> Communicator:
        return self.between or communicators.make("auto")

    @property
    def _within(self) -> Compressor:
        return self.within or compressors.make("none")

    def ranks_per_node(self, ranks: Ranks) -> int:
        """Return the number of ranks on a node. Raises ConfigError if it is unknown or does not divide all ranks."""
        local_size = self.local_size or ranks.local_size
        if ranks.size == 1:
            return 1
        if not local_size:
            raise ConfigError(
                f"communicator hierarchical: the number of ranks on a node is unknown for these {ranks.size} ranks. "
                "Set local_size, or start equally many ranks on every node and number them node by node."
            )
        if ranks.size % local_size:
            raise ConfigError(
                f"communicator hierarchical: expected equally many ranks on every node, received {ranks.size} ranks "
                f"with {local_size} on a node; start as many on every node, or set local_size."
            )
        return local_size

    def divide(self, units: Sequence[Unit], ranks: Ranks, earlier: Sequence[Unit] = ()) -> list[Unit]:
        local_size = self.ranks_per_node(ranks)
        nodes = ranks.size // local_size
        if nodes == 1:
            return [made for unit in units for made in self._within_node(unit, ranks)]
        divided = []
        for unit in units:
            # The first shards of all units do not all lie on one rank.
            first = zlib.crc32(unit.spec.name.encode())
            parts = shards(unit, local_size) if unit.flat else [unit]
            # All ranks of a node take part in the same rounds, even with nothing.
            parts += [empty_shard(unit, number) for number in range(len(parts), local_size)]
            for number, part in enumerate(parts, first):
                owners = tuple(range(number % local_size, ranks.size, local_size))
                divided += [self._of_node(made, owners) for made in self._between_nodes(part, nodes)]
        return divided

    def _between_nodes(self, unit: Unit, nodes: int) -> Sequence[Unit]:
        assert self.between is not None
        method = Method(unit.compressor, unit.memory, self.between, unit.method.coding)
        return self.between.divide([dataclasses.replace(unit, method=method)], Ranks(nodes))

    def _within_node(self, unit: Unit, ranks: Ranks) -> Sequence[Unit]:
        method = self._method_within(unit)
        return method.communicator.divide([dataclasses.replace(unit, method=method)], ranks)

    def _method_within(self, unit: Unit) -> Method:
        within = self._within
        memory = memories.make("leftover" if unit.holding else "none")
        return Method(within, memory, communicators.make(usual_communicator(within)))

    def _of_node(self, unit: Unit, owners: tuple[int, ...]) -> Unit:
        """Return the unit that the ranks of a node exchange so that the owners can exchange `unit` between nodes."""
        spec = dataclasses.replace(unit.spec, name=f"mean of the node of {unit.spec.name}", dtype=unit.spec.work_dtype)
        onward = unit.onward and dataclasses.replace(
            unit.onward, owners=tuple(owners[node] for node in unit.onward.owners or ())
        )
        between = dataclasses.replace(unit, spec=spec, owners=owners, onward=onward, holding=False)
        return dataclasses.replace(unit, method=self._method_within(unit), onward=between, addends=0)

    def route(self, units: Sequence[Unit], ranks: Ranks, checksum: bool = False) -> Route:
        local_size = self.ranks_per_node(ranks)
        if local_size == ranks.size:
            return units[0].communicator.route(units, ranks, checksum)
        owned: list[list[int]] = [[] for _ in range(local_size)]
        for index, unit in enumerate(units):
            owners = _onward(unit).owners
            assert owners is not None
            owned[owners[0]].append(index)
        first: list[GatherLayout] = []
        between: list[Route] = []
        negotiated = 0
        for indices in owned:
            mine = [units[i] for i in indices]
            inner = [_numbered_by_node(_onward(unit), local_size) for unit in mine]
            guarded = [unit.guarded or other.guarded for unit, other in zip(mine, inner, strict=True)]
            first.append(layout_of(mine, checksum, guarded))
            between.append(inner[0].communicator.route(inner, Ranks(ranks.size // local_size), checksum))
            negotiated += sum(unit.negotiated_bytes for unit in inner)
        # There, all shards but its own leave a rank; back, its own one, which counts once however many ranks get it.
        within = sum(layout.nbytes for layout in first)
        return Route(
            within + (sum(route.nbytes for route in between) + negotiated) // local_size,
            all(layout.fixed for layout in first) and all(route.fixed for route in between),
            functools.partial(_by_nodes, owned, first, between),
        )


def _by_nodes(
    owned: Sequence[Sequence[int]], first: Sequence[GatherLayout], between: Sequence[Route], bucket: BucketStep
) -> Program[Received]:
    """Exchange within the node, between nodes, and within the node again.

    All by rank of a node: `owned` holds the indices of its units in the bucket, `first` the layouts within the node,
    there and back.
    """
    ops, stamp, local_size = bucket.ops, bucket.stamp, len(owned)
    node, local = divmod(bucket.rank, local_size)
    here = range(node * local_size, (node + 1) * local_size)
    peers = range(local, bucket.size, local_size)
    there = collectives.alltoall(encode_shards(first, owned, bucket))
    data = yield from among(here, _alone(there), ops, bucket.rank, bucket.size)
    arrived = bucket.decode(first[local], data, owned[local], here)
    mine = [bucket.steps[i] for i in owned[local]]
    inner = []
    for step, theirs, bad in zip(mine, arrived.payloads, arrived.flags, strict=True):
        assert step.onward is not None
        step.onward.begin(step.merged(theirs), step.lr, flags=bad)
        inner.append(step.onward)
    nodes = BucketStep(between[local], ops, rank=node, size=len(peers), mean=True, stamp=stamp, steps=inner)
    received = yield from among(peers, nodes.run(), ops, bucket.rank, bucket.size)
    for every in bucket.steps:
        every.take_mean_from(every.step_of_mean())
    back: list[UnitStep] = []
    for step, theirs, bad in zip(mine, received.payloads, received.flags, strict=True):
        assert step.onward is not None
        assert step.mean_from is not None
        done = step.onward.conclude(theirs, bad)
        back.append(step.mean_from)
        back[-1].begin(done.x if done.factor == 1 else ops.scale_(done.x, done.factor), flags=bad)
    buffer = first[local].encode(ops, [b.payload for b in back], [b.bad for b in back], stamp)
    data = yield from among(here, _alone(collectives.allgather(buffer)), ops, bucket.rank, bucket.size)
    return by_unit(decode_rows(ops, data, first, stamp), owned, [*arrived.in_step, *received.in_step])


def _onward(unit: Unit) -> Unit:
    assert unit.onward is not None
    return unit.onward


def _numbered_by_node(unit: Unit, local_size: int) -> Unit:
    """Return the unit with the owners of its `onward` numbered by nodes, as `between` numbers them."""
    if unit.onward is None:
        return unit
    owners = tuple(rank // local_size for rank in unit.onward.owners or ())
    return dataclasses.replace(unit, onward=dataclasses.replace(unit.onward, owners=owners))


def _alone(collective: Collective) -> Program[Array]:
    """Return a program of one collective."""
    (received,) = yield [collective]
    return received


def _why_not_between(compressor: Compressor) -> str | None:
    if not compressor.flat:
        return "it needs a whole tensor, and shards are parts of tensors"
    if compressor.unfit(_EMPTY):
        return "a shard may be empty, and it cannot compress empty tensors"
    if keeps_state(compressor):
        return "it learns from the payloads of all ranks, and these come only to the owners of a shard"
    return None


def _why_not_within(within: Compressor) -> str | None:
    if memories.make(within.default_memory).feeds_back:
        return f"{within} needs error feedback, and within a node there is none"
    reason = why_not_second(within) if within.flat else "it needs a whole tensor, and shards are parts of tensors"
    return reason and f"{within} cannot compress within a node: {reason}"
