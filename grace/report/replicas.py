"""The ranks of a run: one copy of the weights for all of them, or one for each of them where outer steps are taken."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import grace
from grace.core.transport.collectives import KINDS, Kind
from grace.report.task import Training


class Replicas(ABC):
    """The weights and optimizers of all ranks, which a simulation lets exchange.

    compute: seconds of one core for a rank's gradients and one optimizer step, in each step.
    exchange: seconds of one core for what a rank does in the exchange, in each step.
    """

    def __init__(self, trainings: list[Training], simulation: grace.Simulation) -> None:
        self.simulation, self._trainings = simulation, trainings
        self.compute: list[float] = []
        self.exchange: list[float] = []

    @abstractmethod
    def advance(self, step: int) -> None:
        """Take a step on all ranks."""

    @abstractmethod
    def evaluate(self) -> tuple[float, float]:
        """Return loss and quality on the validation data."""

    @property
    @abstractmethod
    def seconds(self) -> tuple[float, float]:
        """The typical `compute` and `exchange` of a step."""

    @abstractmethod
    def sent(self) -> dict[Kind, float]:
        """Return the bytes that a rank has sent per step, by the kind of collective."""


class Alike(Replicas):
    """One copy of the weights, which stands for all ranks: all receive the same bits in each step."""

    def __init__(self, training: Training, simulation: grace.Simulation) -> None:
        super().__init__([training], simulation)
        self._sent: list[Mapping[Kind, float]] = []

    def advance(self, step: int) -> None:
        ranks, (training,) = self.simulation.size, self._trainings
        # The processor's time leaves out that other programs run meanwhile, or that this one is paused.
        started = time.process_time()
        gradients = [training.gradients(rank, step) for rank in range(ranks)]
        ready = time.process_time()
        merged = self.simulation.step(gradients, lr=training.rate(step))[0]
        done = time.process_time()
        training.apply(merged, step)
        self.exchange.append((done - ready) / ranks)
        self.compute.append((ready - started) / ranks + time.process_time() - done)
        # Bytes may depend on the data; over the run every rank counts.
        self._sent.append(self.simulation.stats(step % ranks)["collectives"])

    def evaluate(self) -> tuple[float, float]:
        (training,) = self._trainings
        return training.loss(), training.quality()

    @property
    def seconds(self) -> tuple[float, float]:
        return statistics.median(self.compute), statistics.median(self.exchange)

    def sent(self) -> dict[Kind, float]:
        return {kind: statistics.fmean(step[kind] for step in self._sent) for kind in KINDS}


class Apart(Replicas):
    """A copy of the weights for each rank, which takes steps of its own between syncs.

    `evaluate` looks at the weights that the ranks have in common, with the buffers of rank 0.
    """

    def __init__(self, trainings: list[Training], simulation: grace.Simulation) -> None:
        super().__init__(trainings, simulation)
        simulation.begin(trainings[0].get_weights())

    def advance(self, step: int) -> None:
        ranks = self.simulation.size
        started = time.process_time()
        for rank, training in enumerate(self._trainings):
            training.apply(training.gradients(rank, step), step)
        ready = time.process_time()
        weights = self.simulation.step([training.get_weights() for training in self._trainings])
        for training, mine in zip(self._trainings, weights, strict=True):
            training.set_weights(mine)
        self.compute.append((ready - started) / ranks)
        self.exchange.append((time.process_time() - ready) / ranks)

    def evaluate(self) -> tuple[float, float]:
        first = self._trainings[0]
        own = first.get_weights()
        first.set_weights(self.simulation.common_weights())
        found = first.loss(), first.quality()
        first.set_weights(own)
        return found

    @property
    def seconds(self) -> tuple[float, float]:
        # Most steps exchange nothing.
        return statistics.median(self.compute), statistics.fmean(self.exchange)

    def sent(self) -> dict[Kind, float]:
        found = [self.simulation.stats(rank) for rank in range(self.simulation.size)]
        nbytes = statistics.fmean(stats["outer"]["bytes_per_step"] for stats in found)
        # Of the last sync of each tensor.
        last = {kind: sum(stats["collectives"][kind] for stats in found) for kind in KINDS}
        return {kind: nbytes * last[kind] / (sum(last.values()) or 1) for kind in KINDS}


def replicas(start: Callable[[], Training], config: Mapping[str, object], ranks: int) -> Replicas:
    """Return the ranks of a run at its beginning; `start` returns a new copy of a rank."""
    training = start()
    simulation = grace.Simulation(ranks, training.shapes, config, framework=training.framework)
    if simulation.config.outer is None:
        return Alike(training, simulation)
    return Apart([training, *(start() for _ in range(1, ranks))], simulation)
