"""Optimizers that exchange what they need themselves: 1-bit Adam.

They take the place of a plain optimizer and of what makes it distributed. The arithmetic is that of `grace.core.optim`,
and every exchange is an ordinary step of a run.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, cast

import torch

from grace.core.config.config import Config
from grace.core.config.recommended import warn_of_pairs
from grace.core.errors import ConfigError, GraceError, StepError
from grace.core.observe.log import logger
from grace.core.optim.adam import Adam
from grace.core.optim.moments import Freezing, Moments, freeze_step_of, horizon, settled
from grace.core.session.start import Request, open_session
from grace.core.state.merge import optimizer_state
from grace.core.state.run import Run
from grace.torch.exchange import OPS, Exchange
from grace.torch.library import Library, connect
from grace.torch.optimizer import refuse_parameters
from grace.torch.steps import describe
from grace.torch.tensors import names_of, refuse_unfrozen, spec_of

#: What `params` of an optimizer of PyTorch may be.
Parameters = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]
#: A configuration as `grace.make_config` takes it.
Configuration = Config | Mapping[str, Any] | str | os.PathLike[str] | None

# One bit per element in both directions, with error feedback at both ends.
_ONE_BIT = {"compressor": "efsignsgd", "memory": "residual", "communicator": "two_shot"}


class _Ruled(torch.optim.Optimizer):
    """An optimizer whose steps are those of `rule`, whose fields are options of the parameter groups."""

    rule: ClassVar[type[Moments]]

    def _rule_of(self, group: Mapping[str, Any]) -> Any:
        fields = {f.name: group[f.name] for f in dataclasses.fields(self.rule)}
        return self.rule(**{**fields, "betas": tuple(group["betas"])})

    def _state_of(self, p: torch.Tensor, rule: Moments) -> dict[str, Any]:
        """Return the state of a parameter, as flat arrays and the number of its steps."""
        if not self.state[p]:
            self._keep(p, 0, rule.init(OPS(str(p.device)), _flat(p)))
        return {key: x.reshape(-1) if isinstance(x, torch.Tensor) else x for key, x in self.state[p].items()}

    def _keep(self, p: torch.Tensor, number: int, arrays: Mapping[str, torch.Tensor]) -> None:
        shaped = {key: x.reshape(p.shape) if x.numel() == p.numel() else x for key, x in arrays.items()}
        self.state[p] = {"step": number, **shaped}


class _Momenta(Exchange):
    """The exchange of momenta; comparisons of the ranks see `moments` as well, which are equal on all of them."""

    moments: Callable[[], dict[str, torch.Tensor]]

    def _weights(self) -> Mapping[str, torch.Tensor]:
        return {**super()._weights(), **self.moments()}


class _Exchanging(_Ruled):
    """Base of optimizers that exchange their gradients and momenta, over Horovod or torch.distributed.

    Two runs share one transport: that of `dense` carries gradients as they are, and that of `grace` momenta by the
    method of the configuration.
    """

    rule: ClassVar[type[Freezing]]
    #: The exchange of the momenta.
    grace: Exchange
    # By this attribute, a GradScaler leaves unscaling, and the decision to skip a step, to the optimizer.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Parameters,
        defaults: dict[str, Any],
        config: Configuration,
        options: dict[str, Any],
        *,
        freeze_step: int | None,
        total_steps: int | None,
        backend: str | None,
        process_set: Any,
        process_group: Any,
    ) -> None:
        # How many steps were taken, and |v|_1 when it was last looked at. Groups are a part of checkpoints.
        super().__init__(params, {**defaults, "step": 0, "freeze_step": freeze_step, "norm": None})
        if config is None and "compressor" not in options:
            options = {**_ONE_BIT, **options}
        request = Request(config, options, type(self).__init__, self._where)
        library = connect(backend, process_set, process_group, request.timeout, self._where)
        self._begin(request, library, total_steps)

    @property
    def _where(self) -> str:
        return f"grace.torch.optim.{type(self).__name__}"

    def _begin(self, request: Request, library: Library, total_steps: int | None) -> None:
        """Start both exchanges; the ranks compare their options and configurations."""
        with _session(request, library, "momentum") as session:
            self._check(library, total_steps)
            first, *_ = self.param_groups
            session.local = {"optimizer": type(self).__name__, "freeze_step": first["freeze_step"]}
            session.local["optimizer number"] = session.number
            self._names = names_of(self, _named(self.param_groups))
            refuse_parameters(list(self._names), request.where)
            self._frozen = {name: p for p, name in self._names.items() if not p.requires_grad}
            gradients = [spec_of(name, p) for p, name in self._names.items() if p.requires_grad]
            momenta = [dataclasses.replace(spec, dtype=spec.work_dtype) for spec in gradients]
            session.begin(momenta, OPS, average=True)
        settings = {"compressor": "none", "seed": session.config.seed, "timeout": session.config.timeout}
        with _session(Request(settings, {}, type(self).__init__, request.where), library, "gradient") as dense:
            self._dense: Run = dense.begin(gradients, OPS, average=True)
        self.grace = _Momenta(session, library, {name: p for p, name in self._names.items()}, None)
        self.grace.moments = self._moments
        # Its gradients come uncompressed.
        self.grace.optimizers.append(describe(self)._replace(adaptive=False))
        if library.transport.rank == 0:
            warn_of_pairs(session.config, self.grace.optimizers[0])
        self.grace.rollback.forget = self._forget
        self.grace.announce(self.grace.run.stages)

    def _check(self, library: Library, total_steps: int | None) -> None:
        """Raise ConfigError for options or a library that cannot work, and set the end of the warm-up."""
        where = self._where
        if library.elastic:
            raise ConfigError(
                f"{where}: elastic Horovod is not supported, because its states do not know this optimizer; wrap a "
                "plain optimizer by grace.DistributedOptimizer."
            )
        for group in self.param_groups:
            self._rule_of(group)
            group["freeze_step"] = freeze_step_of(group["freeze_step"], total_steps, where)
            if not group["lr"] >= 0:
                raise ConfigError(f"{where}: lr must not be negative, received {group['lr']!r}.")

    # --- steps --------------------------------------------------------------------------------------------------------

    @property
    def frozen(self) -> bool:
        """True after the warm-up, when the second moment is frozen and momenta are exchanged."""
        freeze_step = self.param_groups[0]["freeze_step"]
        return freeze_step is not None and self.param_groups[0]["step"] >= freeze_step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange gradients or momenta, and update the weights; all ranks must call it equally often.

        With a GradScaler that has scaled the gradients, all ranks leave the step out if one of them has found NaN or
        infinity. Raises StepError, WaitError or MismatchError if the exchange fails; then nothing was changed.
        """
        self.grace.rollback.check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        refuse_unfrozen(self._frozen, "the optimizer was made", "Make a new optimizer after you unfreeze parameters.")
        self._advance()
        return loss

    def _advance(self) -> None:
        frozen = self.frozen
        run = self.grace.run if frozen else self._dense
        merged = self._exchange(run, self._momentum if frozen else self._gradient)
        if merged is None:
            return
        for group in self.param_groups:
            rule, lr = self._rule_of(group), float(group["lr"])
            step = rule.frozen_step if frozen else rule.step
            for p in group["params"]:
                if p.requires_grad:
                    state, ops = self._state_of(p, rule), OPS(str(p.device))
                    number = state.pop("step") + 1
                    received = _flat(merged[self._names[p]])
                    weights, state = step(ops, _flat(p), received, state, lr, number)
                    p.copy_(weights.view(p.shape))
                    self._keep(p, number, state)
            group["step"] += 1
        self.grace.rollback.release()
        if not frozen:
            self._look()

    def _gradient(self, p: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        """Return the gradient of this rank without the loss scale; zeros if there is none, as others may have one."""
        if p.grad is None:
            return torch.zeros_like(p)
        if p.grad.is_sparse:
            raise StepError(
                f"tensor '{self._names[p]}' has a sparse gradient, and moments are dense; create the embedding with "
                "sparse=False."
            )
        gradient = p.grad.detach()
        scale = getattr(self, "grad_scale", None)
        return gradient if scale is None else gradient / scale.to(gradient.device)

    def _momentum(self, p: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        """Return the common momentum with the gradient of this rank added."""
        rule = self._rule_of(group)
        state, gradient = self._state_of(p, rule), _flat(self._gradient(p, group))
        return cast(torch.Tensor, rule.momentum(OPS(str(p.device)), _flat(p), gradient, state)).view(p.shape)

    def _exchange(
        self, run: Run, value: Callable[[torch.Tensor, Mapping[str, Any]], torch.Tensor]
    ) -> dict[str, torch.Tensor] | None:
        """Return the means over all ranks of a value per parameter; None if a loss scaler has all ranks skip it."""
        exchange, before = self.grace, run.savepoint
        with exchange.rollback.attempt():
            exchange.rollback.keep()
            exchange.start_comparing()
            for group in reversed(self.param_groups):
                lr = float(group["lr"])
                for p in reversed(group["params"]):
                    name = self._names[p]
                    if p.requires_grad:
                        run.current.ready(name, value(p, group), lr)
                    elif name not in self._frozen:
                        # Frozen in mid-run: it keeps its residual and its weight.
                        run.current.rest(name, lr)
            exchange.comparisons.finish()
            merged = run.finish()
        # What one rank has found arrives at all of them as NaN.
        if hasattr(self, "found_inf") and not all(bool(torch.isfinite(x).all()) for x in merged.values()):
            run.put_back(before)
            exchange.rollback.release()
            return None
        return merged

    def _look(self) -> None:
        """Freeze the second moment if it is time: at `freeze_step`, or as soon as it has settled."""
        first = self.param_groups[0]
        number = first["step"]
        if first["freeze_step"] is None and number % horizon(first["betas"]) == 0:
            states = [self.state[p] for p in self._names if "exp_avg_sq" in self.state[p]]
            norm = float(sum(x["exp_avg_sq"].sum(dtype=torch.float64).cpu() for x in states))
            # Sums may differ in their last bits between machines, and all ranks must decide alike.
            norm = self.grace._gather([norm], "settled", f"{self._where}.step()")[0]
            for group in self.param_groups:
                group["freeze_step"] = number if settled(first["norm"], norm) else None
            for group in self.param_groups:
                group["norm"] = norm
        if not self.frozen:
            return
        for group in self.param_groups:
            rule = self._rule_of(group)
            for p in group["params"]:
                if self._names[p] not in self._frozen:
                    state = self._state_of(p, rule)
                    taken = state.pop("step")
                    self._keep(p, taken, rule.freeze(OPS(str(p.device)), state, max(taken, 1)))
        if self.grace.rank == 0:
            logger().info(
                "grace: %s has frozen the second moment after step %d and exchanges momenta from now on.",
                type(self).__name__,
                number,
            )

    def _forget(self) -> None:
        """Forget the step under way, which was dropped."""
        self._dense.discard()
        self.zero_grad()

    def _moments(self) -> dict[str, torch.Tensor]:
        """Return what is equal on all ranks besides the weights."""
        found = {}
        for group in self.param_groups:
            rule = self._rule_of(group)
            for p in group["params"]:
                arrays = self._state_of(p, rule) if self._names[p] not in self._frozen else {}
                found |= {f"{key} of {self._names[p]}": x for key, x in arrays.items() if key != "step"}
        return found

    # --- checkpoints and refusals -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, with that of grace; every rank must save its own."""
        return {**super().state_dict(), "grace": self.grace.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any] | list[Mapping[str, Any]]) -> None:  # type: ignore[override]
        """Load a state of this optimizer, or a list with those of all ranks, whose residuals are merged.

        Raises StateError if it was saved by another optimizer, or with other tensors or methods; nothing is loaded.
        """
        self.grace.rollback.check()
        given = optimizer_state(state_dict, self.grace.rank)
        saved = given.pop("grace", {})
        self.grace.load(saved, self, functools.partial(self._load_plain, given))

    def _load_plain(self, given: dict[str, Any]) -> None:
        super().load_state_dict(given)
        # PyTorch rounds states to the dtype of the parameter.
        numbers, parameters = (
            [x for group in groups for x in group["params"]] for groups in (given["param_groups"], self.param_groups)
        )
        for number, p in zip(numbers, parameters, strict=True):
            for key, x in given["state"].get(number, {}).items():
                if isinstance(x, torch.Tensor):
                    self.state[p][key] = x.detach().to(p.device)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; the constructor does. Raises GraceError afterwards."""
        if hasattr(self, "grace"):
            raise GraceError(
                f"{self._where}: add_param_group() was called after the optimizer was made, and the new parameters "
                "would not be exchanged; pass all groups when you make it."
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Raise GraceError: the copy would have no connection to the other ranks."""
        raise GraceError(
            f"{self._where}: it cannot be copied or pickled, because its collectives belong to one object; save "
            "state_dict(), or make another one."
        )


class OneBitAdam(_Exchanging):
    """1-bit Adam: Adam on exchanged gradients at first, and then on momenta of one bit per element.

    During the warm-up, the gradients of all ranks are averaged as they are, and steps are those of `torch.optim.Adam`.
    Then the second moment is frozen, and the ranks exchange momenta by the configuration, by default one bit per
    element in both directions with error feedback at both ends: `efsignsgd` over `two_shot`. `config` and `options` are
    as for `DistributedOptimizer`, and take any method. The memory must hold no momentum.

    The warm-up has `freeze_step` steps, or 20 % of `total_steps`. With neither, it ends by the rule of the paper: as
    soon as the sum of the second moments has changed by less than 4 % in 1 / (1 - beta2) steps, so after some thousands
    of them. It should be longer than the warm-up of the learning rate. Parameters whose second moment is zero at its
    end, such as rows of an embedding for words that did not occur, keep their values.

    `params` are those of a plain model, best as `model.named_parameters()`; what makes a model parallel, such as DDP,
    would average the gradients once more. Gradients may be accumulated over several backward passes and clipped, and a
    GradScaler needs no argument. `lr`, `betas`, `eps`, `weight_decay` and `decoupled_weight_decay` are those of
    `torch.optim.Adam`. `backend`, `process_set` and `process_group` are as for `DistributedOptimizer`. All ranks must
    make the optimizer and call `step`. Weights at the start must be equal.

    The attribute `grace` is the exchange of the momenta, and `frozen` tells whether the warm-up is over. `state_dict`
    has the residuals; save it on every rank. Raises ConfigError for wrong options, and MismatchError on every rank if
    the ranks differ.

    Reference: Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's convergence speed",
    ICML 2021, Algorithm 1.
    """

    rule = Adam

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        config: Configuration = None,
        *,
        decoupled_weight_decay: bool = False,
        freeze_step: int | None = None,
        total_steps: int | None = None,
        backend: str | None = None,
        process_set: Any = None,
        process_group: Any = None,
        **options: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(
            params,
            defaults,
            config,
            options,
            freeze_step=freeze_step,
            total_steps=total_steps,
            backend=backend,
            process_set=process_set,
            process_group=process_group,
        )


def _session(request: Request, library: Library, kind: str) -> Any:
    return open_session(request, library.transport, world=library.world, group=f"grace/{library.group}", kind=kind)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return the elements as a flat array of the dtype in which moments are kept."""
    return x.detach().reshape(-1).to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def _named(groups: Iterable[Mapping[str, Any]]) -> list[tuple[str, torch.nn.Parameter]] | None:
    """Return the parameters with the names that they were passed with; None if there were none."""
    pairs = [zip(group["param_names"], group["params"], strict=True) for group in groups if "param_names" in group]
    return [pair for each in pairs for pair in each] or None
