"""Outer steps of a Keras optimizer: the variables of `grace.core.session.outer`, and its steps within a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

from grace.core.config.outer import OuterSteps
from grace.core.errors import ConfigError
from grace.core.session.meeting import agreeing, meet, varied, with_variate
from grace.core.session.outer_setup import check_outer, rounds_of_states
from grace.core.spec import TensorSpec
from grace.tensorflow.branches import always, in_python, never
from grace.tensorflow.gradients import inside, weighed
from grace.tensorflow.run import tensorflow_ops
from grace.tensorflow.stage import Stage

if TYPE_CHECKING:
    from grace.tensorflow.optimizer import OptimizerExchange

MakeVariable = Callable[[str, tf.Tensor], tf.Variable]


def check_states(outer: OuterSteps, optimizer: Any, where: str) -> None:
    """Raise ConfigError if the states of a Keras optimizer should start again, and cannot."""
    if outer.state != "reset":
        return
    shared = {kind.__name__ for kind in type(optimizer).__mro__} & {"Nadam", "ScheduleFreeAdamW"}
    if shared:
        raise ConfigError(
            f"{where}: the states of {shared.pop()} cannot start again without what it keeps for all variables, "
            "received state = 'reset' in outer; use 'average' or 'local'."
        )
    if int(optimizer.iterations):
        raise ConfigError(
            f"{where}: state = 'reset' returns to the states before the first step, and the optimizer has taken "
            f"{int(optimizer.iterations)} steps; wrap it before, or use 'average' or 'local'."
        )


def states_of(optimizer: Any) -> list[tuple[str, int, tf.Variable]]:
    """Return what a Keras optimizer keeps of each variable: its name there, such as "momentum", and the index."""
    names = [getattr(v, "path", v.name) for v in optimizer._trainable_variables]
    starts = [name.replace("/", "_").replace(":", "_") + "_" for name in names]
    found = []
    for state in optimizer.variables:
        # Keras names a state after its variable, whose name may be the beginning of another one.
        start = max((x for x in starts if state.name.startswith(x)), key=len, default="")
        if start and len(state.shape) and state.dtype.startswith(("float", "bfloat")):
            found.append((state.name.removeprefix(start), starts.index(start), inside(state)))
    return found


def _first_value(key: str, state: tf.Variable, where: str) -> float:
    """Return the number that all elements of a state begin with. Raises ConfigError if they differ."""
    low, high = float(tf.reduce_min(state)), float(tf.reduce_max(state))
    if low < high:
        raise ConfigError(
            f"{where}: state = 'reset' needs states whose elements begin with one number, and those of {key} differ; "
            "use 'average' or 'local'."
        )
    return low


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
        rounds = rounds_of_states(outer, [key for key, _, _ in states], optimizer._plain.__name__, where)
        self._states = [(v, rounds[key]) for key, _, v in states if key in rounds]
        self.anchors = [make_variable(f"met_{i}", tf.convert_to_tensor(v)) for i, v in enumerate(variables)]
        self._kept = [
            {
                key: make_variable(f"outer_{i}_{key}", value)
                for key, value in outer.optimizer.init(tensorflow_ops(spec.device), self._flat(v, spec)).items()
            }
            for i, (spec, v) in enumerate(zip(specs, variables, strict=True))
        ]
        # The inner step of the last meeting, and the number of meetings, if the next ones depend on them.
        drawn = outer.participation < 1 or outer.pairs
        counts = outer.adapt or any(n > 1 for n in rounds.values()) or drawn or outer.relevance
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
        # The mean changes of the last meeting, which decide on the next one.
        followed = variables if outer.relevance else []
        self._last = [make_variable(f"outer_last_{i}", tf.zeros_like(v)) for i, v in enumerate(followed)]
        # The flat control variates, and by fragment the sum of the learning rates since the last meeting.
        corrected = specs if outer.variates else []
        self.variates = [
            make_variable(f"outer_variate_{i}", tf.zeros([spec.numel], spec.work_dtype))
            for i, spec in enumerate(corrected)
        ]
        fragments = range(outer.count)
        self._rates = [make_variable(f"outer_rates_{i}", tf.zeros([], tf.float64)) for i in fragments if outer.variates]
        # The states that begin again, with their first values, and by fragment the inner steps until they do. The
        # average of weights is none of an optimizer's states.
        resets = states if outer.state == "reset" else []
        self._first = [(i, v, _first_value(key, v, where)) for key, i, v in resets if key != "average"]
        self._begun = [
            make_variable(f"outer_begun_{i}", tf.zeros([], tf.int64)) for i in fragments if outer.state == "reset"
        ]
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

    def begun(self, i: int) -> tf.Tensor | None:
        """Return the number of inner steps before the states of a variable began, None if they never begin again."""
        if not self._begun:
            return None
        return self._begun[next(k for k, members in enumerate(self._fragments) if i in members)].read_value()

    def moved(self) -> None:
        """Go on with other ranks, over which control variates do not add up to zero."""
        for variate in self.variates:
            variate.assign(tf.zeros_like(variate))

    def before(self, steps: tf.Variable, variables: Sequence[tf.Variable], exchange: OptimizerExchange) -> None:
        """Read the weights again where they are those of the last meeting; they may have been loaded or broadcast."""
        taken, outer = tf.cast(steps, tf.int64), self.outer
        exact = taken <= outer.warmup if outer.keeps_own or outer.delay else tf.constant(True)
        for fragment, members in enumerate(self._fragments):
            just_met = taken == self._met if outer.adapt else outer.meets(taken, fragment)

            def read(members: Sequence[int] = members) -> None:
                for i in members:
                    self.anchors[i].assign(variables[i])

            met = just_met & exact if not outer.local_error else tf.constant(False)
            tf.cond((taken == 0) | met, always(read), never)
        if self.variates or outer.pairs:
            tf.cond(exchange.run.is_foreign(exchange.rank, exchange.size), always(self._loaded_another), never)

    def _loaded_another(self) -> None:
        """Go on with what another rank has saved, or one of other ranks."""
        told = (
            "StateError: checkpoint: with pairs, each rank goes on from weights of its own, expected what it has saved "
            "among as many ranks, received what another one has; load one checkpoint per rank."
        )
        tf.debugging.Assert(not self.outer.pairs, [told])
        self.moved()

    def corrected(self, gradients: Sequence[Any], places: Sequence[int], lr: tf.Tensor) -> list[Any]:
        """Return gradients of an inner step less the control variates, and note its learning rate."""
        if not self.variates:
            return list(gradients)
        for rate in self._rates:
            rate.assign_add(tf.cast(lr, tf.float64))
        made = []
        for i, g in zip(places, gradients, strict=True):
            h = self.variates[i]
            wide = None if g is None else tf.cast(tf.convert_to_tensor(g), h.dtype)
            made.append(None if wide is None else tf.cast(wide - tf.reshape(h, wide.shape), g.dtype))
        return made

    def after(self, steps: tf.Variable, variables: Sequence[tf.Variable], exchange: OptimizerExchange) -> None:
        """Exchange what the weights have moved and write new ones, if the ranks meet after this inner step."""
        taken, outer, everything = tf.cast(steps, tf.int64), self.outer, range(len(variables))
        warming = taken <= outer.warmup
        check_outer(exchange.config, self._where, average=True, size=exchange.size)

        def norm(members: Sequence[int]) -> tf.Tensor:
            moved = [tf.cast(self.anchors[i] - variables[i], tf.float64) for i in members]
            return tf.sqrt(tf.add_n([tf.reduce_sum(x * x) for x in moved]))

        # In the warm-up all tensors meet at once, one fragment after the other.
        clips = outer.clip > 0
        whole = tf.cond(warming, lambda: norm(everything), lambda: tf.constant(0.0, tf.float64)) if clips else None

        def changes(members: Sequence[int]) -> list[tf.Tensor]:
            if outer.pairs:
                # The two of a pair do not move from the same weights.
                return [variables[i].read_value() for i in members]
            moved = [self.anchors[i] - variables[i] for i in members]
            return self._private(moved, members, tf.where(warming, whole, norm(members))) if clips else moved

        def send(members: Sequence[int]) -> None:
            for i, change in zip(members, changes(members), strict=True):
                self._flight[i].assign(change)

        def exchanged(members: Sequence[int], fragment: int) -> None:
            if self._flight:
                tf.cond(warming, always(functools.partial(send, members)), never)
            moved = [self._flight[i].read_value() for i in members] if self._flight else changes(members)
            if self.variates:
                paces, moved = self._with_variates(moved, fragment, exchange)
            share = Share(self._factor(taken, fragment, exchange))
            if outer.relevance:
                share = self._share_of_senders(moved, warming, exchange)
            found, own = exchange.meet(dict(zip(members, moved, strict=True)), share.factor)
            merged = share.rescaled(found)
            if outer.pairs:
                merged = [self.anchors[i] - x for i, x in zip(members, merged, strict=True)]
            for i, change, mean, sent in zip(members, moved, merged, own or moved, strict=True):
                self._meet(i, variables[i], change, tf.convert_to_tensor(mean), sent, warming)
                if self._last:
                    self._last[i].assign(mean)
            if self.variates:
                self._vary(fragment, own, merged, paces, warming)
            if self._begun:
                self._restart(members, fragment, taken)
            if fragment < outer.count - 1:
                return
            if self._rounds is not None:
                self._met.assign(taken)
                self._rounds.assign_add(1)
            for rounds in sorted({rounds for _, rounds in self._states}):
                now = tf.constant(True) if rounds == 1 else self._rounds % rounds == 0
                due, label = [v for v, n in self._states if n == rounds], f"state.{rounds}"
                pairing = self._rounds // rounds - 1 if outer.pairs else None
                tf.cond(now, always(functools.partial(share.average, due, exchange, label, pairing=pairing)), never)
            pairing = self._rounds - 1 if outer.pairs else None
            share.average(exchange.buffers, exchange, "buffer", of_first=outer.buffers == "first", pairing=pairing)
            if self._losses:
                self._follow(share, exchange)

        for fragment, members in enumerate(self._fragments):
            meeting = functools.partial(exchanged, members, fragment)
            tf.cond(self._lands(taken, fragment), always(meeting), never)
            if self._flight:
                sends = outer.meets(taken, fragment) & ~warming
                tf.cond(sends, always(functools.partial(send, members)), never)

    def _factor(self, taken: tf.Tensor, fragment: int, exchange: OptimizerExchange) -> tf.Tensor | None:
        """Return the factor on what this rank contributes to a meeting; None if all contribute equally."""
        outer = self.outer
        if outer.is_plain_mean or outer.relevance:
            return None
        # Of any fragment; they take turns after the warm-up.
        before = 0 if self._rounds is None else outer.warmup + (self._rounds - outer.warmup) * outer.count + fragment

        def draw(step: Any, rounds: Any) -> Any:
            return np.float64(outer.factor(int(step), int(rounds), exchange.rank, exchange.size, exchange.config.seed))

        return in_python(draw, [taken, before], tf.float64, [])

    def _share_of_senders(self, moved: Sequence[tf.Tensor], warming: tf.Tensor, exchange: OptimizerExchange) -> Share:
        """Return this rank's part in a meeting of those whose changes have the signs of the last one."""
        equal = [
            agreeing(tensorflow_ops(spec.device), x, last.read_value())
            for spec, x, last in zip(self._specs, moved, self._last, strict=True)
        ]
        relevance = tf.cast(tf.add_n(equal), tf.float64) / sum(spec.numel for spec in self._specs)
        sends = tf.cast(warming | (self._rounds == 0) | (relevance >= self.outer.relevance), tf.float32)
        (share,) = exchange.means([tf.reshape(sends, [1])], "senders")
        return Share(tf.cast(sends, tf.float64), tf.cast(share[0], tf.float64))

    def _with_variates(
        self, moved: Sequence[tf.Tensor], fragment: int, exchange: OptimizerExchange
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Return the pace of the memory of each tensor, and what this rank sends of it."""
        members, made = self._fragments[fragment], []

        def paces(stage: Stage) -> tf.Tensor:
            pace_of = {item.spec.name: item.memory.pace for item in stage.plan.assignments}
            return tf.constant([pace_of[self._specs[i].name] for i in members], tf.float64)

        found = exchange.run.select(paces)
        for number, (i, x) in enumerate(zip(members, moved, strict=True)):
            spec, flat = self._specs[i], tf.reshape(x, [-1])
            ops, h = tensorflow_ops(spec.device), self.variates[i].read_value()
            alone = with_variate(ops, spec, flat, h, self._rates[fragment].read_value())
            made.append(tf.reshape(tf.where(found[number] > 0, alone, flat), x.shape))
        return found, made

    def _vary(
        self,
        fragment: int,
        own: Sequence[tf.Tensor],
        merged: Sequence[tf.Tensor],
        paces: tf.Tensor,
        warming: tf.Tensor,
    ) -> None:
        """Move the control variates of a fragment; see `grace.core.session.outer`."""
        rate = self._rates[fragment].read_value()
        steps = tf.where(paces > 0, paces, 1.0) / rate
        for number, (i, x, mean) in enumerate(zip(self._fragments[fragment], own, merged, strict=True)):
            spec, h = self._specs[i], self.variates[i].read_value()
            kept, factor = 1 - paces[number], steps[number]
            new = varied(tensorflow_ops(spec.device), spec, h, x, mean, kept=kept, factor=factor)
            self.variates[i].assign(tf.where(warming | (rate == 0), h, new))
        self._rates[fragment].assign(0.0)

    def _restart(self, members: Sequence[int], fragment: int, taken: tf.Tensor) -> None:
        """Let the inner optimizer keep of some variables what it kept at the start."""
        for i, v, first in self._first:
            if i in members:
                v.assign(tf.fill(v.shape, tf.cast(first, v.dtype)))
        self._begun[fragment].assign(taken)

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

    def _follow(self, share: Share, exchange: OptimizerExchange) -> None:
        """Take the mean loss of all ranks in this period, on which the next one depends."""
        total, number, first, last = self._losses.values()
        told = "StepError: the periods of outer steps follow the loss, and none was noted since the last meeting; call "
        tf.debugging.Assert(number > 0, [told + "optimizer.scale_loss(loss) in each step."])
        (loss,) = share.means([tf.reshape(tf.cast(total / number, tf.float32), [1])], exchange, "loss")
        last.assign(tf.cast(tf.reshape(loss, []), tf.float64))
        first.assign(tf.where(first == 0, last, first))
        for v in (total, number):
            v.assign(tf.zeros([], tf.float64))

    def _meet(
        self, i: int, variable: tf.Variable, moved: tf.Tensor, mean: tf.Tensor, sent: tf.Tensor, warming: tf.Tensor
    ) -> None:
        spec, anchor, kept = self._specs[i], self.anchors[i], self._kept[i]
        flat = [tf.reshape(x, [-1]) for x in (anchor, mean, variable)]
        state = {key: tf.convert_to_tensor(v) for key, v in kept.items()}
        new, own, after = meet(self.outer, tensorflow_ops(spec.device), spec, *flat, state, warming=warming)
        new, own = (tf.reshape(x, anchor.shape) for x in (new, own))
        anchor.assign(new)
        variable.assign(new - (moved - sent) if self.outer.local_error else own)
        for key, v in kept.items():
            v.assign(after[key])

    def _lands(self, taken: tf.Tensor, fragment: int) -> tf.Tensor:
        """Return whether what a fragment has sent is applied after this inner step."""
        if not self.outer.adapt:
            return self.outer.lands(taken, fragment)

        def period(met: Any, rounds: Any, first: Any = 0.0, last: Any = 0.0) -> Any:
            return np.int64(self.outer.period(int(met), int(rounds), last / first if first else 1.0))

        ends = [v for key, v in self._losses.items() if key in ("first", "last")]
        return taken >= self._met + in_python(period, [self._met, self._rounds, *ends], tf.int64, [])

    def _flat(self, x: tf.Tensor | tf.Variable, spec: TensorSpec) -> tf.Tensor:
        return tensorflow_ops(spec.device).cast(tf.reshape(x, [-1]), spec.work_dtype)


class Share(NamedTuple):
    """Part of a rank in a meeting: the factor on what it contributes, and the share of the ranks that contribute.

    None stands for 1. Both are 0-d and float64.
    """

    factor: tf.Tensor | None = None
    senders: tf.Tensor | None = None

    def means(
        self, tensors: Sequence[tf.Tensor], exchange: OptimizerExchange, label: str, **options: Any
    ) -> list[tf.Tensor]:
        """Return uncompressed means over the ranks that contribute; see `GraphStep.means`."""
        return self.rescaled(exchange.means(weighed(tensors, self.factor), label, **options))

    def average(self, kept: Sequence[tf.Variable], exchange: OptimizerExchange, label: str, **options: Any) -> None:
        """Write these means to the variables that they are of."""
        found = self.means([v.read_value() for v in kept], exchange, label, **options)
        for v, new in zip(kept, found, strict=True):
            v.assign(new)

    def rescaled(self, merged: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return means over the ranks that contribute, from those over all; zeros if there are none."""
        if self.senders is None:
            return list(merged)
        return weighed(merged, tf.where(self.senders > 0, 1 / self.senders, 1.0))
