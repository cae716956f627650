"""Array operations per framework; `get_ops` imports only the file that is asked for."""

from __future__ import annotations

import importlib
from functools import cache

from grace.core.errors import ConfigError, nearest
from grace.core.ops.composites import ArrayOps

_BACKENDS = {
    "numpy": ("grace.core.ops.numpy_ops", "NumpyOps"),
    "torch": ("grace.core.ops.torch_ops", "TorchOps"),
    "tensorflow": ("grace.core.ops.tensorflow_ops", "TensorflowOps"),
}


@cache
def get_ops(framework: str, device: str = "cpu") -> ArrayOps:
    """The array operations of "numpy", "torch" or "tensorflow" on a device. Raises ConfigError for another name."""
    if framework not in _BACKENDS:
        raise ConfigError(f"no array operations for framework '{framework}'.{nearest(framework, _BACKENDS)}")
    module, name = _BACKENDS[framework]
    cls: type[ArrayOps] = getattr(importlib.import_module(module), name)
    return cls(device) if framework == "torch" else cls()  # type: ignore[call-arg]
