"""`TorchState`: Horovod's elastic state for optimizers of grace."""

from __future__ import annotations

import copy
from typing import Any

import horovod.torch as hvd
import horovod.torch.elastic
from horovod.torch.elastic.state import StateHandler

from grace.core.guards.agreement import Meeting
from grace.core.values.errors import ConfigError
from grace.core.values.plan import Plan
from grace.torch.exchange import Exchange
from grace.torch.horovod.library import Horovod

_WHERE = "grace.torch.horovod.TorchState"


class TorchState(horovod.torch.elastic.TorchState):  # type: ignore[misc]
    """Horovod's elastic state, with the residuals of optimizers that grace has wrapped; the arguments are Horovod's.

    If the ranks change, survivors keep what they hold back, in proportion: with N ranks before and M now, M / N of it,
    so the mean over all ranks keeps the survivors' share. What an owner of a shard held back goes to its own residual.
    New ranks hold back nothing, and what a rank that is gone held back is lost; the log says so. Raises ConfigError for
    optimizers of grace whose states cannot go on with other ranks.
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
        if "grace_local" in optimizer.state_dict():
            raise ConfigError(f"{_WHERE}: local_steps is not supported in elastic mode; leave it out.")
        _check(self._exchange.plan)
        # The number of ranks among which this one was last; None if it is new.
        self._before: int | None = None
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
        self._before = before
        _check(self._exchange.plan)
        self.save()
        self._log(
            "elastic Horovod: %d ranks before, %d now. Ranks that stay keep what they hold back; what a rank that is "
            "gone held back is lost.",
            before,
            after,
        )

    def sync(self) -> None:
        exchange = self._exchange
        engine, transport = exchange.engine, exchange.transport
        with Meeting(lambda mine: transport.gather_objects(mine, "grace/sync", "state.sync()"), _WHERE) as meeting:
            meeting.mine.update(exchange.described())
            meeting.mine["of this rank"] = self._before
        known = [theirs["of this rank"] for theirs in meeting.everyone]
        root = hvd.broadcast_object(self.value.state_dict(), root_rank=0, name="grace.sync")
        if transport.rank != 0:
            # What is equal on all ranks is that of rank 0; residuals are this rank's own.
            own = engine.memories()
            engine.load_state_dict(root["grace"], exchange._place)
            if self._before is not None:
                engine.put_memories(own)
            self.value.load_state_dict({**root, "grace": engine.state_dict()})
        self.save()
        stayed, before = len(known) - known.count(None), max((n for n in known if n is not None), default=0)
        if before:
            self._log(
                "elastic Horovod: of %d ranks, %d have stayed and %d are new. What the other %d held back is lost.",
                before,
                stayed,
                known.count(None),
                before - stayed,
            )
        self._before = transport.size

    def _log(self, text: str, *values: int) -> None:
        if self._exchange.rank == 0:
            # Imported here, because logging installs a hook in every process that imports grace.
            import logging

            logging.getLogger("grace").warning(text, *values)


def _check(plan: Plan) -> None:
    """Raise ConfigError if a memory cannot go on with other ranks when one of them is gone."""
    for unit in plan.units:
        keeps = [each.memory for each in unit.chain if each.memory.holds_residual]
        if any(each.memory.joint for each in (unit, *unit.chain)) or (keeps and not unit.memory.holds_residual):
            raise ConfigError(
                f"{_WHERE}: in elastic mode, every rank must keep a residual of its own, and no state of others; "
                f"{unit.memory} with the communicator {unit.communicator} does not. Valid memories are for instance "
                "residual, with communicators such as allgather and two_shot."
            )
