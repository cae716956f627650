"""`DistributedGradientTape`: Horovod's gradient tape with grace's exchange in place of Horovod's allreduce."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from grace.core.config.config import Config, refuse_typos
from grace.core.errors import ConfigError
from grace.core.session.outer_setup import check_references
from grace.core.session.start import refuse_arguments
from grace.tensorflow.exchange import Exchange
from grace.tensorflow.gradients import Gradient, inside
from grace.tensorflow.optimizer import REFUSED
from grace.tensorflow.transport import check_process
from grace.tensorflow.typed import do_not_convert

_WHERE = "grace.tensorflow.DistributedGradientTape"
# A tape exists for one step only. The exchanges here live as long as the first of their variables, so that the tape of
# the next step finds them.
_exchanges: dict[tuple[Any, ...], Exchange] = {}


@do_not_convert
def DistributedGradientTape(  # noqa: N802 - the field's name
    tape: tf.GradientTape,
    config: Exchange | Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    op: int = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
    **options: Any,
) -> Any:
    """Wrap a tape so that `gradient(loss, variables)` compresses the gradients and exchanges them over all ranks.

    `gradient` takes the arguments of `tf.GradientTape.gradient`. A variable that is unconnected on some ranks has a
    gradient of zeros there; one that is unconnected on all has what `unconnected_gradients` says.

    `config` and `options` are those of `grace.make_config`; the other arguments are those of Horovod. The tape of each
    step finds the residuals of the last step by the configuration and the variables. To save them, pass an `Exchange`
    instead of a configuration: `tf.train.Checkpoint(model=..., optimizer=..., grace=exchange)`. After the first call of
    `gradient`, the exchange is the tape's attribute `grace`. It works in eager mode and inside `tf.function`.

    Raises ConfigError for arguments that are not supported, and MismatchError on every rank at the first step if the
    ranks differ in configuration or variables.
    """
    check_process(_WHERE, process_set)
    refuse_arguments(options, _WHERE, REFUSED)
    refuse_typos(options, DistributedGradientTape, _WHERE)
    arguments = {
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "sparse_as_dense": sparse_as_dense,
        "process_set": process_set,
    }
    ignored = options or list(arguments.values()) != [hvd.Average, 1.0, False, hvd.global_process_set]
    if isinstance(config, Exchange) and ignored:
        raise ConfigError(
            f"{_WHERE}: received an Exchange and further arguments; pass op, process_set and all other arguments to "
            "the Exchange."
        )
    given = config if isinstance(config, Exchange) else Exchange(config, **arguments, **options)
    check_references(given.config, _WHERE, False)
    wrapped = hvd.DistributedGradientTape(
        tape, process_set=given.process_set, scale_local_gradients=scale_local_gradients
    )

    # Horovod makes a class for every tape. The methods are set on the class: on the instance they would make a
    # reference cycle, which keeps the tape and its recorded tensors alive.
    cls = type(wrapped)
    of_keras: dict[Any, Any] = {}
    horovod_gradient, horovod_register = cls.gradient, cls.register_local_source

    @do_not_convert
    def reduce(
        self: Any, gradients: Sequence[Gradient | None], sources: Sequence[Any], *_: Any
    ) -> list[Gradient | None]:
        if not sources:
            return list(gradients)
        exchange: Exchange = self.grace
        sources = [of_keras.get(source.ref(), source) for source in sources]
        if not isinstance(config, Exchange):
            # A persistent tape may compute the gradients of several lists of variables.
            fresh = given if not given.built else Exchange(config, **arguments, **options)
            exchange = self.grace = _find(fresh, sources)
        if not exchange.built:
            exchange.build(sources, gradients)
        places = exchange.places(sources)
        merged = exchange([gradients[places.index(place)] for place in range(len(places))], zeros=self._zeros)
        return [merged[place] for place in places]

    # `use_generic_names` belongs to Horovod, whose get_local_and_global_gradients() passes it on. It changes nothing.
    @do_not_convert
    def gradient(
        self: Any,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        # Horovod does not know `unconnected_gradients`. Only the ranks together know what is unconnected.
        self._zeros = tf.UnconnectedGradients(unconnected_gradients) is tf.UnconnectedGradients.ZERO
        # Horovod identifies sources by Variable.ref(). Keras variables lack it; the TensorFlow variables inside have
        # it.
        flat = tf.nest.flatten(sources)
        of_keras.update({s.value.ref(): s for s in flat if isinstance(s, keras.Variable)})
        variables = [inside(s) for s in flat]
        gradients = horovod_gradient(self, target, variables, output_gradients)
        if self._zeros:
            gradients = [tf.zeros_like(v) if g is None else g for v, g in zip(variables, gradients, strict=True)]
        return tf.nest.pack_sequence_as(sources, gradients)

    def register_local_source(self: Any, source: Any) -> None:
        horovod_register(self, inside(source))

    cls.gradient, cls.register_local_source = gradient, register_local_source
    # Horovod's gradient() passes all gradients except those of local sources to _allreduce_grads.
    del wrapped._allreduce_grads
    cls._allreduce_grads = reduce
    wrapped.grace = given
    return wrapped


def _find(exchange: Exchange, variables: Sequence[Any]) -> Exchange:
    """Return the exchange of an earlier tape with the same configuration and variables, or else this one."""
    key = (repr(exchange.settings()), exchange.process_set.process_set_id, *(id(v) for v in variables))
    # A new variable may have the id of a deleted one.
    if key not in _exchanges or not _exchanges[key].serves(variables):
        _exchanges[key] = exchange
        weakref.finalize(variables[0], _exchanges.pop, key, None)
    return _exchanges[key]
