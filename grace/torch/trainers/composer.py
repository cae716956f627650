"""Composer: a callback that compresses gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import composer

from grace.core.errors import ConfigError
from grace.torch.exchange import Exchange
from grace.torch.trainers.compression import Compression, Configuration


class GraceCallback(composer.Callback):  # type: ignore[misc]
    """A callback that compresses the gradients of a `composer.Trainer` in DDP, keeps its state and logs scalars.

    `config` and `options` are as for `grace.torch.register`. The model is registered when `fit` begins. Every
    checkpoint then has the states of all ranks, which rank 0 gathers and `Trainer(load_path=...)` loads. The scalars
    are logged in every batch.

        composer.Trainer(model=model, train_dataloader=loader, callbacks=[GraceCallback({"compressor": "qsgd"})])

    With one rank there is a GraceWarning, and training goes on without compression. `fit` raises the errors of
    `register`, and ConfigError with `ddp_sync_strategy="forced_sync"`, which leaves DDP out of the exchange, and with
    `precision="amp_fp16"`.
    """

    def __init__(self, config: Configuration = None, **options: Any) -> None:
        self._compression = Compression(config, **options)
        # True as soon as a checkpoint had a state of this callback.
        self._loaded = False
        # The step of the exchange when the batch began.
        self._before = 0

    @property
    def exchange(self) -> Exchange | None:
        """The exchange of the model; None before `fit` begins, and with one rank."""
        return self._compression.exchange

    def fit_start(self, state: composer.State, logger: composer.Logger) -> None:
        """Register the model, unless it was trained before."""
        if state.precision is composer.core.Precision.AMP_FP16:
            raise ConfigError(
                "grace.torch.trainers.composer: precision 'amp_fp16' scales the loss, and was never tried with grace; "
                "use 'amp_bf16' or 'fp32'."
            )
        first = self._compression.register(state.model)
        if first and not self._loaded and int(state.timestamp.batch):
            self._compression.load_state_dict({})

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on rank 0, which writes the checkpoint."""
        return self._compression.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` has returned."""
        self._loaded = True
        self._compression.load_state_dict(state)

    def before_train_batch(self, state: composer.State, logger: composer.Logger) -> None:
        """Take note of the step."""
        if self.exchange is not None:
            self._before = int(self.exchange.run.step)

    def after_train_batch(self, state: composer.State, logger: composer.Logger) -> None:
        """Refuse gradients that the exchange has not seen; log the scalars of the step."""
        if self.exchange is None:
            return
        # Without it, an algorithm computes the batch again.
        final = getattr(state.model, "require_backward_grad_sync", True)
        if final and int(self.exchange.run.step) == self._before:
            raise ConfigError(
                "grace.torch.trainers.composer: DDP has not exchanged the gradients of this batch, so grace could not "
                "compress them; leave ddp_sync_strategy='forced_sync' out of composer.Trainer."
            )
        logger.log_metrics(self._compression.scalars())
