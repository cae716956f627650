"""`Exchange`: the plan, the state and the traced step behind TensorFlow's optimizers and tapes."""

from __future__ import annotations

import collections
import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from grace.core.config.config import Config, make_config, refuse_typos
from grace.core.config.registry import compressors
from grace.core.errors import ConfigError, IncompatibleError, MismatchError, StepError
from grace.core.guards.agreement import Meeting
from grace.core.guards.replicas import digest
from grace.core.ops import get_ops
from grace.core.plan.plan import Plan
from grace.core.session import exchange as core
from grace.core.session.start import described
from grace.core.spec import ONE_RANK, Ranks, TensorSpec
from grace.tensorflow.gradients import (
    Gradient,
    as_rows,
    common_kinds,
    device_of,
    flat,
    inside,
    is_embedding,
    names_of,
    nothing,
)
from grace.tensorflow.replicas import Replicas
from grace.tensorflow.stages import Stages
from grace.tensorflow.times import GraphTimes, Measured
from grace.tensorflow.traced import Traced
from grace.tensorflow.transport import HorovodTransport, local_size_of
from grace.tensorflow.waiting import Watch, elastic_timeout, gather, is_elastic

_OPS = functools.partial(get_ops, "tensorflow")

# The number of exchanges that have started, per process set. It is part of the names of their collectives, which must
# differ between exchanges. Ranks start exchanges in the same order.
_meetings: collections.Counter[int] = collections.Counter()


class Kept(NamedTuple):
    """A copy of what an exchange holds, to go back to: its configuration and those before, and all values."""

    config: Config
    history: tuple[Config, ...]
    values: tuple[tf.Tensor, ...]


