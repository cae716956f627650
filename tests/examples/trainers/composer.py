"""The run of Composer."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

# Composer imports torchvision. Where that is built for another PyTorch, its operators are missing, and its import asks
# for the two of them that PyTorch's own library of operators must know. Composer uses neither.
try:
    import torchvision  # noqa: F401
except RuntimeError:
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import composer
from composer.loggers import InMemoryLogger
from torch.utils.data import DataLoader, DistributedSampler

import grace
from tests.examples.resumed_trainer import ACCUMULATED, BATCH, CONFIG, SAVED, STEPS, Classifier, Images, Run


class Watch(composer.Callback):
    """Keeps the state of the exchange before the first step."""

    def __init__(self, callback: Any) -> None:
        self.callback, self.began = callback, None

    def batch_start(self, state: composer.State, logger: composer.Logger) -> None:
        if self.began is None and self.callback.exchange is not None:
            self.began = self.callback.exchange.state_dict()


class Model(composer.ComposerModel):
    """The network in Composer's form."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Classifier()

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self.network(**batch)

    def loss(self, outputs: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return outputs["loss"]


def train(folder: Path, resume: bool, **options: Any) -> Run:
    # Composer's own launcher sets it.
    os.environ.setdefault("NODE_RANK", "0")
    composer.utils.dist.initialize_dist("cpu")
    model, images = Model(), Images()
    sampler: Any = DistributedSampler(images, shuffle=False)
    callback = grace.torch.trainers.composer.GraceCallback(CONFIG)
    watch, logger = Watch(callback), InMemoryLogger()
    trainer = composer.Trainer(
        model=model,
        train_dataloader=DataLoader(images, BATCH * ACCUMULATED, sampler=sampler),
        device_train_microbatch_size=BATCH,
        optimizers=torch.optim.Adam(model.parameters(), 0.01),
        max_duration=f"{STEPS}ba",
        device="cpu",
        save_folder=None if resume else str(folder),
        save_filename="checkpoint-{batch}.pt",
        save_interval=f"{SAVED}ba",
        load_path=str(folder / f"checkpoint-{SAVED}.pt") if resume else None,
        callbacks=[callback, watch],
        loggers=[logger],
        progress_bar=False,
        **options,
    )
    trainer.fit()
    weights = [p.detach().clone() for p in trainer.state.model.parameters()]
    return Run(weights, callback.exchange, watch.began, list(logger.data))


if __name__ == "__main__":
    train(Path(sys.argv[1]), resume=False, ddp_sync_strategy=sys.argv[2])
