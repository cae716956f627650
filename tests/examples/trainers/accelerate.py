"""The run of Accelerate."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import grace
from tests.examples.resumed_trainer import ACCUMULATED, BATCH, CONFIG, SAVED, STEPS, Classifier, Images, Run


def train(folder: Path, resume: bool) -> Run:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATED)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    loader = DataLoader(Images(), BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    compression = grace.torch.trainers.accelerate.register(accelerator, model, CONFIG)
    began, step = None, 0
    if resume:
        accelerator.load_state(folder / "checkpoint")
        step = SAVED
    if compression.exchange is not None:
        began = compression.exchange.state_dict()
    logged: set[str] = set()
    while step < STEPS:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            step += accelerator.sync_gradients
            logged |= compression.scalars().keys()
        if step == SAVED and not resume:
            accelerator.save_state(folder / "checkpoint")
    return Run([p.detach().clone() for p in model.parameters()], compression.exchange, began, list(logged))
