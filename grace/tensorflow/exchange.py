"""`Exchange`: the plan, the state and the traced step behind TensorFlow's optimizers and tapes."""

from __future__ import annotations

import collections
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from grace.core.config.config import Config, make_config, refuse_typos
from grace.core.config.registry import compressors
from grace.core.errors import ConfigError, IncompatibleError, StepError
from grace.core.guards.agreement import Handshake
from grace.core.guards.replicas import digest
from grace.core.ops import get_ops
from grace.core.ops.composites import ArrayOps
from grace.core.plan.plan import Plan, make_plans
from grace.core.plan.unit import Assignment, Unit
from grace.core.session import exchange as core
from grace.core.session.outer_setup import check_references, follows_steps, refuse_outer
from grace.core.session.start import check_auto, check_predivide, describe, is_mean
from grace.core.spec import ONE_RANK, Ranks, TensorSpec
from grace.tensorflow.gradients import (
    Gradient,
    before_graphs,
    common_kinds,
    device_of,
    inside,
    is_embedding,
    kind_of,
    names_of,
)
from grace.tensorflow.run import VariableRun, tensorflow_ops
from grace.tensorflow.step import GraphStep, Selection
from grace.tensorflow.times import GraphTimes
from grace.tensorflow.transport import HorovodTransport, check_process, local_size_of
from grace.tensorflow.typed import Module, do_not_convert
from grace.tensorflow.waiting import elastic_timeout, gather, is_elastic

if TYPE_CHECKING:
    from grace.advice.advise import Advice
    from grace.bench.codec import LocalStep

# The number of exchanges that have started, per process set. It is part of the names of their collectives, which must
# differ between exchanges. Ranks start exchanges in the same order.
_handshakes: collections.Counter[int] = collections.Counter()


