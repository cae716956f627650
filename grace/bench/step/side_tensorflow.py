"""The methods and baselines of `grace bench step` in TensorFlow, with Keras optimizers and traced steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

import grace.tensorflow
from grace.bench.step.methods import BASELINES, COMPUTE, count_hop_bytes, count_memory_bytes
from grace.bench.step.models_tensorflow import MODELS
from grace.bench.step.own import load_builder
from grace.bench.step.side import SEED, Side, Training


def make(library: str, model: str) -> Side:
    """Return the side of Horovod, the only one for TensorFlow."""
    threads = int(os.environ["OMP_NUM_THREADS"])
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    # Two threads, because an operation of the exchange may block while the gradients are computed.
    tf.config.threading.set_inter_op_parallelism_threads(2)
    return HorovodSide(model)


class _Step:
    """Training on random data, different in every step."""

    def __init__(self, step: Callable[[], Any], variables: Any, exchange: Any = None) -> None:
        self._step, self._variables, self._exchange = tf.function(step, jit_compile=False), variables, exchange

    def step(self) -> None:
        # Wait for the value, so that steps do not overlap.
        self._step().numpy()

    def reported_bytes(self) -> int | None:
        return None if self._exchange is None else count_hop_bytes(self._exchange, hvd.size())

    def gradient_bytes(self) -> int:
        return sum(variable.value.dtype.size * variable.value.shape.num_elements() for variable in self._variables)

    def kept_bytes(self) -> int:
        return 0 if self._exchange is None else count_memory_bytes(self._exchange)


class HorovodSide:
    """Horovod's DistributedGradientTape, and grace.

    Horovod's Keras optimizer is no baseline, because it does not reduce gradients under Keras 3.
    """

    def __init__(self, model: str) -> None:
        logging.getLogger("grace").setLevel(logging.WARNING)
        hvd.init()
        self._model = MODELS[model] if model in MODELS else load_builder(model)
        self._last_variables: list[Any] = []

    def barrier(self) -> None:
        """Wait for all ranks."""
        hvd.allreduce(tf.zeros(1), name="grace.bench.barrier")

    def train(self, method: str, launcher: str, options: Mapping[str, Any]) -> Training:
        """Make a model and an optimizer for the method."""
        keras.backend.clear_session()
        self._free_variables()
        keras.utils.set_random_seed(SEED)
        model, loss = self._model()
        keras.utils.set_random_seed(SEED + hvd.rank())
        optimizer = keras.optimizers.SGD(0.001, momentum=0.9)
        exchange = None
        if method != COMPUTE and method not in BASELINES:
            config = {**options, "compressor": method}
            optimizer = grace.tensorflow.DistributedOptimizer(optimizer, config=config, sparse_as_dense=True)
            exchange = optimizer.grace
        variables = model.trainable_variables
        # Horovod needs TensorFlow's own variables.
        sources = [variable.value for variable in variables]
        optimizer.build(variables)
        self._last_variables = [variable.value for variable in (*model.variables, *optimizer.variables)]

        def step() -> Any:
            with tf.GradientTape() as tape:
                value = loss()
            if method in BASELINES:
                fp16 = method == "horovod-fp16"
                compression = hvd.Compression.fp16 if fp16 else hvd.Compression.none
                tape = hvd.DistributedGradientTape(tape, compression=compression, sparse_as_dense=True)
            optimizer.apply(tape.gradient(value, sources), variables)
            return value

        return _Step(step, variables, exchange)

    def _free_variables(self) -> None:
        """Empty the variables of the last training, because a traced step of a Keras optimizer never releases them."""
        for variable in self._last_variables:
            nothing = tf.zeros([], variable.dtype)
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=nothing, validate_shape=False)
        self._last_variables = []
