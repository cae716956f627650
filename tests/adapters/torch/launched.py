"""The library that connects the ranks of a scenario, Horovod or torch.distributed, as their launcher decides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch
import torch.distributed as dist

from grace.torch.distributed import ProcessGroupTransport
from grace.torch.horovod import HorovodTransport


class Group(NamedTuple):
    """Some ranks, and the argument of `DistributedOptimizer` that names them."""

    ranks: Sequence[int]
    argument: dict[str, Any]

    @property
    def included(self) -> bool:
        return my_rank() in self.ranks


# The groups of a launch with four ranks.
GROUPS: list[Group] = []


def by_torchrun() -> bool:
    """Return whether torchrun has started this rank."""
    return dist.is_initialized()


def start(groups: Iterable[Sequence[int]], torchrun: bool) -> None:
    """Connect the ranks, also in groups of some of them."""
    if torchrun:
        dist.init_process_group("gloo")
        GROUPS[:] = [Group(ranks, {"process_group": dist.new_group(list(ranks))}) for ranks in groups]
        return
    # Horovod needs the process sets at its start.
    sets = [(ranks, hvd.ProcessSet(list(ranks))) for ranks in groups]
    hvd.init(process_sets=[made for _, made in sets])
    GROUPS[:] = [Group(ranks, {"process_set": made}) for ranks, made in sets]


def end() -> None:
    """Disconnect the ranks."""
    if by_torchrun():
        dist.destroy_process_group()
    else:
        hvd.shutdown()


def my_rank() -> int:
    return dist.get_rank() if by_torchrun() else hvd.rank()


def world_size() -> int:
    return dist.get_world_size() if by_torchrun() else hvd.size()


def everyone() -> Group:
    """Return the group of all ranks."""
    return Group(range(world_size()), {})


def transport_of(group: Group) -> Any:
    """Return a transport among the ranks of a group."""
    kind = ProcessGroupTransport if by_torchrun() else HorovodTransport
    return kind(*group.argument.values())


def total() -> Any:
    """Return the argument `op` for a sum."""
    return dist.ReduceOp.SUM if by_torchrun() else hvd.Sum


def mean(x: torch.Tensor, name: str) -> torch.Tensor:
    """Return the mean of a tensor over all ranks, by the library itself."""
    if not by_torchrun():
        return hvd.allreduce(x, op=hvd.Average, name=name)
    summed = x.detach().clone()
    dist.all_reduce(summed)
    return summed / world_size()


def broadcast(state: Mapping[str, torch.Tensor]) -> None:
    """Give all ranks the tensors of rank 0."""
    if not by_torchrun():
        hvd.broadcast_parameters(state, root_rank=0)
        return
    for x in state.values():
        dist.broadcast(x, 0)


def broadcast_state(optimizer: Any) -> None:
    """Give all ranks what the optimizer of rank 0 keeps."""
    if not by_torchrun():
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def barrier() -> None:
    dist.barrier() if by_torchrun() else hvd.barrier()
