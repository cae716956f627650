"""`TorchState`: Horovod's elastic state for optimizers of grace."""

from __future__ import annotations

import copy
from typing import Any

import horovod.torch as hvd
import horovod.torch.elastic
import torch
from horovod.torch.elastic.state import StateHandler

from grace.core.guards.elastic import Membership, stays
from grace.torch.exchange import Exchange
from grace.torch.horovod.library import Horovod
from grace.torch.optim.zero_one import ZeroOneAdam

_WHERE = "grace.torch.horovod.TorchState"


class TorchState(horovod.torch.elastic.TorchState):  # type: ignore[misc]
    """Horovod's elastic state, with the residuals of optimizers that grace has wrapped, for `hvd.elastic.run`.

    The arguments, `commit()` and all else that is called on it are Horovod's.

    If there were N ranks and there are M now, each survivor multiplies what it holds back by M / N, so that its share
    in the mean over all ranks stays as it was. What an owner of a shard held back goes to its own residual. New ranks
    hold back nothing. What a lost rank held back is lost, and the log says so. Between two syncs of outer steps, and of
    `ZeroOneAdam`, survivors keep their weights, and new ranks take those of rank 0. Raises ConfigError for optimizers
    of grace whose states cannot go on with other ranks.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **more: Any) -> None:
        super().__init__(model=model, optimizer=optimizer, **more)
        for name, handler in self._handlers.items():
            if isinstance(getattr(handler.value, "grace", None), Exchange):
                self._handlers[name] = _OptimizerHandler(handler.value)

    def reset(self) -> None:
        """Go on with the ranks that Horovod has now; it calls this before it calls `sync`."""
        super().reset()
        for handler in self._of_grace():
            handler.reset()

    def sync(self) -> None:
        """Give all ranks what is equal on them, from rank 0. What belongs to a rank stays with it."""
        for handler in self._of_grace():
            handler.keep_weights()
        super().sync()
        for handler in self._of_grace():
            handler.put_back_weights()
        self.save()

    def _of_grace(self) -> list[_OptimizerHandler]:
        return [handler for handler in self._handlers.values() if isinstance(handler, _OptimizerHandler)]


class _OptimizerHandler(StateHandler):  # type: ignore[misc]
    """Handler of an optimizer of grace in Horovod's elastic state."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._exchange: Exchange = optimizer.grace
        run = self._exchange.run
        self._membership = Membership(self._exchange, lambda: [plan for _, plan in run.stages], _WHERE)
        # The weights of this rank before they are synchronized, if they may be its own.
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.save()

    def keep_weights(self) -> None:
        """Keep the weights, which between two syncs are this rank's own, until others have come."""
        if self._exchange.outers or isinstance(self.value, ZeroOneAdam):
            parameters = [p for group in self.value.param_groups for p in group["params"]]
            self._weights = [(p, p.detach().clone()) for p in parameters]

    def put_back_weights(self) -> None:
        """Write back what `keep_weights` has kept, unless this rank goes on with the weights of rank 0."""
        with torch.no_grad():
            for p, own in self._weights:
                p.copy_(own)
        self._weights = []

    def _steps(self, state: Any) -> int:
        """Return the number of steps that weights of a rank's own depend on."""
        return int(state["grace"]["outer"]["steps"] if self._exchange.outers else state["param_groups"][0]["step"])

    def save(self) -> None:
        state = self.value.state_dict()
        # The arrays of grace are never changed in place.
        self._saved = {"grace": state.pop("grace"), **copy.deepcopy(state)}

    def restore(self) -> None:
        self._exchange.abandon()
        plain = {key: part for key, part in self._saved.items() if key != "grace"}
        # A copy, because PyTorch's optimizers change what they load.
        self.value.load_state_dict({**copy.deepcopy(plain), "grace": self._saved["grace"]})

    def reset(self) -> None:
        self._exchange.abandon()
        library = self._exchange._library
        assert isinstance(library, Horovod)
        library.connect()
        self._membership.move()
        self.save()

    def sync(self) -> None:
        exchange = self._exchange
        run, transport = exchange.run, exchange.transport
        keeps = self._membership.agree(lambda mine: transport.gather_objects(mine, "grace/sync", "state.sync()"))
        mine = self.value.state_dict()
        root = hvd.broadcast_object(mine, root_rank=0, name="grace.sync")
        if not self._weights or not stays(self._steps(mine), self._steps(root), keeps=keeps):
            self._weights, mine = [], root
        if transport.rank != 0:
            # What is equal on all ranks is that of rank 0; residuals are this rank's own.
            own = run.memories()
            run.load_state_dict(root["grace"], exchange._place)
            if keeps:
                run.put_memories(own)
            self.value.load_state_dict({**mine, "grace": {**mine["grace"], **run.state_dict()}})
        self.save()
