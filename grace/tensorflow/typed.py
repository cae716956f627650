"""The bases and decorators that the adapter takes from TensorFlow, Keras and Horovod, as mypy has to see them.

mypy skips the frameworks, which not every machine has, so that all they define is `Any`. A class derived from `Any` has
every attribute, and a method decorated by it takes every argument: what is misspelt or has moved would be no error.
Here mypy finds what the adapter uses of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, TypeVar

    F = TypeVar("F", bound=Callable[..., Any])

    def do_not_convert(function: F) -> F:
        """Return a function that AutoGraph leaves as it is."""

    class Module:
        """A `tf.Module`."""

        def __init__(self, name: str | None = None) -> None: ...

    class Optimizer:
        """A `keras.optimizers.Optimizer`."""

        name: str
        built: bool
        gradient_accumulation_steps: int | None
        loss_scale_factor: float | None
        _trainable_variables: list[Any]
        _iterations: Any
        _tracker: Any
        _variables: list[Any]

        def __init__(self, learning_rate: Any, weight_decay: float | None = None, **options: Any) -> None: ...
        @property
        def iterations(self) -> Any: ...
        @property
        def variables(self) -> list[Any]: ...
        def build(self, variables: Sequence[Any]) -> None: ...
        def add_variable(
            self, shape: Sequence[int], initializer: Any = "zeros", dtype: str | None = None, *, name: str | None = None
        ) -> Any: ...
        def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None: ...
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None: ...
        def scale_loss(self, loss: Any) -> Any: ...
        def load_own_variables(self, store: Mapping[str, Any]) -> None: ...
        def get_config(self) -> dict[str, Any]: ...
        @classmethod
        def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any: ...
        def _apply_weight_decay(self, variables: Sequence[Any]) -> None: ...
        def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None: ...
        def _check_variables_are_known(self, variables: Sequence[Any]) -> None: ...
        def _clip_gradients(self, grads: Sequence[Any]) -> list[Any]: ...
        def _get_current_learning_rate(self) -> Any: ...
        def _get_variable_index(self, variable: Any) -> int: ...
        def _track_trackable(self, trackable: Any, name: str, overwrite: bool = False) -> Any: ...
        def _use_weight_decay(self, variable: Any) -> bool: ...

    #: The base of a class that stands before a Keras optimizer in the order of resolution.
    OptimizerMixin = Optimizer

    class Callback:
        """A `keras.callbacks.Callback`."""

        model: Any

    class ObjectState:
        """A `horovod.common.elastic.ObjectState`."""

        def __init__(
            self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **attributes: Any
        ) -> None: ...
        def save(self) -> None: ...
        def restore(self) -> None: ...
        def reset(self) -> None: ...
        def sync(self) -> None: ...

else:
    import tensorflow as tf
    from horovod.common.elastic import ObjectState  # noqa: F401
    from keras.callbacks import Callback  # noqa: F401
    from keras.optimizers import Optimizer
    from tensorflow import Module  # noqa: F401

    do_not_convert = tf.autograph.experimental.do_not_convert
    OptimizerMixin = object
