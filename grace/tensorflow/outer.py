"""Outer steps of a Keras optimizer: the variables of `grace.core.session.outer`, and its steps within a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from grace.core.config.config import Config
from grace.core.config.outer import OuterSteps
from grace.core.errors import ConfigError
from grace.core.session.outer_setup import check_outer, rounds_of_states
from grace.core.spec import State, TensorSpec
from grace.tensorflow.branches import always, never
from grace.tensorflow.gradients import inside
from grace.tensorflow.run import tensorflow_ops

if TYPE_CHECKING:
    from grace.tensorflow.optimizer import OptimizerExchange

MakeVariable = Callable[[str, tf.Tensor], tf.Variable]


def check_graph(config: Config, where: str) -> None:
    """Raise ConfigError for outer steps that a Keras optimizer cannot take."""
    outer = config.outer
    assert outer is not None
    if outer.participation < 1 or outer.relevance or outer.variates or outer.local_error or outer.pairs:
        raise ConfigError(
            f"{where}: a TensorFlow graph exchanges the same with all ranks at each meeting, and knows only the mean; "
            "so participation, relevance, variates, local_error and pairs are not supported, received "
            f"{outer}; leave them out."
        )
    if outer.state == "reset":
        raise ConfigError(
            f"{where}: the moments of Keras' optimizers cannot start again while 'iterations' counts on, so state = "
            f"'reset' is not supported, received {outer}; use 'average' or 'local'."
        )


def states_of(optimizer: Any) -> list[tuple[str, tf.Variable]]:
    """Return what a Keras optimizer keeps of each variable, by its name there, such as "momentum"."""
    starts = [v.path.replace("/", "_") + "_" for v in optimizer._trainable_variables]
    found = []
    for state in optimizer.variables:
        # Keras names a state after its variable, whose name may be the beginning of another one.
        start = max((x for x in starts if state.name.startswith(x)), key=len, default="")
        if start and len(state.shape) and state.dtype.startswith(("float", "bfloat")):
            found.append((state.name.removeprefix(start), inside(state)))
    return found


def buffers_of(model: Any) -> list[Any]:
    """Return the variables of a Keras model that no optimizer trains; frozen weights are not among them."""
    return [v for layer in model._flatten_layers() for v in layer._non_trainable_variables]


class OuterVariables:
    """The weights after the last meeting, what is on its way, and the states of the outer optimizer.

    `make_variable(name, value)` makes a variable that is saved with the optimizer. Raises ConfigError for states that
    the optimizer does not have.
    """

    def __init__(
        self, outer: OuterSteps, specs: Sequence[TensorSpec], optimizer: Any, make_variable: MakeVariable, where: str
    ) -> None:
        self.outer, self._specs, self._where = outer, specs, where
        places = {spec.name: i for i, spec in enumerate(specs)}
        self._fragments = [[places[name] for name in names] for names in outer.divide(specs)]
        variables, states = [inside(v) for v in optimizer._trainable_variables], states_of(optimizer)
        rounds = rounds_of_states(outer, [key for key, _ in states], optimizer._plain.__name__, where)
        self._states = [(v, rounds[key]) for key, v in states if key in rounds]
        self.anchors = [make_variable(f"met_{i}", tf.convert_to_tensor(v)) for i, v in enumerate(variables)]
        self._kept = [
            {
                key: make_variable(f"outer_{i}_{key}", value)
                for key, value in outer.optimizer.init(tensorflow_ops(spec.device), self._flat(v, spec)).items()
            }
            for i, (spec, v) in enumerate(zip(specs, variables, strict=True))
        ]
        # The inner step of the last meeting, and the number of meetings, if the next ones depend on them.
        counts = outer.adapt or any(n > 1 for n in rounds.values())
        self._met, self._rounds = (
            [make_variable(f"outer_{name}", tf.zeros([], tf.int64)) for name in ("met_at", "rounds")]
            if counts
            else (None, None)
        )
        # The changes on their way.
        sent = variables if outer.delay else []
        self._flight = [make_variable(f"outer_sent_{i}", tf.zeros_like(v)) for i, v in enumerate(sent)]
        # The sum and the number of the losses of this rank since the last meeting, and the mean of all ranks in the
        # first and in the last period.
        names = ("total", "number", "first", "last") if outer.adapt == "loss" else ()
        self._losses = {name: make_variable(f"outer_loss_{name}", tf.zeros([], tf.float64)) for name in names}
        # What all ranks know could be subtracted again.
        self._random = tf.random.Generator.from_non_deterministic_state() if outer.noise else None

    def note_loss(self, loss: tf.Tensor) -> None:
        """Note the loss of an inner step, if the periods follow it."""
        if self._losses:
            loss = tf.cast(tf.reduce_mean(loss), tf.float64)
            told = "StepError: the periods of outer steps follow the square root of the loss, which is"
            tf.debugging.Assert((loss > 0) & tf.math.is_finite(loss), [told, loss])
            self._losses["total"].assign_add(loss)
            self._losses["number"].assign_add(1)

    def before(self, steps: tf.Variable, variables: Sequence[tf.Variable]) -> None:
        """Read the weights again where they are those of the last meeting; they may have been loaded or broadcast."""
        taken = tf.cast(steps, tf.int64)
        exact = taken <= self.outer.warmup if self.outer.keeps_own or self.outer.delay else tf.constant(True)
        for fragment, members in enumerate(self._fragments):
            just_met = taken == self._met if self.outer.adapt else self.outer.meets(taken, fragment)

            def read(members: Sequence[int] = members) -> None:
                for i in members:
                    self.anchors[i].assign(variables[i])

            tf.cond((taken == 0) | (just_met & exact), always(read), never)

    def after(self, steps: tf.Variable, variables: Sequence[tf.Variable], exchange: OptimizerExchange) -> None:
        """Exchange what the weights have moved and write new ones, if the ranks meet after this inner step."""
        taken, buffers, first = tf.cast(steps, tf.int64), exchange.buffers, self.outer.buffers == "first"
        warming = taken <= self.outer.warmup
        check_outer(exchange.config, self._where, average=True, size=exchange.size)
        weight = self.outer.factor(self.outer.warmup + 1, 0, exchange.rank, exchange.size, exchange.config.seed)

        def weighted(xs: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
            """Return this rank's share of a sum whose mean over the ranks is wanted."""
            return [x * tf.cast(tf.where(warming, 1.0, weight), x.dtype) for x in xs] if self.outer.weight else xs

        def mean(kept: Sequence[tf.Variable], label: str) -> None:
            means = exchange.means(weighted([v.read_value() for v in kept]), label, of_first=first and kept is buffers)
            for v, new in zip(kept, means, strict=True):
                v.assign(new)

        def norm(members: Sequence[int]) -> tf.Tensor:
            moved = [tf.cast(self.anchors[i] - variables[i], tf.float64) for i in members]
            return tf.sqrt(tf.add_n([tf.reduce_sum(x * x) for x in moved]))

        everything, clips = range(len(variables)), self.outer.clip > 0
        # In the warm-up all tensors meet at once, one fragment after the other.
        whole = tf.cond(warming, lambda: norm(everything), lambda: tf.constant(0.0, tf.float64)) if clips else None

        def changes(members: Sequence[int]) -> list[tf.Tensor]:
            moved = [self.anchors[i] - variables[i] for i in members]
            return self._private(moved, members, tf.where(warming, whole, norm(members))) if clips else moved

        def send(members: Sequence[int]) -> None:
            for i, change in zip(members, changes(members), strict=True):
                self._flight[i].assign(change)

        def meet(members: Sequence[int], last: bool) -> None:
            if self._flight:
                tf.cond(warming, always(functools.partial(send, members)), never)
            moved = [self._flight[i].read_value() for i in members] if self._flight else changes(members)
            given = dict(zip(members, weighted(moved), strict=True))
            merged = exchange([given.get(i) for i in everything], only=frozenset(members))
            for i in members:
                self._meet(i, variables[i], tf.convert_to_tensor(merged[i]), warming)
            if not last:
                return
            if self._rounds is not None:
                self._met.assign(taken)
                self._rounds.assign_add(1)
            for rounds in sorted({rounds for _, rounds in self._states}):
                now = tf.constant(True) if rounds == 1 else self._rounds % rounds == 0
                due = functools.partial(mean, [v for v, n in self._states if n == rounds], f"state.{rounds}")
                tf.cond(now, always(due), never)
            mean(buffers, "buffer")
            if self._losses:
                self._follow(exchange)

        for fragment, members in enumerate(self._fragments):
            meeting = functools.partial(meet, members, members is self._fragments[-1])
            tf.cond(self._lands(taken, fragment), always(meeting), never)
            if self._flight:
                sends = self.outer.meets(taken, fragment) & ~warming
                tf.cond(sends, always(functools.partial(send, members)), never)

    def _private(self, moved: Sequence[tf.Tensor], members: Sequence[int], norm: tf.Tensor) -> list[tf.Tensor]:
        """Return changes with their common norm limited, and with noise of this rank."""
        made, clip = [], self.outer.clip
        factor = tf.where(norm > clip, clip / norm, tf.ones_like(norm))
        for i, x in zip(members, moved, strict=True):
            wide = tf.cast(x, self._specs[i].work_dtype)
            limited = wide * tf.cast(factor, wide.dtype)
            if self._random is not None:
                limited += self._random.normal(wide.shape, stddev=self.outer.noise * clip, dtype=wide.dtype)
            made.append(tf.cast(limited, x.dtype))
        return made

    def _follow(self, exchange: OptimizerExchange) -> None:
        """Take the mean loss of all ranks in this period, on which the next one depends."""
        total, number, first, last = self._losses.values()
        told = "StepError: the periods of outer steps follow the loss, and none was noted since the last meeting; call "
        tf.debugging.Assert(number > 0, [told + "optimizer.scale_loss(loss) in each step."])
        (loss,) = exchange.means([tf.reshape(tf.cast(total / number, tf.float32), [1])], "loss")
        last.assign(tf.cast(tf.reshape(loss, []), tf.float64))
        first.assign(tf.where(first == 0, last, first))
        for v in (total, number):
            v.assign(tf.zeros([], tf.float64))

    def _meet(self, i: int, variable: tf.Variable, mean: tf.Tensor, warming: tf.Tensor) -> None:
        spec, anchor, kept = self._specs[i], self.anchors[i], self._kept[i]
        ops, state = tensorflow_ops(spec.device), {key: tf.convert_to_tensor(v) for key, v in kept.items()}
        before, change = self._flat(anchor, spec), self._flat(mean, spec)

        def step() -> tuple[tf.Tensor, State]:
            return self.outer.optimizer.step(ops, before, change, state)

        new, after = tf.cond(warming, lambda: (before - change, state), step) if self.outer.warmup else step()
        mixed = new
        if self.outer.keeps_own:
            mixed = tf.where(warming, new, self.outer.mixed(ops, before, new, self._flat(variable, spec)))
        for target, x in ((anchor, new), (variable, mixed)):
            target.assign(tf.reshape(ops.cast(x, spec.dtype), target.shape))
        for key, v in kept.items():
            v.assign(after[key])

    def _lands(self, taken: tf.Tensor, fragment: int) -> tf.Tensor:
        """Return whether what a fragment has sent is applied after this inner step."""
        if not self.outer.adapt:
            return self.outer.lands(taken, fragment)
        every = self.outer.phases[-1][1]
        # As `OuterSteps.period`; in the warm-up the ranks meet anyway.
        if self._losses:
            first, last = self._losses["first"], self._losses["last"]
            ratio = tf.where(first > 0, tf.math.divide_no_nan(last, first), tf.ones_like(first))
            period = tf.maximum(tf.math.ceil(tf.sqrt(ratio) * every), 1)
        else:
            after = tf.cast(self._rounds - self.outer.warmup, tf.float64)
            period = tf.math.ceil((1 + self.outer.adapt * after) * every - 1e-9)
        return (taken <= self.outer.warmup) | (taken >= self._met + tf.cast(period, tf.int64))

    def _flat(self, x: tf.Tensor | tf.Variable, spec: TensorSpec) -> tf.Tensor:
        return tensorflow_ops(spec.device).cast(tf.reshape(x, [-1]), spec.work_dtype)
