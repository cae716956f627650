"""Waits with TensorFlow: handshakes end at the time limit, and a thread watches over the steps of graphs."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from grace.core.errors import WaitError
from grace.core.guards.waiting import wait_until
from grace.core.transport.transport import TIMEOUT, gather_objects

# Set when Python exits: a thread inside TensorFlow would then end the process by an abort.
_exiting = threading.Event()
atexit.register(_exiting.set)


def gather(process_set: Any, purpose: str, what: str, timeout: float = TIMEOUT) -> Callable[[Any], list[Any]]:
    """Return a function that gathers the JSON-able values of the ranks of a process set, or of a rank outside of it.

    The function blocks. It raises WaitError after `timeout` seconds; `what` says for what the handshake is. Horovod's
    collective then stays behind on a thread of its own.
    """
    if process_set.process_set_id is None or not process_set.included():
        return lambda mine: [mine]
    name = f"grace.{process_set.process_set_id}.{purpose}".replace(" ", ".")
    rank, size = process_set.rank(), len(process_set.ranks)

    def joined(data: bytes) -> bytes:
        received: Future[bytes] = Future()

        def run() -> None:
            try:
                sent = tf.constant(np.frombuffer(data, np.uint8))
                received.set_result(hvd.allgather(sent, name=name, process_set=process_set).numpy().tobytes())
            except Exception as error:
                received.set_exception(error)

        threading.Thread(target=run, name=name, daemon=True).start()
        text = f"{what} (collective '{name}')"
        wait_until(received.done, lambda: text, rank=rank, size=size, timeout=timeout)
        return received.result()

    return lambda mine: gather_objects(mine, size, joined)


def is_elastic() -> bool:
    """Return whether the launcher runs Horovod in elastic mode."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def elastic_timeout(timeout: float) -> float:
    """Return the time limit in elastic mode, where Horovod itself raises an error about a rank that is gone.

    It does so after Gloo's time-out, and a rank that has ended before could not go on with the others.
    """
    return max(timeout, 2 * float(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS") or 30))


class Watch:
    """A watch over steps in graphs. Nothing can raise an error in a graph that waits, so it ends the process.

    The graph notes the steps that it begins and ends, and a thread reads these notes. A step waits if it has begun and
    not ended, and if the same call of TensorFlow has been running since. After an error in a step, no such call runs.
    `what` says what a step exchanges.
    """

    def __init__(self, rank: int, size: int, timeout: float, what: Callable[[], str]) -> None:
        self._rank, self._size, self._timeout, self._what = rank, size, timeout, what
        with tf.device("CPU:0"):
            self._begun, self._ended = (tf.Variable(0, trainable=False, dtype=tf.int64) for _ in range(2))
        if size > 1:
            threading.Thread(target=_watch, args=(weakref.ref(self),), name="grace watch", daemon=True).start()

    def begin(self, step: tf.Tensor, inputs: list[tf.Tensor]) -> None:
        """Note that a step begins when the inputs exist. It is traced into a graph."""
        with tf.control_dependencies(inputs):
            self._begun.assign(step + 1)

    def end(self, results: list[tf.Tensor]) -> None:
        """Note that the step ends when the results exist. It is traced into a graph."""
        with tf.control_dependencies(results):
            self._ended.assign(self._begun.read_value())

    def under_way(self) -> int | None:
        """Return the number of the step under way, None between steps."""
        begun = int(self._begun.numpy())
        return begun - 1 if begun != int(self._ended.numpy()) else None

    def wait(self, step: int, done: Callable[[], bool]) -> None:
        """Wait for the end of a step, and end the process if that takes too long."""
        try:
            wait_until(
                # This thread must not run on while Python exits.
                lambda: _exiting.is_set() or done(),
                lambda: f"step {step}, {self._what()}",
                rank=self._rank,
                size=self._size,
                timeout=self._timeout,
                pause=_pause,
            )
        except WaitError as error:
            end_process(error)


def _pause(waited: float) -> None:
    _exiting.wait(min(1.0, 0.05 + waited / 20))


def _watch(watched: weakref.ref[Watch]) -> None:
    """Look every second at the steps of an exchange, for as long as it exists."""
    step: int | None = None
    calls: list[FrameType] = []
    while not _exiting.wait(1.0) and (watch := watched()) is not None:
        before, step = step, watch.under_way()
        calls = _running(calls) if step is not None and step == before else []
        if step is not None and calls:
            watch.wait(step, lambda w=watch, s=step, c=calls: w.under_way() != s or not _running(c))  # type: ignore[misc]
        elif step is not None:
            calls = _calls()
        del watch


def _running(calls: list[FrameType]) -> list[FrameType]:
    """Return those of the calls that still run."""
    now = _calls()
    return [call for call in calls if any(call is other for other in now)]


def _calls() -> list[FrameType]:
    """Return the innermost frames of all threads that are inside TensorFlow."""
    place = f"{os.sep}tensorflow{os.sep}python{os.sep}"
    return [frame for frame in sys._current_frames().values() if place in frame.f_code.co_filename]


def end_process(error: WaitError) -> None:
    """Write the error to standard error and end this process with status 1."""
    print(f"{type(error).__module__}.{type(error).__name__}: {error}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)
