"""0/1 Adam: momenta of one bit from the start, second moments of some steps only, and rare syncs in the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from grace.core.optim import zero_one
from grace.tensorflow.branches import always, never
from grace.tensorflow.gradients import inside
from grace.tensorflow.optim.exchanging import Exchanging


@keras.saving.register_keras_serializable("grace")
class ZeroOneAdam(Exchanging):
    """0/1 Adam: Adam that exchanges momenta of one bit per element from the start, and later only in some steps.

    It is `grace.torch.optim.ZeroOneAdam` for Keras, whose documentation has `every`, `var_update_scaler` and
    `freeze_step`. The exchange and the other arguments are those of `OneBitAdam`. Between two syncs, the weights of the
    ranks differ; what is saved then can be loaded on as many ranks only.

    Reference: Lu et al., "Maximizing communication efficiency for large-scale training via 0/1 Adam", ICLR 2023,
    Algorithm 1. The defaults are those of DeepSpeed.
    """

    rule = zero_one.ZeroOneAdam
    _rule: zero_one.ZeroOneAdam

    if TYPE_CHECKING:

        def _rule_of(self, i: int) -> zero_one.ZeroOneAdam: ...

    def __init__(
        self,
        learning_rate: Any = 0.001,
        *,
        every: int | Mapping[int, int] = zero_one.EVERY,
        var_update_scaler: int = 16,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, **options)
        self._schedule = zero_one.Schedule(every, var_update_scaler, self._freeze_step, self._where)

    def _slots_of(self, variable: Any, name: str) -> dict[str, Any]:
        slots = super()._slots_of(variable, name)
        # The weights after the last sync.
        return {**slots, "anchor": self._slot(variable, name, "anchor", math.prod(variable.shape))}

    def _make_numbers(self) -> None:
        # The gradients in the second moment, the step of the next one, and the sum of the learning rates since the last
        # sync.
        self._learnt, self._learn_at = self._number("learnt", 0), self._number("learn_at", 1)
        self._rates = self._number("rates", 0.0, "float64")

    def _advance(self, gradients: list[tf.Tensor], lr: tf.Tensor, number: tf.Tensor) -> None:
        numbers, learns = range(len(gradients)), self._schedule.learns(number, self._learn_at)
        count = self._learnt + tf.cast(learns, tf.int64)
        learnt, rate = tf.cast(count, tf.float64), self._rule.rate(lr, tf.cast(number, tf.float64))
        rates = self._rates + rate

        def read_again() -> None:
            # The weights are those of the last sync, and may have been loaded or broadcast since.
            for i in numbers:
                self._write(i, None, {"anchor": self._flat(i)})

        def learn() -> None:
            # The momenta, which are exchanged in the same step, compare the replicas.
            for i, mean in enumerate(self.grace.mean_step(gradients, compares=False)):
                state = self._rule_of(i).learn(self._ops(i), self._flat(i), mean, self._read(i))
                self._write(i, None, {"exp_avg_sq": state["exp_avg_sq"]})

        tf.cond(self._rates == 0, always(read_again), never)
        tf.cond(learns, always(learn), never)
        states = [
            self._rule_of(i).advance(self._ops(i), self._flat(i), gradients[i], self._read(i), rate, learnt)
            for i in numbers
        ]

        def sync() -> None:
            sent = [self._rule_of(i).sent(self._ops(i), states[i], learnt) for i in numbers]
            share = tf.math.divide_no_nan(tf.constant(1.0, tf.float64), rates)
            for i, merged in enumerate(self._merge(sent)):
                rule, ops = self._rule_of(i), self._ops(i)
                self._write(i, *rule.sync(ops, self._flat(i), merged, states[i], lr, share, learnt))
            self._rates.assign(tf.zeros([], tf.float64))

        def alone() -> None:
            for i in numbers:
                rule, ops = self._rule_of(i), self._ops(i)
                self._write(i, *rule.alone(ops, self._flat(i), states[i], lr, rate, learnt))
            self._rates.assign(rates)

        tf.cond(self._schedule.syncs(number), always(sync), always(alone))
        after = self._schedule.next_learning(number, count)
        self._learn_at.assign(tf.where(learns, after, self._learn_at))
        self._learnt.assign(count)

    def settings(self) -> dict[str, Any]:
        """Return what must be equal on all ranks besides the configuration."""
        return {**super().settings(), **self._schedule.to_config()}

    def equal_variables(self, weights: dict[str, tf.Variable]) -> dict[str, tf.Variable]:
        """Return the variables that are equal on all ranks before a sync, by name."""
        pairs = list(zip(self.grace.names, self._slots, strict=True))
        anchors = {name: inside(slots["anchor"]) for name, slots in pairs}
        return anchors | {f"exp_avg_sq of {name}": inside(slots["exp_avg_sq"]) for name, slots in pairs}

    def own_variables(self) -> list[tf.Variable]:
        """Return the variables that differ between ranks."""
        return [inside(slots[key]) for slots in self._slots for key in ("exp_avg", "moved")]

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, and what makes the exchange again."""
        return {**super().get_config(), **self._schedule.to_config()}
