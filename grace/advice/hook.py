"""The import hook of `grace advise`: it gives a script of the user an exchange that measures itself."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

#: The environment variable with the folder in which ranks leave what they have to say.
FOLDER = "GRACE_ADVISE"
#: The file of each kind in that folder. FIRST says that rank 0, which leaves the advice, is on this node, and LINE has
#: the lines with which the script would use grace.
ADVICE, REFUSED, FIRST, LINE, SEEN, MEASURED = "advice.json", "refused", "first", "line", "seen", "measured"
_WRAP = "Wrap the optimizer by grace in place of Horovod, and leave `compression` out"
# How to measure what has no exchange that can be watched.
_OTHERWISE = "measure it by grace bench step, or estimate it by grace what-if."


def leave(kind: str, text: str) -> None:
    """Leave a text for the command, whole or not at all."""
    path = os.path.join(os.environ[FOLDER], kind)
    part = f"{path}.{os.getpid()}"
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(part, path)


def tell(what: str, line: str) -> None:
    """Leave what the user does with a line of the script to use grace; "{file}" stands for the configuration."""
    leave(LINE, f"{what}:\n\n    import grace\n\n    {line}")


def end(status: int = 0) -> None:
    """End this rank without what the script would do at its end, such as save a model."""
    for name in ("horovod.torch", "horovod.tensorflow"):
        horovod = sys.modules.get(name)
        if horovod is not None and horovod.is_initialized():
            horovod.shutdown()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        # Otherwise mpirun would call it a failure.
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def refuse(reason: str) -> None:
    """Leave the reason for which there is no advice, and end this rank; the command ends the others."""
    leave(REFUSED, reason)
    end()


def fail(rank: int, error: Exception) -> None:
    """Leave the error of a measurement, and end this rank with an error, so that launchers end the others.

    The first error of a node stays: others follow from it.
    """
    if not os.path.exists(os.path.join(os.environ[FOLDER], REFUSED)):
        leave(REFUSED, f"rank {rank} failed while it was measured: {type(error).__name__}: {error}")
    traceback.print_exception(error)
    os._exit(1)


def install(file: str) -> None:
    """Wait for the imports of libraries. `file` is the module `sitecustomize`, which hides the user's own one."""
    sys.meta_path.insert(0, _Finder())
    folder = os.path.dirname(file)
    hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", [p for p in sys.path if p != folder])
    if hidden is not None and hidden.loader is not None:
        hidden.loader.exec_module(importlib.util.module_from_spec(hidden))


class _Finder(MetaPathFinder):
    """A finder that changes some modules right after they were loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        change = _CHANGES.get(name)
        if change is None:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(module: ModuleType) -> None:
                load(module)
                change(module)

            spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


def _change_ddp(module: Any) -> None:
    """Let each model in DDP get an exchange in its first pass that trains, as late as its own hooks may come."""
    forward = module.DistributedDataParallel.forward
    seen: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(forward)
    def registered(model: Any, *args: Any, **kwargs: Any) -> Any:
        if model not in seen and model.training and module.torch.is_grad_enabled():
            seen.add(model)
            with _refusing():
                _register(model, "after the model is wrapped in DistributedDataParallel")
        return forward(model, *args, **kwargs)

    module.DistributedDataParallel.forward = registered


def _register(model: Any, where: str) -> None:
    import grace
    from grace.torch.model import is_registered

    if not is_registered(model.parameters()):
        grace.torch.register(model, compressor="none")
        tell(f"Add these lines {where}", "grace.torch.register(model, {file})")


def _change_horovod(module: Any) -> None:
    """Let grace wrap an optimizer of PyTorch in place of Horovod, without compression, or with the same 16 bits."""
    wrap = module.DistributedOptimizer

    @functools.wraps(wrap)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("grace."):
            # It wraps this one itself.
            return wrap(*args, **kwargs)
        given = inspect.signature(wrap).bind(*args, **kwargs).arguments
        compression = given.pop("compression", module.Compression.none)
        for name in ("num_groups", "groups"):
            # How Horovod fuses tensors.
            given.pop(name, None)
        import grace

        with _refusing():
            method = "fp16" if compression is module.Compression.fp16 else "none"
            line = 'grace.torch.DistributedOptimizer(optimizer, config={file}, backend="horovod", ...)'
            tell(_WRAP, f"optimizer = {line}")
            return grace.torch.DistributedOptimizer(compressor=method, backend="horovod", **given)

    module.DistributedOptimizer = wrapped


@contextmanager
def _refusing() -> Iterator[None]:
    from grace.core.errors import GraceError

    try:
        yield
    except GraceError as error:
        refuse(str(error))


def _change_fsdp(module: Any) -> None:
    """Let each model in FSDP2 get an exchange in its first pass, before FSDP gathers parameters."""
    shard = module.fully_shard
    seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def register(model: Any, args: Any) -> None:
        if model not in seen:
            # The outermost module comes first, and has all others.
            seen.update(model.modules())
            with _refusing():
                _register(model, "after the model is passed to fully_shard()")

    @functools.wraps(shard)
    def sharded(given: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        result = shard(given, *args, **kwargs)
        for each in given if isinstance(given, list | tuple) else [given]:
            # FSDP's own hook comes after it.
            each.register_forward_pre_hook(torch.compiler.disable(register), prepend=True)
        return result

    module.fully_shard = sharded
    module.FullyShardedDataParallel.__init__ = _refused("a model in FSDP1")


def _change_horovod_keras(module: Any) -> None:
    """Let grace wrap an optimizer of Keras in place of Horovod, without compression, or with the same 16 bits."""
    wrap = module.DistributedOptimizer

    @functools.wraps(wrap)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(wrap).bind(*args, **kwargs).arguments
        compression = given.pop("compression", module.Compression.none)
        import grace

        known = inspect.signature(grace.tensorflow.DistributedOptimizer).parameters
        with _refusing():
            method = "fp16" if compression is module.Compression.fp16 else "none"
            given = {name: value for name, value in given.items() if name in known}
            optimizer = grace.tensorflow.DistributedOptimizer(compressor=method, **given)
        tell(_WRAP, "optimizer = grace.tensorflow.DistributedOptimizer(optimizer, {file}, ...)")
        return optimizer

    module.DistributedOptimizer = wrapped


def _refused(what: str) -> Callable[..., None]:
    """Return a function that ends the job."""

    def refused(*args: Any, **kwargs: Any) -> None:
        refuse(f"{what} cannot be measured in a script; {_OTHERWISE}")

    return refused


_CHANGES: dict[str, Callable[[Any], None]] = {
    "torch.nn.parallel.distributed": _change_ddp,
    "horovod.torch": _change_horovod,
    "torch.distributed.fsdp": _change_fsdp,
    "horovod.keras": _change_horovod_keras,
    "horovod.tensorflow.keras": _change_horovod_keras,
}
