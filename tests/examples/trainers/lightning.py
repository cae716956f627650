"""The run of Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

import grace
from tests.examples.resumed_trainer import ACCUMULATED, BATCH, CONFIG, RANKS, Classifier, Images, Run


class Watch(lightning.Callback):
    """Keeps the state of the exchange before the first step, and the weights after the last one."""

    def __init__(self, callback: Any) -> None:
        self.callback, self.began, self.weights = callback, None, []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.began is None and self.callback.exchange is not None:
            self.began = self.callback.exchange.state_dict()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights = [p.detach().clone() for p in pl_module.parameters()]


class Module(lightning.LightningModule):
    """The network in Lightning's form, with data that need the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Classifier()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.network(**batch)["loss"]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.network(**batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Images(), BATCH, shuffle=True)

    val_dataloader = train_dataloader


def train(folder: Path, resume: bool) -> Run:
    model = Module()
    callback = grace.torch.trainers.lightning.GraceCallback(CONFIG)
    watch = Watch(callback)
    logger = CSVLogger(folder, name="again" if resume else "whole")
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=RANKS,
        max_epochs=3,
        accumulate_grad_batches=ACCUMULATED,
        precision="bf16-mixed",
        log_every_n_steps=2,
        logger=logger,
        callbacks=[
            callback,
            watch,
            ModelCheckpoint(folder, "{epoch}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True),
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, ckpt_path=folder / "epoch=1.ckpt" if resume else None)
    if dist.is_initialized():
        dist.barrier()
    metrics = Path(logger.log_dir) / "metrics.csv"
    logged = metrics.read_text().splitlines()[0].split(",") if metrics.exists() else []
    return Run(watch.weights, callback.exchange, watch.began, logged)
