"""A task of the study, and one run of it."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol, TypeVar

from grace.core.config.recommended import Optimizer
from grace.core.errors import ConfigError, nearest
from grace.core.spec import Array

T = TypeVar("T", bound="type[Task]")

# The module of `grace.report.tasks` that registers a task. Names must be known before PyTorch is imported.
MODULES = {
    "mf": "factorization",
    "mf_adam": "factorization",
    "cnn": "vision",
    "resnet": "vision",
    "transformer": "language",
    "lstm": "language",
    "ncf": "recommendation",
    "unet": "segmentation",
}

tasks: dict[str, Task] = {}


class Training(Protocol):
    """A run of a task: weights, optimizer and data. It must be the same for the same arguments of `Task.start`."""

    #: Kind of the arrays, as `grace.Simulation` names it: "numpy" or "torch".
    framework: str
    #: Shapes of the weights by name, in their order.
    shapes: Mapping[str, tuple[int, ...]]
    #: The optimizer as the recommendations see it.
    optimizer: Optimizer

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        ...

    def gradients(self, rank: int, step: int) -> Mapping[str, Array]:
        """Return the gradients of a rank's own batch at the present weights; the weights stay as they are.

        What dropout and the like draw depends on the seed, the rank and the step only.
        """
        ...

    def apply(self, merged: Mapping[str, Array], step: int) -> None:
        """Take one optimizer step with the merged gradients, clipping and learning-rate schedule included."""
        ...

    def get_weights(self) -> dict[str, Array]:
        """Return the weights by name, as they are now."""
        ...

    def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Take over these weights; what the optimizer keeps stays as it is."""
        ...

    def loss(self) -> float:
        """Return the mean loss over the validation data."""
        ...

    def quality(self) -> float:
        """Return the metric of the task over the validation data."""
        ...


class Task(ABC):
    """Something to train, with the settings that suit uncompressed gradients."""

    name: str
    title: str
    #: "accuracy", "perplexity", "hit rate at 10", "intersection over union" or "loss".
    metric: str
    higher_is_better: bool
    #: Name of the optimizer, as `Training.optimizer` has it.
    optimizer: str
    #: Optimizer steps of a run in the full study, and of one by `--quick`.
    steps: int
    quick_steps: int
    #: Samples per rank and step.
    batch: int
    #: Learning rate, tuned for uncompressed gradients, and momentum: of SGD, or the first beta of Adam.
    lr: float
    momentum: float
    #: Seconds of one core for a run with `quick_steps` on 4 ranks, roughly: the first estimate of the time left.
    seconds: float
    #: The package that has the data of the task, if none are drawn and none are given; empty if Python has them.
    package: str = ""

    @abstractmethod
    def start(self, seed: int, ranks: int, *, steps: int, lr: float, momentum: float) -> Training:
        """Return a run at its beginning.

        `seed` gives the first weights and the order of the data, `steps` the length of a learning-rate schedule.
        `momentum` is `self.momentum`, or 0 for a method whose memory has momentum of its own. A task of `DATA_SETS`
        has a further argument `data`: the folder with its data set, or None.
        """


def register(task: T) -> T:
    """Enter a class of tasks in the registry, as a decorator."""
    tasks[task.name] = task()
    return task


def find_task(name: str) -> Task:
    """Return the task of a name, whose module is imported now.

    Raises ConfigError if there is none, ModuleNotFoundError if it needs a package that is not installed.
    """
    if name not in MODULES:
        raise ConfigError(f"--tasks: there is no task '{name}'.{nearest(name, MODULES)}")
    importlib.import_module(f"grace.report.tasks.{MODULES[name]}")
    return tasks[name]
