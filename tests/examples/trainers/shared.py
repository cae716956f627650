"""A run without a trainer: what the callbacks share, with both kinds of checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from grace.torch.trainers.compression import Compression
from tests.examples.resumed_trainer import BATCH, CONFIG, SAVED, STEPS, Classifier, Images, Run


def train(folder: Path, resume: bool) -> Run:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    plain, images = Classifier(), Images()
    compression = Compression(CONFIG)
    saved = torch.load(folder / "plain.pt") if resume else None
    if saved:
        plain.load_state_dict(saved["model"])
        # It waits for the model.
        compression.load_state_dict(torch.load(folder / "all.pt"))
    model = DistributedDataParallel(plain)
    compression.register(model)
    compression.register(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
    began = None if compression.exchange is None else compression.exchange.state_dict()
    if saved:
        compression.load(folder)
    logged: set[str] = set()
    loader = DataLoader(images, BATCH, sampler=DistributedSampler(images, shuffle=False))
    step = SAVED if resume else 0
    while step < STEPS:
        for batch in loader:
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
            logged |= compression.scalars().keys()
            step += 1
            if step == SAVED and not resume:
                compression.save(folder)
                state = compression.state_dict()
                if dist.get_rank() == 0:
                    torch.save({"model": plain.state_dict(), "optimizer": optimizer.state_dict()}, folder / "plain.pt")
                    torch.save(state, folder / "all.pt")
                dist.barrier()
            if step == STEPS:
                break
    return Run([p.detach().clone() for p in model.parameters()], compression.exchange, began, list(logged))
