"""LAMB and LANS, which leave the exchange of gradients to others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from grace.core.errors import ConfigError, nearest
from grace.core.optim import lamb, lans
from grace.torch.exchange import OPS
from grace.torch.optim.ruled import Parameters, Ruled, flat
from grace.torch.tensors import is_sharded
from grace.torch.typed import no_grad


class _Local(Ruled):
    """Base of both: steps with the gradients as they are."""

    def __init__(self, params: Parameters, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, lr, options, {})
        for name in options:
            raise ConfigError(f"{self._where}: there is no option '{name}'.{nearest(name, self.defaults)}")
        for group in self.param_groups:
            self._check(group)
            if any(is_sharded(p) for p in group["params"]):
                raise ConfigError(
                    f"{self._where}: it needs the norms of whole parameters, received sharded ones (DTensor); use an "
                    "optimizer that acts on elements, such as AdamW."
                )

    @no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rule, lr = self._rule_of(group), float(group["lr"])
            for p in group["params"]:
                if p.grad is not None:
                    state, ops = self._state_of(p, rule), OPS(str(p.device))
                    taken = state.pop("step")
                    self._update(p, taken, *rule.step(ops, flat(p), flat(self._dense(p)), state, lr, taken + 1))
        return loss


class Lamb(_Local):
    """LAMB: Adam whose update of each tensor is as long as a share of the tensor, for large batches.

    The ratio |w| / |u| of each tensor is limited to [`min_coeff`, `max_coeff`]; the other arguments are those of
    `torch.optim.AdamW`. It is an ordinary optimizer: wrap it by `DistributedOptimizer`, or train a model that
    `register` has taken. Raises ConfigError for sharded parameters.

    Reference: You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020,
    Algorithm 2.
    """

    rule = lamb.Lamb


class Lans(_Local):
    """LANS: LAMB on gradients of norm 1 per tensor, with Nesterov's momentum, for large batches.

    The arguments are those of `torch.optim.AdamW`. It is an ordinary optimizer: wrap it by `DistributedOptimizer`, or
    train a model that `register` has taken. With a compressor and the communicator `two_shot`, this is CLAN. Raises
    ConfigError for sharded parameters.

    Reference: Zheng et al., "Accelerated large batch optimization of BERT pretraining in 54 minutes", 2020,
    Algorithm 2; Zhong et al., "Compressed communication for distributed training: adaptive methods and system", 2021.
    """

    rule = lans.Lans
