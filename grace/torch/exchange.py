"""`Exchange`: what an optimizer's attribute `grace` gives access to."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from grace.core.agreement import agree
from grace.core.config import Config
from grace.core.engine import Engine
from grace.core.errors import StateError, StepError
from grace.core.part import Part
from grace.core.plan import Plan, change_plan
from grace.core.spec import TensorSpec
from grace.torch.transport import HorovodTransport
from grace.torch.views import apart


class Exchange:
    """What `optimizer.grace` gives access to: the plan, the statistics and the state of the exchange."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        specs: Sequence[TensorSpec],
        prefix: str,
        delegate: Callable[[Part], bool],
    ) -> None:
        self.config = config
        self.engine = engine
        self._specs = specs
        self._prefix = prefix
        self._delegate = delegate
        self._changes = 0
        self._met = False
        self._merged: dict[str, torch.Tensor] = {}
        # The buffers of the framework that hold the gradients of the step under way.
        self._gradients: dict[str, torch.Tensor] = {}

    @property
    def plan(self) -> Plan:
        """What happens to every tensor in the step to come."""
        return self.engine.plan

    def change(self, **changes: Any) -> None:
        """Go on with other options or parts, for instance change(compress_ratio=0.1); residuals are carried over.

        All ranks must call it between the same two steps. Raises what `make_config` raises, ConfigError where the
        configuration has a schedule, StepError in the middle of a step, MismatchError on every rank if ranks differ.
        """
        self._changes += 1
        prefix, failure, description = f"{self._prefix}.change{self._changes}", None, {}
        try:
            if self.engine.under_way:
                raise StepError("change() was called while gradients are on their way; call it after step().")
            config, plan = change_plan(
                self._specs, self.config, self.plan, changes, prefix=prefix, delegate=self._delegate
            )
            description = {"step": int(self.engine.step), "configuration": config.to_dict()}
        except Exception as error:
            failure = error
        transport = self.engine.transport
        assert isinstance(transport, HorovodTransport)
        meet = (lambda mine: transport.gather_objects(mine, prefix)) if transport.rank >= 0 else lambda mine: [mine]
        agree(description, failure, meet, "optimizer.grace.change")
        self.engine.change(plan)
        self.config = config

    def stats(self) -> dict[str, Any]:
        """Bytes, times, relative errors and residual norms of the last step; see `grace.core.engine.Engine.stats`."""
        return self.engine.stats()

    def report(self) -> str:
        """The start-up report: per tensor the method, memory, collective and bytes, and why one stays dense."""
        return self.plan.report()

    @property
    def track_norms(self) -> bool:
        """Whether each step measures errors and norms for stats(); costs a decompression per tensor and step."""
        return self.engine.track_norms

    @track_norms.setter
    def track_norms(self, value: bool) -> None:
        self.engine.track_norms = value

    def start_timeline(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace of the steps from now on; see `grace.core.timeline.Times.start`."""
        self.engine.times.start(path, hvd.rank(), hvd.size())

    def stop_timeline(self) -> None:
        """Write no more steps to the timeline."""
        self.engine.times.stop()

    def load(self, saved: dict[str, Any]) -> None:
        """Take over the state of a checkpoint; warns where it is of another rank, so that residuals start from zero.

        Raises StateError if it is of other tensors, parts or shapes.
        """
        mine = self.engine.load_state_dict(saved, _place)
        self._merged.clear()
        if not mine:
            warnings.warn(
                f"the checkpoint is of rank {saved['rank']} of {saved['size']}, this is rank "
                f"{self.engine.transport.rank} of {self.engine.transport.size}: residuals start from zero. Save and "
                "load one file per rank for an exact continuation.",
                stacklevel=3,
            )

    def meet_once(self) -> None:
        """With a schedule, see that all ranks begin in one stage: collectives of several would wait for each other.

        Raises MismatchError on every rank if a checkpoint was loaded on some of them only.
        """
        if self._met or len(self.config.stages) == 1:
            return
        self._met = True
        transport = self.engine.transport
        assert isinstance(transport, HorovodTransport)
        name = f"{self._prefix}/first step"
        agree({"step": int(self.engine.step)}, None, lambda m: transport.gather_objects(m, name), "the first step")

    def _result(self, name: str) -> torch.Tensor:
        if name not in self._merged:
            with torch.no_grad():
                self._merged = self.engine.finish(apart(self._gradients))
            self._gradients = {}
        return self._merged.pop(name)


def _place(saved: Any, current: torch.Tensor) -> torch.Tensor:
    if not isinstance(saved, torch.Tensor):
        raise StateError(f"checkpoint: expected tensors, received {type(saved).__name__}.")
    return saved.detach().to(device=current.device, dtype=current.dtype, copy=True)