class Exchange(core.Exchange, Module):
    """The compressed exchange of the gradients of one list of variables, with the state that it keeps between steps.

    An optimizer has its own exchange as the attribute `grace`. For tapes, make one exchange and pass it to every tape.
    It is a `tf.Module` and can be part of a `tf.train.Checkpoint`. `config` and `options` are those of
    `grace.make_config`; the other arguments are those of Horovod. `plan`, `report`, `stats`, `check_replicas`,
    `state_dict` and `load_state_dict` raise StepError until the variables are known, after `build` or the first step.
    After `change`, trace every graph that contains a step again: an old one raises an error. `ScheduleCallback` does
    all this for `fit`. Raises ConfigError for a wrong configuration or arguments that are not supported.
    """

    called = "optimizer.grace"
    watches = True
    takes_references = True
    # True if the ranks may step on their own: an optimizer has the weights, and a tape has none.
    takes_outer = False
    # True if the compressor "auto" may choose.
    takes_auto = True
    # True in a batch of `fit`, before which the advisor has decided, and whose function is traced again after a change.
    in_batch = False
    # Returns the buffers, as soon as they are known.
    _buffers: Callable[[], Sequence[Any]] | None = None
    # It has what `core.Exchange` asks of a `Run`, where the methods are not overridden here.
    _runs: list[VariableRun]  # type: ignore[assignment]
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
        Module.__init__(self, name="grace")
        where = "grace.tensorflow.Exchange"
        average = is_mean(op, hvd.Average, hvd.Sum, "hvd.Average or hvd.Sum", where)
        check_predivide(gradient_predivide_factor, average, f"op=hvd.Average ({hvd.Average})", op, where)
        refuse_typos(options, type(self), where)
        made = make_config(config, **options)
        check_auto(made, where, self.takes_auto and not is_elastic())
        core.Exchange.__init__(self, made, (), [], tensorflow_ops, prefix="bucket", delegate=self._delegated)
        if not self.takes_outer:
            refuse_outer(self.config, where)
        check_references(self.config, where, self.takes_references)
        self.op = hvd.Average if average else hvd.Sum
        self.gradient_predivide_factor = gradient_predivide_factor
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        # The names of the variables: known after `build`, or earlier for an optimizer that was loaded.
        self.names: tuple[str, ...] = ()
        self.traces = 0
        self._variables: list[tf.Variable] = []
        # The weights at which second gradients are computed, equal on all ranks; none before the first `evaluate`.
        self._earlier: list[tf.Variable] = []
        # In elastic mode, `grace.tensorflow.KerasState` sets `synchronized`.
        self.elastic, self.synchronized = is_elastic(), False
        self.times, self._track_norms = GraphTimes(), False
        # The tensors whose gradients are known to be rows, since the first step.
        self._rows: frozenset[str] = frozenset()
        # Set at the first step, when all ranks have agreed.
        self._step: GraphStep | None = None

    # --- public interface ---------------------------------------------------------------------------------------

    @property
    def run(self) -> VariableRun:  # type: ignore[override]
        """The plans and states of all stages. Raises StepError before the variables are known."""
        if not self._runs:
            raise StepError("the variables are not known yet; build the optimizer, or run a first step.")
        return self._runs[0]

    @property
    def built(self) -> bool:
        """True if the variables are known and the plan and the state exist."""
        return bool(self._runs)

    def stats(self) -> dict[str, Any]:
        """Return bytes, times, relative errors and residual norms of the last step. Raises StepError before the first.

        `grace.core.state.run.Run.stats` describes the keys.
        """
        if self._step is None:
            raise StepError("stats() describes the last step, and there is none yet; call it after the first step.")
        return self._with_auto(self.run.stats(self.times, self._track_norms))

    def announce(self, stages: Sequence[tuple[int, Plan]], step: int | None = None) -> None:
        """Tell the user on rank 0 what is sent, after the handshake."""
        if self._step is not None:
            super().announce(stages, step)

    @property
    def track_norms(self) -> bool:
        """True if each step measures errors and norms for stats(). This costs a decompression per tensor and step.

        Setting it after the first step raises StepError.
        """
        return self._track_norms

    @track_norms.setter
    def track_norms(self, value: bool) -> None:
        self._check_untraced("track_norms")
        self._track_norms = value

    @property
    def track_times(self) -> bool:
        """True if each step records its times for stats() and a timeline.

        Setting it after the first step raises StepError.
        """
        return self.times.track

    @track_times.setter
    def track_times(self, value: bool) -> None:
        self._check_untraced("track_times")
        self.times.track = value

    def start_timeline(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace of all further steps to `path`; several ranks add ".rankN" before its suffix.

        It sets `track_times`. Raises StepError after the first step unless `track_times` was set before, and
        ConfigError if the file cannot be written.
        """
        if not hvd.is_initialized():
            raise ConfigError("start_timeline: Horovod is not initialized; call hvd.init() first.")
        if not self.track_times:
            self._check_untraced("the timeline")
        self.times.start(path, hvd.rank(), hvd.size())

    def stop_timeline(self) -> None:
        """Stop writing the timeline."""
        self.times.stop()

    def note_buffers(self, variables: Sequence[Any] | Callable[[], Sequence[Any]]) -> None:
        """Note the buffers of a model, which sync at outer steps, or a function that returns them in the first step.

        `fit` notes those of its model. In a loop of your own, pass `model.non_trainable_weights` before the first step.
        Raises StepError afterwards.
        """
        self._check_untraced("the buffers")
        # An ordinary assignment would have TensorFlow save them as a part of the exchange.
        vars(self)["_buffers"] = variables if callable(variables) else lambda: variables

    def advise(self, steps: int = 10) -> Advice | None:
        """Return whether compression pays, or None; see `grace.core.session.exchange.Exchange`.

        The first call must come before the first step, which is traced with what measures it. Raises StepError
        otherwise.
        """
        if self.advisor is None:
            self._check_untraced("advise()")
        return super().advise(steps)

    @property
    def graph(self) -> GraphStep:
        """The step as a graph, after `fill`."""
        assert self._step is not None
        return self._step

    @property
    def transport(self) -> HorovodTransport:
        """The transport of the steps, after the first one."""
        return self.graph.transport

    def local_step(self, unit: Unit, ops: ArrayOps, ranks: int) -> LocalStep:
        """Return the local step of a unit as one graph, to time it."""
        from grace.bench.traced import TracedStep

        return TracedStep(unit, ops, ranks)

    def _check_untraced(self, name: str) -> None:
        if self._step is not None:
            raise StepError(f"{name} was set after the first step was traced; set it before the first step.")

    # --- before the first step ----------------------------------------------------------------------------------

    def build(self, variables: Sequence[Any], gradients: Sequence[Gradient | None] | None = None) -> None:
        """Make the plan and the state for these variables.

        `gradients` tells by its `tf.IndexedSlices` whose gradients are rows; without it, those of embeddings are. It
        does not contact other ranks, so a single process can load a model. Raises StepError if the exchange is built,
        and ConfigError in a strategy of several replicas.
        """
        if self.built:
            raise StepError("this exchange is already built; make another Exchange for another list of variables.")
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise ConfigError(
                "tf.distribute strategies with several replicas per process are not supported; "
                "start one process per device, for example by horovodrun."
            )
        names = self.names = names_of(variables, self.names)
        sparse = [
            is_embedding(name) if gradient is None else isinstance(gradient, tf.IndexedSlices)
            for name, gradient in zip(names, gradients or [None] * len(names), strict=True)
        ]
        specs = [
            TensorSpec(name, tuple(v.shape), self._dtype_of(v), device_of(v), sparse=rows)
            for name, v, rows in zip(names, variables, sparse, strict=True)
        ]
        with before_graphs():
            self._specs = tuple(specs)
            self._watched = tuple(weakref.ref(inside(v)) for v in variables)
            self.rank, self.ranks = self._rank_of_ranks()
            self._make_others()
            self._runs = [self._run_for(self.ranks, self._make_variable)]
        self._start_watching()

    def _run_for(self, ranks: Ranks, make_variable: Callable[[str, tf.Tensor], tf.Variable]) -> VariableRun:
        """Return the run that the exchange has with these ranks, at its start."""
        # A checkpoint has the variables of earlier configurations, too.
        first, *later = (*self.history, self.config)
        stages = make_plans(
            self._specs,
            first,
            ranks=ranks,
            prefix=self.prefix,
            delegate=self._delegate,
            modules=self._modules_for(ranks),
        )
        turns = 1 if first.outer is None else first.outer.count
        run = VariableRun(stages, make_variable, seed=first.seed, rank=self.rank, ranks=ranks, turns=turns)
        for number, config in enumerate(later, 1):
            run.change(self._plan_after(run.plan, config, number, ranks))
        return run

    def _delegated(self, item: Assignment) -> bool:
        """Return whether Horovod reduces the tensor: it can add the dtype of a dense one, and gather rows."""
        outer = self.config.outer
        # Where ranks are out, a communicator that does not add lets them send less.
        kept = outer is not None and (outer.pairs or (outer.participation < 1 and not item.method.communicator.adds))
        dense = item.dense and item.spec.dtype != "bfloat16" and not item.spec.complex and not kept
        return dense or item.spec.name in self._rows

    def _merge(self, run: VariableRun, states: Sequence[Mapping[str, Any]]) -> list[str]:  # type: ignore[override]
        for ranks in self._possible_ranks(len(states)):
            try:
                before = self._run_for(ranks, lambda name, value: tf.Variable(value, trainable=False))
            except (ConfigError, IncompatibleError):
                continue
            if before.states.keys() == states[0]["tensors"].keys():
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

    # --- what an optimizer has ways of its own for -----------------------------------------------------------------

    def _dtype_of(self, variable: Any) -> str:
        """Return the dtype of what is exchanged for a variable."""
        return str(tf.as_dtype(variable.dtype).name)

    def _make_variable(self, name: str, value: tf.Tensor) -> tf.Variable:
        """Make a variable of the state, which is saved with the exchange."""
        variable = tf.Variable(value, trainable=False, name=name.replace("/", "_"))
        # A checkpoint finds the variable in this list, and fills it if the checkpoint was restored earlier.
        self._variables.append(variable)
        return variable

    def _make_others(self) -> None:
        """Make what is kept besides the states of a run, whose variables may be replaced: so they come last."""

    def _drop_variables(self, variables: Sequence[tf.Variable]) -> None:
        """Drop variables of `_make_variable`."""
        dropped = {id(variable) for variable in variables}
        # A new list: TensorFlow saves no list from which something was taken.
        self._variables = [variable for variable in self._variables if id(variable) not in dropped]

    def _iterations(self) -> int:
        """Return the number of the optimizer's steps, on which its gradient accumulation depends."""
        return 0

    def _learning_rate(self) -> tf.Tensor | None:
        """Return the learning rate of the step under way; None if it is not known, as with tapes."""
        return None

    def _equal_variables(self) -> Sequence[tf.Variable | None]:
        """Return the variables that are equal on all ranks before a step, as far as they still exist."""
        return [watched() for watched in self._watched]

    # --- what others need -----------------------------------------------------------------------------------------

    @property
    def buffers(self) -> list[tf.Variable]:
        """The variables that sync by the option `buffers` of outer steps, such as the statistics of BatchNorm."""
        if self.config.outer is None or self.config.outer.buffers == "local":
            return []
        if self._buffers is None and self.config.outer.buffers == "first":
            raise ConfigError(
                "outer: buffers = 'first' needs the variables that the optimizer does not train, received none; call "
                "optimizer.grace.note_buffers(model.non_trainable_weights) before the first step, or leave buffers out."
            )
        given = [] if self._buffers is None else self._buffers()
        return [inside(v) for v in given if tf.as_dtype(v.dtype).is_floating]

    @property
    def of_this_rank(self) -> list[tf.Variable]:
        """The variables that differ between ranks. A broadcast must not change them."""
        return [self.run.origin, *self.run.of_this_rank]

    def shared_variables(self) -> list[tf.Variable]:
        """Return the variables that are equal on all ranks, which a new one takes from another."""
        earlier: Sequence[tf.Variable] = ()
        if any(stage.plan.period for stage in self.run.live):
            earlier = self._make_earlier([watched() for watched in self._watched])
        return [*self.run.shared_variables, *earlier]

    def settings(self) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks."""
        return {"configuration": self.config.to_dict(), **self.arguments}

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that it was made with, besides the configuration and the process set."""
        names = ("op", "gradient_predivide_factor", "sparse_as_dense")
        return {name: getattr(self, name) for name in names}

    def description(self) -> dict[str, Any]:
        """Return what must be equal on all ranks before they synchronize their states."""
        return {
            **self.settings(),
            "history": [config.to_dict() for config in self.history],
            "buffers": [list(v.shape) for v in self.buffers],
            **describe(self.config, self._specs, self.run.plans, tensorflow_ops),
        }

    # --- elastic mode -------------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[Config, list[Config], list[tf.Tensor]]:
        """Return a copy of everything that changes between steps: configuration, those before it, and all values."""
        return self.config, [*self.history], [tf.identity(v) for v in (*self.run.variables, *self._earlier)]

    def go_back(self, config: Config, history: list[Config], values: Sequence[tf.Tensor]) -> None:
        """Return to a copy made among the same ranks. If `change` was called since, steps must be traced again."""
        if len(self.history) != len(history):
            self.config, self.history = config, [*history]
            self._remake()
        # A copy made before the first step has no earlier weights, which that step makes.
        _assign([*self.run.variables, *self._earlier][: len(values)], values)

    def move(self) -> tuple[int, int]:
        """Go on with the ranks that Horovod has now; return the numbers of ranks before and now.

        The handshake is repeated at the next step. Graphs of earlier steps raise an error.
        """
        before = self.size
        self.rank, self.ranks = self._rank_of_ranks()
        old = self._remake()
        self.run.move(old, average=self.op == hvd.Average)
        return before, self.size

    def _remake(self) -> VariableRun:
        """Start a run with the ranks and the configuration of now, with new variables; return the old one."""
        old = self.run
        old.retire()
        self._drop_variables(old.variables)
        # The watch over a step that has failed ends with it.
        self._step = None
        self._runs = [self._run_for(self.ranks, self._make_variable)]
        return old

    # --- the first step -----------------------------------------------------------------------------------------

    def _start(self, gradients: Sequence[Gradient | None], failure: Exception | None, zeros: bool) -> GraphStep:
        """Compare the settings of all ranks, and return the step.

        With `zeros`, a gradient that no rank has is dense. Raises `failure` if it is not None, and MismatchError if
        another rank failed or the ranks differ.
        """
        if self.process_set is None:
            raise ConfigError(
                "the saved optimizer used a process set, and process sets are not saved; set it before the first step: "
                "model.optimizer.grace.process_set = hvd.add_process_set(...)."
            )
        check_process("grace.tensorflow", self.process_set)
        run = self.run
        set_id = self.process_set.process_set_id
        if not self.process_set.included():
            raise ConfigError(
                f"this process is not in {self.process_set} and cannot take part in its steps; "
                "call it only on the ranks of the set."
            )
        self.rank, self.ranks = self._rank_of_ranks()
        where = "the first step"
        # Rows of a tensor that is compressed in a stage are added into a dense gradient: error feedback needs all.
        plain = [{item.spec.name for item in plan.delegated} for plan in run.plans]
        rows = set() if self.sparse_as_dense else set.intersection(*plain)
        with Handshake(lambda mine: self._gather([mine], "first step", where), where) as handshake:
            if failure is not None:
                raise failure
            self.times.start_from_environment(hvd.rank(), hvd.size())
            if self.ranks != run.ranks:
                self._check_ranks(run)
            handshake.local = {
                **self.description(),
                "iterations": self._iterations(),
                "methods": [
                    {item.spec.name: compressors.name_of(item.compressor) for item in plan.assignments}
                    for plan in run.plans
                ],
                "of this rank": {
                    "handshakes": _handshakes[set_id],
                    "kinds": {
                        spec.name: kind_of(gradient, spec.name in rows)
                        for spec, gradient in zip(self._specs, gradients, strict=True)
                    },
                },
            }
        everyone = handshake.everyone
        # Horovod may reuse the identifier of a removed set with other ranks. So the ranks' counts may differ.
        number = max(other["of this rank"]["handshakes"] for other in everyone)
        _handshakes[set_id] = number + 1
        # Horovod takes an error for one of its own only if the name of a collective says so, and swallows all others.
        kind = ".HorovodAllreduce" if self.elastic else ""
        transport = HorovodTransport(self.process_set, f"grace.{set_id}.{number}{kind}")
        found = common_kinds([other["of this rank"]["kinds"] for other in everyone])
        kinds = [(spec, found[spec.name] or ("dense" if zeros else None)) for spec in self._specs]
        self._rows = frozenset(spec.name for spec, kind in kinds if kind not in (None, "dense"))
        run.place = transport.rank, transport.size
        self._step = GraphStep(self, transport, kinds)
        stages = [(stage.first // run.turns, stage.plan) for stage in run.live]
        self.announce(stages, run.step // run.turns or None)
        return self._step

    def _check_ranks(self, run: VariableRun) -> None:
        """Raise an error if the ranks of now cannot go on with plans that were made for others."""
        for plan in run.plans:
            plan.check_ranks(self.size)
            # Of integers that are added, as many share a word as the number of ranks allows.
            if plan.shards or any(field.lanes for unit in plan.units for field in unit.fields):
                raise ConfigError(
                    f"the plan was made for {run.ranks.size} ranks, and there are {self.size}; call hvd.init() before "
                    "you build or load the optimizer, or wrap a new one: what a rank sends depends on their number."
                )

    # --- one step -----------------------------------------------------------------------------------------------

    @do_not_convert
    def fill(self, gradients: Sequence[Gradient | None], *, zeros: bool = False) -> list[Gradient | None]:
        """Return the gradients, with zeros for None where another rank has a gradient; for `zeros` see `__call__`.

        The first call contacts the other ranks. Raises StepError for a wrong number of gradients, ConfigError inside
        `jit_compile=True`, and MismatchError on every rank if the ranks differ.
        """
        return self._agree(gradients, zeros).fill(gradients)

    def _agree(self, gradients: Sequence[Gradient | None], zeros: bool) -> GraphStep:
        """Return the step for these gradients, after the ranks have agreed on it."""
        failure, step = self._objection(gradients), self._step
        if step is None:
            with before_graphs():
                step = self._start(gradients, failure, zeros)
        if failure is not None:
            raise failure
        return step

    def _objection(self, gradients: Sequence[Gradient | None]) -> Exception | None:
        """Return the error that keeps this rank from the step, or None."""
        if len(gradients) != len(self._specs):
            return StepError(f"expected {len(self._specs)} gradients, one per variable, received {len(gradients)}.")
        if not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            return ConfigError(
                "XLA cannot compile Horovod's collectives; pass jit_compile=False to model.compile() or tf.function()."
            )
        if self.config.auto and not tf.executing_eagerly() and not self.in_batch:
            return ConfigError(
                "the compressor 'auto' changes the method between steps, and a graph of yours would have to be traced "
                "again; train by fit() or train_on_batch(), or without tf.function, or name a compressor."
            )
        if self.elastic and not self.synchronized:
            return StepError(
                "elastic Horovod keeps no residuals in its own states; pass the optimizer, or for tapes an Exchange, "
                "to grace.tensorflow.KerasState in their place."
            )
        return None

    @do_not_convert
    def __call__(
        self,
        gradients: Sequence[Gradient | None],
        *,
        absent: frozenset[int] = frozenset(),
        loss_scale: tf.Tensor | None = None,
        zeros: bool = False,
        references: Sequence[Gradient | None] | None = None,
    ) -> list[Gradient | None]:
        """Exchange one gradient per variable, in the order of `build`. A gradient that is None on all ranks stays None.

        With `zeros` in the first step, None on all ranks means a dense gradient of zeros, in later steps as well.
        `absent` holds the indices of variables that this step does not train; their memories do not change. With
        `loss_scale`, all memories are rolled back if a result times `loss_scale` is not finite, because the caller then
        skips the step; with `rollback = false` in the configuration, they start from zero. `references` has the
        gradients of the same batch at other weights, for memories that need them; none if `full_round`. Then a
        `tf.function` has a graph for each of both kinds of steps. The step is traced once, in
        eager mode and inside a `tf.function`. Inside a `tf.function`, TensorFlow wraps errors of the first step. The
        first call contacts the other ranks. Raises StepError for a wrong number of gradients, or for one that no rank
        had in the first step, ConfigError inside `jit_compile=True`, and MismatchError on every rank if the ranks
        differ.
        """
        step = self._agree(gradients, zeros)
        if tf.executing_eagerly() and self.advisor is not None:
            self.advisor.decide()
        return step(gradients, Selection(untrained=absent), loss_scale=loss_scale, references=references)

    def mean_step(self, tensors: Sequence[tf.Tensor], *, compares: bool = True) -> list[tf.Tensor]:
        """Exchange tensors uncompressed in place of a step; see `GraphStep.mean_step`. Call it after `fill`."""
        return self.graph.mean_step(tensors, compares=compares)

    @do_not_convert
    def evaluate(
        self,
        closure: Callable[[], Sequence[Gradient | None]],
        *,
        full: bool | None = None,
        restored: Sequence[Any] = (),
    ) -> list[Gradient | None]:
        """Exchange the gradients of a closure, and those at earlier weights as well if a memory needs second gradients.

        `closure()` returns one gradient per variable, in the order of `build`: of all data if `full_round` is true,
        else of a batch. For second gradients it is called at earlier weights, then again at those of now. Between the
        two, the variables `restored` return to what they were: with `model.non_trainable_variables`, both calls draw
        the same random numbers, and BatchNorm counts a batch once. Inside a `tf.function`, `full` must have the value
        of `full_round`, which is known outside only. The earlier weights are a part of checkpoints. Raises StepError
        before `build` and inside a `tf.function` without `full`, ConfigError if some tensors need gradients at other
        weights than others, and the errors of a call.
        """
        plans = [stage.plan for stage in self.run.live]
        if not any(plan.period for plan in plans):
            return self(closure())
        if full is None and not tf.executing_eagerly():
            raise StepError(
                "evaluate: inside a tf.function, the kind of the step is not known, received full = None; call the "
                "function with exchange.full_round, and pass that as full."
            )
        full = self.full_round if full is None else full
        follows = follows_steps((item for plan in plans for item in plan.exchanged), "grace.tensorflow.Exchange")
        weights, second = [watched() for watched in self._watched], None
        earlier = self._make_earlier(weights)
        if not full:
            before = [(v, v.read_value()) for v in (*map(inside, restored), *weights)]
            try:
                _assign(weights, earlier)
                second = closure()
            finally:
                _assign(*zip(*before, strict=True))
        merged = self(closure(), references=second)
        if full or follows:
            _assign(earlier, weights)
        return merged

    def _make_earlier(self, weights: Sequence[Any]) -> Sequence[tf.Variable]:
        """Return the variables of earlier weights; make them of those of now if there are none."""
        if not self._earlier:
            with before_graphs():
                for v in weights:
                    # As with `_variables`, a checkpoint that was restored earlier fills it here.
                    self._earlier.append(tf.Variable(v, trainable=False))
        return self._earlier

    def _saved(self, run: Any) -> dict[str, Any]:
        earlier = {name: v.numpy() for name, v in zip(self.names, self._earlier, strict=False)}
        return {**super()._saved(run), **({"earlier": earlier} if earlier else {})}

    def _load(self, run: Any, rank: int, state: Any) -> tuple[bool, str]:
        result = super()._load(run, rank, state)
        # Equal on all ranks.
        saved = (state[0] if isinstance(state, list) else state).get("earlier", {})
        if saved or self._earlier:
            weights = [watched() for watched in self._watched]
            _assign(self._make_earlier(weights), [saved.get(*pair) for pair in zip(self.names, weights, strict=True)])
        return result

    def _gather(self, mine: Sequence[Any], purpose: str, what: str) -> list[Any]:
        return gather(self.process_set, purpose, what, self.timeout)(mine[0])

    @property
    def timeout(self) -> float:
        """The time limit in seconds of a wait for other ranks."""
        return elastic_timeout(self.config.timeout) if self.elastic else self.config.timeout

    def _digest(self, x: tf.Variable) -> int:
        return digest(get_ops("numpy"), x.numpy())

    def _weights(self) -> dict[str, tf.Variable]:
        """Return the variables that must be equal on all ranks before a step, as far as they still exist."""
        return {name: v for name, v in zip(self.names, self._equal_variables(), strict=True) if v is not None}


def _assign(variables: Sequence[tf.Variable], values: Sequence[Any]) -> None:
    for v, value in zip(variables, values, strict=True):
        v.assign(value)
