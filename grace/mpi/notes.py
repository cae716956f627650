"""Notes between ranks over MPI: a rank that ends, fails or drops a step tells those that may wait for it."""

from __future__ import annotations

import atexit
import sys
from types import TracebackType
from typing import Any

import numpy as np
from mpi4py import MPI

# The errors of other ranks contain notes. Longer ones might have to wait for their receivers.
_NOTE_BYTES = 300
# The error that ends this process, and what informs the other ranks of it.
_ending: list[str] = []
_open: set[Notes] = set()
# Notes under way, whose buffers MPI reads.
_sent: list[Any] = []


class Notes:
    """Short texts from each rank to all others, on a communicator without other messages than collectives."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._received: dict[int, str] = {}
        if not _open and not _ending:
            _tell_the_end()
        _open.add(self)

    def send(self, text: str) -> None:
        """Send a text to all other ranks, without waiting for them."""
        data = np.frombuffer(text.encode()[:_NOTE_BYTES], np.uint8)
        for rank in range(self._comm.Get_size()):
            if rank != self._comm.Get_rank():
                _sent.append((data, self._comm.Isend([data, MPI.BYTE], rank)))

    def received(self) -> dict[int, str]:
        """Return the last text of each rank that has sent one."""
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self._comm.Recv([data, MPI.BYTE], status.Get_source())
            self._received[status.Get_source()] = data.tobytes().decode(errors="replace")
        return self._received

    def close(self) -> None:
        """Send nothing more when this process ends."""
        _open.discard(self)


def _tell_the_end() -> None:
    """Let the end of this process send notes. An error that ends it is part of them."""
    before = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _ending.append(f"has failed with {kind.__name__}: {error}")
        before(kind, error, trace)

    sys.excepthook = note
    # mpi4py finalizes MPI after the functions of atexit.
    atexit.register(_say_goodbye)


def _say_goodbye() -> None:
    if not MPI.Is_finalized():
        for notes in _open:
            notes.send((_ending or ["has ended"])[-1])
