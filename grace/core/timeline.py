"""When what happened in a step: moments noted as it runs, the phases of every bucket, and their export as a trace."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from grace.core.errors import ConfigError
from grace.core.plan import Bucket, Plan
from grace.core.spec import Array

ENVIRONMENT_VARIABLE = "GRACE_TIMELINE"

PHASES = ("ready", "compress", "settle", "send", "wait", "merge")
# What happened, and to which tensor, unit or bucket; in seconds since the epoch.
Moments: TypeAlias = Mapping[tuple[str, str], float]
Spans: TypeAlias = dict[str, dict[str, tuple[float, float] | None]]

# To read a clock that never goes back as one that all processes share; several times, since one may be interrupted.
_EPOCH = max(time.time() - time.perf_counter() for _ in range(10))


class Times:
    """The moments of the step under way and of the last one, and the timeline, if any, that gets every step.

    A moment is noted when the host gets there and waits for nothing: on a GPU it is when work was enqueued. An adapter
    whose steps are traced into graphs overrides `mark`, `finish` and `moments`.
    """

    def __init__(self) -> None:
        self._timeline: Timeline | None = None
        self._marks: dict[tuple[str, str], float] = {}
        self._last: Moments = {}

    def mark(self, moment: str, name: str, after: Iterable[Array] | None = None) -> None:
        """Note the moment; in a graph the one in which the arrays `after` were there, and nothing without them."""
        self._marks[moment, name] = _EPOCH + time.perf_counter()

    def finish(self, step: Any, plan: Plan, sent: Callable[[str], Any]) -> None:
        """The step of that number is done; `sent(bucket)` are the bytes that this rank handed to collectives."""
        self._last, self._marks = self._marks, {}
        self.write(int(step), plan, self._last, sent)

    def moments(self, plan: Plan) -> Moments:
        """Those of the last step, which was one of this plan."""
        return self._last

    def write(self, step: int, plan: Plan, moments: Moments, sent: Callable[[str], Any]) -> None:
        """Add a step to the timeline, if there is one."""
        if self._timeline is not None:
            self._timeline.add(step, plan, spans(plan, moments), sent)

    def start(self, path: str | os.PathLike[str], rank: int, size: int) -> None:
        """Write the steps from now on to `path`, with ".rankN" before its suffix where there are several ranks.

        Raises ConfigError if it cannot be written.
        """
        self._timeline = Timeline.at(path, rank, size)

    def start_as_told(self, rank: int, size: int) -> None:
        """Start where GRACE_TIMELINE says, if it says anything and none was started by hand."""
        path = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
        if path and self._timeline is None:
            self.start(path, rank, size)

    def stop(self) -> None:
        """Write no more steps."""
        self._timeline = None


def moments_of(plan: Plan) -> list[tuple[str, str]]:
    """The moments of a step that have a place in a graph, too: those in which arrays are there."""
    found = [("ready", part.spec.name) for part in plan.exchanged]
    for bucket in plan.buckets:
        found += [(moment, unit.spec.name) for moment in ("begun", "merged") for unit in bucket.parts]
        settles = any(unit.agreement for unit in bucket.parts)
        found += [(m, bucket.name) for m in (("proposed", "settled") if settles else ()) + ("handed", "arrived")]
    return found


def tensors_of(bucket: Bucket) -> list[str]:
    """The tensors of which a bucket holds something, in its order."""
    return list(dict.fromkeys(piece.tensor for unit in bucket.parts for piece in unit.pieces))


def spans(plan: Plan, moments: Moments) -> Spans:
    """Per bucket from when to when its phases lasted, as `Engine.stats` defines them; None where it is not known."""
    if any(("arrived", bucket.name) not in moments for bucket in plan.buckets):
        return {bucket.name: dict.fromkeys(PHASES) for bucket in plan.buckets}
    idle = max((moments["handed", bucket.name] for bucket in plan.buckets), default=0.0)
    found: Spans = {}
    for bucket in plan.buckets:
        ready = [moments["ready", name] for name in tensors_of(bucket)]
        begun, merged = ([moments[m, unit.spec.name] for unit in bucket.parts] for m in ("begun", "merged"))
        handed, arrived = (moments[moment, bucket.name] for moment in ("handed", "arrived"))
        waiting = min(arrived, moments.get(("waiting", bucket.name), idle))
        # A graph may look at the clock a little late.
        begin, sent, wait, here, end = itertools.accumulate([min(begun), handed, waiting, arrived, max(merged)], max)
        settle = None
        if ("settled", bucket.name) in moments:
            proposed, settled = (moments[moment, bucket.name] for moment in ("proposed", "settled"))
            settle = (min(max(proposed, begin), sent), min(max(settled, begin), sent))
        found[bucket.name] = {
            "ready": (min(ready), max(ready)),
            "compress": (begin, sent),
            "settle": settle,
            "send": (sent, wait),
            "wait": (wait, here),
            "merge": (here, end),
        }
    return found


class Timeline:
    """A Chrome trace of one process: per bucket a row of phases, and one that shows when its gradients came.

    The file is whole JSON after every step. Steps that cannot be written, as the disk is full, end it with a warning.
    """

    # Of the process, whose exchanges share a file.
    _open: ClassVar[dict[Path, Timeline]] = {}

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank, self._ended = path, rank, False
        self._rows: dict[str, int] = {}
        name = _metadata("process_name", rank, 0, name=f"rank {rank}")
        with path.open("wb") as file:
            file.write(f"[\n{json.dumps(name)}\n]".encode())

    @classmethod
    def at(cls, path: str | os.PathLike[str], rank: int, size: int) -> Timeline:
        """The one of this process under that path. Raises ConfigError if it cannot be written."""
        try:
            place = Path(path)
            if size > 1:
                place = place.with_name(f"{place.stem}.rank{rank}{place.suffix}")
            place = place.absolute()
            if place not in cls._open or not place.exists():
                cls._open[place] = cls(place, rank)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the timeline '{path}' cannot be written: {getattr(error, 'strerror', None) or error}. Give "
                f"start_timeline() or {ENVIRONMENT_VARIABLE} a file in a directory that exists on all ranks."
            ) from None
        return cls._open[place]

    def add(self, step: int, plan: Plan, phases: Spans, sent: Callable[[str], Any]) -> None:
        """Write one step."""
        events: list[dict[str, Any]] = []
        for bucket in plan.buckets:
            if bucket.name not in self._rows:
                events += self._new_row(bucket)
            row, names = self._rows[bucket.name], tensors_of(bucket)
            some = ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]}, {len(names)} in all"
            told = {"step": step, "bytes": int(sent(bucket.name) or 0), "tensors": some}
            for phase, span in phases[bucket.name].items():
                if span is not None:
                    begin, end = (round(moment * 1e6) for moment in span)
                    tid = row + _GRADIENTS if phase == "ready" else row
                    place = {"ts": begin, "dur": end - begin, "pid": self._rank, "tid": tid}
                    events.append({"name": phase, "cat": "grace", "ph": "X", **place, "args": told})
        if events and not self._ended:
            self._write(events)

    def _new_row(self, bucket: Bucket) -> list[dict[str, Any]]:
        row = self._rows[bucket.name] = len(self._rows)
        # Gradients may still come while the first unit is compressed, and what overlaps needs rows of its own.
        rows = {row + _GRADIENTS: f"{bucket.name} gradients", row: bucket.name}
        return [
            event
            for order, (tid, name) in enumerate(rows.items(), start=2 * row)
            for event in (
                _metadata("thread_name", self._rank, tid, name=name),
                _metadata("thread_sort_index", self._rank, tid, sort_index=order),
            )
        ]

    def _write(self, events: list[dict[str, Any]]) -> None:
        text = "".join(f",\n{json.dumps(event)}" for event in events)
        try:
            with self._path.open("r+b") as file:
                # In the place of the bracket that ends it.
                file.seek(-2, os.SEEK_END)
                file.write(f"{text}\n]".encode())
        except OSError as error:
            # Imported here, because it leaves a hook in every process that only imports grace.
            import logging

            self._ended = True
            logging.getLogger("grace").warning("the timeline '%s' ends here: %s", self._path, error)


# Rows of gradients have the number of their bucket and this.
_GRADIENTS = 1_000_000


def _metadata(kind: str, rank: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": tid, "args": args}
