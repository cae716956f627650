"""0/1 Adam: momenta of one bit from the start, second moments of some steps only, and rare syncs in the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from grace.core.errors import StateError, StepError
from grace.core.optim import zero_one
from grace.torch.exchange import OPS
from grace.torch.optim.exchanging import Exchanging
from grace.torch.optim.ruled import Parameters, flat


class ZeroOneAdam(Exchanging):
    """0/1 Adam: Adam that exchanges momenta of one bit per element from the start, and later only in some steps.

    The ranks step on their own, and at a sync they exchange the momenta since the last one, weighted by the learning
    rate. They sync after every step until `freeze_step`, and afterwards every `every` steps: a number, or a table such
    as {32768: 2} by the number of steps since the freeze, as the option `every` of outer steps. The second moment takes
    the mean gradients of some steps, which are exchanged as they are: of every step at first, and half as often after
    each `var_update_scaler` of them, until `freeze_step`.

    Give `freeze_step`, or `total_steps`, of which 20 % are taken. The exchange and the other arguments are those of
    `OneBitAdam`, and elements whose second moment is zero keep their weights. A GradScaler is refused: a rank that left
    a step out would be alone with it. Between two syncs, the weights of the ranks differ. Such a state can be loaded on
    as many ranks only.

    Reference: Lu et al., "Maximizing communication efficiency for large-scale training via 0/1 Adam", ICLR 2023,
    Algorithm 1. The defaults are those of DeepSpeed.
    """

    rule = zero_one.ZeroOneAdam

    # The gradients in the second moment, the step of the next one, and the sum of the learning rates since the last
    # sync.
    kept: ClassVar[Mapping[str, Any]] = {"learnt": 0, "learn_at": 1, "rates": 0.0}

    if TYPE_CHECKING:

        def _rule_of(self, group: Mapping[str, Any]) -> zero_one.ZeroOneAdam: ...

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        *,
        every: int | Mapping[int, int] = zero_one.EVERY,
        var_update_scaler: int = 16,
        **options: Any,
    ) -> None:
        self._every = every, var_update_scaler
        super().__init__(params, lr, **options)

    def _options(self, total_steps: int | None) -> dict[str, Any]:
        options = super()._options(total_steps)
        self._schedule = zero_one.Schedule(*self._every, options["freeze_step"], self._where)
        return {**options, **self._schedule.to_config()}

    def _advance(self) -> None:
        if hasattr(self, "found_inf"):
            raise StepError(
                f"{self._where}: a GradScaler calls step(), and could skip it on one rank between two syncs; train "
                "in bfloat16, or use OneBitAdam."
            )
        first, *_ = self.param_groups
        number = first["step"] + 1
        learns = self._schedule.learns(number, first["learn_at"])
        learnt = first["learnt"] + learns
        means = self._exchange(self._gradients, self._gradient) if learns else None
        advanced: dict[torch.Tensor, dict[str, Any]] = {}

        def advance(p: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
            rule, ops = self._rule_of(group), OPS(str(p.device))
            state = self._state_of(p, rule)
            if means is not None:
                state = rule.learn(ops, flat(p), flat(means[self._names[p]]), state)
            gradient, rate = flat(self._gradient(p, group)), self._rate(group, number)
            advanced[p] = rule.advance(ops, flat(p), gradient, state, rate, learnt)
            return rule.sent(ops, advanced[p], learnt).view(p.shape)

        # Nothing is changed until all exchanges are over.
        merged = self._exchange(self.grace.run, advance) if self._schedule.syncs(number) else None
        for group in self.param_groups:
            group["learnt"] = learnt
            group["rates"] += self._rate(group, number)
            rule, lr, share = self._rule_of(group), float(group["lr"]), 1 / group["rates"] if group["rates"] else 0.0
            for p in group["params"]:
                if merged is None and p.requires_grad:
                    advance(p, group)
                if p not in advanced:
                    self._rest(p, rule)
                    continue
                ops, weights, state = OPS(str(p.device)), flat(p), advanced[p]
                taken = state.pop("step")
                if merged is None:
                    new = rule.alone(ops, weights, state, lr, self._rate(group, number), learnt)
                else:
                    new = rule.sync(ops, weights, flat(merged[self._names[p]]), state, lr, share, learnt)
                self._update(p, taken, *new)
            group["step"] = number
            if merged is not None:
                group["rates"] = 0.0
            if learns:
                group["learn_at"] = self._schedule.next_learning(number, learnt)
        self.grace.rollback.release()

    def _rate(self, group: Mapping[str, Any], number: int) -> float:
        return float(self._rule_of(group).rate(float(group["lr"]), number))

    def _rest(self, p: torch.Tensor, rule: zero_one.ZeroOneAdam) -> None:
        """Return a parameter that was frozen between two syncs to its weights after the last one."""
        if "anchor" in self.state.get(p, {}):
            state = self._state_of(p, rule)
            p.copy_(state.pop("anchor").view(p.shape))
            fresh = rule.init(OPS(str(p.device)), flat(p))
            self._keep(p, state.pop("step"), {**fresh, "exp_avg_sq": state["exp_avg_sq"]})

    def _equal(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for p, name in self._names.items():
            state = self.state.get(p, {})
            found[name] = state.get("anchor", p)
            if state:
                found[f"exp_avg_sq of {name}"] = state["exp_avg_sq"]
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any] | list[Mapping[str, Any]]) -> None:
        """Load a state as that of `OneBitAdam`; one from between two syncs on as many ranks as have saved it."""
        one = state_dict[0] if isinstance(state_dict, list) else state_dict
        size = len(state_dict) if isinstance(state_dict, list) else one.get("grace", {}).get("size")
        if any(group.get("rates") for group in one.get("param_groups", ())) and size != self.grace.size:
            raise StateError(
                f"checkpoint: {size} ranks saved it between two syncs, when each had weights of its own, and "
                f"{self.grace.size} load it; expected as many ranks. Save after a sync."
            )
        super().load_state_dict(state_dict)
