"""Hugging Face's Trainer: a callback that compresses gradients."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import transformers
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from grace.torch.exchange import Exchange
from grace.torch.trainers.compression import Compression, Configuration


class GraceCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """A callback that compresses the gradients of a `transformers.Trainer`, keeps its state and logs scalars.

    `config` and `options` are as for `grace.torch.register`. The model is registered when training begins, after the
    Trainer has wrapped it. Every checkpoint then has a file of each rank, which `train(resume_from_checkpoint=...)`
    loads. The scalars are logged with the loss, every `logging_steps`.

        trainer.add_callback(GraceCallback(trainer, {"compressor": "qsgd"}))

    With one rank there is a GraceWarning, and training goes on without compression. `train` raises the errors of
    `register`.
    """

    def __init__(self, trainer: transformers.Trainer, config: Configuration = None, **options: Any) -> None:
        self._trainer, self._compression = trainer, Compression(config, **options)
        # Where the run continues from; no callback gets it.
        self._checkpoint: str | None = None
        train = trainer.train

        @functools.wraps(train)
        def train_from(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
            given = resume_from_checkpoint
            self._checkpoint = get_last_checkpoint(trainer.args.output_dir) if given is True else given or None
            return train(resume_from_checkpoint, *args, **kwargs)

        trainer.train = train_from

    @property
    def exchange(self) -> Exchange | None:
        """The exchange of the model; None before training begins, and with one rank."""
        return self._compression.exchange

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Register the model, unless it was trained before; load the state of a checkpoint."""
        self._compression.register(self._trainer.model_wrapped, grad_scaler=self._trainer.accelerator.scaler)
        if self._checkpoint:
            self._compression.load(self._checkpoint)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Save the state of this rank in the Trainer's checkpoint, from which nobody resumes a search."""
        if not state.is_hyper_param_search:
            self._compression.save(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **others: Any) -> None:
        """Log the scalars after the loss of a step."""
        scalars = self._compression.scalars() if logs and "loss" in logs else {}
        if scalars:
            self._trainer.log(scalars)
