"""Comparison of the replicas inside of a traced step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from grace.core.errors import MismatchError
from grace.core.guards.replicas import (
    SUMMARY_BYTES,
    WEIGHTS,
    check_digests,
    check_equal,
    check_same_step,
    digest,
    summary,
)
from grace.core.ops import get_ops
from grace.tensorflow.transport import HorovodTransport

_BROADCAST = (
    "Pass grace.tensorflow.BroadcastGlobalVariablesCallback(0) to fit(), or call "
    "hvd.broadcast_variables([v.value for v in model.weights], root_rank=0) before the first "
    "step, or right after it if it builds the model."
)


class Replicas:
    """The comparisons of one exchange: once before the second step, and before every `every`-th step.

    Even a script whose first step builds the model must have broadcast its weights before the second step. Every rank
    sends 8 bytes.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        # The steps of this process. It belongs to no checkpoint.
        self._taken = tf.Variable(0, trainable=False, dtype=tf.int64)

    def compare(
        self,
        weights: Mapping[str, tf.Variable],
        states: Mapping[str, tf.Variable],
        step: tf.Tensor,
        transport: HorovodTransport,
    ) -> None:
        """Compare the replicas if they are due before this step. It is traced into a graph."""
        if transport.size == 1:
            return
        taken = self._taken.read_value()
        due = tf.equal(taken, 1)
        if self._every:
            # The step in a checkpoint may differ between ranks, and then only some of them would compare.
            due = tf.logical_or(due, tf.logical_and(taken > 0, tf.equal(taken % self._every, 0)))

        def compare() -> tf.Tensor:
            return _compare({**weights, **states}, len(weights), tf.stack([taken, step]), transport)

        tf.cond(due, compare, lambda: tf.constant(True))
        self._taken.assign(taken + 1)


def _compare(
    variables: Mapping[str, tf.Variable], weights: int, moment: tf.Tensor, transport: HorovodTransport
) -> tf.Tensor:
    names = list(variables)
    # In Python: traced operations would make every graph of a step much larger.
    mine = _in_python(
        functools.partial(_digests, names), [v.read_value() for v in variables.values()], tf.int64, [len(names) + 1]
    )
    brief = _gather(mine[-1:], "replicas", transport)

    def explain() -> tf.Tensor:
        everyone = _gather(tf.concat([mine[:-1], moment], 0), "replicas.detail", transport)
        text = _in_python(functools.partial(_explain, names, weights, transport.rank), [everyone], tf.string, [])
        check = tf.debugging.Assert(tf.equal(text, ""), [text])
        with tf.control_dependencies([check]):
            return tf.constant(False)

    return tf.cond(tf.reduce_all(tf.equal(brief, brief[0])), lambda: tf.constant(True), explain)


def _in_python(function: Callable[..., Any], inputs: list[tf.Tensor], dtype: tf.DType, shape: list[int]) -> tf.Tensor:
    result = tf.numpy_function(function, inputs, dtype)
    result.set_shape(shape)
    return result


def _gather(values: tf.Tensor, name: str, transport: HorovodTransport) -> tf.Tensor:
    """Return the int64 values of all ranks, one after another."""
    everyone = transport.allgather(tf.reshape(tf.bitcast(values, tf.uint8), [-1]), name=name).wait()
    transport.end_turn()
    return tf.bitcast(tf.reshape(everyone, [-1, SUMMARY_BYTES]), tf.int64)


def _digests(names: list[str], *arrays: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    found = {name: digest(get_ops("numpy"), np.asarray(x)) for name, x in zip(names, arrays, strict=True)}
    return np.array([*found.values(), int.from_bytes(summary(found), "little", signed=True)], np.int64)


def _explain(names: list[str], weights: int, rank: int, everyone: np.ndarray[Any, Any]) -> bytes:
    """Return the text of the error.

    Every rank sends the digests of `names`, the first `weights` of which are weights, its steps in this process, and
    its step.
    """
    rows = everyone.reshape(-1, len(names) + 2)
    taken = int(rows[rank, -2])
    steps = [int(step) for step in rows[:, -1]]
    ranks = [dict(zip(names, map(int, mine[:-2]), strict=True)) for mine in rows]
    try:
        check_same_step(steps, rank)
        if taken == 1:
            first = [dict([*mine.items()][:weights]) for mine in ranks]
            check_digests(first, WEIGHTS, "before the second step", _BROADCAST)
        check_equal([*zip(steps, ranks, strict=True)], rank)
    except MismatchError as error:
        return f"{MismatchError.__name__}: {error}".encode()
    return b""
