"""Array operations per framework, found in a table of backends; `get_ops` imports only the requested one."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from grace.core.config import plugins
from grace.core.errors import ConfigError, nearest
from grace.core.ops.composites import ArrayOps

if TYPE_CHECKING:
    from grace.core.ops.native import Native

_GROUP = "grace.backends"
_backends: dict[str, EntryPoint] = {}


def register_backend(name: str, path: str) -> None:
    """Announce the array operations of a framework: "module:Class", imported when they are first asked for.

    The class derives from ArrayOps; its flags say what the framework can do. Other distributions may announce it in
    the entry-point group `grace.backends` instead. Raises ConfigError if the name is taken.
    """
    taken = _backends.setdefault(name, EntryPoint(name, path, _GROUP))
    if taken.value != path:
        raise ConfigError(f"backend name '{name}' is taken by {taken.value}; choose another name for {path}.")


register_backend("numpy", "grace.core.ops.numpy_ops:NumpyOps")


@cache
def _announce_kernels() -> None:
    for entry in entry_points(group=_GROUP):
        register_backend(entry.name, entry.value)


@cache
def _reference(framework: str) -> type[ArrayOps]:
    _announce_kernels()
    if framework not in _backends:
        raise ConfigError(f"unknown framework '{framework}'.{nearest(framework, _backends)}")
    found: type[ArrayOps] = plugins.load(_backends[framework])
    return found


@cache
def _kernels(framework: str) -> type[Native] | None:
    path = _reference(framework).kernels
    return None if path is None else EntryPoint(framework, path, _GROUP).load()


def serves(framework: str, device: str) -> bool:
    """Return whether there are kernels for a framework's arrays on a device: "cpu", "cuda" or "cuda:1"."""
    kernels = _kernels(framework)
    return kernels is not None and kernels.fault(device) is None


def get_ops(framework: str, device: str = "cpu", native: bool | None = None) -> ArrayOps:
    """Return the array operations of a framework, such as "numpy", on a device.

    `native` selects kernels; the default uses them if they are built and serve the device, and GRACE_NATIVE is not 0.
    Raises ConfigError for another name, for kernels that do not exist, or for an invalid environment variable.
    """
    from grace.core.ops.native import is_enabled

    served = serves(framework, device)
    if native and not served:
        raise ConfigError(
            f"there are no kernels for {framework} on {device} here. `grace doctor` shows what was built; "
            "`pip install --no-build-isolation -e .` builds them if there is a C++ compiler."
        )
    return _make(framework, device, served and is_enabled() if native is None else native)


@cache
def _make(framework: str, device: str, native: bool) -> ArrayOps:
    from grace.core.ops.native import check_environment

    check_environment()
    kernels = _kernels(framework)
    return kernels(device) if native and kernels is not None else _reference(framework)(device)
