"""Callbacks for `model.fit` on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import horovod.tensorflow as hvd

from grace.core.config.schedule import as_changes
from grace.core.errors import ConfigError, MismatchError
from grace.core.guards.agreement import Handshake
from grace.core.transport.transport import TIMEOUT
from grace.tensorflow.exchange import Exchange
from grace.tensorflow.transport import broadcast
from grace.tensorflow.typed import Callback
from grace.tensorflow.waiting import gather


def _gather(callback: Any, purpose: str) -> Callable[[Any], list[Any]]:
    """Return the function that gathers the values of all ranks, with the time limit of the model's exchange."""
    exchange: Exchange | None = getattr(callback.model.optimizer, "grace", None)
    timeout = TIMEOUT if exchange is None else exchange.timeout
    return gather(callback.process_set, purpose, type(callback).__name__, timeout)


def _exchange_of(callback: Callback) -> Exchange:
    """Return the exchange of the model's optimizer. Raises ConfigError if there is none."""
    exchange: Exchange | None = getattr(callback.model.optimizer, "grace", None)
    if exchange is None:
        raise ConfigError(
            f"{type(callback).__name__}: expected a model whose optimizer compresses, received a plain optimizer; "
            "wrap it with grace.tensorflow.DistributedOptimizer before model.compile()."
        )
    return exchange


class BroadcastGlobalVariablesCallback(Callback):
    """A callback that broadcasts the root's weights and optimizer state to all ranks before the first batch.

    If the first batch builds the model (a Sequential without Input, a subclassed Model), it broadcasts after that
    batch. It does not change residuals, which differ between ranks, or the random seeds of layers and metrics. Raises
    MismatchError on every rank if the ranks have different variables.
    """

    def __init__(self, root_rank: int = 0, process_set: Any = hvd.global_process_set) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.process_set = process_set

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcast if the model is built."""
        self._done = all(layer.built for layer in self.model._flatten_layers())
        if self._done:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Broadcast after the first batch if it has built the model."""
        if not self._done:
            self._done = True
            self._broadcast()

    def _broadcast(self) -> None:
        optimizer = self.model.optimizer
        exchange: Exchange | None = getattr(optimizer, "grace", None)
        # The broadcast itself has no time limit.
        with Handshake(_gather(self, "broadcast"), type(self).__name__) as handshake:
            if not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            mine = {id(variable) for variable in exchange.of_this_rank} if exchange else set()
            variables = [v.value for v in (*self.model.weights, *optimizer.variables) if id(v.value) not in mine]
            handshake.local.update({f"variable {i}": [list(v.shape), v.dtype.name] for i, v in enumerate(variables)})
        broadcast(variables, self.root_rank, self.process_set)


class MetricAverageCallback(Callback):
    """A callback that replaces the metrics of an epoch by their mean over all ranks.

    Put it before ReduceLROnPlateau, EarlyStopping, ModelCheckpoint and TensorBoard in the list of callbacks. Then they
    see the mean and make the same decision on all ranks. Raises MismatchError on every rank if the ranks have different
    metrics.
    """

    def __init__(self, process_set: Any = hvd.global_process_set) -> None:
        super().__init__()
        self.process_set = process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the metrics in `logs` by their mean over all ranks."""
        if logs is None:
            return
        everyone = _gather(self, "metrics")({name: float(value) for name, value in logs.items()})
        different = sorted({name for other in everyone for name in set(other) ^ set(everyone[0])})
        if different:
            raise MismatchError(
                f"expected the same metrics on all ranks, but only some ranks have {', '.join(different)}; "
                "compile the same metrics on every rank, and pass validation data to every rank or to none."
            )
        for name in logs:
            logs[name] = sum(other[name] for other in everyone) / len(everyone)


class StatisticsCallback(Callback):
    """A callback that adds grace's statistics to the logs of an epoch, for `History`, TensorBoard and CSV files.

    They are those of `Exchange.scalars`, with names such as `grace_wire_bytes`. Each is the mean over the steps after
    which Keras calls the callback (every `steps_per_execution`-th step). Put it before TensorBoard in the list of
    callbacks. Raises ConfigError for an optimizer without grace.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Find the exchange of the model's optimizer."""
        self._exchange = _exchange_of(self)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Forget the steps of the last epoch."""
        self._steps: dict[str, list[float]] = {}

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Note the statistics of the step."""
        for name, value in self._exchange.scalars().items():
            # Keras names metrics like variables.
            self._steps.setdefault(name.replace("/", "_"), []).append(value)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the statistics to `logs`."""
        if logs is not None:
            logs |= {name: sum(values) / len(values) for name, values in self._steps.items()}


class ScheduleCallback(Callback):
    """A callback that changes the options or the method of the compression at the start of epochs. Residuals are kept.

    `schedule(epoch)` returns the settings from this epoch on: a dictionary such as {"compress_ratio": 0.01}, a number
    (the compress_ratio), or None for no change. It must return the same on all ranks. A change traces the train
    function again; a `schedule` or `warmup_steps` in the configuration does not. Raises the errors of
    `Exchange.change`, and ConfigError for an optimizer without grace.
    """

    def __init__(self, schedule: Callable[[int], Mapping[str, Any] | float | None]) -> None:
        super().__init__()
        self.schedule = schedule
        self._last: Mapping[str, Any] = {}

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Apply the schedule's change for the epoch."""
        exchange = _exchange_of(self)
        changes = as_changes(self.schedule(epoch))
        if changes and changes != self._last:
            self._last = changes
            exchange.change(**changes)
            self.model.make_train_function(force=True)
