"""Outer steps of a Keras optimizer: the variables of `grace.core.session.outer`, and its steps within a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from grace.core.config.outer import OuterSteps
from grace.core.errors import ConfigError
from grace.core.spec import State, TensorSpec
from grace.tensorflow.gradients import Gradient
from grace.tensorflow.run import tensorflow_ops

#: Exchanges one gradient per variable, and returns the means.
ExchangeAll = Callable[[Sequence[tf.Tensor]], Sequence[Gradient | None]]


def check_graph(outer: OuterSteps, where: str) -> None:
    """Raise ConfigError for outer steps that no graph can take: it exchanges all tensors at once, and waits."""
    if outer.count > 1 or outer.delay or outer.adapt or outer.variates or outer.dense_every or not outer.is_plain_mean:
        raise ConfigError(
            f"{where}: a TensorFlow graph exchanges all variables of all ranks at once and waits for the result, so "
            "fragments, delay, adapt, participation, weight, relevance, variates and dense_every are not supported, "
            f"received {outer}; leave them out."
        )


class OuterVariables:
    """The weights after the last meeting, and the states of the outer optimizer.

    `make_variable(name, value)` makes a variable that is saved with the optimizer.
    """

    def __init__(
        self,
        outer: OuterSteps,
        specs: Sequence[TensorSpec],
        variables: Sequence[tf.Variable],
        make_variable: Callable[[str, tf.Tensor], tf.Variable],
    ) -> None:
        self.outer, self._specs = outer, specs
        self.anchors = [make_variable(f"met_{i}", tf.convert_to_tensor(v)) for i, v in enumerate(variables)]
        self._kept = [
            {
                key: make_variable(f"outer_{i}_{key}", value)
                for key, value in outer.optimizer.init(tensorflow_ops(spec.device), self._flat(v, spec)).items()
            }
            for i, (spec, v) in enumerate(zip(specs, variables, strict=True))
        ]

    def before(self, steps: tf.Variable, variables: Sequence[tf.Variable]) -> None:
        """Read the weights again where they are those of the last meeting; they may have been loaded or broadcast."""
        exact = steps <= self.outer.warmup if self.outer.keeps_own else tf.constant(True)

        def read() -> tf.Tensor:
            for anchor, v in zip(self.anchors, variables, strict=True):
                anchor.assign(v)
            return tf.constant(True)

        tf.cond((steps == 0) | (self._meets(steps) & exact), read, lambda: tf.constant(False))

    def after(self, steps: tf.Variable, variables: Sequence[tf.Variable], exchange: ExchangeAll) -> None:
        """Exchange what the weights have moved and write new ones, if the ranks meet after this inner step."""

        def meet() -> tf.Tensor:
            means = exchange([anchor - v for anchor, v in zip(self.anchors, variables, strict=True)])
            for i, (v, mean) in enumerate(zip(variables, means, strict=True)):
                self._meet(i, v, tf.convert_to_tensor(mean), steps <= self.outer.warmup)
            return tf.constant(True)

        tf.cond(self._meets(steps), meet, lambda: tf.constant(False))

    def _meet(self, i: int, variable: tf.Variable, mean: tf.Tensor, warming: tf.Tensor) -> None:
        spec, anchor, kept = self._specs[i], self.anchors[i], self._kept[i]
        ops, state = tensorflow_ops(spec.device), {key: tf.convert_to_tensor(v) for key, v in kept.items()}
        before, change = self._flat(anchor, spec), self._flat(mean, spec)

        def step() -> tuple[tf.Tensor, State]:
            return self.outer.optimizer.step(ops, before, change, state)

        new, after = tf.cond(warming, lambda: (before - change, state), step) if self.outer.warmup else step()
        mixed = new
        if self.outer.keeps_own:
            mixed = tf.where(warming, new, self.outer.mixed(ops, before, new, self._flat(variable, spec)))
        for target, x in ((anchor, new), (variable, mixed)):
            target.assign(tf.reshape(ops.cast(x, spec.dtype), target.shape))
        for key, v in kept.items():
            v.assign(after[key])

    def _meets(self, steps: tf.Variable) -> tf.Tensor:
        """Return whether the ranks meet after an inner step, as `OuterSteps.meetings` does."""
        found, ends = steps <= self.outer.warmup, [start for start, _ in self.outer.phases[1:]]
        for (start, every), end in zip(self.outer.phases, [*ends, steps.dtype.max], strict=True):
            found |= (steps > start) & (steps <= end) & ((steps - start) % every == 0)
        return found & (steps > 0)

    def _flat(self, x: tf.Tensor | tf.Variable, spec: TensorSpec) -> tf.Tensor:
        return tensorflow_ops(spec.device).cast(tf.reshape(x, [-1]), spec.work_dtype)
