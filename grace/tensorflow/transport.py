"""Transport over Horovod's TensorFlow collectives, which are operations of a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from grace.core.errors import ConfigError
from grace.core.ops import get_ops
from grace.core.spec import HALF_DTYPES
from grace.core.transport import Handle, Reduction, Transport


@dataclass(frozen=True)
class _Tensor(Handle):
    """A result that the graph waits for by itself: whatever reads the tensor runs after the collective."""

    result: tf.Tensor

    def wait(self) -> tf.Tensor:
        return self.result


class HorovodTransport(Transport):
    """Named collectives of Horovod within one process set, to be traced into a graph; `rank` is -1 outside of the set.

    `prefix` keeps the names of several exchanges apart. Raises ConfigError for a process set unknown to Horovod.
    """

    def __init__(self, process_set: Any, prefix: str) -> None:
        if process_set.process_set_id is None or process_set.ranks is None:
            raise ConfigError(
                f"{process_set} is unknown to Horovod; "
                "pass it to hvd.init(process_sets=[...]) or hvd.add_process_set() first."
            )
        self.size = len(process_set.ranks)
        self.rank = process_set.rank() if process_set.included() else -1
        self._process_set = process_set
        self._prefix = prefix
        self._turn = tf.Variable(True, trainable=False)
        self._on_cpu = not tf.config.list_logical_devices("GPU")

    def _named(self, name: str) -> dict[str, Any]:
        # Horovod matches collectives by the name of the operation. Name scopes depend on where it was traced; what
        # follows the last slash does not.
        return {
            "name": f"{self._prefix}.{name}".replace("/", "."),
            "ignore_name_scope": True,
            "process_set": self._process_set,
        }

    def _at_run_time(self, x: tf.Tensor) -> tf.Tensor:
        """x as something that is known only when the graph runs, and like nothing else; no copy.

        TensorFlow takes Horovod's collectives for pure functions. It would run those of constants while it optimizes,
        where other ranks do not wait for them, and merge those of equal inputs into one. It does not know the value of
        a variable, and leaves placeholders alone.
        """
        if tf.executing_eagerly():
            return x
        either = tf.raw_ops.Select(condition=self._turn, x=x, y=x)
        return tf.raw_ops.PlaceholderWithDefault(input=either, shape=x.shape)

    def end_turn(self, results: list[tf.Tensor]) -> None:
        """Let the collectives that a graph starts later wait for these results.

        Two steps in one graph use the same names, and Horovod would match one rank's first with another's second. What
        is sent has read the variable that is written here, and the order of reads and writes is kept.
        """
        with tf.control_dependencies(results):
            self._turn.assign(True)

    def allreduce(self, x: tf.Tensor, *, op: Reduction, name: str) -> Handle:
        if x.shape.num_elements() == 0 or self.size == 1:
            return _Tensor(x)
        x = self._at_run_time(x)
        if x.dtype.name in HALF_DTYPES and op != "max":
            return _Tensor(self._half_sum(x, 1 / self.size if op == "mean" else 1.0, name))
        return _Tensor(hvd.allreduce(x, op={"sum": hvd.Sum, "max": hvd.Max}[op], **self._named(name)))

    def _half_sum(self, x: tf.Tensor, factor: float, name: str) -> tf.Tensor:
        """Gloo adds 16-bit floats one by one in software, and Horovod knows no bfloat16: the ranks add by themselves.

        Two of them send each other all of it. More exchange slices, add, and gather the sums. The bytes that a rank
        sends are those of a ring allreduce, 2 (size - 1) / size of x.
        """
        # A graph does not know where x will lie; reference bodies run everywhere.
        ops = get_ops("tensorflow", "cpu" if self._on_cpu else "gpu")
        n = ops.length(x)
        if self.size == 2:
            # Whole 32-bit integers.
            both = self._gather_of_two(tf.pad(x, [[0, n % 2]]) if n % 2 else x, name)
            return ops.half_sum(both, 2, factor)[:n]
        data = tf.bitcast(x, tf.int16)
        splits = tf.stack([(n + rank) // self.size for rank in range(self.size)])
        slices, _ = hvd.alltoall(data, splits=splits, **self._named(f"{name}.slices"))
        total = ops.half_sum(tf.bitcast(slices, x.dtype), self.size, factor)
        sums = hvd.allgather(tf.bitcast(total, tf.int16), **self._named(f"{name}.sums"))
        return tf.reshape(tf.bitcast(sums, x.dtype), [n])

    def _gather_of_two(self, x: tf.Tensor, name: str) -> tf.Tensor:
        """The buffers of two ranks, of one length of whole 32-bit integers.

        Gloo lets two ranks gather in turns, and reduce at once; see `_GatherOfTwo` of PyTorch. TensorFlow keeps such
        integers on the host.
        """
        if not self._on_cpu:
            both = hvd.allgather(tf.bitcast(x, tf.int16), **self._named(name))
            return tf.reshape(tf.bitcast(both, x.dtype), [2 * x.shape.num_elements()])
        mine = tf.bitcast(tf.reshape(x, [-1, 4 // x.dtype.size]) if x.dtype.size < 4 else x, tf.int32)
        other = hvd.allreduce(mine, op=hvd.Sum, **self._named(name)) - mine
        both = tf.concat([mine, other] if self.rank == 0 else [other, mine], 0)
        return tf.reshape(tf.bitcast(both, x.dtype), [2 * x.shape.num_elements()])

    def allgather(self, x: tf.Tensor, *, name: str, equal: bool = False) -> Handle:
        if self.size == 1:
            return _Tensor(x)
        x = self._at_run_time(x)
        if equal and self.size == 2 and self._on_cpu and x.shape.num_elements():
            return _Tensor(self._gather_of_two(x, name))
        return _Tensor(hvd.allgather(x, **self._named(name)))

    def broadcast(self, x: tf.Tensor, *, root: int, name: str) -> Handle:
        if x.shape.num_elements() == 0 or self.size == 1:
            return _Tensor(x)
        # Horovod counts roots in global ranks, also within a process set.
        return _Tensor(hvd.broadcast(self._at_run_time(x), self._process_set.ranks[root], **self._named(name)))

    def average(
        self, x: tf.Tensor | tf.IndexedSlices, *, op: int, predivide: float, name: str
    ) -> tf.Tensor | tf.IndexedSlices:
        """An uncompressed gradient as Horovod reduces it: dense ones are added, the rows of sparse ones gathered."""
        if self.size == 1:
            return x
        if isinstance(x, tf.IndexedSlices):
            values = hvd.allgather(self._at_run_time(x.values), **self._named(f"{name}.values"))
            indices = hvd.allgather(self._at_run_time(x.indices), **self._named(f"{name}.indices"))
            if op == hvd.Average:
                values = values / tf.cast(self.size, values.dtype)
            return tf.IndexedSlices(values, indices, x.dense_shape)
        scale = {"prescale_factor": 1.0 / predivide, "postscale_factor": predivide} if op == hvd.Average else {}
        return hvd.allreduce(self._at_run_time(x), op=op, **scale, **self._named(name))
