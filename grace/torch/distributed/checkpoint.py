"""`ExchangeState`: the state of an exchange in a checkpoint of torch.distributed.checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, StorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from grace.core.errors import StateError
from grace.torch.exchange import Exchange

# All but the arrays, as JSON.
_HEAD = "head"
# The key there of what stands for an array: its place in the checkpoint.
_ARRAY = "array at"


class ExchangeState:
    """The state of an exchange as a `Stateful`: every key names the rank, because what ranks hold differs.

    With replicas of a sharded model, it also names the part that the rank holds. The ranks of another process group
    need another place in the checkpoint.

    To save, pass the exchange: `grace.torch.register` returns one, and a wrapped optimizer has it as `optimizer.grace`.
    To load, pass the checkpoint as well, as a path or a storage reader: its metadata tell how many ranks saved it. As
    many ranks load their own states, bit for bit; others load all, as `Exchange.load_state_dict` does with a list.
    `key` is the place of this object in the checkpoint, with dots between the keys of nested dictionaries.

        dcp.save({"grace": ExchangeState(exchange)}, checkpoint_id=path)
        dcp.load({"grace": ExchangeState(exchange, path)}, checkpoint_id=path)

    Load the own state of a wrapped optimizer before, because residuals then start from zero.
    """

    def __init__(
        self,
        exchange: Exchange,
        checkpoint: str | os.PathLike[str] | StorageReader | None = None,
        *,
        key: str = "grace",
    ) -> None:
        self._exchange, self._key = exchange, key
        self._reader = FileSystemReader(checkpoint) if isinstance(checkpoint, str | os.PathLike) else checkpoint

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state of this rank; before a load, tensors to read into.

        Raises StateError if the checkpoint has no state of an exchange at the key.
        """
        if self._reader is not None:
            return self._empty(self._reader)
        place, arrays = self._place, dict[str, torch.Tensor]()
        text = json.dumps(_without_arrays(self._exchange.state_dict(), place, arrays)).encode()
        return {f"{place}/{_HEAD}": torch.frombuffer(bytearray(text), dtype=torch.uint8), **arrays}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Load what was read; afterwards this is the state of the exchange again.

        Raises the errors of `Exchange.load_state_dict`.
        """
        self._reader = None
        places = [name.removesuffix(f"/{_HEAD}") for name in state_dict if name.endswith(f"/{_HEAD}")]
        states = [_nest(state_dict, place) for place in places]
        self._exchange.load_state_dict(states[0] if places == [self._place] else states)

    @property
    def _part(self) -> str:
        """The start of the keys of all ranks that hold the same part of the model."""
        part = self._exchange.part
        return "rank " if part is None else f"part {part[0]} of {part[1]}, rank "

    @property
    def _place(self) -> str:
        return f"{self._part}{self._exchange.rank} of {self._exchange.size}"

    def _empty(self, reader: StorageReader) -> dict[str, torch.Tensor]:
        """Return tensors for the state of this rank if as many ranks have saved one, else for those of all ranks.

        With replicas, these are all ranks that hold this rank's part, or if the parts were others, all that there are.
        """
        start = f"{self._key}."
        saved = {
            name.removeprefix(start): torch.empty(found.size, dtype=found.properties.dtype)
            for name, found in reader.read_metadata().state_dict_metadata.items()
            if name.startswith((f"{start}rank ", f"{start}part ")) and isinstance(found, TensorStorageMetadata)
        }
        if not saved:
            raise StateError(
                f"checkpoint: expected the state of an exchange at the key '{self._key}', received none; save it by "
                "grace.torch.distributed.ExchangeState, and name its place by the argument 'key'."
            )
        for begin in (f"{self._place}/", self._part):
            chosen = {name: x for name, x in saved.items() if name.startswith(begin)}
            if chosen:
                return chosen
        return saved


def _without_arrays(x: Any, place: str, arrays: dict[str, torch.Tensor]) -> Any:
    """Return a nested dictionary whose arrays are replaced by their places, and collect the arrays by these."""
    if isinstance(x, torch.Tensor):
        arrays[place] = x
        return {_ARRAY: place}
    if isinstance(x, Mapping):
        return {key: _without_arrays(value, f"{place}/{key}", arrays) for key, value in x.items()}
    return x


def _with_arrays(x: Any, arrays: Mapping[str, torch.Tensor]) -> Any:
    """Return what `_without_arrays` was given."""
    if not isinstance(x, dict):
        return x
    if set(x) == {_ARRAY}:
        return arrays[x[_ARRAY]]
    return {key: _with_arrays(value, arrays) for key, value in x.items()}


def _nest(read: Mapping[str, torch.Tensor], place: str) -> dict[str, Any]:
    """Return the state of an exchange from what was read of it."""
    try:
        state = _with_arrays(json.loads(bytes(read[f"{place}/{_HEAD}"].tolist())), read)
        return dict(state)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StateError(
            f"checkpoint, {place}: expected the state of an exchange, received something else ({error!r}). The "
            "checkpoint is damaged; load another one."
        ) from error
