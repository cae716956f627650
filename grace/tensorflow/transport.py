"""The transport over Horovod's TensorFlow collectives, which are operations of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from grace.core.errors import ConfigError
from grace.core.transport.collectives import Collective
from grace.core.transport.transport import Done, Handle, Transport, known_local_size


def check_process(where: str, process_set: Any) -> None:
    """Raise ConfigError if this process cannot run collectives."""
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise ConfigError(f"{where}: TensorFlow runs in TensorFlow 1's graph mode; do not disable eager execution.")
    if not hvd.is_initialized():
        raise ConfigError(f"{where}: Horovod is not initialized; call hvd.init() first.")
    if not isinstance(process_set, hvd.ProcessSet):
        raise ConfigError(
            f"{where}: the argument 'process_set' must be an hvd.ProcessSet, received {process_set!r}; "
            "leave it out to use all ranks."
        )


def local_size_of(process_set: Any) -> int:
    """Return how many ranks of a process set each node has; 0 if unknown."""
    if process_set.process_set_id != 0:
        return 0
    return known_local_size(hvd.rank(), hvd.cross_rank(), hvd.local_rank(), hvd.local_size())


class HorovodTransport(Transport):
    """Named collectives of Horovod within one process set, to be traced into a graph. `rank` is -1 outside the set.

    Handles are done at once: the graph itself waits, as readers of a tensor run after the collective that it is of.
    `prefix` makes the names of several exchanges unique. Raises ConfigError for a process set that is not registered
    with Horovod.
    """

    def __init__(self, process_set: Any, prefix: str) -> None:
        if process_set.process_set_id is None or process_set.ranks is None:
            raise ConfigError(
                f"{process_set} is not registered with Horovod; "
                "pass it to hvd.init(process_sets=[...]) or hvd.add_process_set() first."
            )
        self.size = len(process_set.ranks)
        self.rank = process_set.rank() if process_set.included() else -1
        self.local_size = local_size_of(process_set)
        self._process_set = process_set
        self._prefix = prefix
        self._turn = tf.Variable(True, trainable=False)
        # The results of the collectives since `end_turn`.
        self._results: list[tf.Tensor] = []
        self._on_cpu = not tf.config.list_logical_devices("GPU")

    def _named(self, name: str) -> dict[str, Any]:
        # Horovod matches collectives by the name of the operation. Name scopes depend on the place of the trace; the
        # part after the last slash does not.
        return {
            "name": f"{self._prefix}.{name}".replace("/", "."),
            "ignore_name_scope": True,
            "process_set": self._process_set,
        }

    def _at_run_time(self, x: tf.Tensor) -> tf.Tensor:
        """Return x as a tensor that TensorFlow's graph optimizer knows nothing about. Nothing is copied.

        TensorFlow assumes that Horovod's collectives are pure functions. It would run a collective of a constant during
        optimization, when other ranks do not take part, and would merge two collectives of equal inputs into one. It
        does not evaluate variables and does not change placeholders; so both hide x.
        """
        if tf.executing_eagerly():
            return x
        either = tf.raw_ops.Select(condition=self._turn, x=x, y=x)
        return tf.raw_ops.PlaceholderWithDefault(input=either, shape=x.shape)

    def _keep(self, result: tf.Tensor) -> tf.Tensor:
        """Note the result of a collective for `end_turn`, and return it."""
        if not tf.executing_eagerly():
            self._results.append(result)
        return result

    def end_turn(self, results: Sequence[Any] = ()) -> None:
        """Let this graph run all collectives that it has started, and start later ones only after them.

        Call it at the end of each step, and of each branch with collectives. The other ranks wait for a collective of
        this rank even if it does not use the result. TensorFlow's graph optimizer would remove such a collective; a
        control dependency does not prevent that, but a use of the result does. It must not know the result's shape,
        which would be enough for the size.

        Later collectives also wait for `results`, which are tensors or operations. Two steps in one graph use the same
        names, and Horovod could match the first step of one rank with the second step of another. Every collective
        reads the variable that this method writes, and TensorFlow keeps the order of reads and writes.
        """
        here = tf.compat.v1.get_default_graph()
        started = [x for x in self._results if x.graph is here]
        self._results = [x for x in self._results if x.graph is not here]
        hidden = [tf.raw_ops.PlaceholderWithDefault(input=x, shape=tf.TensorShape(None)) for x in started]
        with tf.control_dependencies(results):
            self._turn.assign(tf.add_n([tf.constant(1), *map(tf.size, hidden)]) > 0)

    def _start(self, collective: Collective, name: str) -> Handle:
        kind, (x, *_) = collective.kind, collective.buffers
        if x.shape.num_elements() == 0 and kind in ("allreduce", "broadcast"):
            return Done(x)
        named = self._named(name)
        if kind == "alltoall":
            splits = tf.stack([tf.size(part) for part in collective.buffers])
            x = self._at_run_time(tf.concat(list(collective.buffers), 0))
            return Done(self._keep(hvd.alltoall(x, splits=splits, **named)[0]))
        x = self._at_run_time(x)
        if kind == "allreduce":
            op = {"sum": hvd.Sum, "max": hvd.Max}[collective.op]
            return Done(self._keep(hvd.allreduce(x, op=op, **named)))
        if kind == "broadcast":
            # Horovod expects the root as a global rank, even within a process set.
            return Done(self._keep(hvd.broadcast(x, self._process_set.ranks[collective.root], **named)))
        if collective.equal and self.size == 2 and self._on_cpu and x.shape.num_elements():
            return Done(self._gather_of_two(x, name))
        return Done(self._keep(hvd.allgather(x, **named)))

    def _gather_of_two(self, x: tf.Tensor, name: str) -> list[tf.Tensor]:
        """Gather the byte buffers of two ranks, of equal length, by an allreduce.

        It is faster; see `_GatherOfTwo` in `grace.torch.horovod.transport`. It serves the CPU only, because TensorFlow
        keeps 32-bit integers of a GPU in host memory.
        """
        n = x.shape.num_elements()
        padded = tf.pad(x, [[0, -n % 4]]) if n % 4 else x
        mine = tf.bitcast(tf.reshape(padded, [-1, 4]), tf.int32)
        other = self._keep(hvd.allreduce(mine, op=hvd.Sum, **self._named(name))) - mine
        theirs = tf.reshape(tf.bitcast(other, tf.uint8), [-1])[:n]
        return [x, theirs] if self.rank == 0 else [theirs, x]

    def average(
        self, x: tf.Tensor | tf.IndexedSlices, *, op: int, predivide: float, name: str
    ) -> tf.Tensor | tf.IndexedSlices:
        """Reduce an uncompressed gradient by Horovod: add dense gradients, gather the rows of sparse ones."""
        if self.size == 1:
            return x
        if isinstance(x, tf.IndexedSlices):
            values = self._keep(hvd.allgather(self._at_run_time(x.values), **self._named(f"{name}.values")))
            indices = self._keep(hvd.allgather(self._at_run_time(x.indices), **self._named(f"{name}.indices")))
            if op == hvd.Average:
                values = values / tf.cast(self.size, values.dtype)
            return tf.IndexedSlices(values, indices, x.dense_shape)
        scale = {"prescale_factor": 1.0 / predivide, "postscale_factor": predivide} if op == hvd.Average else {}
        return self._keep(hvd.allreduce(self._at_run_time(x), op=op, **scale, **self._named(name)))


def broadcast(variables: Iterable[tf.Variable], root_rank: int, process_set: Any = hvd.global_process_set) -> None:
    """Give the variables the values that they have on the root. All ranks pass variables of the same shapes and dtypes.

    Horovod's own function names its collectives after variables, and a process that starts later may have other names.
    """
    for variable in variables:
        # Horovod does not support bfloat16. float32 holds its values exactly.
        wide = tf.cast(variable, tf.float32) if variable.dtype == tf.bfloat16 else variable.read_value()
        variable.assign(tf.cast(hvd.broadcast(wide, root_rank, process_set=process_set), variable.dtype))
