"""Lightning: a callback that compresses gradients."""

from __future__ import annotations

from typing import Any

import lightning

from grace.torch.exchange import Exchange
from grace.torch.trainers.compression import Compression, Configuration

_KEY = "grace"


class GraceCallback(lightning.Callback):  # type: ignore[misc]
    """A callback that compresses the gradients of a `lightning.Trainer`, keeps its state and logs scalars.

    `config` and `options` are as for `grace.torch.register`. The model is registered when `fit` begins, after the
    strategy has wrapped it. Every checkpoint then has the states of all ranks, which rank 0 gathers and
    `fit(ckpt_path=...)` loads. The scalars are logged every `log_every_n_steps`.

        lightning.Trainer(strategy="ddp", devices=2, callbacks=[GraceCallback({"compressor": "qsgd"})])

    Each `fit` makes a new model in DDP, a new optimizer and a new exchange, whose residuals start from zero. With one
    rank there is a GraceWarning, and training goes on without compression. `fit` raises the errors of `register`.
    """

    def __init__(self, config: Configuration = None, **options: Any) -> None:
        self._config, self._options = config, options
        self._compression = Compression(config, **options)

    @property
    def exchange(self) -> Exchange | None:
        """The exchange of the model; None before `fit` begins, and with one rank."""
        return self._compression.exchange

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Forget an earlier `fit`, before a checkpoint is loaded."""
        if stage == "fit":
            self._compression = Compression(self._config, **self._options)

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Register the model and load the state of a checkpoint."""
        # There is one with precision="16-mixed".
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._compression.register(trainer.strategy.model, grad_scaler=scaler)

    def on_save_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Put the states of all ranks into the checkpoint that rank 0 writes."""
        checkpoint[_KEY] = self._compression.state_dict()

    def on_load_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Load this rank's state from a checkpoint of which training continues."""
        if trainer.state.fn == "fit":
            self._compression.load_state_dict(checkpoint.get(_KEY, {}))

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the scalars of the step."""
        if trainer.loggers and trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log_dict(self._compression.scalars())
