"""Hugging Face Accelerate: a function that compresses the gradients of a prepared model."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator

from grace.torch.trainers.compression import Compression, Configuration


def register(
    accelerator: Accelerator, model: torch.nn.Module, config: Configuration = None, **options: Any
) -> Compression:
    """Compress the gradients of a model that `accelerator.prepare` has returned; save the state in its checkpoints.

    Call it on all ranks, before the first forward pass. `config` and `options` are as for `grace.torch.register`. The
    scaler of `mixed_precision="fp16"` is taken into account. `accelerator.save_state()` then writes a file of each
    rank, and `accelerator.load_state()` loads it.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        compression = register(accelerator, model, {"compressor": "qsgd"})
        ...
        accelerator.log(compression.scalars(), step=step)

    Returns an object whose attribute `exchange` is that of the model. With one rank it is None, there is a
    GraceWarning, and training goes on without compression. Raises the errors of `grace.torch.register`.
    """
    compression = Compression(config, **options)
    compression.register(model, grad_scaler=accelerator.scaler)
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: compression.save(folder))
    accelerator.register_load_state_pre_hook(lambda models, folder: compression.load(folder))
    return compression
