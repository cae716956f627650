"""`Compression`: what the callbacks of all trainers do."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grace.core.config.config import Config
from grace.core.errors import GraceWarning, StateError
from grace.core.session.outer_setup import check_references
from grace.core.state.checks import check_mapping, show
from grace.torch.exchange import Exchange
from grace.torch.register import register

Configuration = Config | Mapping[str, Any] | str | os.PathLike[str] | None
_KINDS = ("memory", "compressor")


class Compression:
    """The exchange of the model that a trainer trains, and its state in the trainer's checkpoints.

    `config` and `options` are as for `grace.torch.register`.

    A trainer that saves a folder has a file per rank in it, by `save` and `load`. One that saves a single file has the
    states of all ranks in it, by `state_dict` and `load_state_dict`.
    """

    #: What `grace.torch.register` has returned for the model. None before, and with one rank, which exchanges nothing.
    exchange: Exchange | None = None

    def __init__(self, config: Configuration = None, **options: Any) -> None:
        self._config, self._options = config, options
        # The model that was registered last.
        self._model: torch.nn.Module | None = None
        # What was loaded before the model is registered: the states of all ranks, or this rank's own, or an empty list.
        self._waiting: Any = None

    def register(self, model: torch.nn.Module, *, grad_scaler: torch.amp.GradScaler | None = None) -> bool:
        """Register a model that the trainer has wrapped, and load what waits for it; return False if this was done.

        With one rank, warns and does nothing else. Raises the errors of `grace.torch.register` and of
        `Exchange.load_state_dict`.
        """
        if model is self._model:
            return False
        self._model, self.exchange = model, None
        if not dist.is_initialized() or dist.get_world_size() == 1:
            self._warn("there is one rank, so grace compresses nothing. Start several, for instance by torchrun.")
        else:
            self.exchange = register(model, self._config, grad_scaler=grad_scaler, **self._options)
            # Trainers compute one gradient of a batch.
            self.exchange.takes_references = False
            check_references(self.exchange.config, "grace.torch.trainers", self.exchange.takes_references)
        if self._waiting is not None:
            self._load(self._waiting)
        return True

    def scalars(self) -> dict[str, float]:
        """Return the scalars of the exchange for a logger; none if nothing is exchanged."""
        return {} if self.exchange is None else self.exchange.scalars()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on rank 0, in host memory, and an empty dictionary on the others.

        All ranks must call it. The dictionary is empty on rank 0 as well if nothing is exchanged.
        """
        if self.exchange is None:
            return {}
        mine = self.exchange.state_dict()
        states = _gather({**mine, "tensors": {}})
        # One unit at a time, because a GPU may not have the memory for the states of all ranks.
        names = self.exchange.everyone(list(mine["tensors"]), "units", "the states of a checkpoint")
        for unit in sorted({name for each in names for name in each}):
            entries = _gather(_on_host(mine["tensors"].get(unit)))
            for state, entry in zip(states, entries, strict=True):
                if entry is not None:
                    state["tensors"][unit] = entry
        return {"ranks": states} if states else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` has returned on rank 0, from any number of ranks, now or when the model is registered.

        Warns if the state is empty. Raises the errors of `Exchange.load_state_dict`.
        """
        states = check_mapping(state, "the state of grace").get("ranks") if state else []
        if not isinstance(states, list):
            raise StateError(
                f"checkpoint, ranks: expected a list with one state per rank, received {show(states)}; load what a "
                "callback of grace has saved."
            )
        self._load(states)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the state of this rank into the folder of a checkpoint; all ranks must call it."""
        if self.exchange is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            saved = {"ranks": dist.get_world_size(), "grace": self.exchange.state_dict()}
            torch.save(saved, _file(folder, dist.get_rank()))

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Load the files of a checkpoint, from any number of ranks, now or when the model is registered.

        Reads the own file if as many ranks have saved, else those of all. Warns if there is none. Raises StateError if
        a file is missing or damaged, and the errors of `Exchange.load_state_dict`.
        """
        present = sorted(Path(folder).glob(_file("", "*").name), key=lambda file: int(file.stem.rpartition("-")[2]))
        if not present:
            self._load([])
            return
        # On every node it is the same run that decides, also if an earlier one has left more files.
        ranks = int(_read(present[0])["ranks"])
        one = dist.is_initialized() and dist.get_world_size() == ranks
        wanted = [dist.get_rank()] if one else range(ranks)
        states = [_read(_file(folder, rank))["grace"] for rank in wanted]
        self._load(states[0] if one else states)

    def _load(self, states: Any) -> None:
        if self._model is None:
            self._waiting = states
            return
        self._waiting = None
        if self.exchange is None:
            if states:
                self._warn("what the ranks held back that saved the checkpoint is lost, because there is one rank.")
        elif states:
            self.exchange.load_state_dict(states)
        else:
            self._warn("the checkpoint contains no state of grace: residuals start from zero")

    def _warn(self, text: str) -> None:
        warnings.warn(text, GraceWarning, stacklevel=3)


def _file(folder: str | os.PathLike[str], rank: int | str) -> Path:
    """Return the file of a rank in the folder of a checkpoint."""
    return Path(folder) / f"grace-rank-{rank}.pt"


def _read(file: Path) -> Mapping[str, Any]:
    """Return what a file contains. Raises StateError if it is missing or damaged."""
    try:
        saved = torch.load(file, map_location="cpu")
        return {"ranks": int(saved["ranks"]), "grace": saved["grace"]}
    except Exception as error:
        raise StateError(
            f"checkpoint {file}: expected the state of a rank, received {type(error).__name__}: {error}. Every rank "
            "reads its own file, and with another number of ranks those of all; make them available to it."
        ) from error


def _gather(value: Any) -> list[Any]:
    """Return the values of all ranks on rank 0, and nothing on the others."""
    values: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(value, values or None)
    return values


def _on_host(entry: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the states of a unit with all arrays in host memory."""
    if entry is None:
        return None
    return {**entry, **{kind: {key: x.cpu() for key, x in entry[kind].items()} for kind in _KINDS}}
