"""Scenarios about torch.distributed.checkpoint, and about other numbers of ranks, run by each of four ranks."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from grace.core.errors import StateError
from grace.torch.distributed import ExchangeState
from tests.adapters.torch.launched import GROUPS, Group, everyone
from tests.adapters.torch.model import Net, digest, make_net, train, wrap
from tests.support.cases import EVERYTHING

CONFIG = {"compressor": "topk", "compress_ratio": 0.1, "communicator": "two_shot", **EVERYTHING}


def distributed_checkpoint() -> dict[str, Any]:
    """Save on all ranks and on two, and load on as many, on fewer and on more, with the steps that follow."""
    results: dict[str, Any] = {}
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    path = Path(folder[0])
    pair = GROUPS[0]
    for name, before, after in (
        ("4 to 4", everyone(), everyone()),
        ("4 to 2", everyone(), pair),
        ("4 to 3", everyone(), GROUPS[2]),
        ("2 to 4", pair, everyone()),
    ):
        if before.included:
            model, optimizer = begun(before, 0)
            parts = {"model": model.state_dict(), "app": {"grace": ExchangeState(optimizer.grace).state_dict()}}
            dcp.save(parts, checkpoint_id=path / name, process_group=before.argument.get("process_group"))
        everything: list[Any] = [None] * 4
        dist.all_gather_object(everything, optimizer.state_dict() if before.included else None)
        saved = [state for state in everything if state is not None]
        if after.included:
            results[name] = loaded(after, path / name, saved)
        if before.included and name == "4 to 4":
            results[name]["went on"] = went_on(model, optimizer)
    reader = dcp.FileSystemReader(path / "4 to 4")
    try:
        ExchangeState(optimizer_of(everyone()).grace, reader).state_dict()
    except StateError as error:
        results["elsewhere"] = str(error)
    return results


def optimizer_of(group: Group) -> Any:
    return wrap(make_net(), CONFIG, **group.argument)


def begun(group: Group, seed: int) -> tuple[Net, Any]:
    model = make_net(seed)
    optimizer = wrap(model, CONFIG, **group.argument)
    train(model, optimizer, 3)
    return model, optimizer


def went_on(model: Net, optimizer: Any) -> str:
    train(model, optimizer, 2, start=3)
    return digest(model.parameters())


def loaded(group: Group, path: Path, saved: list[dict[str, Any]]) -> dict[str, Any]:
    """Load a checkpoint, and the same states as a list; compare them and what the ranks hold."""
    process_group = group.argument.get("process_group")
    models, ends, states = [make_net(1), make_net(1)], [], []
    for model, way in zip(models, ("dcp", "list"), strict=True):
        optimizer = wrap(model, CONFIG, **group.argument)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            # A copy, because PyTorch's optimizers change the momentum that they load.
            optimizer.load_state_dict(copy.deepcopy(saved[::-1]))
            if way == "dcp":
                optimizer.grace.run.reset()
                state = ExchangeState(optimizer.grace, path, key="app.grace")
                parts = {"model": model.state_dict(), "app": {"grace": state.state_dict()}}
                dcp.load(parts, checkpoint_id=path, process_group=process_group)
                state.load_state_dict(parts["app"]["grace"])
                models[1].load_state_dict(model.state_dict())
        states.append(optimizer.state_dict()["grace"])
        ends.append(went_on(model, optimizer))
    same = states[0].keys() == states[1].keys() and all(
        torch.equal(x, states[1]["tensors"][name]["memory"][key])
        for name, entry in states[0]["tensors"].items()
        for key, x in entry["memory"].items()
    )
    mine: list[Any] = [None] * len(group.ranks)
    dist.all_gather_object(mine, states[0], group=process_group)
    return {
        "same": same,
        "ends": ends,
        "held": [held([state["grace"] for state in saved]), held(mine)],
        "step": states[0]["step"],
    }


def held(states: Sequence[dict[str, Any]]) -> float:
    """Return the sum of what the ranks hold back of the mean, also as owners of shards."""
    return sum(
        float(entry["memory"]["residual"].double().sum()) / (1 if name.startswith("mean of ") else len(states))
        for state in states
        for name, entry in state["tensors"].items()
        if "residual" in entry["memory"]
    )
