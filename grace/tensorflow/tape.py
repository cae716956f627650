"""`DistributedGradientTape`: Horovod's tape with grace's exchange behind its seam."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from grace.core.config import Config
from grace.core.errors import ConfigError
from grace.tensorflow.exchange import Exchange
from grace.tensorflow.gradients import Gradient
from grace.tensorflow.optimizer import refuse

_WHERE = "grace.tensorflow.DistributedGradientTape"
# A tape lives for one step; what it must find again is kept as long as the first of its variables.
_exchanges: dict[tuple[Any, ...], Exchange] = {}


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
    """Wrap a tape so that `gradient(loss, variables)` gives the gradients exchanged over all ranks, compressed.

    `config` and `options` are those of `grace.make_config`, the other arguments those of Horovod. Residuals are found
    again, step after step, by the configuration and the variables; or pass an `Exchange` in place of a configuration,
    which can be saved: `tf.train.Checkpoint(model=..., optimizer=..., grace=exchange)`. After the first call of
    `gradient` it is the attribute `grace` of the tape. Works eagerly and inside `tf.function`.

    Raises ConfigError for arguments that cannot be honoured; MismatchError on every rank, at the first step, if ranks
    differ in configuration or variables.
    """
    if not hvd.is_initialized():
        raise ConfigError(f"{_WHERE}: Horovod is not initialized; call hvd.init() first.")
    refuse(options, _WHERE)
    arguments = {
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "sparse_as_dense": sparse_as_dense,
        "process_set": process_set,
    }
    given = config if isinstance(config, Exchange) else Exchange(config, **arguments, **options)
    wrapped = hvd.DistributedGradientTape(
        tape, process_set=given.process_set, scale_local_gradients=scale_local_gradients
    )

    @tf.autograph.experimental.do_not_convert
    def reduce(gradients: Sequence[Gradient | None], sources: Sequence[Any], *_: Any) -> list[Gradient | None]:
        sources = [of_keras.get(source.ref(), source) for source in sources]
        if not isinstance(config, Exchange):
            wrapped.grace = _found(given, sources)
        exchange = wrapped.grace
        if exchange.plan is None:
            exchange.build(sources, gradients)
        return exchange(gradients)

    @tf.autograph.experimental.do_not_convert
    def gradient(target: Any, sources: Sequence[Any], *args: Any, **keywords: Any) -> list[Gradient | None]:
        # Horovod keeps sources apart by Variable.ref(), which Keras' variables lack; the ones inside them have it.
        of_keras.update({s.value.ref(): s for s in sources if isinstance(s, keras.Variable)})
        plain = [s.value if isinstance(s, keras.Variable) else s for s in sources]
        return type(wrapped).gradient(wrapped, target, plain, *args, **keywords)

    of_keras: dict[Any, keras.Variable] = {}
    wrapped.gradient = gradient
    wrapped.grace = given
    # Horovod's own seam, on the instance: gradient() hands every gradient but those of local sources to it.
    wrapped._allreduce_grads = reduce
    return wrapped


def _found(exchange: Exchange, variables: Sequence[Any]) -> Exchange:
    """The exchange of an earlier tape with the same configuration and variables, or else this one."""
    key = (repr(exchange.describe()), exchange.process_set.process_set_id, *(id(v) for v in variables))
    if key not in _exchanges:
        _exchanges[key] = exchange
        weakref.finalize(variables[0], _exchanges.pop, key, None)
    return _exchanges[key]