class Exchange(Measured, core.Exchange, tf.Module):
    """The compressed exchange of the gradients of one list of variables, with the state that it keeps between steps.

    An optimizer has its own exchange as the attribute `grace`. For tapes, make one exchange and pass it to every tape.
    It is a `tf.Module` and can be part of a `tf.train.Checkpoint`. `config` and `options` are those of
    `grace.make_config`; the other arguments are those of Horovod. `plan`, `report`, `stats`, `check_replicas`,
    `state_dict` and `load_state_dict` raise StepError until the variables are known, after `build` or the first step.
    Raises ConfigError for a wrong configuration or arguments that are not supported.
    """

    called = "optimizer.grace"
    #: The process set of Horovod whose ranks take part; an exchange that was loaded needs it before its first step.
    process_set: Any

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        op: int = hvd.Average,
        gradient_predivide_factor: float = 1.0,
        sparse_as_dense: bool = False,
        process_set: Any = hvd.global_process_set,
        **options: Any,
    ) -> None:
        tf.Module.__init__(self, name="grace")
        if op not in (hvd.Average, hvd.Sum):
            raise ConfigError(
                f"the argument 'op' must be hvd.Average or hvd.Sum, received {op}; "
                "other reductions are not linear and do not work with compression."
            )
        if gradient_predivide_factor != 1.0 and (op == hvd.Sum or gradient_predivide_factor <= 0.0):
            raise ConfigError(
                "the argument 'gradient_predivide_factor' must be a positive number and needs op=hvd.Average "
                f"({hvd.Average}), received {gradient_predivide_factor!r} with op={op}."
            )
        refuse_typos(options, type(self), "grace.tensorflow.Exchange")
        core.Exchange.__init__(self, make_config(config, **options), (), (), _OPS)
        self.op = op
        self.gradient_predivide_factor = gradient_predivide_factor
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        # The names of the variables: known after `build`, or earlier for an optimizer that was loaded.
        self.names: tuple[str, ...] = ()
        # The configuration before each call of `change`. Variables of these configurations are saved too.
        self.history: list[Config] = []
        self.traces = 0
        # Returns the number of the optimizer's steps, on which its gradient accumulation depends.
        self.iterations: Callable[[], int] = lambda: 0
        # Returns the learning rate of the current step. Tapes do not know it.
        self.learning_rate: Callable[[], tf.Tensor] | None = None
        # Returns the variables that are equal on all ranks before a step, by name, if these are not the weights.
        self.equal_weights: Callable[[], Sequence[tf.Variable]] | None = None
        # Makes a variable from a name and an initial value. An optimizer sets its own function.
        self.make_variable: Callable[[str, tf.Tensor], tf.Variable] = self._make_variable
        # Drops variables that `make_variable` has made. An optimizer sets its own function.
        self.drop_variables: Callable[[Sequence[tf.Variable]], None] = self._drop_variables
        self._variables: list[tf.Variable] = []
        # In elastic mode, `grace.tensorflow.KerasState` sets `synchronized`.
        self.elastic, self.synchronized = is_elastic(), False
        self.times = GraphTimes()
        self._stages: Stages | None = None
        # Set at the first step, when all ranks have met.
        self._transport: HorovodTransport | None = None
        self._watch: Watch | None = None

    # --- public interface ---------------------------------------------------------------------------------------

    @property
    def runs(self) -> Sequence[Stages]:
        """The plans and states of all stages; none before the variables are known."""
        return [] if self._stages is None else [self._stages]

    @property
    def run(self) -> Stages:
        """The plans and states of all stages. Raises StepError before the variables are known."""
        if self._stages is None:
            raise StepError("the variables are not known yet; build the optimizer, or run a first step.")
        return self._stages

    @property
    def built(self) -> bool:
        """True if the variables are known and the plan and the state exist."""
        return self._stages is not None

    def change(self, **changes: Any) -> None:
        """Change options, for instance change(compress_ratio=0.1), or the method. Residuals are kept.

        All ranks must call it between the same two steps. Then trace every graph that contains a step again; an old
        graph raises an error. `ScheduleCallback` does all this for `fit`. Raises the errors of `make_config`,
        ConfigError if the configuration has a schedule, StepError inside a graph, and MismatchError on every rank if
        the ranks differ.
        """
        before = self.config
        super().change(**changes)
        if self.built:
            self.history.append(before)
        if self._transport is not None:
            self._trace_anew()

    def announce(self, stages: Sequence[tuple[int, Plan]], step: int | None = None) -> None:
        """Tell the user on rank 0 what is sent, as soon as the ranks have met."""
        if self._transport is not None:
            super().announce(stages, step)

    # --- before the first step ----------------------------------------------------------------------------------

    def build(self, variables: Sequence[Any], gradients: Sequence[Gradient | None] | None = None) -> None:
        """Make the plan and the state for these variables.

        `gradients` tells by its `tf.IndexedSlices` whose gradients are rows; without it, those of embeddings are. It
        does not contact other ranks, so a single process can load a model. Raises StepError if the exchange is built,
        and ConfigError in a strategy of several replicas.
        """
        if self._stages is not None:
            raise StepError("this exchange is already built; make another Exchange for another list of variables.")
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise ConfigError(
                "tf.distribute strategies with several replicas per process are not supported; "
                "start one process per device, for example by horovodrun."
            )
        names = self.names = names_of(variables, self.names)
        sparse = (
            [is_embedding(name) for name in names]
            if gradients is None
            else [
                is_embedding(name) if gradient is None else isinstance(gradient, tf.IndexedSlices)
                for name, gradient in zip(names, gradients, strict=True)
            ]
        )
        specs = [
            TensorSpec(name, tuple(v.shape), tf.as_dtype(v.dtype).name, device_of(v), sparse=rows)
            for name, v, rows in zip(names, variables, sparse, strict=True)
        ]
        with tf.init_scope():
            self._specs = tuple(specs)
            self._watched = tuple(weakref.ref(inside(v)) for v in variables)
            self.rank, self.ranks = self._rank_of_ranks()
            self._stages = self._stages_for(self.ranks, self.make_variable)

    def _stages_for(
        self,
        ranks: Ranks,
        make_variable: Callable[[str, tf.Tensor], tf.Variable],
        rows: Sequence[str] = (),
    ) -> Stages:
        """Return the stages that the exchange has with these ranks, before the first step.

        `rows` names the tensors whose gradients are known to be rows.
        """
        first, *later = (*self.history, self.config)
        stages = Stages(
            self._specs,
            first,
            make_variable,
            sparse_as_dense=self.sparse_as_dense,
            rank=self.rank,
            ranks=ranks,
            rows=rows,
        )
        for config in later:
            stages.change(stages.plan_of(config))
        return stages

    def _merge(self, run: Stages, states: Sequence[Mapping[str, Any]]) -> list[str]:
        for ranks in self._possible_ranks(len(states)):
            try:
                before = self._stages_for(ranks, lambda name, value: tf.Variable(value, trainable=False))
            except (ConfigError, IncompatibleError):
                continue
            if before.slots.states.keys() == states[0]["tensors"].keys():
                return run.merge_state_dicts(states, before, average=self.op == hvd.Average)
        raise self._no_plan(states)

    def _rank_of_ranks(self) -> tuple[int, Ranks]:
        """Return this rank and the ranks; 0 of 1 where Horovod is not initialized, as in a process that only loads."""
        ranks = getattr(self.process_set, "ranks", None) if hvd.is_initialized() else None
        if not ranks:
            return 0, ONE_RANK
        rank = self.process_set.rank() if self.process_set.included() else -1
        return rank, Ranks(len(ranks), local_size_of(self.process_set))

    def serves(self, variables: Sequence[Any]) -> bool:
        """Return whether the exchange was built for exactly these variables, in any order."""
        return len(variables) == len(self._watched) and {id(inside(v)) for v in variables} == {
            id(watched()) for watched in self._watched
        }

    def places(self, variables: Sequence[Any]) -> list[int]:
        """Return the indices of the variables in the list of `build`. Raises StepError for other variables."""
        if not self.serves(variables):
            raise StepError(
                f"this exchange was built for the variables {', '.join(self.names)}, but received gradients of "
                f"{', '.join(names_of(variables, ()))}; use one Exchange per list of variables."
            )
        order = {id(watched()): place for place, watched in enumerate(self._watched)}
        return [order[id(inside(v))] for v in variables]

    def _make_variable(self, name: str, value: tf.Tensor) -> tf.Variable:
        variable = tf.Variable(value, trainable=False, name=name.replace("/", "_"))
        # A checkpoint finds the variable in this list, and fills it if the checkpoint was restored earlier.
        self._variables.append(variable)
        return variable

    def _drop_variables(self, variables: Sequence[tf.Variable]) -> None:
        dropped = {id(variable) for variable in variables}
        # A new list: TensorFlow saves no list from which something was taken.
        self._variables = [variable for variable in self._variables if id(variable) not in dropped]

    @property
    def of_this_rank(self) -> list[tf.Variable]:
        """The variables that differ between ranks. A broadcast must not change them."""
        slots = self.run.slots
        return [slots.origin, *slots.of_this_rank]

    def describe(self) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks."""
        return {
            "configuration": self.config.to_dict(),
            "op": self.op,
            "gradient_predivide_factor": self.gradient_predivide_factor,
            "sparse_as_dense": self.sparse_as_dense,
        }

    def described(self) -> dict[str, Any]:
        """Return what must be equal on all ranks before they synchronize their states."""
        return {
            **self.describe(),
            "history": [config.to_dict() for config in self.history],
            **described(self.config, self._specs, self.run.plans, _OPS),
        }

    # --- elastic mode -------------------------------------------------------------------------------------------

    def meet(self, mine: Sequence[Any], purpose: str, what: str) -> list[Any]:
        """Return the JSON-able values of all ranks, in rank order."""
        return self._gather(mine, purpose, what)

    def snapshot(self) -> Kept:
        """Return a copy of everything that changes between steps."""
        values = tuple(tf.identity(variable) for variable in self.run.slots.variables)
        return Kept(self.config, tuple(self.history), values)

    def go_back(self, kept: Kept) -> None:
        """Return to a copy made among the same ranks. If `change` was called since, steps must be traced anew."""
        if len(self.history) != len(kept.history):
            self.config, self.history = kept.config, list(kept.history)
            self._make_anew()
        for variable, value in zip(self.run.slots.variables, kept.values, strict=True):
            variable.assign(value)

    def move(self) -> tuple[int, int]:
        """Go on with the ranks that Horovod has now; return the numbers of ranks before and now.

        The ranks meet again at the next step. Graphs of earlier steps raise an error.
        """
        before = self.size
        self.rank, self.ranks = self._rank_of_ranks()
        old = self._make_anew()
        self.run.move(old, average=self.op == hvd.Average)
        return before, self.size

    def _make_anew(self) -> Stages:
        """Make stages for the ranks and the configuration of now, with new variables; return the old stages."""
        old = self.run
        old.retire()
        self.drop_variables(old.slots.variables)
        # The watch over a step that has failed ends with it.
        self._transport = self._watch = None
        self._stages = self._stages_for(self.ranks, self.make_variable, old.known_rows)
        return old

    # --- the first step -----------------------------------------------------------------------------------------

    def _start(self, gradients: Sequence[Gradient | None], failure: Exception | None, zeros: bool) -> None:
        """Compare the settings of all ranks and start the run.

        With `zeros`, a gradient that no rank has is dense. Raises `failure` if it is not None, and MismatchError if
        another rank failed or the ranks differ.
        """
        if not hvd.is_initialized():
            raise ConfigError("grace.tensorflow: Horovod is not initialized; call hvd.init() first.")
        if self.process_set is None:
            raise ConfigError(
                "the saved optimizer used a process set, and process sets are not saved; set it before the first step: "
                "model.optimizer.grace.process_set = hvd.add_process_set(...)."
            )
        stages = self.run
        set_id = self.process_set.process_set_id
        if not self.process_set.included():
            raise ConfigError(
                f"this process is not in {self.process_set} and cannot take part in its steps; "
                "call it only on the ranks of the set."
            )
        rank, ranks = self._rank_of_ranks()
        self.rank, self.ranks, where = rank, ranks, "the first step"
        with Meeting(lambda mine: self._gather([mine], "first step", where), where) as meeting:
            if failure is not None:
                raise failure
            self.times.start_as_told(hvd.rank(), hvd.size())
            if ranks != stages.ranks and any(plan.shards for plan in stages.plans):
                raise ConfigError(
                    f"the plan was made for {stages.ranks.size} ranks, and there are {ranks.size}; call hvd.init() "
                    "before you build or load the optimizer: the communicator cuts tensors into one shard per rank."
                )
            meeting.mine = {
                **self.describe(),
                "iterations": self.iterations(),
                **described(self.config, self._specs, stages.plans, _OPS),
                "methods": [
                    {item.spec.name: compressors.name_of(item.compressor) for item in plan.assignments}
                    for plan in stages.plans
                ],
                "of this rank": {
                    "meetings": _meetings[set_id],
                    "kinds": {spec.name: self._kind(spec, g) for spec, g in zip(self._specs, gradients, strict=True)},
                },
            }
        everyone = meeting.everyone
        # Horovod may reuse the identifier of a removed set with other ranks. So the ranks' counts may differ.
        number = max(other["of this rank"]["meetings"] for other in everyone)
        _meetings[set_id] = number + 1
        # Horovod takes an error for one of its own only if the name of a collective says so, and swallows all others.
        kind = ".HorovodAllreduce" if self.elastic else ""
        self._transport = HorovodTransport(self.process_set, f"grace.{set_id}.{number}{kind}")
        self._watch = Watch(self._transport.rank, self._transport.size, self.timeout, self._under_way)
        kinds = common_kinds([other["of this rank"]["kinds"] for other in everyone])
        self._kinds = {name: kind or ("dense" if zeros else None) for name, kind in kinds.items()}
        self._replicas = Replicas(self.config.check_replicas)
        rows = [name for name, kind in self._kinds.items() if kind not in (None, "dense")]
        stages.start(
            self._transport,
            rows,
            op=self.op,
            predivide=self.gradient_predivide_factor,
            track_norms=self._track_norms,
            times=self.times,
        )
        self.announce(stages.schedule, stages.step or None)
        self._trace_anew()

    def _under_way(self) -> str:
        more = f" and {len(self.names) - 1} other variables" if len(self.names) > 1 else ""
        return (
            f"the gradient of '{self.names[0]}'{more}; Horovod's warning on rank 0 names the collective and the ranks "
            "that are missing"
        )

    def _trace_anew(self) -> None:
        self._traced = Traced(self._exchange, [spec.shape for spec in self._specs])

    # --- one step -----------------------------------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def filled(self, gradients: Sequence[Gradient | None], *, zeros: bool = False) -> list[Gradient | None]:
        """Return the gradients, with zeros for None where another rank has a gradient; for `zeros` see `__call__`.

        The first call contacts the other ranks. Raises StepError for a wrong number of gradients, ConfigError inside
        `jit_compile=True`, and MismatchError on every rank if the ranks differ.
        """
        failure = self._objection(gradients)
        if self._transport is None:
            with tf.init_scope():
                self._start(gradients, failure, zeros)
        if failure is not None:
            raise failure
        for spec, gradient in zip(self._specs, gradients, strict=True):
            if self._kinds[spec.name] is None and gradient is not None:
                raise StepError(
                    f"tensor '{spec.name}' has a gradient now, but had none on any rank in the first step; "
                    "use one optimizer or tape per set of variables that are trained together."
                )
        return [
            None if self._kinds[spec.name] is None else self._shaped(spec, gradient)
            for spec, gradient in zip(self._specs, gradients, strict=True)
        ]

    def _objection(self, gradients: Sequence[Gradient | None]) -> Exception | None:
        """Return the error that keeps this rank from the step, or None."""
        if len(gradients) != len(self._specs):
            return StepError(f"expected {len(self._specs)} gradients, one per variable, received {len(gradients)}.")
        if not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            return ConfigError(
                "XLA cannot compile Horovod's collectives; pass jit_compile=False to model.compile() or tf.function()."
            )
        if self.elastic and not self.synchronized:
            return StepError(
                "elastic Horovod keeps no residuals in its own states; pass the optimizer, or for tapes an Exchange, "
                "to grace.tensorflow.KerasState in their place."
            )
        return None

    @tf.autograph.experimental.do_not_convert
    def __call__(
        self,
        gradients: Sequence[Gradient | None],
        *,
        absent: frozenset[int] = frozenset(),
        loss_scale: tf.Tensor | None = None,
        zeros: bool = False,
    ) -> list[Gradient | None]:
        """Exchange one gradient per variable, in the order of `build`. A gradient that is None on all ranks stays None.

        With `zeros` in the first step, None on all ranks means a dense gradient of zeros, in later steps as well.
        `absent` holds the indices of variables that this step does not train; their memories do not change. With
        `loss_scale`, all memories are rolled back if a result times `loss_scale` is not finite, because the caller then
        skips the step; with `rollback = false` in the configuration, they start from zero. The step is traced once per
        pattern of dense and sparse gradients, in eager mode and inside a `tf.function`. Inside a `tf.function`,
        TensorFlow wraps errors of the first step. The first call contacts the other ranks. Raises StepError for a wrong
        number of gradients, or for one that no rank had in the first step, ConfigError inside `jit_compile=True`, and
        MismatchError on every rank if the ranks differ.
        """
        given = [
            tf.zeros(spec.shape, spec.dtype) if gradient is None else gradient
            for spec, gradient in zip(self._specs, self.filled(gradients, zeros=zeros), strict=True)
        ]
        try:
            merged = self._traced(given, absent, loss_scale)
        except tf.errors.InvalidArgumentError as error:
            if MismatchError.__name__ not in str(error.message):
                raise
            raise MismatchError(str(error.message)) from None
        return [None if self._kinds[spec.name] is None else m for spec, m in zip(self._specs, merged, strict=True)]

    def everywhere(self, condition: tf.Tensor) -> tf.Tensor:
        """Return whether the condition holds on all ranks. All ranks must call it, after `filled`."""
        assert self._transport is not None
        fails = tf.cast(tf.reshape(tf.logical_not(condition), [1]), tf.int32)
        failing = self._transport.allreduce(fails, op="max", name="everywhere").wait()
        self._transport.end_turn()
        return failing[0] == 0

    def _shaped(self, spec: TensorSpec, gradient: Gradient | None) -> Gradient:
        """Convert the gradient to the form that all ranks agreed on: dense, or rows."""
        kind = self._kinds[spec.name]
        if gradient is None:
            gradient = nothing(spec, kind)
        if gradient.dtype != spec.dtype:
            gradient = tf.cast(gradient, spec.dtype)
        if isinstance(gradient, tf.IndexedSlices):
            gradient = tf.IndexedSlices(gradient.values, gradient.indices, tf.constant(spec.shape))
        if kind == "dense":
            return tf.ensure_shape(tf.convert_to_tensor(gradient), spec.shape)
        return as_rows(gradient, str(kind))

    def _kind(self, spec: TensorSpec, gradient: Gradient | None) -> str | None:
        """Return the form in which a gradient is sent: "dense", "rows of DTYPE" (of the indices), or None."""
        if gradient is None:
            return None
        rows = isinstance(gradient, tf.IndexedSlices) and spec.name in self.run.rows
        return f"rows of {gradient.indices.dtype.name}" if rows else "dense"

    def _gather(self, mine: Sequence[Any], purpose: str, what: str) -> list[Any]:
        return gather(self.process_set, purpose, what, self.timeout)(mine[0])

    @property
    def timeout(self) -> float:
        """The time limit in seconds of a wait for other ranks."""
        return elastic_timeout(self.config.timeout) if self.elastic else self.config.timeout

    def _plan_of(self, config: Config) -> Plan:
        return self.run.plan_of(config)

    def _digest(self, x: tf.Variable) -> int:
        return digest(get_ops("numpy"), x.numpy())

    def _weights(self) -> dict[str, tf.Variable]:
        """Return the variables that must be equal on all ranks before a step, as far as they still exist."""
        variables = self.equal_weights() if self.equal_weights else [watched() for watched in self._watched]
        return {name: v for name, v in zip(self.names, variables, strict=True) if v is not None}

    def _exchange(
        self, gradients: Sequence[Gradient], absent: frozenset[int], loss_scale: tf.Tensor | None
    ) -> list[Gradient]:
        """Run the body of the traced step."""
        self.traces += 1
        assert self._transport is not None
        assert self._watch is not None
        stages = self.run
        # Otherwise a collective could begin before the error, on some ranks only.
        self._transport.end_turn([stages.check_current()])
        self._watch.begin(stages.slots.step, flat(gradients)[:1])
        self._replicas.compare(self._weights(), stages.slots.shared_states, stages.slots.step, self._transport)
        stages.slots.belong_to(self._transport.rank, self._transport.size)
        stages.enter()
        before, rollback = [], self.config.rollback
        if absent or loss_scale is not None:
            before = stages.slots.snapshot(memories=bool(absent) or rollback)
        merged = stages.run(gradients, None if self.learning_rate is None else self.learning_rate())
        results = flat(merged)
        if loss_scale is not None:
            scaled = [x * tf.cast(loss_scale, x.dtype) for x in results if x.dtype.is_floating]
            finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(x)) for x in scaled])
            tf.cond(finite, lambda: tf.constant(True), lambda: stages.slots.restore(before, memories=rollback))
        names = {self._specs[place].name for place in absent}
        stages.slots.restore_tensors(before, names, stages.units)
        self._transport.end_turn(results)
        self._watch.end(results)
        return merged
