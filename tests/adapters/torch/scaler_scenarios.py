"""Scenarios about a GradScaler together with wrappers, run by each rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.adapters.torch.launched import my_rank
from tests.adapters.torch.model import batches, digest, flat, make_net, wrap
from tests.adapters.torch.usage_scenarios import Wrapper
from tests.support.cases import LAYERS


def scaled_inside_a_wrapper() -> dict[str, Any]:
    """Train with a GradScaler, with the optimizer inside a wrapper or not, of which the scaler gets one or the other.

    The second step overflows on one rank. Return the weights, a residual and the scales of each way.
    """
    results = {}
    for name, inside, given in (("plain", False, False), ("inside", True, False), ("wrapper", True, True)):
        model, scaler = make_net(), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        config = {"compressor": "topk", "compress_ratio": 0.1, **LAYERS}
        raw = wrap(model, config, grad_scaler=scaler)
        optimizer = Wrapper(raw) if inside else raw
        scales = []
        for i, (x, y) in enumerate(batches(4, my_rank())):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss * (float("inf") if i == 1 and my_rank() == 0 else 1.0)).backward()
            scaler.unscale_(optimizer if given else raw)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer if given else raw)
            scaler.update()
            scales.append(scaler.get_scale())
        state = raw.grace.run.state_dict()["tensors"]["left.weight"]
        results[name] = [digest(model.parameters()), flat(state), scales]
    return results
