"""`Exchange`: the interface behind an optimizer's attribute `grace`."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from grace.core.exchange.engine import Engine
from grace.core.guards.agreement import agree, formats
from grace.core.guards.replicas import SUMMARY_BYTES, WEIGHTS, check_digests, compare, digest, is_due, shared_states
from grace.core.ops import get_ops
from grace.core.ops.composites import ArrayOps
from grace.core.values.config import Config
from grace.core.values.errors import GraceWarning, StateError, StepError
from grace.core.values.plan import Plan, change_plan
from grace.core.values.spec import TensorSpec
from grace.core.values.unit import Assignment
from grace.torch.loss_scale import LossScale
from grace.torch.transport import HorovodTransport
from grace.torch.views import apart
from grace.torch.way_back import WayBack


class Exchange:
    """The plan, the statistics and the state of an optimizer's exchange, available as `optimizer.grace`."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        specs: Sequence[TensorSpec],
        prefix: str,
        delegate: Callable[[Assignment], bool],
        parameters: Mapping[str, torch.Tensor],
    ) -> None:
        self.config = config
        self.engine = engine
        self._specs = specs
        self.prefix = prefix
        self._delegate = delegate
        self._parameters = parameters
        self._changes = 0
        self._met = False
        # The last step before which the replicas were compared.
        self._compared = -1
        self._merged: dict[str, torch.Tensor] = {}
        # PyTorch's buffers with the gradients of the current step.
        self._gradients: dict[str, torch.Tensor] = {}
        self.loss_scale: LossScale | None = None
        self.way_back = WayBack(engine, prefix)

    @property
    def plan(self) -> Plan:
        """The plan for the next step: how each tensor is exchanged."""
        return self.engine.plan

    def change(self, **changes: Any) -> None:
        """Change options, for instance change(compress_ratio=0.1), or the method. Residuals are kept.

        All ranks must call it between the same two steps. Raises the errors of `make_config`, ConfigError if the
        configuration has a schedule, StepError during a step, and MismatchError on every rank if the ranks differ.
        """
        prefix, failure, description = f"{self.prefix}.change{self._changes + 1}", None, {}
        try:
            if self.engine.under_way:
                raise StepError("change() was called while gradients are being exchanged; call it after step().")
            config, plan = change_plan(
                self._specs,
                self.config,
                self.plan,
                changes,
                ranks=self._transport.ranks,
                prefix=prefix,
                delegate=self._delegate,
            )
            description = {"step": int(self.engine.step), "configuration": config.to_dict()}
            description["formats"] = formats([plan], functools.partial(get_ops, "torch"))
        except Exception as error:
            failure = error
        transport = self._transport
        meet = (
            (lambda mine: transport.gather_objects(mine, prefix, "optimizer.grace.change()"))
            if transport.rank >= 0
            else lambda mine: [mine]
        )
        agree(description, failure, meet, "optimizer.grace.change")
        self._changes += 1
        self.engine.change(plan)
        self.config = config

    def discard(self) -> None:
        """Drop the step under way on all ranks: after an error in it, or because nobody needs its gradients.

        All ranks must call it between the same two calls of `step()`, wherever they are between these, also if the step
        failed on some of them only. Residuals and all other states are then what they were before the step, gradients
        are None, and nothing is on its way. It does not change weights, except with `local_steps`, where they return to
        what they were after the last exchange. A rank waits up to twice the `timeout` of the configuration for the
        others. Raises MismatchError on every rank if some ranks have applied a step that others have not. Then a
        checkpoint can be loaded.
        """
        self._merged, self._gradients = {}, {}
        self.way_back.discard()

    def stats(self) -> dict[str, Any]:
        """Return bytes, times, relative errors and residual norms of the last step.

        `grace.core.exchange.engine.Engine.stats` describes the keys.
        """
        return self.engine.stats()

    def report(self) -> str:
        """Return the start-up report: method, memory, collective and bytes of each tensor, and why some stay dense."""
        return self.plan.report()

    @property
    def track_norms(self) -> bool:
        """True if each step measures errors and norms for stats(). This costs a decompression per tensor and step."""
        return self.engine.track_norms

    @track_norms.setter
    def track_norms(self, value: bool) -> None:
        self.engine.track_norms = value

    def start_timeline(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace of all further steps; see `grace.core.observe.timeline.Times.start`."""
        self.engine.times.start(path, hvd.rank(), hvd.size())

    def stop_timeline(self) -> None:
        """Stop writing the timeline."""
        self.engine.times.stop()

    def load(self, saved: Any, optimizer: Any, load_plain: Callable[[], None]) -> None:
        """Load a checkpoint: grace's part `saved` (None: initial states), and the optimizer's own by `load_plain`.

        If another rank saved it, warns and starts with residuals of zero. Raises StateError if the checkpoint has other
        tensors, methods, shapes or dtypes, or if PyTorch refuses its part; then nothing was loaded.
        """
        before, plain = self.engine.snapshot(), (optimizer.state, optimizer.param_groups)
        mine = saved is None or self.engine.load_state_dict(saved, _place)
        try:
            load_plain()
        except Exception as error:
            self.engine.restore(before)
            optimizer.state, optimizer.param_groups = plain
            raise StateError(
                "checkpoint: expected a state of the same optimizer, received one that PyTorch refuses "
                f"({type(error).__name__}: {error}); load a checkpoint of this optimizer and these parameters."
            ) from error
        self._merged.clear()
        if saved is None:
            self.engine.reset()
        if not mine:
            warnings.warn(
                f"rank {saved['rank']} of {saved['size']} saved this checkpoint, and rank "
                f"{self.engine.transport.rank} of {self.engine.transport.size} loads it: residuals start from zero. "
                "To continue exactly, save and load one file per rank.",
                GraceWarning,
                stacklevel=3,
            )

    def meet(self) -> None:
        """Compare the ranks before the first gradient of a step, if it is the first step or the replicas are due.

        Raises MismatchError on every rank.
        """
        if not self._met:
            self._met = True
            self._meet_first()
        if is_due(self.engine.step, self.config.check_replicas) and self._compared != self.engine.step:
            self._compared = self.engine.step
            self.check_replicas()

    def _meet_first(self) -> None:
        """Check that all ranks begin with the same weights, in the same stage of a schedule.

        Otherwise replicas would part silently, or ranks would start different collectives and wait forever.
        """
        name = f"{self.prefix}/first step"
        description = {"step of the loaded checkpoint": int(self.engine.step), "of this rank": self._digests()}
        transport = self._transport
        everyone = agree(
            description, None, lambda m: transport.gather_objects(m, name, "the first step"), "the first step"
        )
        check_digests(
            [other["of this rank"] for other in everyone],
            WEIGHTS,
            "before the first step",
            "Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before you train.",
        )

    def check_replicas(self) -> None:
        """Compare the weights and the shared states of all ranks now; all ranks must call it between the same steps.

        The option `check_replicas` does it every so many steps. Raises MismatchError, which names the first tensor that
        differs, on every rank.
        """
        states = {name: digest(_ops_of(x), x) for name, x in shared_states(self.engine.snapshot()).items()}
        transport, name = self._transport, f"{self.prefix}/replicas"

        def exchange(mine: bytes) -> list[bytes]:
            sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            everyone = bytes(transport.allgather(sent, name=name).wait().tolist())
            return [everyone[i : i + SUMMARY_BYTES] for i in range(0, len(everyone), SUMMARY_BYTES)]

        compare(
            {**self._digests(), **states},
            exchange,
            lambda mine: transport.gather_objects(mine, f"{name} in detail", "the comparison of replicas"),
            f"before step {int(self.engine.step)}",
        )

    @property
    def _transport(self) -> HorovodTransport:
        assert isinstance(self.engine.transport, HorovodTransport)
        return self.engine.transport

    def _digests(self) -> dict[str, int]:
        return {name: digest(_ops_of(p), p.detach()) for name, p in self._parameters.items()}

    def _result(self, name: str) -> torch.Tensor:
        if name not in self._merged:
            with torch.no_grad():
                self._merged = self.engine.finish(apart(self._gradients))
                if self.loss_scale is not None:
                    self.loss_scale.scale_again(self._merged)
            self._gradients = {}
        return self._merged.pop(name)


def _ops_of(x: torch.Tensor) -> ArrayOps:
    return get_ops("torch", str(x.device))


def _place(saved: Any, current: torch.Tensor) -> torch.Tensor:
    if not isinstance(saved, torch.Tensor):
        raise StateError(
            f"checkpoint: expected a torch.Tensor, received {type(saved).__name__}; "
            "load a checkpoint that grace.torch has saved."
        )
    return torch.empty_like(current).copy_(saved.detach())
