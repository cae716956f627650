"""`DistributedOptimizer`: a Keras 3 optimizer that exchanges its gradients before it clips and applies them.

Horovod's own Keras optimizer hooks methods that Keras 3 does not call. Its replicas then diverge without an error.
grace changes the class of the optimizer to a subclass, which exchanges gradients where Keras clips them. This is after
unscaling and after accumulation. So clipping, weight decay and moving averages see the global gradient, and an
accumulated gradient is sent once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from grace.core.config.config import Config, make_config
from grace.core.config.recommended import Optimizer, warn_of_pairs
from grace.core.errors import ConfigError, StateError, StepError
from grace.core.guards.agreement import Handshake
from grace.core.observe.announcement import warn
from grace.core.observe.log import logger
from grace.core.plan.plan import Plan, early_warnings
from grace.core.session.outer_graph import GraphOuter
from grace.core.session.outer_setup import check_inner, check_outer, refuse_arguments_of_gradients
from grace.core.session.start import Request, refuse_arguments
from grace.tensorflow.branches import always, never
from grace.tensorflow.exchange import Exchange
from grace.tensorflow.gradients import Gradient, before_graphs, inside
from grace.tensorflow.outer import check_states, outer_variables
from grace.tensorflow.saved import check_saved_variables
from grace.tensorflow.transport import HorovodTransport, check_process
from grace.tensorflow.typed import OptimizerMixin, do_not_convert
from grace.tensorflow.waiting import gather, is_elastic

_WHERE = "grace.tensorflow.DistributedOptimizer"
# Keras 3.12, the last one for Python 3.10, has none.
MULTI_OPTIMIZER: Any = getattr(keras.optimizers, "MultiOptimizer", ())
# Arguments of Horovod's that only TensorFlow has, with the reasons why they are not supported.
REFUSED = {
    "use_locking": "belongs to TensorFlow 1 optimizers; leave it out",
    "device_dense": "would move tensors between devices; leave it out. Gradients are exchanged on their own device",
    "device_sparse": "would move tensors between devices; leave it out. Gradients are exchanged on their own device",
    "scale_local_gradients": "is for variables that are not exchanged, which the optimizer does not support; "
    "use grace.tensorflow.DistributedGradientTape and its register_local_source",
    "name": "belongs to the Keras optimizer; pass it there: keras.optimizers.SGD(name=...)",
}


def DistributedOptimizer(  # noqa: N802 - the field's name
    optimizer: keras.optimizers.Optimizer,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    local_steps: int = 1,
    op: int = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
    process_set: Any = hvd.global_process_set,
    **options: Any,
) -> Any:
    """Change a Keras optimizer so that its gradients are compressed and exchanged over Horovod. Return the optimizer.

    It works in `model.compile` and `fit`, in `apply` and `apply_gradients`, in eager mode and inside `tf.function`.
    Wrap it before the first step: a `tf.function` of your own that was traced with the plain optimizer does not
    exchange. `fit` and `train_on_batch` make their function again.

    `config` is a mapping, a `Config` or the path of a TOML file. `options` are further keys of the configuration (see
    `grace.make_config`). If they name no compressor, the environment variable GRACE_CONFIG gives the configuration.
    All other arguments are those of Horovod, except:

    - `backward_passes_per_step`: sets Keras' `gradient_accumulation_steps`. The passes are summed, or averaged with
      `average_aggregated_gradients`.
    - `gradient_predivide_factor`: applies only to tensors that stay dense.
    - `local_steps`: above 1, each rank applies its own gradients, and every local_steps-th step exchanges the change of
      the weights since the last exchange instead of gradients (local SGD; Qsparse-local-SGD with a compressor). It is
      the short form of `outer={"every": local_steps}`, a key of the configuration with more options (DiLoCo).

    The optimizer has the attribute `grace`, an `Exchange`. Its state is part of the optimizer's variables, which Keras
    and `tf.train.Checkpoint` save. Dynamic loss scaling checks the exchanged gradients, so that all ranks skip the same
    steps. All ranks of the process set must call this function.

    Raises ConfigError for arguments that are not supported, TypeError for an optimizer that is not of Keras 3, and
    MismatchError on every rank if the ranks differ: in their configuration here, in their variables at the first step.
    """
    check_process(_WHERE, process_set)
    request = Request(config, options, DistributedOptimizer, _WHERE, local_steps)
    # In elastic mode the handshake comes when states are synchronized: a new rank makes its optimizer while the others
    # go on.
    together = gather(process_set, "optimizer", f"{_WHERE}()", request.timeout)
    with Handshake((lambda mine: [mine]) if is_elastic() else together, _WHERE) as handshake:
        refuse_arguments(options, _WHERE, REFUSED)
        _check(optimizer)
        # Raises ConfigError for a process set that is not registered with Horovod.
        transport = HorovodTransport(process_set, "")
        rank = transport.rank
        exchange = OptimizerExchange(
            request.config,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
        )
        outer = exchange.config.outer
        exchange.optimizers = [
            # What outer steps exchange is no gradient.
            used if outer is None else used._replace(adaptive=False)
            for used in _describe(innermost(optimizer))
        ]
        if rank == 0:
            for used in exchange.optimizers:
                warn_of_pairs(exchange.config, used)
        if rank >= 0:
            exchange.times.start_from_environment(hvd.rank(), hvd.size())
        _check_passes(innermost(optimizer), backward_passes_per_step)
        if outer is not None:
            _check_outer(innermost(optimizer), exchange, backward_passes_per_step, transport.size)
        handshake.local = {
            **exchange.settings(),
            "backward_passes_per_step": backward_passes_per_step,
            "average_aggregated_gradients": average_aggregated_gradients,
            "local_steps": local_steps,
        }
    if rank == 0:
        warn(early_warnings(exchange.config), exchange.warned)
    inner = innermost(optimizer)
    if backward_passes_per_step > 1:
        inner.gradient_accumulation_steps = backward_passes_per_step
    late = inner.built and int(inner.iterations) > 0
    if late:
        logger().warning(
            "%s: the optimizer has taken steps already. fit() makes its train function again, but a tf.function of "
            "your own that was traced before does not exchange gradients; make a new one.",
            _WHERE,
        )
    _distribute(inner, exchange, 1 if average_aggregated_gradients else backward_passes_per_step)
    inner.wrapped_late = late
    return optimizer


def _check(optimizer: Any) -> None:
    if keras.backend.backend() != "tensorflow":
        raise ConfigError(
            f"{_WHERE}: expected the Keras backend 'tensorflow', received '{keras.backend.backend()}'; "
            "set KERAS_BACKEND=tensorflow, or wrap a PyTorch optimizer with grace.torch."
        )
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise TypeError(
            f"{_WHERE}: {type(optimizer).__qualname__} is a TensorFlow 1 optimizer; use one of keras.optimizers, or "
            "pass gradients from grace.tensorflow.DistributedGradientTape to its apply_gradients."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"{_WHERE}: expected a Keras 3 optimizer (keras.optimizers), received {type(optimizer).__qualname__} "
            f"from module {type(optimizer).__module__}."
        )
    inner = innermost(optimizer)
    if any(isinstance(innermost(o), Exchanges) for o in (inner, *getattr(inner, "optimizers", ()))):
        raise ConfigError(f"{_WHERE}: the optimizer is already wrapped; its exchange is the attribute 'grace'.")


def _check_passes(optimizer: Any, passes: int) -> None:
    if passes < 1:
        raise ConfigError(f"{_WHERE}: backward_passes_per_step must be at least 1, received {passes!r}.")
    if passes > 1 and isinstance(optimizer, MULTI_OPTIMIZER):
        raise ConfigError(
            f"{_WHERE}: a MultiOptimizer does not accumulate gradients; set gradient_accumulation_steps of its "
            "optimizers instead of backward_passes_per_step."
        )
    if passes > 1 and (optimizer.gradient_accumulation_steps or optimizer.built):
        raise ConfigError(
            f"{_WHERE}: backward_passes_per_step={passes} sets Keras' gradient_accumulation_steps, but it is already "
            f"{optimizer.gradient_accumulation_steps}, or the optimizer is already built; "
            "use only one of the two arguments, and wrap the optimizer before it is built."
        )


def _check_outer(optimizer: Any, exchange: Exchange, passes: int, size: int) -> None:
    outer = exchange.config.outer
    assert outer is not None
    check_inner(outer, _describe(optimizer)[0], _WHERE)
    check_states(outer, optimizer, _WHERE)
    check_outer(exchange.config, _WHERE, average=exchange.op == hvd.Average, size=size)
    refuse_arguments_of_gradients(
        _WHERE,
        backward_passes_per_step=passes != 1,
        gradient_predivide_factor=exchange.gradient_predivide_factor != 1.0,
    )
    if isinstance(optimizer, MULTI_OPTIMIZER):
        raise ConfigError(
            f"{_WHERE}: a MultiOptimizer cannot take local_steps or outer, because its optimizers count their own "
            "steps; leave them out, or use a plain optimizer."
        )


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside LossScaleOptimizers, which applies the gradients."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def _describe(optimizer: Any) -> list[Optimizer]:
    """Describe an optimizer, or those that it consists of; the momentum of Adam and its kind is beta_1."""
    if isinstance(optimizer, MULTI_OPTIMIZER):
        return [found for each in optimizer.optimizers for found in _describe(each)]
    momentum: Any = getattr(optimizer, "momentum", None) or getattr(optimizer, "beta_1", 0.0)
    return [Optimizer.of(type(optimizer), float(momentum))]


@dataclass
class _Call:
    """Data of one call of `apply`, for the methods that Keras calls within it: the indices of its variables."""

    places: list[int]
    absent: frozenset[int]
    asked: bool = False


class OptimizerExchange(Exchange):
    """The exchange of an optimizer, which has its learning rate and saves its variables."""

    takes_outer = True
    takes_references = False
    _optimizer: Exchanges
    #: What outer steps keep, if there are any and the variables are known.
    outer: GraphOuter | None = None
    # The ranks of the process set of a saved optimizer, after loading.
    _saved_ranks: tuple[int, ...] | None = None

    def attach(self, optimizer: Exchanges) -> None:
        """Take the optimizer that it belongs to."""
        # An ordinary assignment would have TensorFlow save the optimizer as a part of its exchange.
        vars(self)["_optimizer"] = optimizer

    def saved(self) -> dict[str, Any]:
        """Return what Keras saves to make the exchange again, without its states."""
        ranks = self._saved_ranks
        if self.process_set is not None:
            ranks = None if self.process_set is hvd.global_process_set else tuple(self.process_set.ranks)
        return {
            "grace": {"config": self.config.to_dict(), **self.arguments},
            "history": [before.to_dict() for before in self.history],
            "names": list(self.names),
            "ranks": None if ranks is None else list(ranks),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what `saved` has returned, but for what an exchange is made with."""
        self.names = tuple(saved["names"])
        self.history = [make_config(before) for before in saved["history"]]
        if saved["ranks"] is not None:
            self.process_set, self._saved_ranks = None, tuple(saved["ranks"])

    def _make_variable(self, name: str, value: tf.Tensor) -> tf.Variable:
        return self._optimizer.add_variable(
            shape=tuple(value.shape),
            dtype=value.dtype.name,
            initializer=lambda shape, dtype: tf.cast(value, dtype),
            name=f"grace_{name}".replace("/", "_"),
        ).value

    def _make_others(self) -> None:
        if self.config.outer is not None:
            self.outer = outer_variables(self.config.outer, self._specs, self._optimizer, self._make_variable, _WHERE)

    def _drop_variables(self, variables: Sequence[tf.Variable]) -> None:
        optimizer, dropped = self._optimizer, {id(variable) for variable in variables}
        kept = [variable for variable in optimizer._variables if id(variable.value) not in dropped]
        # TensorFlow saves no list from which something was taken. So there is a new one, which TensorFlow tracks and to
        # which Keras adds variables. An ordinary assignment would have Keras track it, too.
        made = tf.__internal__.tracking.wrap(kept)
        object.__setattr__(optimizer, "_variables", made)
        optimizer._track_trackable(made, "_variables", overwrite=True)
        optimizer._tracker.config["variables"] = optimizer._tracker.config["variables"][0], made
        optimizer._tracker.stored_ids["variables"] = {id(variable) for variable in kept}

    def _iterations(self) -> int:
        return int(self._optimizer._iterations)

    def _learning_rate(self) -> tf.Tensor:
        return tf.convert_to_tensor(self._optimizer._get_current_learning_rate())

    def stats(self) -> dict[str, Any]:
        """Return statistics of the last step, and with outer steps those of `grace.core.session.record.Record.stats`.

        Raises StepError before the first step.
        """
        found = super().stats()
        if self.outer is not None:
            assert isinstance(self._optimizer, Distributed)
            found["outer"] = self.outer.stats(int(self._optimizer.inner_steps()), self.run.step, self.graph)
        return found

    def announce(self, stages: Sequence[tuple[int, Plan]], step: int | None = None) -> None:
        """Tell the user on rank 0 what is sent, and later what network would suffice."""
        super().announce(stages, step)
        if self.outer is not None:
            self.outer.record.logs_need = self._logs

    def common_weights(self) -> dict[str, tf.Tensor]:
        """Return copies of the weights that all ranks have in common; see `grace.core.session.exchange.Exchange`."""
        if self.outer is None:
            return super().common_weights()
        return {name: tf.identity(v) for name, v in zip(self.names, self.outer.anchors, strict=True)}

    def variates(self, rank: int = 0) -> dict[str, tf.Tensor]:
        """Return copies of the control variates; see `grace.core.session.exchange.Exchange`."""
        if self.outer is None:
            return super().variates(rank)
        return dict(zip(self.names, self.outer.shaped_variates(), strict=False))

    @property
    def of_this_rank(self) -> list[tf.Variable]:
        """The variables that differ between ranks. A broadcast must not change them."""
        return super().of_this_rank + ([] if self.outer is None else self.outer.variates)

    def move(self) -> tuple[int, int]:
        """Go on with the ranks that Horovod has now; return the numbers of ranks before and now."""
        if self.outer is not None:
            self.outer.ranks_changed()
        return super().move()

    def _equal_variables(self) -> Sequence[tf.Variable | None]:
        # With outer steps, the weights of a rank are its own between two exchanges, and with pairs always.
        if self.outer is None:
            return super()._equal_variables()
        return [None] * len(self.outer.anchors) if self.outer.outer.pairs else self.outer.anchors


