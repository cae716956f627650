"""How each framework is set up, timed and copied with.

The modules that import a framework do so when their class is made, after the numbers of threads are set.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from grace.bench.codec import LocalStep
from grace.core.errors import ConfigError, nearest
from grace.core.ops import get_ops
from grace.core.ops.composites import ArrayOps
from grace.core.part import Part
from grace.core.spec import Array
from grace.machine import installed

T = TypeVar("T")

DEVICES = ("cpu", "cuda")


class Framework:
    """A framework on one device; `native=False` keeps the kernels out."""

    name: ClassVar[str]

    def __init__(self, device: str, native: bool) -> None:
        self.device = device
        self.ops: ArrayOps = get_ops(self.name, device, None if native else False)

    @property
    def native(self) -> bool:
        """Whether the array operations are those of the kernels."""
        # Not at the top: with it comes NumPy, before the number of threads is known.
        from grace.core.ops.native import Native

        return isinstance(self.ops, Native)

    @property
    def device_name(self) -> str | None:
        """What the accelerator is called."""
        return None

    def load(self, values: Any) -> Array:
        """A NumPy array where the copies beside the steps are made."""
        return values

    def gradient(self, loaded: Array) -> Array:
        """A part of what was loaded as a step takes it."""
        return loaded

    def step(self, part: Part, ranks: int) -> LocalStep:
        """The work that is timed."""
        return LocalStep(part, self.ops, ranks)

    def clock(self, work: Callable[[], T]) -> tuple[float, T]:
        """Seconds that the work takes, and its result."""
        start = time.perf_counter()
        result = work()
        return time.perf_counter() - start, result

    def copier(self, loaded: Array) -> Callable[[Array], None]:
        """A function that copies an array like this one into one that exists."""
        import numpy as np

        target = np.zeros_like(loaded)
        return lambda source: np.copyto(target, source)


class Numpy(Framework):
    """NumPy; the process' environment tells it the number of threads before it is imported."""

    name = "numpy"


class Torch(Framework):
    """PyTorch; on CUDA timed by events of the current stream."""

    name = "torch"

    def __init__(self, device: str, threads: int, native: bool) -> None:
        import torch

        torch.set_num_threads(threads)
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f"device 'cuda': PyTorch {torch.__version__} finds no CUDA device; "
                "use --device cpu, or a build of PyTorch for CUDA on a machine with a GPU."
            )
        super().__init__(device, native)
        self._torch = torch

    @property
    def device_name(self) -> str | None:
        return self._torch.cuda.get_device_name() if self.device == "cuda" else None

    def load(self, values: Any) -> Array:
        # A copy also on the CPU: PyTorch aligns its memory, NumPy less.
        return self._torch.from_numpy(values).to(self.device, copy=True)

    def clock(self, work: Callable[[], T]) -> tuple[float, T]:
        if self.device == "cpu":
            return super().clock(work)
        torch = self._torch
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        result = work()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1000, result

    def copier(self, loaded: Array) -> Callable[[Array], None]:
        target = self._torch.zeros_like(loaded)

        def copy(source: Array) -> None:
            target.copy_(source)

        return copy


def set_up(name: str, device: str, threads: int, native: bool) -> Framework:
    """The framework of that name. `native=False` keeps the kernels out. Raises ConfigError where it cannot be used."""
    if name not in FRAMEWORKS:
        raise ConfigError(f"no framework '{name}'.{nearest(name, FRAMEWORKS)}")
    if device not in DEVICES:
        raise ConfigError(f"no device '{device}'.{nearest(device, DEVICES)}")
    if importlib.util.find_spec(name) is None:
        raise ConfigError(f"framework '{name}' is not installed here; install it, or name another with --framework.")
    if device == "cuda" and name != "torch":
        raise ConfigError(f"device 'cuda' is timed with --framework torch only, received --framework {name}.")
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads)
    return FRAMEWORKS[name](device, threads, native)


def _numpy(device: str, threads: int, native: bool) -> Framework:
    return Numpy(device, native)


def _tensorflow(device: str, threads: int, native: bool) -> Framework:
    # It has much to say when it is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from grace.bench.traced import Tensorflow

    return Tensorflow(device, threads, native)


FRAMEWORKS: dict[str, Callable[[str, int, bool], Framework]] = {
    "numpy": _numpy,
    "torch": Torch,
    "tensorflow": _tensorflow,
}


def versions(name: str) -> dict[str, str | None]:
    """Versions of the packages that take part."""
    return {package: installed(package) for package in dict.fromkeys(("numpy", name))}
