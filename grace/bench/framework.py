"""A framework, as `grace bench codec` needs it: arrays, a step to time, a clock and a copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from grace.bench.codec import LocalStep
from grace.core.ops import get_ops
from grace.core.ops.composites import ArrayOps
from grace.core.plan.unit import Unit
from grace.core.spec import Array

T = TypeVar("T")


class Framework:
    """A framework on one device. `native=False` disables the kernels."""

    name: ClassVar[str]

    def __init__(self, device: str, native: bool) -> None:
        self.device = device
        self.ops: ArrayOps = get_ops(self.name, device, None if native else False)

    @property
    def native(self) -> bool:
        """True if the array operations use the kernels."""
        # A local import: it imports NumPy, which reads the number of threads.
        from grace.core.ops.native import Native

        return isinstance(self.ops, Native)

    @property
    def device_name(self) -> str | None:
        """Name of the accelerator, None on the CPU."""
        return None

    def load(self, values: Any) -> Array:
        """Return a NumPy array as an array of the framework on the device."""
        return values

    def gradient(self, loaded: Array) -> Array:
        """Return a window of a loaded array in the form that a step expects."""
        return loaded

    def on_host(self, array: Array) -> Any:
        """Return an array of the framework as a NumPy array."""
        return array

    def step(self, unit: Unit, ranks: int) -> LocalStep:
        """Return the local step to time."""
        return LocalStep(unit, self.ops, ranks)

    def clock(self, work: Callable[[], T]) -> tuple[float, T]:
        """Run the work. Return its time in seconds and its result."""
        start = time.perf_counter()
        result = work()
        return time.perf_counter() - start, result

    def make_copier(self, loaded: Array) -> Callable[[Array], None]:
        """Return a function that copies an array of this shape into an existing array."""
        import numpy as np

        target = np.zeros_like(loaded)
        return lambda source: np.copyto(target, source)
