"""`Watch`: what an exchange shows of the steps of a job, and what candidates cost on its gradients."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from grace.advice.cost import communicator_of, grown, law_of
from grace.core.communicators.hierarchical import Hierarchical
from grace.core.errors import ConfigError, IncompatibleError
from grace.core.plan.plan import make_plan
from grace.core.spec import Array, TensorSpec

if TYPE_CHECKING:
    from grace.bench.codec import LocalStep
    from grace.core.config.config import Config
    from grace.core.ops.composites import ArrayOps
    from grace.core.plan.unit import Unit
    from grace.core.session.exchange import Exchange

# A codec is timed on so many of the largest tensors, each cut to so many elements, and on the first ones of each. The
# default rules compress no smaller tensor.
_TENSORS, _ELEMENTS, _SMALL, _REPETITIONS = 3, 1_000_000, 1_024, 3
# After so many seconds, no more candidates are measured: advice is there within a minute.
_LONGEST = 30.0
# A rank merges payloads of at most so many ranks while it is timed. The cost of more goes on as between these.
_MERGED = (2, 4)


class Watch:
    """Times of the last `steps` steps of an exchange on this rank, and gradients of some tensors.

    An adapter calls `begin` before the first gradient of a step, `note_gradient` for each gradient of this rank, and
    `end` when all are merged. One whose backward pass waits for an exchange calls `resume` after it. Times are those of
    the host.
    """

    def __init__(self, exchange: Exchange, steps: int) -> None:
        self.exchange, self.steps = exchange, steps
        #: Seconds from the begin of a step to that of the next.
        self.periods: deque[float] = deque(maxlen=steps)
        #: Seconds from the last gradient of a step until all were merged, and those for which the pass has waited.
        self.exposed: deque[float] = deque(maxlen=steps)
        #: True if the backward pass waits for each exchange within it.
        self.waits = False
        self._waited = self._last = 0.0
        self._ready: deque[dict[str, float]] = deque(maxlen=steps)
        self._begun: float | None = None
        self._now: dict[str, float] = {}
        fit = [s for s in exchange._specs if s.numel >= _SMALL and not s.sparse and not s.complex]
        large = sorted(fit, key=lambda spec: -spec.numel)[:_TENSORS]
        self._sampled = {spec.name: spec for spec in large}
        self._samples: dict[str, Array] = {}

    @property
    def complete(self) -> bool:
        """True as soon as all steps were seen."""
        return len(self.periods) == self.steps

    def clear(self) -> None:
        """Forget all steps: what follows is another configuration, or the last one took longer for a reason."""
        self.periods.clear()
        self.exposed.clear()
        self._ready.clear()
        self._begun = None

    def stats(self) -> dict[str, Any]:
        """Return what the statistics of the exchange show of it: nothing."""
        return {}

    def begin(self, at: float | None = None) -> None:
        """Note that a step begins: its first gradient is there, now or at a time that the adapter has measured."""
        now = time.perf_counter() if at is None else at
        if self._begun is not None:
            self.periods.append(now - self._begun)
        self._begun, self._now, self._waited = now, {}, 0.0

    def decide(self) -> None:
        """Do what follows from the steps seen so far, between two steps: nothing."""

    def note_gradient(self, name: str, *parts: Array, at: float | None = None) -> None:
        """Note that a gradient of this rank is there, in one or more parts."""
        if self._begun is None:
            return
        self._last = time.perf_counter() if at is None else at
        self._now[name] = self._last - self._begun - self._waited
        spec = self._sampled.get(name)
        if spec is not None and name not in self._samples and len(self.periods) == self.steps - 1:
            ops = self.exchange._ops(spec.device)
            flat = ops.concat([ops.reshape(part, (-1,)) for part in parts])
            self._samples[name] = ops.cast(ops.copy(flat[: _cut(spec).numel]), spec.dtype)

    def resume(self) -> None:
        """Note that the backward pass goes on, which has waited since the last gradient that was noted."""
        self.waits = True
        self._waited += time.perf_counter() - self._last

    def end(self, at: float | None = None) -> None:
        """Note that all gradients of the step are merged."""
        if self._begun is not None and self._now:
            now = time.perf_counter() if at is None else at
            self.exposed.append(now - self._begun - max(self._now.values()))
            self._ready.append(self._now)

    def seen(self) -> dict[str, Any]:
        """Return what this rank has seen of the steps, in seconds; JSON-able."""
        names = self._ready[-1] if self._ready else {}
        periods = sorted(self.periods)
        return {
            "period": statistics.median(periods),
            "band": [periods[len(periods) // 10], periods[-1 - len(periods) // 10]],
            "exposed": statistics.median(self.exposed) if self.exposed else 0.0,
            "waits": self.waits,
            "ready": {name: statistics.median(ready.get(name, 0.0) for ready in self._ready) for name in names},
        }

    def figures(self, candidates: Mapping[str, Config]) -> dict[str, Any]:
        """Return the same, the cost of the candidates by label, and the optimizers."""
        begin, codecs = time.perf_counter(), dict[str, dict[str, Any]]()
        for label, config in candidates.items():
            if time.perf_counter() - begin > _LONGEST:
                # The gentlest ones come first.
                codecs[label] = {"reason": f"the methods before it took {_LONGEST:.0f} s to measure"}
            else:
                codecs[label] = self._codec(config)
        return {
            **self.seen(),
            "codecs": codecs,
            "optimizers": [list(optimizer) for optimizer in self.exchange.optimizers],
        }

    def _codec(self, config: Config) -> dict[str, Any]:
        """Return seconds per unit and per element of a step with the codec, and |x - C(x)|^2 / |x|^2 of the samples."""
        seconds, elements, fixed, error, size = 0.0, 0, 0.0, 0.0, 0.0
        try:
            made = type(config)(config.method, default_rules=False, granularity="layer", split_bytes=0)
            for name, x in self._samples.items():
                spec = _cut(self._sampled[name])
                ops = self.exchange._ops(spec.device)
                (unit,) = make_plan([spec], made).units
                merged_by_rank = self._merged(spec, made)
                seconds += self._timed(unit, x, ops, merged_by_rank)
                if not elements:
                    # Once: to trace it takes as long as for a large one.
                    small = TensorSpec(name, (_SMALL // 32, 32), spec.dtype, spec.device)
                    (small_unit,) = make_plan([small], made).units
                    fixed = self._timed(small_unit, x[:_SMALL], ops, merged_by_rank)
                elements += spec.numel
                # By one rank alone, because the errors of several are smaller together.
                step = self.exchange.local_step(unit, ops, 1)
                merged = step.run(x, 0, step.receive([x], 0)).gradient
                error += float(ops.norm(x - ops.reshape(merged, (spec.numel,)))) ** 2
                size += float(ops.norm(x)) ** 2
        except (ConfigError, IncompatibleError) as reason:
            return {"reason": str(reason)}
        if not elements:
            return {"reason": "no gradient was seen that could be compressed"}
        each = max(0.0, seconds - fixed * len(self._samples)) / elements
        return {"fixed": fixed, "element": each, "error": error / size if size else 0.0}

    def _merged(self, spec: TensorSpec, config: Config) -> int:
        """Return how many payloads of a tensor a rank merges, at least two.

        A sum is one payload on any number of ranks. Shards that a rank merges have as many elements as two payloads.
        """
        ranks = self.exchange.ranks
        modules = self.exchange._modules_for(ranks)
        communicator = (modules and modules.communicator) or communicator_of(spec, config, ranks)
        if law_of(communicator) not in ("allgather", "broadcast"):
            return 2
        nodes = communicator.ranks_per_node(ranks) if isinstance(communicator, Hierarchical) else 1
        return max(2, ranks.size // nodes)

    def _timed(self, unit: Unit, x: Array, ops: ArrayOps, merged: int) -> float:
        """Return the seconds of a rank for its step with a unit, if it merges the payloads of so many ranks."""

        def took(ranks: int) -> float:
            return _timed(self.exchange.local_step(unit, ops, ranks), x, ops)

        few, many = _MERGED
        return took(merged) if merged <= many else grown(took(few), took(many), _MERGED, merged)


def _cut(spec: TensorSpec) -> TensorSpec:
    """Return a tensor with at most so many elements, of the same number of columns if it has several dimensions."""
    if spec.numel <= _ELEMENTS:
        return spec
    columns = min(_ELEMENTS, spec.numel // spec.shape[0])
    return TensorSpec(spec.name, (_ELEMENTS // columns, columns), spec.dtype, spec.device)


def _timed(step: LocalStep, x: Array, ops: ArrayOps) -> float:
    """Return the seconds of a rank for a local step."""
    found = []
    for number in range(1 + _REPETITIONS):
        arrived, mine = step.receive([x] * step.ranks, number), ops.copy(x)
        # Reading one number waits for the device.
        float(ops.norm(mine[:1]))
        begin = time.perf_counter()
        done = step.run(mine, number, arrived)
        float(ops.norm(done.gradient[:1]))
        found.append(time.perf_counter() - begin)
    # The first one loads libraries.
    return min(found[1:])
