"""TensorFlow: the timed step as one traced graph."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from grace.bench.codec import Arrived, Done, LocalStep
from grace.bench.framework import Framework
from grace.core.ops.composites import ArrayOps
from grace.core.plan.unit import Unit
from grace.core.spec import Array, Field, State
from grace.core.wire.lanes import dtype_of


class Tensorflow(Framework):
    """TensorFlow on the CPU. Steps run as graphs; NumPy makes the copies."""

    name = "tensorflow"

    def __init__(self, device: str, threads: int, native: bool) -> None:
        tf.config.set_visible_devices([], "GPU")
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
        # Without this, TensorFlow warns that the untimed part of a step is traced for many shapes.
        tf.get_logger().setLevel("ERROR")
        super().__init__(device, native)

    def gradient(self, loaded: Array) -> Array:
        return tf.constant(loaded)

    def on_host(self, array: Array) -> Any:
        return array.numpy()

    def step(self, unit: Unit, ranks: int) -> LocalStep:
        return TracedStep(unit, self.ops, ranks)


class TracedStep(LocalStep):
    """A local step whose timed part is one graph, traced once. The states of rank 0 are variables."""

    def __init__(self, unit: Unit, ops: ArrayOps, ranks: int) -> None:
        super().__init__(unit, ops, ranks)
        unit = self.unit
        self._variables = {
            kind: {key: tf.Variable(value, trainable=False) for key, value in state.items()}
            for kind, state in super().states(0).items()
        }
        signature = [tf.TensorSpec([unit.spec.numel], tf.float32), tf.TensorSpec([], tf.int64)]
        signature += [_form(f) for f in unit.proposed]
        self._wire = [f for f in unit.fields if f.wire]
        # What arrives: payloads, and their flags.
        self._count = 1 if unit.communicator.adds else ranks
        signature += [_form(f) for f in self._wire] * self._count
        signature += [tf.TensorSpec([], tf.bool)] * self._count * unit.guarded
        graph = tf.function(self._run_graph, input_signature=signature, autograph=False)
        # TensorFlow counts the traces of a function in all instances, and warns of many when it is called.
        self._graph = graph.get_concrete_function()

    def states(self, rank: int) -> dict[str, State]:
        if rank > 0:
            return super().states(rank)
        return {
            kind: {key: variable.read_value() for key, variable in state.items()}
            for kind, state in self._variables.items()
        }

    def run(self, gradient: Array, step: int, arrived: Arrived) -> Done:
        negotiated = [] if arrived.negotiated is None else [arrived.negotiated]
        payloads = [payload[f.name] for payload in arrived.payloads for f in self._wire]
        return Done(*self._graph(gradient, tf.constant(step, tf.int64), *negotiated, *payloads, *arrived.flags))

    def _run_graph(self, gradient: Array, step: Array, *arrays: Array) -> tuple[Any, ...]:
        first, width = len(self.unit.proposed), len(self._wire)
        end = first + self._count * width
        negotiated, flat, flags = arrays[0] if first else None, arrays[first:end], arrays[end:]
        names = [f.name for f in self._wire]
        payloads = [dict(zip(names, flat[i : i + width], strict=True)) for i in range(0, len(flat), width)]
        done, states = self.run_from(gradient, self.states(0), step, Arrived(negotiated, payloads, list(flags)))
        for kind, state in states.items():
            for key, value in state.items():
                self._variables[kind][key].assign(value)
        return tuple(done)


def _form(field: Field) -> tf.TensorSpec:
    length = None if isinstance(field.length, str) else field.length
    return tf.TensorSpec([length], tf.dtypes.as_dtype(dtype_of(field.lanes) if field.lanes else field.dtype))
