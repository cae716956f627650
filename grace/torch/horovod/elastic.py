"""`TorchState`: Horovod's elastic state for optimizers of grace."""

from __future__ import annotations

import copy
from typing import Any

import horovod.torch as hvd
import horovod.torch.elastic
from horovod.torch.elastic.state import StateHandler

from grace.core.guards.elastic import Membership, check_plan, refusal_of_local_steps
from grace.torch.exchange import Exchange
from grace.torch.horovod.library import Horovod

_WHERE = "grace.torch.horovod.TorchState"


class TorchState(horovod.torch.elastic.TorchState):  # type: ignore[misc]
    """Horovod's elastic state, with the residuals of optimizers that grace has wrapped, for `hvd.elastic.run`.

    The arguments, `commit()` and all else that is called on it are Horovod's.

    If there were N ranks and there are M now, each survivor multiplies what it holds back by M / N, so that its share
    in the mean over all ranks stays as it was. What an owner of a shard held back goes to its own residual. New ranks
    hold back nothing. What a lost rank held back is lost, and the log says so. Raises ConfigError for optimizers of
    grace whose states cannot go on with other ranks.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **more: Any) -> None:
        super().__init__(model=model, optimizer=optimizer, **more)
        for name, handler in self._handlers.items():
            if isinstance(getattr(handler.value, "grace", None), Exchange):
                self._handlers[name] = _OptimizerHandler(handler.value)

    def reset(self) -> None:
        """Go on with the ranks that Horovod has now; it calls this before it calls `sync`."""
        super().reset()
        for handler in self._handlers.values():
            if isinstance(handler, _OptimizerHandler):
                handler.reset()


class _OptimizerHandler(StateHandler):  # type: ignore[misc]
    """Handler of an optimizer of grace in Horovod's elastic state."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._exchange: Exchange = optimizer.grace
        if self._exchange.outers:
            raise refusal_of_local_steps(_WHERE)
        check_plan(self._exchange.plan, _WHERE)
        self._membership = Membership()
        self._exchange.synchronized = True
        self.save()

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
        before, after = self._exchange.move()
        check_plan(self._exchange.plan, _WHERE)
        self.save()
        self._membership.move(before, after, self._exchange.rank)

    def sync(self) -> None:
        exchange = self._exchange
        run, transport = exchange.run, exchange.transport
        keeps = self._membership.agree(
            exchange.description,
            lambda mine: transport.gather_objects(mine, "grace/sync", "state.sync()"),
            _WHERE,
            transport.rank,
        )
        root = hvd.broadcast_object(self.value.state_dict(), root_rank=0, name="grace.sync")
        if transport.rank != 0:
            # What is equal on all ranks is that of rank 0; residuals are this rank's own.
            own = run.memories()
            run.load_state_dict(root["grace"], exchange._place)
            if keeps:
                run.put_memories(own)
            self.value.load_state_dict({**root, "grace": run.state_dict()})
        self.save()
