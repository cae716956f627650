"""Train functions of Keras models, made anew if the optimizer was wrapped late."""

from __future__ import annotations

import weakref
from functools import wraps
from typing import Any

import keras

from grace.tensorflow.optimizer import Distributed, innermost

# The functions that were made for an optimizer that exchanges.
_made: weakref.WeakSet[Any] = weakref.WeakSet()


def _for_late_wrapping(keras_make: Any) -> Any:
    """Return a `Model.make_train_function` that does not keep a function from before the optimizer was wrapped.

    `fit` and `train_on_batch` call it, and Keras then keeps the function that it has. If that has run with the plain
    optimizer, it is traced, and no gradient would be exchanged. The class is changed because only the model knows the
    function, and the optimizer does not know the model.
    """

    @wraps(keras_make)
    def make_train_function(self: Any, force: bool = False) -> Any:
        inner = innermost(self.optimizer)
        exchanges = isinstance(inner, Distributed)
        result = keras_make(self, force or (exchanges and inner.wrapped_late and self.train_function not in _made))
        if exchanges and self.train_function is not None:
            _made.add(self.train_function)
        return result

    make_train_function.for_late_wrapping = True  # type: ignore[attr-defined]
    return make_train_function


if not hasattr(keras.Model.make_train_function, "for_late_wrapping"):
    keras.Model.make_train_function = _for_late_wrapping(keras.Model.make_train_function)
