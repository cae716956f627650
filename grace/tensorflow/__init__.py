"""TensorFlow adapter: Keras 3 optimizers and gradient tapes that exchange compressed gradients over Horovod."""

from __future__ import annotations

from grace.tensorflow import optim as optim
from grace.tensorflow import replaced as _replaced  # noqa: F401 - changes Keras' LossScaleOptimizer and Model
from grace.tensorflow.callbacks import (
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
    ScheduleCallback,
    StatisticsCallback,
)
from grace.tensorflow.elastic import KerasState
from grace.tensorflow.exchange import Exchange
from grace.tensorflow.optimizer import DistributedOptimizer
from grace.tensorflow.tape import DistributedGradientTape
from grace.tensorflow.transport import HorovodTransport

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Exchange",
    "HorovodTransport",
    "KerasState",
    "MetricAverageCallback",
    "ScheduleCallback",
    "StatisticsCallback",
]
