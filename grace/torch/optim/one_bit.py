"""1-bit Adam and 1-bit LAMB: the second moment is frozen after a warm-up, and then the ranks exchange momenta."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from grace.core.optim import adam, lamb
from grace.core.optim.moments import Freezing, horizon, is_settled, tell_frozen
from grace.torch.exchange import OPS
from grace.torch.optim.exchanging import Exchanging
from grace.torch.optim.ruled import flat


class OneBit(Exchanging):
    """Base of both: exchanged gradients in the warm-up, and momenta afterwards."""

    rule: ClassVar[type[Freezing]]
    # |v|_1 when it was last looked at.
    kept: ClassVar[Mapping[str, Any]] = {"norm": 0.0}

    if TYPE_CHECKING:

        def _rule_of(self, group: Mapping[str, Any]) -> Freezing: ...

    @property
    def frozen(self) -> bool:
        """True after the warm-up, when the second moment is frozen and momenta are exchanged."""
        freeze_step = self.param_groups[0]["freeze_step"]
        return freeze_step is not None and self.param_groups[0]["step"] >= freeze_step

    def _advance(self) -> None:
        frozen = self.frozen
        run = self.grace.run if frozen else self._gradients
        merged = self._exchange(run, self._momentum if frozen else self._gradient)
        if merged is None:
            return
        for group in self.param_groups:
            rule, lr = self._rule_of(group), float(group["lr"])
            for p in group["params"]:
                if p.requires_grad:
                    state, ops = self._state_of(p, rule), OPS(str(p.device))
                    given, taken = (flat(p), flat(merged[self._names[p]])), state.pop("step")
                    if frozen:
                        new = rule.frozen_step(ops, *given, state, lr, taken + 1, out=given)
                    else:
                        new = rule.step(ops, *given, state, lr, taken + 1)
                    self._update(p, taken, *new)
            group["step"] += 1
        self.grace.rollback.release()
        if not frozen:
            self._look()

    def _momentum(self, p: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        """Return the common momentum with the gradient of this rank added."""
        rule = self._rule_of(group)
        state, gradient = self._state_of(p, rule), flat(self._gradient(p, group))
        return cast(torch.Tensor, rule.momentum(OPS(str(p.device)), flat(p), gradient, state)).view(p.shape)

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
                group["freeze_step"] = number if is_settled(first["norm"], norm) else None
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
            tell_frozen(type(self).__name__, number)


class OneBitAdam(OneBit):
    """1-bit Adam: Adam on exchanged gradients at first, and then on momenta of one bit per element.

    During the warm-up, the gradients of all ranks are averaged as they are, and steps are those of `torch.optim.Adam`.
    Then the second moment is frozen, and the ranks exchange momenta by the configuration, by default one bit per
    element in both directions with error feedback at both ends: `efsignsgd` over `two_shot`. `config` and `options` are
    as for `DistributedOptimizer`, and take any method. The memory must hold no momentum.

    The warm-up has `freeze_step` steps, or 20 % of `total_steps`. With neither, it ends by the rule of the paper: as
    soon as the sum of the second moments has changed by less than 4 % in 1 / (1 - beta2) steps, so after some thousands
    of them. It should be longer than the warm-up of the learning rate. Parameters whose second moment is zero at its
    end, such as rows of an embedding for words that did not occur, keep their values.

    Momenta are divided by sqrt(v) + eps before they are exchanged, and limited to the quotients that Adam has at most,
    so that one scale per tensor fits all of its elements. With `scaled` false, they are exchanged as they are, as in
    the paper. Steps then have any length where v is small.

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

    rule = adam.Adam


class OneBitLamb(OneBit):
    """1-bit LAMB: LAMB on exchanged gradients at first, and then on momenta of one bit per element.

    The warm-up, the exchange and the other arguments are those of `OneBitAdam`. During the warm-up, steps are those of
    `Lamb` with the mean gradients. Then the second moment is frozen, and with it the moving average of the ratios
    |w| / |u| of each tensor, with `coeff_beta`. That average is scaled by how far the second moment of now is from the
    frozen one: by `factor_min` to `factor_max`, and by at most the share `factor_threshold` more or less than in the
    last step. The second moment of now is computed of successive momenta.

    Reference: Li et al., "1-bit LAMB: communication efficient large-scale large-batch training with LAMB's convergence
    speed", HiPC 2022, Algorithm 1.
    """

    rule = lamb.OneBitLamb
