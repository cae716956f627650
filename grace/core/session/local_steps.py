"""Local steps: each rank steps on its own, and every few steps the ranks exchange the change of their weights.

Each rank sends d = (weights after the last exchange - weights now), compressed with error feedback. All ranks then set
their weights to (weights after the last exchange - mean of the decoded d). The residual is in units of the weights.
Momentum stays local. Basu et al., "Qsparse-local-SGD", NeurIPS 2019, Algorithm 1.
"""

from __future__ import annotations

from grace.core.config.config import Config
from grace.core.errors import ConfigError


def check_local_steps(
    config: Config, local_steps: int, where: str, *, average: bool, passes: int, factor: float
) -> None:
    """Raise ConfigError if an argument cannot be combined with local steps.

    `passes` is `backward_passes_per_step` and `factor` is `gradient_predivide_factor`.
    """
    if local_steps < 1:
        raise ConfigError(f"{where}: local_steps must be at least 1, received {local_steps!r}.")
    if not average:
        raise ConfigError(
            f"{where}: local_steps averages the change of the weights and needs the mean as op, received a sum; "
            "leave op out."
        )
    if passes != 1 or factor != 1.0:
        raise ConfigError(
            f"{where}: with local_steps no gradients are exchanged, so backward_passes_per_step and "
            "gradient_predivide_factor have no effect; leave them out. To accumulate gradients, call step() after "
            "several backward passes."
        )
    needing = [stage.method.memory for _, stage in config.stages if "lr" in stage.method.memory.needs]
    if needing:
        raise ConfigError(
            f"{where}: with local_steps the residual already includes the learning rate, and {needing[0]} would "
            "correct it for the learning rate again; leave lr_correction out."
        )
