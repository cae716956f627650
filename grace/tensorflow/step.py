"""`GraphStep`: the steps of an exchange as graphs, after all ranks have agreed on the form of each gradient."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import horovod.tensorflow as hvd
import tensorflow as tf

from grace.core.communicators.pairs import from_partner, partner_of, to_partner
from grace.core.errors import MismatchError, StepError
from grace.core.methods.memory import keeps_nothing
from grace.core.spec import TensorSpec
from grace.core.state.carry import splice_units
from grace.core.state.states import States, UnitStates
from grace.core.step.step import Step
from grace.core.transport.collectives import KINDS, Kind, copies
from grace.tensorflow.branches import always, never
from grace.tensorflow.gradients import Gradient, as_kind, nbytes, signature_of
from grace.tensorflow.replicas import Replicas
from grace.tensorflow.run import tensorflow_ops
from grace.tensorflow.stage import Stage, made_outside
from grace.tensorflow.transport import HorovodTransport
from grace.tensorflow.waiting import Watch

if TYPE_CHECKING:
    from grace.tensorflow.exchange import Exchange


class Selection(NamedTuple):
    """The part that a rank has in a step: by default, it sends the gradients of all variables, and trains them.

    If only `members` are exchanged, by their indices, the others sync in other steps. The memories of `untrained`
    variables do not change. A rank that is `resting` sends zeros, and keeps its memories.
    """

    members: frozenset[int] | None = None
    untrained: frozenset[int] = frozenset()
    resting: bool = False


class GraphStep:
    """The step of an exchange as a graph, for any number of rows.

    `kinds` pairs each tensor with the form in which its gradient is exchanged; see `kind_of`. None: no rank has one.
    """

    def __init__(
        self, exchange: Exchange, transport: HorovodTransport, kinds: Sequence[tuple[TensorSpec, str | None]]
    ) -> None:
        self._exchange, self.transport, self._kinds = exchange, transport, kinds
        self._states = exchange.run
        self._watch = Watch(transport.rank, transport.size, exchange.timeout, self._under_way)
        self._replicas = Replicas(exchange.config.check_replicas)
        # What outer steps look at; see `grace.core.session.outer_graph.GraphExchange`.
        self.rank, self.size, self.seed = transport.rank, transport.size, exchange.config.seed
        self.track_norms = exchange.track_norms
        self.buffers: Sequence[tf.Variable] = exchange.buffers
        self.is_foreign = self._states.is_foreign
        # What `traffic` returns.
        self._traffic = made_outside([2], tf.float64)
        # The stages in the graphs that were traced.
        self._traced: list[Stage] | None = None
        # The graph of a step that compresses nothing, and the stages that it was traced for.
        self._mean_step: tuple[list[Stage], Any] | None = None

    def _trace(self, selection: Selection, scale: tf.DType | None, second: bool, leaves_out: bool) -> Any:
        """Return the graph of a step, which is skipped after an overflow if there is a loss scale.

        With `second`, there are second gradients as well, and if it `leaves_out` ranks, there is a vector that says
        which.
        """
        exchange, transport, run = self._exchange, self.transport, self._states

        def step(
            gradients: Sequence[Gradient],
            references: Sequence[Gradient],
            scales: Sequence[tf.Tensor],
            out: Sequence[tf.Tensor],
        ) -> Any:
            exchange.traces += 1
            transport.end_turn([run.check_full(not second)])
            self._begin(gradients, True)
            run.belong_to_this_rank()
            run.enter()
            lr = exchange._learning_rate()

            def exchanged(stage: Stage) -> list[Gradient]:
                return self._exchange_stage(stage, selection, gradients, references, lr, out, *scales)

            merged = list(run.select(exchanged))
            results = tf.nest.flatten(merged, expand_composites=True)
            transport.end_turn(results)
            self._watch.end(results)
            if exchange.advisor is not None:
                self._tell(gradients, results)
            kinds = itertools.cycle(self._kinds)
            return [None if kind is None else x for (_, kind), x in zip(kinds, merged, strict=False)]

        forms = [signature_of(spec, kind) for spec, kind in self._kinds]
        scales = [] if scale is None else [tf.TensorSpec([], scale)]
        out = [tf.TensorSpec([], tf.bool)] * (self.size if leaves_out else 0)
        return tf.function(step, input_signature=[forms, forms if second else [], scales, out], autograph=False)

    def _under_way(self) -> str:
        (first, _), *others = self._kinds
        more = f" and {len(others)} other variables" if others else ""
        return (
            f"the gradient of '{first.name}'{more}; Horovod's warning on rank 0 names the collective and the ranks "
            "that are missing"
        )

    def fill(self, gradients: Sequence[Gradient | None]) -> list[Gradient | None]:
        """Return the gradients in the form that the ranks agreed on, with zeros for None where a rank has one."""
        for (spec, kind), gradient in zip(self._kinds, gradients, strict=True):
            if kind is None and gradient is not None:
                raise StepError(
                    f"tensor '{spec.name}' has a gradient now, but had none on any rank in the first step; "
                    "use one optimizer or tape per set of variables that are trained together."
                )
        return [
            None if kind is None else as_kind(gradient, kind, spec)
            for (spec, kind), gradient in zip(self._kinds, gradients, strict=True)
        ]

    def __call__(
        self,
        gradients: Sequence[Gradient | None],
        selection: Selection,
        *,
        loss_scale: tf.Tensor | None = None,
        references: Sequence[Gradient | None] | None = None,
        out: Sequence[tf.Tensor] = (),
    ) -> list[Gradient | None]:
        """Exchange gradients; see `Exchange.__call__`.

        `out` says of each rank whether it is known to rest. If outer steps follow what this rank has sent, that comes
        after the merged gradients.
        """

        def given(some: Sequence[Gradient | None]) -> list[Gradient]:
            pairs = zip(self._kinds, self.fill(some), strict=True)
            return [as_kind(None, "dense", spec) if x is None else x for (spec, _), x in pairs]

        if self._traced is not self._states.live:
            # It is the first step, or the first one after `change`.
            self._traced, self._graph = self._states.live, functools.cache(self._trace)
        second, scales = references is not None, [] if loss_scale is None else [loss_scale]
        graph = self._graph(selection, scales[0].dtype if scales else None, second, bool(out))
        merged = _call(graph, given(gradients), [] if references is None else given(references), scales, list(out))
        # A graph returns the shape of rows as a tensor.
        return [
            tf.IndexedSlices(x.values, x.indices, tf.constant(spec.shape)) if isinstance(x, tf.IndexedSlices) else x
            for (spec, _), x in zip(itertools.cycle(self._kinds), merged, strict=False)
        ]

    def sync(
        self, changes: Mapping[int, tf.Tensor], inside: tf.Tensor | None, absent: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Exchange the changes of some variables, by their indices, at a sync.

        Return the means over all ranks and, if outer steps follow it, what this rank has sent. It contributes its
        changes if it is `inside`; None stands for true. `absent` is as for `Step.leave_out`.
        """
        members, count = frozenset(changes), len(self._kinds)
        given = [changes.get(i) for i in range(count)]

        def exchanged(resting: bool) -> list[Gradient | None]:
            found = self(given, Selection(members, resting=resting), out=absent)
            return [x for i, x in enumerate(found) if i % count in members]

        if inside is None:
            found = exchanged(False)
        else:
            found = tf.cond(inside, lambda: exchanged(False), lambda: exchanged(True))
        return found[: len(members)], found[len(members) :]

    def paces(self, places: Sequence[int]) -> tf.Tensor:
        """Return the pace of the memory of each of these variables in the next step."""

        def of(stage: Stage) -> tf.Tensor:
            pace_of = {item.spec.name: item.memory.pace for item in stage.plan.assignments}
            return tf.constant([pace_of[self._kinds[i][0].name] for i in places], tf.float64)

        return self._states.select(of)

    def traffic(self) -> list[tf.Tensor]:
        """Return the bytes of all syncs until now: those that this rank has sent, and those on the links."""
        return list(tf.unstack(self._traffic.read_value()))

    def everywhere(self, condition: tf.Tensor) -> tf.Tensor:
        """Return whether the condition holds on all ranks. All ranks must call it."""
        fails = tf.cast(tf.reshape(tf.logical_not(condition), [1]), tf.int32)
        failing = self.transport.allreduce(fails, op="max", name="everywhere").wait()
        self.transport.end_turn()
        return failing[0] == 0

    def means(
        self,
        tensors: Sequence[tf.Tensor],
        label: str,
        *,
        of_first: bool = False,
        pairing: tf.Tensor | None = None,
    ) -> list[tf.Tensor]:
        """Return uncompressed means over all ranks, or the values `of_first`, the first rank. All ranks must call it.

        With `pairing`, the number of a draw, they are over the pair of this rank. `label` begins the names of the
        collectives.
        """
        transport, found = self.transport, []
        for i, x in enumerate(tensors):
            # Horovod for TensorFlow does not add bfloat16.
            wide, name = tf.cast(x, tf.float32) if x.dtype == tf.bfloat16 else tf.convert_to_tensor(x), f"{label}.{i}"
            if of_first:
                merged = transport.broadcast(wide, root=0, name=name).wait()
            elif pairing is not None:
                merged = (wide + tf.reshape(self._of_partner(tf.reshape(wide, [-1]), pairing, name), wide.shape)) / 2
            else:
                merged = transport.average(wide, op=hvd.Average, predivide=1.0, name=name)
            found.append(tf.cast(merged, x.dtype))
            kind: Kind = "broadcast" if of_first else "allreduce" if pairing is None else "alltoall"
            self._count([nbytes(wide)], [(kind, nbytes(wide))])
        transport.end_turn()
        return found

    def _count(self, sent: Sequence[Any], handed: Sequence[tuple[Kind, Any]]) -> None:
        """Count bytes that this rank sends at a sync, and those that it hands to collectives."""
        if self._exchange.config.outer is not None:
            on_links = [tf.cast(x, tf.float64) * float(copies(kind, self.transport.size)) for kind, x in handed]
            self._traffic.assign_add([sum(tf.cast(x, tf.float64) for x in sent), sum(on_links)])

    def _of_partner(self, x: tf.Tensor, pairing: tf.Tensor, name: str) -> tf.Tensor:
        """Return the flat tensor of the other rank of a pair, or the same of a rank that is alone."""
        transport, ops, seed = self.transport, tensorflow_ops("cpu"), self._exchange.config.seed
        partner = ops.computed(functools.partial(partner_of, transport.rank, transport.size, seed), pairing)
        sent = to_partner(ops, x, partner, transport.size)
        return from_partner(ops, transport.alltoall(sent, name=name).wait(), x, partner)

    def mean_step(self, tensors: Sequence[tf.Tensor], *, compares: bool) -> list[tf.Tensor]:
        """Exchange flat tensors uncompressed in place of a step; `compares` says whether it compares the replicas."""
        live = self._states.live
        if self._mean_step is None or self._mean_step[0] is not live:

            def step(*given: tf.Tensor) -> list[tf.Tensor]:
                self._begin(given, compares)
                merged: dict[int, tf.Tensor] = {}
                for dtype in sorted({x.dtype for x in given}, key=str):
                    places = [i for i, x in enumerate(given) if x.dtype == dtype]
                    # As one tensor: which of several Horovod fuses depends on the time, and with it the order of sums.
                    (joined,) = self.means([tf.concat([given[i] for i in places], 0)], f"gradient.{dtype.name}")
                    parts = tf.split(joined, [given[i].shape[0] for i in places])
                    merged.update(zip(places, parts, strict=True))
                self._watch.end(list(merged.values()))
                return [merged[i] for i in range(len(given))]

            signature = [tf.TensorSpec(x.shape, x.dtype) for x in tensors]
            self._mean_step = live, tf.function(step, input_signature=signature, autograph=False)
        return list(_call(self._mean_step[1], *tensors))

    def _begin(self, inputs: Sequence[Any], compares: bool) -> None:
        """Begin a step: see that the graph is valid, watch over the step, and compare the replicas."""
        run = self._states
        # Otherwise a collective could begin before the error, on some ranks only.
        self.transport.end_turn([run.check_current()])
        self._watch.begin(run.counter, tf.nest.flatten(inputs, expand_composites=True)[:1])
        if compares:
            self._replicas.compare(self._exchange._weights(), run.shared_states, run.counter, self.transport)

    def _tell(self, gradients: Sequence[Gradient], results: Sequence[tf.Tensor]) -> None:
        """Let the graph tell the advisor when each dense gradient was there, and when all were merged."""
        given = {
            spec.name: x
            for (spec, _), x in zip(self._kinds, gradients, strict=True)
            if not isinstance(x, tf.IndexedSlices)
        }

        def time_after(*tensors: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies(tensors):
                return tf.timestamp()

        def tell(times: Any, *arrays: Any) -> None:
            advisor, (*there, end) = self._exchange.advisor, map(float, times)
            if advisor is not None:
                advisor.begin(min(there))
                for name, at, x in zip(given, there, arrays, strict=True):
                    advisor.note_gradient(name, x, at=at)
                advisor.end(end)

        times = tf.stack([*map(time_after, given.values()), time_after(*results)])
        tf.numpy_function(tell, [times, *given.values()], [])

    def _exchange_stage(
        self,
        stage: Stage,
        selection: Selection,
        gradients: Sequence[Gradient],
        references: Sequence[Gradient],
        lr: tf.Tensor | None,
        out: Sequence[tf.Tensor],
        loss_scale: tf.Tensor | None = None,
    ) -> list[Gradient]:
        exchange, transport = self._exchange, self.transport
        follows = exchange.config.outer is not None and exchange.config.outer.follows_sent
        given = {spec.name: gradient for (spec, _), gradient in zip(self._kinds, gradients, strict=True)}
        numbers = {name: number for number, name in enumerate(given)}
        second = dict(zip(given, references, strict=False))
        plan, merged, reduced = stage.plan, dict[str, Gradient](), list[Any]()
        members = selection.members
        if members is not None and len(members) < len(given):
            plan, merged = plan.only({name for name, i in numbers.items() if i in members}), dict(given)
        for item in plan.delegated:
            name, x = item.spec.name, given[item.spec.name]
            if selection.resting:
                x = tf.zeros_like(x)
            if isinstance(x, tf.IndexedSlices):
                stage.note({("rows", name): nbytes(x)})
            predivide, label = exchange.gradient_predivide_factor, f"dense.{numbers[name]}"
            merged[name] = transport.average(x, op=exchange.op, predivide=predivide, name=label)
            reduced.append(nbytes(x))
        counter, turns = self._states.counter, self._states.turns
        # As many syncs as each tensor has had: random numbers follow from it.
        number = counter // turns if turns > 1 else counter
        step = Step(
            States([(0, plan)], number, {name: stage.read_unit(name) for name in plan.stateful}),
            tensorflow_ops,
            transport,
            seed=exchange.config.seed,
            average=exchange.op == hvd.Average,
            rollback=exchange.config.rollback,
            track_norms=exchange.track_norms,
            keeps_own=follows,
            times=exchange.times,
            full=plan.period > 0 and not references,
        )
        step.leave_out(out, out=selection.resting)
        for item in plan.exchanged:
            step.ready(item.spec.name, given[item.spec.name], lr, second.get(item.spec.name))
        outcome = step.finish()
        merged.update(outcome.merged)
        self._commit(stage, outcome.states.units, [merged[name] for name in given], selection, loss_scale)
        stage.note(outcome.notes)
        handed: list[tuple[Kind, Any]] = [(kind, x) for (kind, _), x in outcome.notes.items() if kind in KINDS]
        sent = [x for (kind, _), x in outcome.notes.items() if kind == "bucket"]
        self._count([*sent, *reduced], [*handed, *(("allreduce", x) for x in reduced)])
        self._states.go_to(counter + 1)
        # A stage may be a branch of the graph.
        transport.end_turn()
        if not follows:
            return [merged[name] for name in given]
        # Where a memory feeds back what is dropped, control variates take what this rank has moved.
        memories = {item.spec.name: item.memory for item in plan.assignments}
        own = {name: x for name, x in outcome.own.items() if keeps_nothing(memories[name]) or memories[name].pace}
        return [merged[name] for name in given] + [own.get(name, x) for name, x in given.items()]

    def _commit(
        self,
        stage: Stage,
        units: dict[str, UnitStates],
        merged: Sequence[Gradient],
        selection: Selection,
        loss_scale: tf.Tensor | None,
    ) -> None:
        """Write the new states of a step, except what they hold of untrained variables; not if the step is skipped.

        Without roll-back, memories start from zero after a skipped step.
        """
        if not selection.untrained and loss_scale is None:
            stage.write(units)
            return
        before, untrained = stage.read(), {self._kinds[i][0].name for i in selection.untrained}
        restarted: dict[str, UnitStates] = {
            name: {**states, "memory": {key: tf.zeros_like(x) for key, x in states["memory"].items()}}
            for name, states in before.items()
        }
        for new in (units, restarted):
            splice_units(stage.plan, new, before, untrained, tensorflow_ops)
        if loss_scale is None:
            stage.write(units)
            return
        results = tf.nest.flatten(list(merged), expand_composites=True)
        scaled = [x * tf.cast(loss_scale, x.dtype) for x in results if x.dtype.is_floating]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(x)) for x in scaled])
        otherwise = never if self._exchange.config.rollback else always(lambda: stage.write(restarted))
        tf.cond(finite, always(lambda: stage.write(units)), otherwise)


def _call(graph: Any, *given: Any) -> Any:
    """Call the graph of a step. Raises MismatchError if it says that the replicas differ."""
    try:
        return graph(*given)
    except tf.errors.InvalidArgumentError as error:
        if MismatchError.__name__ not in str(error.message):
            raise
        raise MismatchError(str(error.message)) from None
