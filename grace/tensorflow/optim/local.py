"""LAMB and LANS, which leave the exchange of gradients to others."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from grace.core.errors import ConfigError, nearest
from grace.core.optim import lamb, lans
from grace.tensorflow.optim.ruled import Ruled


class _Local(Ruled):
    """Base of both: steps with the gradients as they are."""

    def __init__(self, learning_rate: Any = 0.001, **options: Any) -> None:
        super().__init__(learning_rate, options)
        for name in options:
            raise ConfigError(f"{self._where}: there is no option '{name}'.{nearest(name, self.get_config())}")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update a variable and its moments."""
        i = self._get_variable_index(variable)
        number = tf.cast(tf.convert_to_tensor(self.iterations), tf.float64) + 1
        lr = tf.cast(learning_rate, tf.float64)
        rule, ops = self._rule_of(i), self._ops(i)
        self._write(i, *rule.step(ops, self._flat(i), self._flat(i, gradient), self._read(i), lr, number))


@keras.saving.register_keras_serializable("grace")
class Lamb(_Local):
    """LAMB: Adam whose update of each tensor is as long as a share of the tensor, for large batches.

    The ratio |w| / |u| of each tensor is limited to [`min_coeff`, `max_coeff`]; the other arguments are those of
    `keras.optimizers.Adam`. It is an ordinary optimizer: wrap it by `DistributedOptimizer`. Raises ConfigError for
    options that cannot work.

    Reference: You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020,
    Algorithm 2.
    """

    rule = lamb.Lamb


@keras.saving.register_keras_serializable("grace")
class Lans(_Local):
    """LANS: LAMB on gradients of norm 1 per tensor, with Nesterov's momentum, for large batches.

    With compressed gradients over `two_shot`, it is CLAN. The arguments are those of `keras.optimizers.Adam`. It is an
    ordinary optimizer: wrap it by `DistributedOptimizer`. Raises ConfigError for options that cannot work.

    Reference: Zheng et al., "Accelerated large batch optimization of BERT pretraining in 54 minutes", 2020, Algorithm
    2.
    """

    rule = lans.Lans
