"""1-bit Adam and 1-bit LAMB: the second moment is frozen after a warm-up, and then the ranks exchange momenta."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import keras
import tensorflow as tf

from grace.core.optim import adam, lamb
from grace.core.optim.moments import Freezing, horizon, is_settled, tell_frozen
from grace.tensorflow.branches import always, never
from grace.tensorflow.gradients import inside
from grace.tensorflow.optim.exchanging import Exchanging
from grace.tensorflow.optim.ruled import zeros_of


class OneBit(Exchanging):
    """Base of both: exchanged gradients in the warm-up, and momenta afterwards."""

    rule: ClassVar[type[Freezing]]
    _rule: Freezing

    if TYPE_CHECKING:

        def _rule_of(self, i: int) -> Freezing: ...

    @property
    def frozen(self) -> bool:
        """True after the warm-up, when the second moment is frozen and momenta are exchanged."""
        return self.built and 0 <= int(self._freeze_at) <= int(self.iterations)

    def _slots_of(self, variable: Any, name: str) -> dict[str, Any]:
        slots, (ops, x) = super()._slots_of(variable, name), zeros_of(variable)
        self._warm_keys = tuple(slots)
        later = self._rule.freeze(ops, self._rule.init(ops, x), 1)
        self._frozen_keys = tuple(later)
        # What is no longer needed after the freeze makes room for what comes then.
        free = [slot for key, slot in slots.items() if key not in later]
        for key, value in later.items():
            if key not in slots:
                slots[key] = free.pop() if free else self._slot(variable, name, key, len(value))
        return slots

    def _make_numbers(self) -> None:
        # The step of the freeze, -1 until it is known, and |v|_1 when it was last looked at.
        self._freeze_at = self._number("freeze_step", -1 if self._freeze_step is None else self._freeze_step)
        self._norm = self._number("norm", 0.0, "float64")

    def _advance(self, gradients: list[tf.Tensor], lr: tf.Tensor, number: tf.Tensor) -> None:
        t = tf.cast(number, tf.float64)

        def warm() -> None:
            for i, mean in enumerate(self.grace.mean_step(gradients)):
                state = self._read(i, self._warm_keys)
                self._write(i, *self._rule_of(i).step(self._ops(i), self._flat(i), mean, state, lr, t))
            self._look(number)

        def frozen() -> None:
            states = [self._read(i, self._frozen_keys) for i in range(len(gradients))]
            sent = [
                self._rule_of(i).momentum(self._ops(i), self._flat(i), gradient, states[i])
                for i, gradient in enumerate(gradients)
            ]
            for i, merged in enumerate(self._merge(sent)):
                self._write(i, *self._rule_of(i).frozen_step(self._ops(i), self._flat(i), merged, states[i], lr, t))

        tf.cond((self._freeze_at >= 0) & (number > self._freeze_at), always(frozen), always(warm))

    def _look(self, number: tf.Tensor) -> None:
        """Freeze the second moment if it is time: at `freeze_step`, or as soon as it has settled."""

        def look() -> None:
            seconds = [tf.cast(inside(slots["exp_avg_sq"]), tf.float64) for slots in self._slots]
            norm = tf.add_n([tf.reduce_sum(x) for x in seconds])
            # Sums may differ in their last bits between machines, and all ranks must decide alike.
            (norm,) = self.grace.graph.means([tf.reshape(norm, [1])], "settled", of_first=True)
            norm = tf.reshape(norm, [])
            self._freeze_at.assign(tf.where(is_settled(self._norm, norm), number, self._freeze_at))
            self._norm.assign(norm)

        def freeze() -> None:
            for i in range(len(self._slots)):
                state = self._rule_of(i).freeze(
                    self._ops(i), self._read(i, self._warm_keys), tf.cast(number, tf.float64)
                )
                self._write(i, None, state)
            if self.grace.rank == 0:
                tf.numpy_function(lambda step: tell_frozen(type(self).__name__, int(step)), [number], [])

        if self._freeze_step is None:
            tf.cond(number % horizon(self._rule.betas) == 0, always(look), never)
        tf.cond(number == self._freeze_at, always(freeze), never)


@keras.saving.register_keras_serializable("grace")
class OneBitAdam(OneBit):
    """1-bit Adam: Adam on exchanged gradients at first, and then on momenta of one bit per element.

    During the warm-up, the gradients of all ranks are averaged as they are, and steps are those of
    `keras.optimizers.AdamW`. Then the second moment is frozen, and the ranks exchange momenta by the configuration, by
    default one bit per element in both directions with error feedback at both ends. It is
    `grace.torch.optim.OneBitAdam` for Keras, whose documentation has `freeze_step`, `total_steps`, `scaled` and
    `config`. The other arguments are those of `keras.optimizers.AdamW`, and `process_set` is that of
    `DistributedOptimizer`.

    Pass it to `model.compile`, or call `apply` in a loop of your own. Each rank clips its own gradients. Weights at the
    start must be equal; all ranks must take equally many steps. The attribute `grace` is the exchange of the momenta,
    and `frozen` tells whether the warm-up is over. What Keras and `tf.train.Checkpoint` save has the residuals; save it
    on every rank. Dynamic loss scaling is refused. Raises ConfigError for wrong options, and
    MismatchError on every rank in the first step if the ranks differ.

    Reference: Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's convergence speed",
    ICML 2021, Algorithm 1.
    """

    rule = adam.Adam


@keras.saving.register_keras_serializable("grace")
class OneBitLamb(OneBit):
    """1-bit LAMB: LAMB on exchanged gradients at first, and then on momenta of one bit per element.

    The warm-up, the exchange and the other arguments are those of `OneBitAdam`; `grace.torch.optim.OneBitLamb` has
    `coeff_beta` and the factors.

    Reference: Li et al., "1-bit LAMB: communication efficient large-scale large-batch training with LAMB's convergence
    speed", HiPC 2022, Algorithm 1.
    """

    rule = lamb.OneBitLamb
