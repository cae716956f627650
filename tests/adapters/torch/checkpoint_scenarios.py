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
from torch.utils._pytree import tree_flatten

from grace.core.errors import StateError
from grace.torch.distributed import ExchangeState
from tests.adapters.torch.launched import GROUPS, Group, everyone
from tests.adapters.torch.model import Net, digest, make_net, train, wrap
from tests.support.cases import EVERYTHING

CONFIG = {"compressor": "topk", "compress_ratio": 0.1, "communicator": "two_shot", **EVERYTHING}
OUTER = {**CONFIG, "outer": {"every": 3, "delay": 2, "lr": 0.7, "momentum": 0.9}}
# The steps before a checkpoint, and those after it. With OUTER, it has residuals of a sync after step 5 and changes
# that arrive after step 8, when all ranks have equal weights.
STEPS = {"plain": (3, 2), "outer": (7, 1)}


def distributed_checkpoint() -> dict[str, Any]:
    """Save on all ranks and on two, and load on as many, on fewer and on more, with the steps that follow."""
    results: dict[str, Any] = {}
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    path = Path(folder[0])
    pair = GROUPS[0]
    for name, before, after, config in (
        ("4 to 4", everyone(), everyone(), CONFIG),
        ("4 to 2", everyone(), pair, CONFIG),
        ("4 to 3", everyone(), GROUPS[2], CONFIG),
        ("2 to 4", pair, everyone(), CONFIG),
        ("4 to 4, outer", everyone(), everyone(), OUTER),
        ("4 to 3, outer", everyone(), GROUPS[2], OUTER),
        ("2 to 4, outer", pair, everyone(), OUTER),
    ):
        if before.included:
            model, optimizer = begun(before, config)
            parts = {"model": model.state_dict(), "app": {"grace": ExchangeState(optimizer.grace).state_dict()}}
            dcp.save(parts, checkpoint_id=path / name, process_group=before.argument.get("process_group"))
        everything: list[Any] = [None] * 4
        dist.all_gather_object(everything, optimizer.state_dict() if before.included else None)
        saved = [state for state in everything if state is not None]
        if after.included:
            results[name] = loaded(after, config, path / name, saved)
        if before.included and name.startswith("4 to 4"):
            results[name]["went on"] = went_on(model, optimizer, config)
    reader = dcp.FileSystemReader(path / "4 to 4")
    try:
        ExchangeState(optimizer_of(everyone()).grace, reader).state_dict()
    except StateError as error:
        results["elsewhere"] = str(error)
    return results


def optimizer_of(group: Group) -> Any:
    return wrap(make_net(), CONFIG, **group.argument)


def begun(group: Group, config: dict[str, Any]) -> tuple[Net, Any]:
    model = make_net(0)
    optimizer = wrap(model, config, **group.argument)
    train(model, optimizer, _steps(config)[0])
    return model, optimizer


def _steps(config: dict[str, Any]) -> tuple[int, int]:
    return STEPS["outer" if "outer" in config else "plain"]


def went_on(model: Net, optimizer: Any, config: dict[str, Any]) -> str:
    before, after = _steps(config)
    train(model, optimizer, after, start=before)
    return digest(model.parameters())


def loaded(group: Group, config: dict[str, Any], path: Path, saved: list[dict[str, Any]]) -> dict[str, Any]:
    """Load a checkpoint, and the same states as a list; compare them and what the ranks hold."""
    process_group = group.argument.get("process_group")
    models, ends, states = [make_net(1), make_net(1)], [], []
    for model, way in zip(models, ("dcp", "list"), strict=True):
        optimizer = wrap(model, config, **group.argument)
        # A copy, because PyTorch's optimizers change the momentum that they load.
        given = copy.deepcopy(saved[::-1])
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            if way == "list":
                optimizer.load_state_dict(given)
            else:
                # It warns that residuals start from zero.
                warnings.simplefilter("ignore", UserWarning)
                optimizer.load_state_dict([{key: x for key, x in one.items() if key != "grace"} for one in given][-1])
                warnings.simplefilter("error", UserWarning)
                state = ExchangeState(optimizer.grace, path, key="app.grace")
                parts = {"model": model.state_dict(), "app": {"grace": state.state_dict()}}
                dcp.load(parts, checkpoint_id=path, process_group=process_group)
                state.load_state_dict(parts["app"]["grace"])
                models[1].load_state_dict(model.state_dict())
        states.append(copy.deepcopy(optimizer.state_dict()["grace"]))
        ends.append(went_on(model, optimizer, config))
    (ours, shape), (theirs, other) = map(tree_flatten, states)
    same = shape == other and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(ours, theirs, strict=True)
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
    """Return the sum of what the ranks hold back of the mean, also as owners of shards, and of what is on its way."""
    residuals = sum(
        float(entry["memory"]["residual"].double().sum()) / (1 if name.startswith("mean of ") else len(states))
        for state in states
        for name, entry in state["tensors"].items()
        if "residual" in entry["memory"]
    )
    pending = [state["outer"]["flight"]["changes"] for state in states if "outer" in state]
    return residuals + sum(float(x.double().sum()) for changes in pending for x in changes.values()) / len(states)
