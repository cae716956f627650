"""Models of the user for `grace bench step --model file.py:build`.

`build()` returns a pair: the model, a module of PyTorch or a model of Keras, and a function without arguments that
computes the loss of a batch with this model. Every rank calls it once per method, with the same seed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grace.bench.step.models import NAMES
from grace.bench.variants import import_own
from grace.core.errors import ConfigError, nearest

OPTION = "--model"


def check_model(text: str) -> None:
    """Raise ConfigError unless the text is a name of NAMES, or of the form FILE.py:FUNCTION or MODULE:FUNCTION."""
    module, colon, function = text.rpartition(":")
    if not colon:
        if text not in NAMES:
            raise ConfigError(
                f"{OPTION}: unknown name '{text}'.{nearest(text, NAMES)} A model of your own is FILE.py:FUNCTION."
            )
        return
    if not module or not function.isidentifier():
        raise ConfigError(f"{OPTION}: expected FILE.py:FUNCTION, such as train.py:build, received '{text}'.")
    if module.endswith(".py") and not Path(module).is_file():
        raise ConfigError(f"{OPTION}: there is no file '{module}'.")


def load_builder(text: str) -> Callable[[], tuple[Any, Callable[[], Any]]]:
    """Return the function that FILE.py:FUNCTION names, and which returns a model and its loss.

    Raises ConfigError if it cannot be imported, and when it is called if it returns something else.
    """
    module, _, function = text.rpartition(":")
    import_own([module], OPTION)
    found = getattr(sys.modules[Path(module).stem if module.endswith(".py") else module], function, None)
    if not callable(found):
        raise ConfigError(f"{OPTION}: '{module}' has no function '{function}'.")

    def build() -> tuple[Any, Callable[[], Any]]:
        made = found()
        if not isinstance(made, tuple) or len(made) != 2 or not callable(made[1]):
            raise ConfigError(
                f"{OPTION}: {function}() must return the model and a function without arguments that returns the loss "
                f"of a batch, received {type(made).__name__}."
            )
        return made

    return build