class Exchanges(OptimizerMixin):
    """Mixin for the class of a Keras optimizer that has an exchange."""

    grace: OptimizerExchange

    def _variables_of_call(self, variables: Sequence[Any] | None) -> list[Any]:
        """Return the variables of a call. Build the optimizer if necessary."""
        if variables is None:
            return self._trainable_variables
        variables = list(variables)
        if not self.built:
            with keras.name_scope(self.name), before_graphs():
                self.build(variables)
        self._check_variables_are_known(variables)
        return variables

    def _places(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[int]:
        """Return the indices of the variables of a call. Raises StepError for another number of gradients."""
        if len(grads) != len(variables):
            raise StepError(
                f"expected one gradient per variable, received {len(grads)} gradients for {len(variables)} variables."
            )
        return [self._get_variable_index(v) for v in variables]

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Load what Keras has saved, all or nothing.

        Raises StateError if it is damaged or belongs to another optimizer. `load_model` makes a ValueError of it.
        """
        if self.built:
            check_saved_variables(self.variables, store)
        super().load_own_variables(store)


class Distributed(Exchanges):
    """Mixin for the class of a Keras optimizer, which exchanges the gradients."""

    # True if it has taken steps before it was wrapped: functions may exist that were traced without an exchange.
    wrapped_late = False
    # The class without the mixin.
    _plain: type
    _call: _Call
    # True while the incoming gradients are already exchanged.
    _exchanged = False
    # The factor that turns Keras' mean over accumulated passes into a sum.
    _summed_passes = 1
    # The number of steps that an update takes for that of all.
    _steps: tf.Tensor | None = None

    def build(self, variables: Sequence[Any]) -> None:
        """Build the Keras optimizer and the exchange for these variables."""
        if not self.built:
            super().build(variables)
            self.built = False
            self._build_exchange(variables)
            self.built = True

    def _build_exchange(self, variables: Sequence[Any]) -> None:
        overwritten = [v.path for v in variables if getattr(v, "overwrite_with_gradient", False)]
        if overwritten:
            raise ConfigError(
                f"{_WHERE}: float8 training is not supported, because {', '.join(overwritten[:3])} are overwritten by "
                "their gradients, and such gradients cannot be reduced over ranks; train without float8."
            )
        self.grace.build(variables)

    # AutoGraph would take longer than the tracing, and is not needed: no branch depends on a tensor.
    @do_not_convert
    def apply(self, grads: Sequence[Gradient | None], trainable_variables: Sequence[Any] | None = None) -> None:
        """Exchange the gradients and update the variables.

        Raises StepError if the number of gradients is wrong, or if the optimizer did not exchange its gradients.
        """
        grads = list(grads)
        if not grads or self._exchanged or (trainable_variables is None and not self.built):
            super().apply(grads, trainable_variables)
            return
        if self.grace.config.outer is not None:
            self.apply_locally(grads, trainable_variables, super().apply)
            return
        # Keras drops variables without a gradient on this rank, although another rank may have one.
        grads = self._fill(grads, trainable_variables)
        if isinstance(self, MULTI_OPTIMIZER):
            # A MultiOptimizer never clips. Its inner optimizers do, and they are plain ones.
            grads = self.exchanged(grads)
        super().apply(grads, trainable_variables)
        if not (self._call.asked or self.gradient_accumulation_steps):
            raise StepError(
                f"{self._plain.__qualname__}.apply() did not call Keras' _clip_gradients(), where gradients are "
                "exchanged, and has applied only this rank's gradients; call super().apply() at its end, or use "
                "grace.tensorflow.DistributedGradientTape."
            )

    def _fill(self, grads: Sequence[Gradient | None], variables: Sequence[Any] | None) -> list[Gradient | None]:
        variables, count = self._variables_of_call(variables), len(self._trainable_variables)
        places = self._places(grads, variables)
        if self.gradient_accumulation_steps:
            # Keras accumulates rows in a dense array, and that array is exchanged.
            grads = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
        self._call = _Call(places, frozenset(range(count)) - set(places))
        filled = self.grace.fill(arrange(grads, places, count))
        return [filled[place] for place in places]

    def _backend_apply_gradients(self, grads: Sequence[Gradient], trainable_variables: Sequence[Any]) -> None:
        # _clip_gradients does not get the variables of the gradients.
        if not self._exchanged:
            self._call.places = [self._get_variable_index(v) for v in trainable_variables]
        super()._backend_apply_gradients(grads, trainable_variables)

    def _clip_gradients(self, grads: Sequence[Gradient]) -> list[Gradient]:
        if not self._exchanged:
            grads = self.exchanged(grads)
        return super()._clip_gradients(grads)

    def exchanged(self, grads: Sequence[Gradient | None], loss_scale: tf.Tensor | None = None) -> list[Gradient | None]:
        """Exchange the gradients of this call of `apply`, and return those to apply."""
        self._call.asked = True
        given = arrange(grads, self._call.places, len(self._trainable_variables))
        merged = self.grace(given, absent=self._call.absent, loss_scale=loss_scale)
        if self._summed_passes > 1:
            merged = [m if m is None else keras.ops.multiply(m, self._summed_passes) for m in merged]
        return [merged[place] for place in self._call.places]

    @contextmanager
    def after_exchange(self) -> Iterator[None]:
        """Let `apply` take the gradients as they are."""
        self._exchanged = True
        try:
            yield
        finally:
            self._exchanged = False

    def apply_locally(
        self,
        grads: Sequence[Gradient | None],
        trainable_variables: Sequence[Any] | None,
        apply: Callable[..., object],
        scale: tf.Tensor | None = None,
    ) -> None:
        """Apply this rank's gradients by `apply`, and exchange the changes of the weights if it is time.

        The gradients are `scale` times as large as `apply` applies them. A step that it leaves out counts all the same.
        """
        places, exchange = self._places(grads, self._variables_of_call(trainable_variables)), self.grace
        outer = exchange.outer
        assert outer is not None
        check_outer(exchange.config, _WHERE, average=True, size=exchange.size)
        # The first call contacts the other ranks. That must happen outside of the conditional branches below.
        exchange.fill([tf.zeros_like(inside(v)) for v in self._trainable_variables])
        outer.before(self.inner_steps(), exchange.graph)
        taken, complete = self._iterations.value.read_value() + 1, self.completes
        if self.gradient_accumulation_steps:
            # Keras accumulates rows in a dense array.
            grads = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
        if outer.variates:
            factor = (1.0 if scale is None else scale) * (self.loss_scale_factor or 1.0)
            given = {i: tf.convert_to_tensor(g) / factor for i, g in zip(places, grads, strict=True) if g is not None}
            rate = exchange._learning_rate()
            corrected = outer.correct(given, tf.where(complete, rate, tf.zeros_like(rate)))
            grads = [None if i not in corrected else corrected[i] * factor for i in places]
        with self.after_exchange():
            apply(grads, trainable_variables)
        # A rank whose gradients are not finite leaves the step out, and must take part in the next sync.
        self._iterations.assign(taken)
        if self.gradient_accumulation_steps:
            tf.cond(complete, always(lambda: outer.after(self.inner_steps(), exchange.graph)), never)
        else:
            outer.after(self.inner_steps(), exchange.graph)

    @property
    def completes(self) -> tf.Tensor:
        """True if the next pass is the last one of an inner step."""
        return (self._iterations.value.read_value() + 1) % (self.gradient_accumulation_steps or 1) == 0

    def inner_steps(self) -> tf.Tensor:
        """Return the number of inner steps until now; each may accumulate the gradients of several passes."""
        return self._iterations.value.read_value() // (self.gradient_accumulation_steps or 1)

    @property
    def iterations(self) -> Any:
        """The number of steps; while a variable is updated, of those since what is kept of it began again."""
        return super().iterations if self._steps is None else self._steps

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update a variable by its gradient."""
        outer = self.grace.outer
        begun = None if outer is None else outer.begun(self._get_variable_index(variable))
        self._steps = None if begun is None else tf.cast(self.inner_steps(), tf.int64) - begun
        try:
            super().update_step(gradient, variable, learning_rate)
        finally:
            self._steps = None

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss that Keras differentiates, and note it for outer steps.

        `fit` calls it, and a loop of your own must call it if it uses `adapt = "loss"`.
        """
        self.note_loss(loss)
        return super().scale_loss(loss)

    def note_loss(self, loss: Any) -> None:
        """Note a loss for outer steps. Raises StepError if it comes too early."""
        outer, kept = self.grace.config.outer, self.grace.outer
        if kept is not None:
            kept.note_loss(tf.cast(tf.reduce_mean(loss), tf.float64))
        elif outer is not None and outer.adapt == "loss":
            raise StepError(
                "scale_loss() was called before the optimizer had variables; call "
                "optimizer.build(model.trainable_variables) first."
            )

    def get_config(self) -> dict[str, Any]:
        """Return the configurations of the Keras optimizer and of the exchange."""
        # An uninitialized instance of the plain class: its __init__ could fail, but serializing needs only get_config.
        plain: Any = object.__new__(self._plain)
        config = super().get_config()
        plain.__dict__["get_config"] = lambda: config
        return {
            "optimizer": keras.optimizers.serialize(plain),
            **self.grace.saved(),
            "summed_passes": self._summed_passes,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:
        """Make the optimizer from the result of `get_config`."""
        # This must not contact other ranks, because a single process may load a model.
        if config.get("local_steps", 1) > 1:
            raise StateError(
                "saved optimizer: expected the key 'outer' in its configuration, received local_steps = "
                f"{config['local_steps']} of an earlier version of grace; load the model with compile=False, and wrap "
                "a new optimizer."
            )
        optimizer = keras.optimizers.deserialize(config["optimizer"], custom_objects)
        exchange = OptimizerExchange(**config["grace"])
        exchange.restore(config)
        return _distribute(optimizer, exchange, config["summed_passes"])


keras.saving.register_keras_serializable("grace", "DistributedOptimizer")(Distributed)


@cache
def _class(plain: type) -> type:
    """Return the subclass of a Keras optimizer class that exchanges gradients."""
    made = type(f"Distributed{plain.__name__}", (Distributed, plain), {"__module__": __name__, "_plain": plain})
    # All these classes share one name in saved models. The name means the class that was registered last. This works,
    # because Keras only calls `from_config`, which makes the right class.
    keras.saving.register_keras_serializable("grace", "DistributedOptimizer")(made)
    return made


def _distribute(optimizer: Any, exchange: OptimizerExchange, summed_passes: int) -> Any:
    plain: type = type(optimizer)
    optimizer.__class__ = _class(plain)
    optimizer.grace = exchange
    exchange.attach(optimizer)
    optimizer._summed_passes = summed_passes
    if optimizer.built:
        optimizer._build_exchange(optimizer._trainable_variables)
    return optimizer


def arrange(grads: Sequence[Gradient | None], places: Sequence[int], count: int) -> list[Gradient | None]:
    """Return the gradients in the order of the optimizer's variables, None for variables without a gradient."""
    ordered: list[Gradient | None] = [None] * count
    for place, gradient in zip(places, grads, strict=True):
        ordered[place] = gradient
    return ordered
