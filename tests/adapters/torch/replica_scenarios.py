"""Scenarios about the comparison of replicas, run by each rank."""

from __future__ import annotations

from typing import Any

import torch

from tests.adapters.torch.launched import my_rank, world_size
from tests.adapters.torch.model import digest, make_net, spy, train, wrap
from tests.support.cases import EVERYTHING, LAYERS

EVERY = 2


def _outcome(model: Any, optimizer: Any, steps: int) -> str:
    try:
        train(model, optimizer, steps)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def drifting_replicas() -> dict[str, Any]:
    """Change something on the last rank alone after four steps, and return the errors of four more steps."""
    last, errors = my_rank() == world_size() - 1, {}
    for label, config, options in (
        ("weight", {"compressor": "topk", **EVERYTHING}, {}),
        ("none", {"compressor": "none"}, {}),
        ("local", {"compressor": "topk", **EVERYTHING}, {"local_steps": 2}),
        ("state", {"compressor": "powersgd", **LAYERS}, {}),
        ("svrg", {"compressor": "topk", "memory": "svrg", **LAYERS}, {}),
        ("residual", {"compressor": "topk", **LAYERS}, {}),
        ("off", {"compressor": "topk", **EVERYTHING, "check_replicas": 0}, {}),
    ):
        model = make_net()
        optimizer = wrap(model, {"check_replicas": EVERY, **config}, **options)
        train(model, optimizer, 4)
        if last and label in ("weight", "none", "local", "off"):
            with torch.no_grad():
                model.head.bias[3] += 1e-3
        elif last:
            state = optimizer.grace.run.units["left.weight"]
            kind = "compressor" if label == "state" else "memory"
            next(iter(state[kind].values())).view(-1)[0] += 1
        errors[label] = _outcome(model, optimizer, 4)
    return errors


def compared_replicas() -> dict[str, Any]:
    """Train with and without comparisons and checksums, and compare once more by hand."""
    weights, sent = [], []
    for every, checksum in ((0, False), (EVERY, True)):
        model = make_net()
        config = {"compressor": "topk", "checksum": checksum, **EVERYTHING, "check_replicas": every}
        optimizer = wrap(model, config)
        with spy(optimizer, comparisons=True) as seen:
            train(model, optimizer, 5)
        sent.append([(name.rpartition("/")[2], nbytes) for name, nbytes in seen if "replicas" in name])
        weights.append(digest(model.parameters()))
    optimizer.grace.check_replicas()
    return {"weights": weights, "sent": sent}
