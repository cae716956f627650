"""The tasks in NumPy, a second per run: factorization of a matrix of ratings, by SGD with momentum and by Adam."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from grace.core.config.recommended import Optimizer
from grace.report.task import Task, register

Arrays = dict[str, npt.NDArray[np.float32]]


class Ratings:
    """Ratings of items by users, as products of 8 unknown factors each, by SGD; a rank has users of its own."""

    framework = "numpy"
    users, items, ratings, factors, true_factors, noise = 400, 300, 20_000, 8, 4, 0.3

    def __init__(self, seed: int, ranks: int, batch: int, lr: float, momentum: float) -> None:
        self._seed, self._batch = seed, batch
        rng = np.random.default_rng(2000 + seed)
        true = [rng.standard_normal((n, self.true_factors)) for n in (self.users, self.items)]
        # Some users and items have many ratings, most have few.
        self._user, self._item = (
            rng.choice(n, self.ratings, p=rng.dirichlet(np.full(n, 0.5))) for n in (self.users, self.items)
        )
        noise = self.noise * rng.standard_normal(self.ratings)
        self._given = ((true[0] @ true[1].T / 2)[self._user, self._item] + noise).astype(np.float32)
        self._parts = np.array_split(np.argsort(self._user, kind="stable"), ranks)
        sizes = {"users": self.users, "items": self.items}
        self.weights: Arrays = {
            name: (0.3 * rng.standard_normal((number, self.factors))).astype(np.float32)
            for name, number in sizes.items()
        }
        self.shapes = {name: w.shape for name, w in self.weights.items()}
        self.optimizer = Optimizer("SGD", momentum, adaptive=False)
        self._lr, self._momentum = np.float32(lr), np.float32(momentum)
        self._moved = {name: np.zeros_like(w) for name, w in self.weights.items()}

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return float(self._lr)

    def gradients(self, rank: int, step: int) -> Arrays:
        """Return the gradients of the mean square error over the rank's own batch."""
        chosen = np.random.default_rng((self._seed, rank, step)).choice(self._parts[rank], self._batch)
        u, i = self._user[chosen], self._item[chosen]
        x, y = self.weights["users"][u], self.weights["items"][i]
        error = ((x * y).sum(1) - self._given[chosen])[:, None] * np.float32(2 / self._batch)
        found = {name: np.zeros_like(w) for name, w in self.weights.items()}
        np.add.at(found["users"], u, error * y)
        np.add.at(found["items"], i, error * x)
        return found

    def apply(self, merged: Mapping[str, npt.NDArray[np.float32]], step: int) -> None:
        """Take one step: v <- momentum v + g, w <- w - lr v."""
        for name, w in self.weights.items():
            self._moved[name] = self._momentum * self._moved[name] + merged[name]
            self.weights[name] = w - self._lr * self._moved[name]

    def get_weights(self) -> Arrays:
        """Return the weights by name; a step makes new ones."""
        return dict(self.weights)

    def set_weights(self, weights: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Take over these weights."""
        self.weights = dict(weights)

    def loss(self) -> float:
        """Return the mean square error over all ratings: the task tests how well one optimizes."""
        x, y = self.weights["users"][self._user], self.weights["items"][self._item]
        return float((((x * y).sum(1) - self._given) ** 2).mean())

    def quality(self) -> float:
        """Return the loss."""
        return self.loss()


class RatingsByAdam(Ratings):
    """The same, trained by Adam; `momentum` is its first beta, and the second is 0.999."""

    def __init__(self, seed: int, ranks: int, batch: int, lr: float, momentum: float) -> None:
        super().__init__(seed, ranks, batch, lr, momentum)
        self.optimizer = Optimizer("Adam", momentum, adaptive=True)
        self._squares = {name: np.zeros_like(w) for name, w in self.weights.items()}

    def apply(self, merged: Mapping[str, npt.NDArray[np.float32]], step: int) -> None:
        """Take one step: w <- w - lr m / (sqrt(v) + 1e-8), with unbiased means m and v of g and its square."""
        first, second = self._momentum, np.float32(0.999)
        scales = (1 / (1 - beta ** np.float32(step + 1)) for beta in (first, second))
        scale_m, scale_v = map(np.float32, scales)
        for name, w in self.weights.items():
            g = merged[name]
            m = self._moved[name] = first * self._moved[name] + (1 - first) * g
            v = self._squares[name] = second * self._squares[name] + (1 - second) * g * g
            self.weights[name] = w - self._lr * scale_m * m / (np.sqrt(scale_v * v) + np.float32(1e-8))


@register
class Factorization(Task):
    """Factorization of a matrix of ratings."""

    name, title = "mf", "matrix factorization"
    metric, higher_is_better, optimizer = "loss", False, "SGD"
    steps = quick_steps = 150
    batch, lr, momentum = 128, 1.5, 0.9
    seconds = 0.4

    def start(self, seed: int, ranks: int, *, steps: int, lr: float, momentum: float) -> Ratings:
        return Ratings(seed, ranks, self.batch, lr, momentum)


@register
class FactorizationByAdam(Factorization):
    """The same factorization, by Adam."""

    # Of 0.02, 0.025, 0.03, 0.035, 0.04 and 0.05 the best with uncompressed gradients on 4 ranks, over 3 seeds.
    name, optimizer, lr = "mf_adam", "Adam", 0.035

    def start(self, seed: int, ranks: int, *, steps: int, lr: float, momentum: float) -> RatingsByAdam:
        return RatingsByAdam(seed, ranks, self.batch, lr, momentum)
