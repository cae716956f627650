"""Repeated timing of a local step and of a copy of the same array."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from grace import __version__
from grace.bench.codec import LocalStep
from grace.bench.framework import Framework
from grace.bench.frameworks import versions
from grace.bench.gradients import Gradients
from grace.bench.variants import Variant
from grace.core.communicators.two_shot import keeps_state
from grace.core.config.config import dense_method
from grace.core.config.registry import communicators, memories
from grace.core.plan.unit import Unit
from grace.core.spec import Array
from grace.machine import processor

WARM_UP = 3
# A method whose step takes more than SLOW seconds gets as many repetitions as fit into BUDGET seconds, at least FEWEST.
SLOW, BUDGET, FEWEST = 1.0, 60.0, 3
# A method that learns sees the gradients this many times before its error is taken, as in docs/errors.md.
LESSONS = 3
# The error is added up over so many elements at a time, because differences are float64.
CHUNK = 1_000_000


@dataclass(frozen=True)
class Setting:
    """The settings that all methods of a run share."""

    framework: Framework
    ranks: int
    threads: int
    repetitions: int


@dataclass(frozen=True)
class Result:
    """The measurements of one method at one size: times in seconds, bytes sent in each step, and the error."""

    variant: Variant
    unit: Unit
    setting: Setting
    times: list[float]
    copy_times: list[float]
    sent: list[int]
    # |m - mean|^2 / |mean|^2 of the mean m that the ranks get in a step without memory.
    error: float

    @property
    def numel(self) -> int:
        """Number of elements of the gradient."""
        return self.unit.spec.numel

    @property
    def median(self) -> float:
        """Median time of the step in seconds."""
        return float(np.median(self.times))

    @property
    def copy(self) -> float:
        """Median time of the copy in seconds."""
        return float(np.median(self.copy_times))

    @property
    def spread(self) -> tuple[float, float]:
        """10th and 90th percentile of the step's time in seconds."""
        low, high = np.percentile(self.times, (10, 90))
        return float(low), float(high)

    @property
    def ratio(self) -> float:
        """Time of the step divided by the time of the copy."""
        return self.median / self.copy

    @property
    def gb_per_s(self) -> float:
        """Throughput: size of the gradient / time of the step, in 10^9 bytes per second."""
        return self.unit.spec.nbytes / self.median / 1e9

    @property
    def wire_bytes(self) -> int:
        """Bytes that one rank sends in a step; the mean over the steps if they depend on the data."""
        return round(float(np.mean(self.sent)))

    @property
    def bits_per_element(self) -> float:
        """Bits that one rank sends per element of the gradient."""
        return 8 * self.wire_bytes / self.numel

    @property
    def break_even(self) -> float | None:
        """Break-even bandwidth in Gbit/s: bytes saved / time of the step. None if no bytes are saved.

        On a faster network, sending the saved bytes takes less time than the compression does.
        """
        saved = self.unit.spec.nbytes - self.wire_bytes
        return 8 * saved / self.median / 1e9 if saved > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Return the settings, measurements and derived figures as an object for JSON."""
        setting, framework = self.setting, self.setting.framework
        return {
            "compressor": self.variant.name,
            "options": dict(self.variant.options),
            "memory": memories.name_of(self.unit.memory),
            "communicator": communicators.name_of(self.unit.communicator),
            "dense": self.unit.reason or None,
            "numel": self.numel,
            "shape": list(self.unit.spec.shape),
            "framework": framework.name,
            "device": framework.device,
            "ranks": setting.ranks,
            "threads": setting.threads,
            "native": framework.native,
            "repetitions": len(self.times),
            "median_s": self.median,
            "copy_s": self.copy,
            "ratio_to_copy": self.ratio,
            "spread": list(self.spread),
            "gb_per_s": self.gb_per_s,
            "wire_bytes": self.wire_bytes,
            "bits_per_element": self.bits_per_element,
            "break_even_gbit_per_s": self.break_even,
            "error": self.error,
            "times": self.times,
            "copy_times": self.copy_times,
            "machine": machine(framework),
            "command": shlex.join(["grace", *sys.argv[1:]]),
        }


def machine(framework: Framework) -> dict[str, Any]:
    """Return the hardware and the software versions that the times depend on."""
    return {
        "cpu": processor(),
        "gpu": framework.device_name,
        "system": platform.platform(),
        "python": platform.python_version(),
        "grace": __version__,
        **versions(framework.name),
    }


class Bench:
    """Measurements of methods on one size, all on the same gradients."""

    def __init__(self, shape: tuple[int, int], setting: Setting) -> None:
        self._setting = setting
        self._gradients = Gradients(shape, (WARM_UP + setting.repetitions) * setting.ranks)
        self._loaded = setting.framework.load(self._gradients.array())

    def measure(self, variant: Variant, unit: Unit, progress: Callable[[int], None]) -> Result:
        """Time the step of a method. Call `progress(n)` when n more steps are done or skipped."""
        setting, times = self._setting, []
        step = setting.framework.step(unit, setting.ranks)
        copy = setting.framework.make_copier(self._loaded[self._gradients.window(0)])
        warm_up, repetitions = WARM_UP, setting.repetitions
        while len(times) < warm_up + repetitions:
            times.append(self._run_once(step, copy, len(times)))
            progress(1)
            # Judge by the second step: in the first, TensorFlow traces and libraries load.
            seconds = times[-1][0]
            if len(times) == 2 and seconds > SLOW:
                fewer = min(repetitions, max(FEWEST, int(BUDGET / seconds)))
                progress(WARM_UP - 2 + repetitions - fewer)
                warm_up, repetitions = 2, fewer
        of_step, of_copy, sent = zip(*times[warm_up:], strict=True)
        return Result(variant, unit, setting, list(of_step), list(of_copy), list(sent), self._error(unit))

    def _error(self, unit: Unit) -> float:
        """Return |m - mean|^2 / |mean|^2: m is what the ranks get for their mean in a step without memory."""
        framework, ranks = self._setting.framework, self._setting.ranks
        windows = [self._loaded[self._gradients.window(rank)] for rank in range(ranks)]
        gradients = [framework.gradient(window) for window in windows]
        # A memory holds nothing in the first step, but it may change the gradient, and it would with each lesson.
        alone = replace(unit, method=replace(unit.method, memory=dense_method().memory))
        step = LocalStep(alone, framework.ops, ranks)
        for number in range(1 + LESSONS * keeps_state(unit.compressor)):
            merged = step.run(gradients[0], number, step.receive(gradients, number)).gradient
        lost = whole = 0.0
        found, exact = framework.on_host(merged), [framework.on_host(gradient) for gradient in gradients]
        for start in range(0, len(found), CHUNK):
            part = slice(start, start + CHUNK)
            mean = sum(x[part].astype(np.float64) for x in exact) / ranks
            lost += float(np.sum((found[part] - mean) ** 2))
            whole += float(np.sum(mean**2))
        return lost / whole

    def _run_once(self, step: LocalStep, copy: Callable[[Array], None], number: int) -> tuple[float, float, int]:
        """Run one step and one copy. Return the seconds of both, and the bytes sent."""
        framework, ranks = self._setting.framework, self._setting.ranks
        windows = [self._loaded[self._gradients.window(number * ranks + rank)] for rank in range(ranks)]
        gradients = [framework.gradient(window) for window in windows]
        arrived = step.receive(gradients, number)
        seconds, done = framework.clock(lambda: step.run(gradients[0], number, arrived))
        copy_seconds, _ = framework.clock(lambda: copy(windows[0]))
        return seconds, copy_seconds, step.wire_bytes(done)
