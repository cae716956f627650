"""Array operations per framework; `get_ops` imports only the requested one."""

from __future__ import annotations

import importlib
from functools import cache

from grace.core.ops.composites import ArrayOps
from grace.core.values.errors import ConfigError, nearest

# Module and class of the reference implementation, and of the kernels.
_BACKENDS = {
    "numpy": (("numpy_ops", "NumpyOps"), ("native_numpy", "NativeNumpyOps")),
    "torch": (("torch_ops", "TorchOps"), ("native_torch", "NativeTorchOps")),
    "tensorflow": (("tensorflow_ops", "TensorflowOps"), ("native_tensorflow", "NativeTensorflowOps")),
}


def get_ops(framework: str, device: str = "cpu", native: bool | None = None) -> ArrayOps:
    """Return the array operations of "numpy", "torch" or "tensorflow" on a device.

    `native` selects kernels; the default uses them if they are built and serve the device, and GRACE_NATIVE is not 0.
    Raises ConfigError for another name, for kernels that do not exist, or for an invalid environment variable.
    """
    from grace.core.ops import native as kernels

    if framework not in _BACKENDS:
        raise ConfigError(f"unknown framework '{framework}'.{nearest(framework, _BACKENDS)}")
    served = kernels.serves(framework, device)
    if native and not served:
        raise ConfigError(
            f"there are no kernels for {framework} on {device} here. `grace doctor` shows what was built; "
            "`pip install --no-build-isolation -e .` builds them if there is a C++ compiler."
        )
    return _make(framework, device, served and kernels.wanted() if native is None else native)


@cache
def _make(framework: str, device: str, native: bool) -> ArrayOps:
    from grace.core.ops.native import check_environment

    check_environment()
    module, name = _BACKENDS[framework][native]
    cls: type[ArrayOps] = getattr(importlib.import_module(f"grace.core.ops.{module}"), name)
    return cls(device) if framework == "torch" else cls()  # type: ignore[call-arg]
