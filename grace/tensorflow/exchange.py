"""`Exchange`: the plan, the state and the traced step that optimizers and tapes of TensorFlow share."""

from __future__ import annotations

import collections
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from grace.core.agreement import agree
from grace.core.config import Config, change_config, make_config
from grace.core.errors import ConfigError, MismatchError, StepError
from grace.core.plan import Plan
from grace.core.registry import compressors
from grace.core.spec import TensorSpec
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
from grace.tensorflow.stages import Stages
from grace.tensorflow.times import GraphTimes, Measured
from grace.tensorflow.traced import Traced
from grace.tensorflow.transport import HorovodTransport

logger = logging.getLogger("grace")

# Collectives of different exchanges of one process set must not share names; its ranks meet in the same order.
_meetings: collections.Counter[int] = collections.Counter()


class Exchange(Measured, tf.Module):
    """Exchanges the gradients of one list of variables, compressed; holds what must live across steps.

    An optimizer has its own as the attribute `grace`. For tapes, make one and pass it to every tape; as a `tf.Module`
    it can be part of a `tf.train.Checkpoint`. `config` and `options` are those of `grace.make_config`, the other
    arguments those of Horovod. Raises ConfigError for a configuration or arguments that cannot be honoured.
    """

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
        super().__init__(name="grace")
        if op not in (hvd.Average, hvd.Sum):
            raise ConfigError("the argument 'op' must be hvd.Average or hvd.Sum; other reductions are not linear.")
        if gradient_predivide_factor != 1.0 and (op == hvd.Sum or gradient_predivide_factor <= 0.0):
            raise ConfigError(
                "the argument 'gradient_predivide_factor' splits the division of an average in two; "
                f"give a positive number and op=hvd.Average, not {gradient_predivide_factor!r} and op={op}."
            )
        self.config = make_config(config, **options)
        self.op = op
        self.gradient_predivide_factor = gradient_predivide_factor
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        # Of the variables, once they are known; those of a saved optimizer are known before.
        self.names: tuple[str, ...] = ()
        # The configurations before every change by hand, whose variables are saved too.
        self.history: list[Config] = []
        self.traces = 0
        # How many steps the optimizer has taken; its accumulation of gradients depends on it.
        self.iterations: Callable[[], int] = lambda: 0
        # The learning rate of the step under way, which tapes do not know.
        self.learning_rate: Callable[[], tf.Tensor] | None = None
        # Makes a variable of a name and an initial value; an optimizer sets its own.
        self.make_variable: Callable[[str, tf.Tensor], tf.Variable] = self._make_variable
        self._variables: list[tf.Variable] = []
        self.times = GraphTimes()
        # What was said already when an optimizer was wrapped.
        self.warned: tuple[str, ...] = ()
        self._stages: Stages | None = None
        # Set when the ranks have met.
        self._transport: HorovodTransport | None = None

    # --- what the user sees -------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Bytes, times, relative errors and residual norms of the last step; see `grace.core.engine.Engine.stats`.

        Raises StepError before the first step.
        """
        if self._transport is None:
            raise StepError("no step has been made yet; statistics are those of the last step.")
        return self._known().stats()

    def report(self) -> str:
        """The start-up report: per tensor the method, memory, collective and bytes, and why one stays dense."""
        return self.plan.report()

    @property
    def plan(self) -> Plan:
        """What happens to every tensor in the step to come. Raises StepError before the variables are known."""
        return self._known().plan

    @property
    def built(self) -> bool:
        """Whether the variables are known, and with them plan and state."""
        return self._stages is not None

    def change(self, **changes: Any) -> None:
        """Go on with other options or parts, for instance change(compress_ratio=0.1); residuals are carried over.

        All ranks must call it, between the same two steps, and graphs that hold a step must be traced anew: after it,
        one of before raises an error that says so. `ScheduleCallback` does all that for `fit`. Raises what
        `make_config` raises, ConfigError where the configuration has a schedule, StepError inside a graph,
        MismatchError on every rank if ranks differ.
        """
        description: dict[str, Any] = {}
        failure: Exception | None = None
        stages, plan = self._stages, None
        try:
            if not tf.executing_eagerly():
                raise StepError("change() must be called between steps, outside of tf.function.")
            config = change_config(self.config, changes)
            if stages is not None:
                plan = stages.plan_of(config)
                description["step"] = int(stages.slots.step)
            description["configuration"] = config.to_dict()
        except Exception as error:
            failure = error
        agree(description, failure, gather(self.process_set, "change"), "optimizer.grace.change")
        before, self.config = self.config, config
        if stages is not None and plan is not None:
            self.history.append(before)
            stages.change(plan)
            if self._transport is not None:
                self._trace_anew()

    # --- before the first step ----------------------------------------------------------------------------------

    def build(self, variables: Sequence[Any], gradients: Sequence[Gradient | None] | None = None) -> None:
        """Plan for these variables and make the state; touches no other rank, so a model can be loaded anywhere."""
        if self._stages is not None:
            raise StepError("an exchange is built once, for one list of variables; make another one for others.")
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise ConfigError(
                "grace exchanges between processes, one replica each; "
                "a tf.distribute strategy with several replicas in a process cannot be combined with it."
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
            first, *later = (*self.history, self.config)
            self._stages = Stages(specs, first, self.make_variable, sparse_as_dense=self.sparse_as_dense)
            for config in later:
                self._stages.change(self._stages.plan_of(config))

    def serves(self, variables: Sequence[Any]) -> bool:
        """Whether it was built for exactly these variables, in any order."""
        return len(variables) == len(self._watched) and {id(inside(v)) for v in variables} == {
            id(watched()) for watched in self._watched
        }

    def places(self, variables: Sequence[Any]) -> list[int]:
        """Where the variables stand in the list of `build`. Raises StepError for others."""
        if not self.serves(variables):
            raise StepError(
                f"the exchange was built for the variables {', '.join(self.names)}, and received gradients of "
                f"{', '.join(names_of(variables, ()))}; use one exchange per list of variables."
            )
        order = {id(watched()): place for place, watched in enumerate(self._watched)}
        return [order[id(inside(v))] for v in variables]

    def _make_variable(self, name: str, value: tf.Tensor) -> tf.Variable:
        variable = tf.Variable(value, trainable=False, name=name.replace("/", "_"))
        # In the list, a checkpoint finds it, and one that was restored before fills it.
        self._variables.append(variable)
        return variable

    def _known(self) -> Stages:
        if self._stages is None:
            raise StepError("the variables are not known yet; build the optimizer or take a first step.")
        return self._stages

    @property
    def of_this_rank(self) -> list[tf.Variable]:
        """The variables that differ between ranks, which a broadcast must leave alone."""
        slots = self._known().slots
        return [slots.origin, *slots.of_this_rank]

    def describe(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
        return {
            "configuration": self.config.to_dict(),
            "op": self.op,
            "gradient_predivide_factor": self.gradient_predivide_factor,
            "sparse_as_dense": self.sparse_as_dense,
        }

    def _start(self, gradients: Sequence[Gradient | None], failure: Exception | None) -> None:
        """Meet the other ranks; raises the failure of this one, MismatchError if another failed or they differ."""
        if not hvd.is_initialized():
            raise ConfigError("grace.tensorflow: Horovod is not initialized; call hvd.init() first.")
        if self.process_set is None:
            raise ConfigError(
                "the optimizer was saved with a process set, which is not saved; set it before the first step: "
                "model.optimizer.grace.process_set = hvd.add_process_set(...)."
            )
        failure = failure or self._start_as_told()
        stages = self._known()
        set_id = self.process_set.process_set_id
        if not self.process_set.included():
            raise ConfigError(f"this process is not in {self.process_set}, so it cannot take a step there.")
        description = {
            **self.describe(),
            "iterations": self.iterations(),
            "parameters": {spec.name: [list(spec.shape), spec.dtype] for spec in self._specs},
            "methods": [
                {part.spec.name: compressors.name_of(part.compressor) for part in plan.parts} for plan in stages.plans
            ],
            "of this rank": {
                "meetings": _meetings[set_id],
                "kinds": {spec.name: self._kind(spec, g) for spec, g in zip(self._specs, gradients, strict=False)},
            },
        }
        everyone = agree(description, failure, gather(self.process_set, "first step"), "the first step")
        # An identifier may have been that of another set before, which not all of these ranks were in.
        number = max(other["of this rank"]["meetings"] for other in everyone)
        _meetings[set_id] = number + 1
        self._transport = HorovodTransport(self.process_set, f"grace.{set_id}.{number}")
        self._kinds = common_kinds([other["of this rank"]["kinds"] for other in everyone])
        rows = [name for name, kind in self._kinds.items() if kind not in (None, "dense")]
        stages.start(
            self._transport,
            rows,
            op=self.op,
            predivide=self.gradient_predivide_factor,
            track_norms=self._track_norms,
            times=self.times,
            warned=self.warned,
        )
        self._trace_anew()

    def _trace_anew(self) -> None:
        self._traced = Traced(self._exchange, [spec.shape for spec in self._specs])

    # --- one step -----------------------------------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def filled(self, gradients: Sequence[Gradient | None]) -> list[Gradient | None]:
        """The gradients with zeros for None, where another rank has a gradient; meets the other ranks the first time.

        Raises StepError for a wrong number of gradients, ConfigError inside `jit_compile=True`, MismatchError on every
        rank if ranks differ.
        """
        self._known()
        failure = self._objection(gradients)
        if self._transport is None:
            with tf.init_scope():
                self._start(gradients, failure)
        if failure is not None:
            raise failure
        for spec, gradient in zip(self._specs, gradients, strict=True):
            if self._kinds[spec.name] is None and gradient is not None:
                raise StepError(
                    f"tensor '{spec.name}' had no gradient on any rank in the first step, and has one now; "
                    "use one optimizer or tape per set of variables that are trained together."
                )
        return [
            None if self._kinds[spec.name] is None else self._shaped(spec, gradient)
            for spec, gradient in zip(self._specs, gradients, strict=True)
        ]

    def _objection(self, gradients: Sequence[Gradient | None]) -> Exception | None:
        """Why this rank cannot take part in the step."""
        if len(gradients) != len(self._specs):
            return StepError(f"expected {len(self._specs)} gradients, one per variable, received {len(gradients)}.")
        if not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            return ConfigError(
                "the step is being compiled by XLA, which has no kernels for Horovod's collectives; "
                "pass jit_compile=False to model.compile() or tf.function()."
            )
        return None

    @tf.autograph.experimental.do_not_convert
    def __call__(
        self,
        gradients: Sequence[Gradient | None],
        *,
        absent: frozenset[int] = frozenset(),
        loss_scale: tf.Tensor | None = None,
    ) -> list[Gradient | None]:
        """Exchange one gradient per variable, in the order of `build`; what is None on every rank stays None.

        The variables at the places `absent` are not trained now: their memories stay as they are. With `loss_scale`,
        one tensor that is not finite when multiplied by it rolls back the memories of all: the caller will drop the
        step. The step is traced once per pattern of dense and sparse gradients, whether it is called eagerly or inside
        a `tf.function`; inside one, errors of the first step reach the caller as TensorFlow wraps them. Raises what
        `filled` does.
        """
        given = [
            tf.zeros(spec.shape, spec.dtype) if gradient is None else gradient
            for spec, gradient in zip(self._specs, self.filled(gradients), strict=True)
        ]
        try:
            merged = self._traced(given, absent, loss_scale)
        except tf.errors.InvalidArgumentError as error:
            if MismatchError.__name__ not in str(error.message):
                raise
            raise MismatchError(str(error.message)) from None
        return [None if self._kinds[spec.name] is None else m for spec, m in zip(self._specs, merged, strict=True)]

    def everywhere(self, condition: tf.Tensor) -> tf.Tensor:
        """Whether the condition holds on all ranks; to be asked by all of them, after `filled`."""
        assert self._transport is not None
        fails = tf.cast(tf.reshape(tf.logical_not(condition), [1]), tf.int32)
        failing = self._transport.allreduce(fails, op="max", name="everywhere").wait()
        self._transport.end_turn([failing])
        return failing[0] == 0

    def _shaped(self, spec: TensorSpec, gradient: Gradient | None) -> Gradient:
        """The gradient in the form that all ranks agreed on: dense, or rows."""
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
        """How a gradient travels: "dense", as rows under indices of a dtype, or not at all."""
        if gradient is None:
            return None
        rows = isinstance(gradient, tf.IndexedSlices) and spec.name in self._known().rows
        return f"rows of {gradient.indices.dtype.name}" if rows else "dense"

    def _exchange(
        self, gradients: Sequence[Gradient], absent: frozenset[int], loss_scale: tf.Tensor | None
    ) -> list[Gradient]:
        """The body of the traced step."""
        self.traces += 1
        assert self._transport is not None
        stages = self._known()
        stages.slots.belong_to(self._transport.rank, self._transport.size)
        stages.enter()
        before = stages.slots.snapshot() if absent or loss_scale is not None else []
        merged = stages.step(gradients, None if self.learning_rate is None else self.learning_rate())
        results = flat(merged)
        if loss_scale is not None:
            scaled = [x * tf.cast(loss_scale, x.dtype) for x in results if x.dtype.is_floating]
            finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(x)) for x in scaled])
            tf.cond(finite, lambda: tf.constant(True), lambda: stages.slots.restore(before))
        names = {self._specs[place].name for place in absent}
        stages.slots.restore_tensors(before, names, stages.units)
        self._transport.end_turn(results)
        return merged


def gather(process_set: Any, purpose: str) -> Callable[[Any], list[Any]]:
    """A function that gives the objects of all ranks of the set; blocks."""
    name = f"grace.{process_set.process_set_id}.{purpose}".replace(" ", ".")
    return lambda mine: hvd.allgather_object(mine, name=name, process_set=process_set)
