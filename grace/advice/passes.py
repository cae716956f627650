"""The passes of a step without exchange: their seconds, and when each gradient is ready."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from grace.core.spec import TensorSpec

# The part of a step in which the forward pass runs. A backward pass computes twice as much.
FORWARD = 1 / 3
STEPS = 5


class Passes(NamedTuple):
    """Seconds of the forward and the backward pass, and from the begin of the backward pass to each gradient."""

    forward: float
    backward: float
    ready: Mapping[str, float]

    @property
    def compute(self) -> float:
        """Seconds of both passes."""
        return self.forward + self.backward

    def scaled(self, compute: float) -> Passes:
        """Return the passes with so many seconds in all and the same shares."""
        factor = compute / self.compute
        return Passes(
            self.forward * factor, self.backward * factor, {name: at * factor for name, at in self.ready.items()}
        )


def assumed(specs: Sequence[TensorSpec], compute: float) -> Passes:
    """Return passes of so many seconds in which gradients come in reverse order, each after its share of elements."""
    backward = compute * (1 - FORWARD)
    total = max(1, sum(spec.numel for spec in specs))
    ends = itertools.accumulate(spec.numel for spec in reversed(specs))
    ready = {spec.name: backward * end / total for spec, end in zip(reversed(specs), ends, strict=True)}
    return Passes(compute - backward, backward, ready)


class Clock(NamedTuple):
    """A clock of a device: `now` notes a moment of the work that it was given, `between` has the seconds of two."""

    now: Callable[[], Any]
    between: Callable[[Any, Any], float]


def clock_of(device: Any) -> Clock:
    """Return the clock of a device of PyTorch: on a GPU, its own events, because the host runs ahead of it."""
    if device.type != "cuda":
        return Clock(time.perf_counter, lambda begin, end: end - begin)
    from torch.cuda import Event, current_stream

    def now() -> Any:
        event = Event(enable_timing=True)
        event.record(current_stream(device))
        return event

    def between(begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return Clock(now, between)


def measured(model: Any, loss: Callable[[], Any], steps: int = STEPS, clock: Clock | None = None) -> Passes:
    """Return the medians of some steps of a PyTorch module in this process; the function returns the loss of a batch.

    The clock is that of the device with the parameters if none is given. Gradients of the module are None afterwards.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    now, between = clock or clock_of(next(iter(named.values())).device)
    ready: dict[str, Any] = {}

    def note(name: str) -> Callable[[Any], None]:
        return lambda parameter: ready.__setitem__(name, now())

    handles = [p.register_post_accumulate_grad_hook(note(name)) for name, p in named.items()]
    seen: list[tuple[float, float, dict[str, float]]] = []
    # The first step allocates.
    for _ in range(steps + 1):
        ready.clear()
        begin = now()
        value = loss()
        middle = now()
        value.backward()
        end = now()
        # A parameter without a gradient is settled when the pass ends.
        gradients = {name: between(middle, ready.get(name, end)) for name in named}
        seen.append((between(begin, middle), between(middle, end), gradients))
        model.zero_grad()
    for handle in handles:
        handle.remove()
    forward, backward, times = zip(*seen[1:], strict=True)
    return Passes(
        statistics.median(forward),
        statistics.median(backward),
        {name: statistics.median(each[name] for each in times) for name in named},
    )
