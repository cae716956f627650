"""The promises of every exchange, kept by one of TensorFlow on each rank."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from grace.tensorflow import Exchange
from tests.support.promises import TENSORS, Run, gradients, joined, kept


def promises() -> dict[str, str]:
    return kept(_run)


def _run(config: dict[str, Any]) -> Run:
    exchange = Exchange(config)
    variables = [tf.Variable(tf.zeros(shape), name=name) for name, shape in TENSORS.items()]
    exchange.build(variables)

    def step(number: int) -> bytes:
        # The exchange holds its variables weakly.
        assert len(variables) == len(TENSORS)
        given = gradients(number, hvd.rank())
        merged = exchange([tf.constant(given[name]) for name in TENSORS])
        return joined({name: x.numpy() for name, x in zip(TENSORS, merged, strict=True)})

    return Run(exchange, step)
