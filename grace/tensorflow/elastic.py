"""`KerasState`: an elastic state of Horovod for models and optimizers of Keras 3, with what grace holds back."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from grace.core.errors import ConfigError
from grace.core.guards.elastic import Membership, refusal_of_process_sets, stays
from grace.tensorflow.exchange import Exchange
from grace.tensorflow.gradients import inside
from grace.tensorflow.optim.exchanging import Exchanging
from grace.tensorflow.optimizer import Exchanges, innermost
from grace.tensorflow.transport import broadcast
from grace.tensorflow.typed import ObjectState

_WHERE = "grace.tensorflow.KerasState"


def _with_errors_of_horovod(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that turns TensorFlow's error of a collective into the error after which Horovod restarts.

    Horovod does so only in the function that it runs, and it synchronizes the state outside of that.
    """

    @wraps(function)
    def call(*positional: Any, **named: Any) -> Any:
        try:
            return function(*positional, **named)
        except tf.errors.UnknownError as error:
            raise HorovodInternalError(error) from error

    return call


class KerasState(ObjectState):
    """Horovod's elastic state of a Keras model and its optimizer, with what grace holds back, for `hvd.elastic.run`.

    `commit()` and all else that is called on it are Horovod's. `optimizer` is by default that of the compiled model.
    Pass the `Exchange` of tapes under any other name. All further arguments become attributes that are synchronized, as
    in Horovod's states.

    If there were N ranks and there are M now, each survivor multiplies what it holds back by M / N, so that its share
    in the mean over all ranks stays as it was. What an owner of a shard held back goes to its own residual. New ranks
    hold back nothing. What a lost rank held back is lost, and the log says so. Between two syncs of outer steps, and of
    `ZeroOneAdam`, survivors keep their weights, and new ranks take those of rank 0. Steps are traced again: `fit` makes
    its function again, and a `tf.function` of your own must be made in the function that Horovod runs.

    Raises ConfigError for a model without variables, and for exchanges whose states cannot go on with other ranks.
    """

    def __init__(self, model: Any, optimizer: Any = None, **more: Any) -> None:
        self.model, self.optimizer = model, model.optimizer if optimizer is None else optimizer
        if self.optimizer is None or not all(layer.built for layer in model._flatten_layers()):
            raise ConfigError(
                f"{_WHERE}: expected a model with variables and an optimizer, received one without; give the model a "
                "keras.Input or call model.build(shape), and compile it or pass the optimizer."
            )
        if not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        inner = innermost(self.optimizer)
        exchanges: list[Exchange] = [inner.grace] if isinstance(inner, Exchanges) else []
        outer = inner.grace.config.outer if exchanges else None
        # Whether a rank has weights of its own between two syncs.
        self._has_own_weights = outer is not None or isinstance(inner, Exchanging)
        for name in [name for name, value in more.items() if isinstance(value, Exchange)]:
            exchange: Exchange = more.pop(name)
            setattr(self, name, exchange)
            exchanges.append(exchange)
            if not exchange.built:
                exchange.build(model.trainable_variables)
        self._exchanges = [(exchange, _membership_of(exchange)) for exchange in exchanges]
        self._save_variables()
        super().__init__(bcast_object=_with_errors_of_horovod(hvd.broadcast_object), get_rank=hvd.rank, **more)

    def save(self) -> None:
        """Keep a copy of everything."""
        self._save_variables()
        super().save()

    def restore(self) -> None:
        """Return to the last copy."""
        for exchange, saved in self._saved_exchanges:
            exchange.go_back(*saved)
        for variable, value in self._saved_variables:
            variable.assign(value)
        super().restore()

    def reset(self) -> None:
        """Go on with the ranks that Horovod has now; it calls this before it calls `sync`."""
        super().reset()
        for _, membership in self._exchanges:
            membership.move()
        if self.model.train_function is not None:
            self.model.make_train_function(force=True)
        self._save_variables()

    @_with_errors_of_horovod
    def sync(self) -> None:
        """Give all ranks what is equal on them, from rank 0. What they hold back stays with each."""
        keeping = [self._agree(number) for number in range(len(self._exchanges))]
        shared = [variable for exchange, _ in self._exchanges for variable in exchange.shared_variables()]
        own = {id(variable) for variable in self._accumulators()}
        inner = innermost(self.optimizer)
        steps, kept = int(inner._iterations), self._of_keras(self.model.weights) if self._has_own_weights else []
        before = [tf.identity(v) for v in kept]
        broadcast([*(v for v in self._of_keras(self.model.weights) if id(v) not in own), *shared], root_rank=0)
        if kept and stays(steps, int(inner._iterations), keeps=keeping[0]):
            for variable, value in zip(kept, before, strict=True):
                variable.assign(value)
        for (exchange, _), keeps in zip(self._exchanges, keeping, strict=True):
            if not keeps:
                exchange.run.reset_memories()
        self._save_variables()
        super().sync()

    def _agree(self, number: int) -> bool:
        """Compare an exchange with that of the other ranks; return whether this one keeps what it holds back."""
        exchange, membership = self._exchanges[number]
        return membership.agree(lambda mine: exchange._gather([mine], f"sync {number}", "state.sync()"))

    def _save_variables(self) -> None:
        self._saved_exchanges = [(exchange, exchange.snapshot()) for exchange, _ in self._exchanges]
        # All variables of the model: each rank has its own metrics and random seeds.
        self._saved_variables = [(v, tf.identity(v)) for v in self._of_keras(self.model.variables)]

    def _of_keras(self, of_model: list[Any]) -> list[tf.Variable]:
        """Return variables of the model, and those of the optimizer that do not belong to an exchange."""
        of_grace = {id(v) for exchange, _ in self._exchanges for v in exchange.run.variables}
        every = [inside(v) for v in (*of_model, *self.optimizer.variables)]
        return [v for v in every if id(v) not in of_grace]

    def _accumulators(self) -> list[tf.Variable]:
        """Return the sums of gradients that are not exchanged yet, which differ between ranks."""
        inner = innermost(self.optimizer)
        optimizers = [inner, *getattr(inner, "optimizers", ())]
        return [inside(v) for each in optimizers for v in getattr(each, "_accumulated_gradients", ())]


def _membership_of(exchange: Exchange) -> Membership:
    """Return the ranks of an exchange. Raises ConfigError if it cannot go on with others."""
    if exchange.process_set is not hvd.global_process_set:
        raise refusal_of_process_sets(_WHERE)
    return Membership(exchange, lambda: exchange.run.plans, _WHERE)
