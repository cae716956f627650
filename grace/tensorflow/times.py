"""Times of a step that runs as a graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from grace.core.observe.timeline import Moments, Times, moments_of
from grace.core.plan.plan import Plan
from grace.core.spec import Array
from grace.tensorflow.stage import made_outside


class GraphTimes(Times):
    """Times that TensorFlow records while the graph runs, if `track` is set before the graph is traced.

    Python code does not run during a step. So the graph calls it at the end of each step to write the timeline.
    """

    def __init__(self) -> None:
        super().__init__()
        self.track = False
        # For the moments of each plan, their values in the last step.
        self._values: dict[tuple[tuple[str, str], ...], tf.Variable] = {}
        self._stamps: dict[tuple[str, str], tf.Tensor] = {}

    def start(self, path: str | os.PathLike[str], rank: int, size: int) -> None:
        super().start(path, rank, size)
        self.track = True

    def mark(self, moment: str, name: str, after: Iterable[Array] | None = None) -> None:
        if self.track and after is not None:
            with tf.control_dependencies(list(after)):
                self._stamps[moment, name] = tf.timestamp()

    def finish(self, step: Any, plan: Plan, sent: Callable[[str], Any]) -> None:
        if not self.track or not plan.buckets:
            return
        names, found = [bucket.name for bucket in plan.buckets], tuple(moments_of(plan))
        if found not in self._values:
            self._values[found] = made_outside([len(found)], tf.float64)
        stamps = tf.stack([self._stamps[place] for place in found])
        self._stamps.clear()
        self._values[found].assign(stamps)

        def write(step: Any, stamps: Any, counts: Any) -> None:
            moments = dict(zip(found, map(float, stamps), strict=True))
            self.write(int(step), plan, moments, dict(zip(names, counts, strict=True)).__getitem__)

        counts = tf.stack([tf.cast(sent(name), tf.int64) for name in names])
        tf.numpy_function(write, [step, stamps, counts], [])

    def moments(self, plan: Plan) -> Moments:
        found = tuple(moments_of(plan))
        if found not in self._values:
            return {}
        values = self._values[found].numpy()
        return dict(zip(found, map(float, values), strict=True)) if values.all() else {}
