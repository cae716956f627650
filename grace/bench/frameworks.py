"""The frameworks that `grace bench codec` times.

A framework is imported when its class is instantiated, after the number of threads is set.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

from grace.bench.framework import Framework, T
from grace.core.errors import ConfigError, nearest
from grace.core.spec import Array
from grace.machine import installed

DEVICES = ("cpu", "cuda")


class Numpy(Framework):
    """NumPy. It reads the number of threads from the environment when it is imported."""

    name = "numpy"


class Torch(Framework):
    """PyTorch. On CUDA, events of the current stream measure the time."""

    name = "torch"

    def __init__(self, device: str, threads: int, native: bool) -> None:
        import torch

        torch.set_num_threads(threads)
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f"--device cuda: PyTorch {torch.__version__} finds no CUDA device; "
                "use --device cpu, or a CUDA build of PyTorch on a machine with a GPU."
            )
        super().__init__(device, native)
        self._torch = torch

    @property
    def device_name(self) -> str | None:
        return self._torch.cuda.get_device_name() if self.device == "cuda" else None

    def load(self, values: Any) -> Array:
        # Copy on the CPU too: PyTorch aligns its memory to more bytes than NumPy.
        return self._torch.from_numpy(values).to(self.device, copy=True)

    def on_host(self, array: Array) -> Any:
        return array.cpu().numpy()

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

    def make_copier(self, loaded: Array) -> Callable[[Array], None]:
        target = self._torch.zeros_like(loaded)

        def copy(source: Array) -> None:
            target.copy_(source)

        return copy


def set_up(name: str, device: str, threads: int, native: bool) -> Framework:
    """Return the framework with this name. `native=False` disables the kernels.

    The number of threads must be set (`set_threads`). Raises ConfigError if the framework or device is unknown, not
    installed, or the two do not go together.
    """
    if name not in FRAMEWORKS:
        raise ConfigError(f"--framework: unknown framework '{name}'.{nearest(name, FRAMEWORKS)}")
    if device not in DEVICES:
        raise ConfigError(f"--device: unknown device '{device}'.{nearest(device, DEVICES)}")
    if importlib.util.find_spec(name) is None:
        raise ConfigError(f"--framework: '{name}' is not installed; install it, or choose another framework.")
    if device == "cuda" and name != "torch":
        raise ConfigError(f"--device cuda works with --framework torch only, received --framework {name}.")
    return FRAMEWORKS[name](device, threads, native)


def set_threads(threads: int) -> None:
    """Set the number of threads of libraries that read it from the environment when they are imported."""
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads)


def _numpy(device: str, threads: int, native: bool) -> Framework:
    return Numpy(device, native)


def _tensorflow(device: str, threads: int, native: bool) -> Framework:
    # TensorFlow logs a lot when it is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from grace.bench.traced import Tensorflow

    return Tensorflow(device, threads, native)


FRAMEWORKS: dict[str, Callable[[str, int, bool], Framework]] = {
    "numpy": _numpy,
    "torch": Torch,
    "tensorflow": _tensorflow,
}


def versions(name: str) -> dict[str, str | None]:
    """Return the versions of NumPy and of the framework."""
    return {package: installed(package) for package in dict.fromkeys(("numpy", name))}
