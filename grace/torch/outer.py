"""Outer steps: each rank steps on its own, and every few steps the ranks exchange the change of their weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from grace.core.errors import ConfigError
from grace.core.session.start import Request, open_session
from grace.core.state.merge import optimizer_state
from grace.torch.adapter import OptimizerAdapter, PlainMethods, give_own_class
from grace.torch.beside import Beside, buffers_of
from grace.torch.exchange import OPS, Exchange
from grace.torch.loss_scale import enabled
from grace.torch.steps import check_optimizer, describe
from grace.torch.tensors import is_sharded, names_of, own_part, refuse_unfrozen, spec_of

if TYPE_CHECKING:
    from grace.torch.distributed.library import TorchDistributed


class OuterAdapter(OptimizerAdapter):
    """The methods of an optimizer whose ranks exchange what their weights have moved, instead of gradients.

    `names` has the parameters that train. `grace.core.session.outer` decides when they meet, and has the weights then.
    `beside` has what accompanies them.
    """

    def __init__(self, *given: Any, scaler: torch.amp.GradScaler | None, beside: Beside) -> None:
        super().__init__(*given)
        give_own_class(self.optimizer)
        self.scaler, self.beside = scaler, beside
        (self.outer,) = self.exchange.outers
        self.outer.begin(self._weights())

    def attach(self) -> None:
        """Put the methods in their places. A step that the GradScaler skips on this rank is an inner step, too."""
        super().attach()
        if self.scaler is None:
            return
        step = self.scaler.step

        def counted(optimizer: Any, *given: Any, **options: Any) -> Any:
            taken = self.outer.state.steps
            result = step(optimizer, *given, **options)
            # A wrapper such as Lightning's forwards the attribute.
            if getattr(optimizer, "grace", None) is self.exchange and self.outer.state.steps == taken:
                self._begin()
                self._end()
            return result

        self.scaler.step = counted

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: own_part(p) for p, name in self.names.items()} | self.beside.tensors()

    def step(self, closure: Any = None) -> Any:
        """Apply the gradients of this rank, and exchange what the weights have moved if it is time."""
        self._begin()

        def evaluate() -> Any:
            loss = closure()
            self.check_frozen()
            if self.outer.outer.adapt == "loss":
                self.outer.note_loss(float(loss))
            self._correct()
            return loss

        if closure is None:
            self.check_frozen()
            self._correct()
        loss = self.plain.step() if closure is None else self.plain.step(evaluate)
        self._end()
        return loss

    @torch.no_grad()
    def _correct(self) -> None:
        """Subtract the control variates from the gradients."""
        variates = self.outer.state.variates
        for p, name in self.names.items():
            if name in variates and p.grad is not None:
                own_part(p.grad).sub_(variates[name].view(own_part(p).shape))

    def _begin(self) -> None:
        self.rollback.check()
        self.outer.before(self._weights())
        self.exchange.start_comparing()

    def _end(self) -> None:
        with self.rollback.attempt(), torch.no_grad():
            self._meet()

    def _meet(self) -> None:
        if self.outer.meets_next:
            self.rollback.keep()
        weights = self._weights()
        # What was frozen in mid-run keeps its residual and its weight.
        resting = [name for p, name in self.names.items() if not p.requires_grad]
        self.outer.send(weights, resting, self._rates() if self.outer.outer.variates else None)
        if not self.outer.is_due:
            return
        self.exchange.comparisons.finish()
        met = self.outer.receive(weights)
        self._write(met)
        self.beside.write(met)
        self.rollback.release()

    def _rates(self) -> dict[str, float]:
        groups = self.optimizer.param_groups
        return {self.names[p]: float(group["lr"]) for group in groups for p in group["params"] if p in self.names}

    def _write(self, weights: Mapping[str, torch.Tensor]) -> None:
        for p, name in self.names.items():
            if name in weights:
                own_part(p).copy_(weights[name].view(own_part(p).shape))

    def forget(self) -> None:
        """Return to the weights after the last meeting of each parameter, and to the inner step of the last one."""
        with torch.no_grad():
            self._write(self.outer.drop())
        self.optimizer.zero_grad()

    def load_state_dict(self, state_dict: Mapping[str, Any] | list[Mapping[str, Any]]) -> None:
        """Load a state of this optimizer, or a list with those of all ranks."""
        self.rollback.check()
        given = optimizer_state(state_dict, self.exchange.rank)
        saved = given.pop("grace", {})
        self.exchange.load(saved, self.optimizer, lambda: self.plain.load_state_dict(given))


def register_outer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    request: Request,
    library: TorchDistributed,
    process_group: Any,
    grad_scaler: Any,
) -> Exchange:
    """Let the ranks of a group exchange what an optimizer has moved of a model; see `grace.torch.register`."""
    where = request.where
    with open_session(
        request, library.transport, world=library.world, group=f"grace/{library.group}", kind="outer"
    ) as session:
        check_optimizer(optimizer, where)
        scaler = enabled(grad_scaler, (p for group in optimizer.param_groups for p in group["params"]), where)
        if session.config.outer is None:
            raise ConfigError(
                f"{where}: with an optimizer, the ranks step on their own and need outer, for example outer='diloco'; "
                "leave optimizer out to exchange gradients."
            )
        module = model.module if isinstance(model, DistributedDataParallel) else model
        names = names_of(optimizer, module.named_parameters())
        _refuse_shards(names, dist.get_process_group_ranks(process_group or dist.group.WORLD), where)
        trained = {p: name for p, name in names.items() if p.requires_grad}
        session.local = {"outer number": session.number, "grad_scaler": scaler is not None}
        specs = [spec_of(name, own_part(p)) for p, name in trained.items()]
        beside = Beside(session.config.outer, optimizer, trained, buffers_of(module), library.transport, where)
        specs += beside.specs
        run = session.begin(specs, OPS, average=True, outer=True)
    exchange = Exchange(session, library, {name: p for p, name in names.items()}, None)
    exchange.optimizers.append(describe(optimizer)._replace(adaptive=False))
    check_frozen = functools.partial(
        refuse_unfrozen,
        {name: p for p, name in names.items() if not p.requires_grad},
        "the model was registered",
        "Register the model again, with a new optimizer, after you unfreeze parameters.",
    )
    plain = PlainMethods.of(optimizer)
    OuterAdapter(optimizer, plain, exchange, trained, check_frozen, scaler=scaler, beside=beside).attach()
    exchange.announce(run.stages)
    return exchange


def _refuse_shards(names: Mapping[torch.Tensor, str], ranks: list[int], where: str) -> None:
    """Raise ConfigError if ranks that hold different parts of a parameter would exchange them with each other."""
    for p, name in names.items():
        if is_sharded(p):
            parts = set(p.device_mesh.mesh.flatten().tolist())
            if len(parts.intersection(ranks)) > 1:
                raise ConfigError(
                    f"{where}: the ranks {sorted(parts)} each hold a part of parameter '{name}', and would exchange "
                    "different parts with each other; pass process_group with the ranks that hold the same part, one "
                    "of each site."
                )
