"""Timeline of steps: moments recorded as a step runs, the phases of every bucket, and their export as a trace."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from grace.core.errors import ConfigError
from grace.core.observe.log import logger
from grace.core.plan.plan import Bucket, Plan
from grace.core.spec import Array

ENVIRONMENT_VARIABLE = "GRACE_TIMELINE"

PHASES = ("ready", "compress", "negotiate", "send", "wait", "merge")
# (moment, name of the tensor, unit or bucket) -> time in seconds since the epoch.
Moments: TypeAlias = Mapping[tuple[str, str], float]
Spans: TypeAlias = dict[str, dict[str, tuple[float, float] | None]]

# Offset from the monotonic clock to the clock that all processes share; several tries, since one may be interrupted.
_EPOCH = max(time.time() - time.perf_counter() for _ in range(10))


class Times:
    """Moments of the step under way and of the last one, and the timeline, if any, that records every step.

    A moment is recorded when the host gets there, and waits for nothing: for a GPU it is the time when work was
    enqueued. An adapter whose steps are traced into graphs overrides `mark`, `finish` and `moments`.
    """

    def __init__(self) -> None:
        self._timeline: Timeline | None = None
        self._marks: dict[tuple[str, str], float] = {}
        self._last: Moments = {}

    def mark(self, moment: str, name: str, after: Iterable[Array] | None = None) -> None:
        """Record a moment; in a graph the one in which the arrays `after` exist, and nothing without them."""
        self._marks[moment, name] = _EPOCH + time.perf_counter()

    def finish(self, step: Any, plan: Plan, sent: Callable[[str], Any]) -> None:
        """Finish the step of that number; `sent(bucket)` returns the bytes that this rank passed to collectives."""
        self._last, self._marks = self._marks, {}
        self.write(int(step), plan, self._last, sent)

    def drop(self) -> None:
        """Forget the moments of a step that will not be finished."""
        self._marks = {}

    def moments(self, plan: Plan) -> Moments:
        """Return the moments of the last step, which belonged to this plan."""
        return self._last

    def write(self, step: int, plan: Plan, moments: Moments, sent: Callable[[str], Any]) -> None:
        """Add a step to the timeline, if there is one."""
        if self._timeline is not None:
            self._timeline.add(step, plan, spans(plan, moments), sent)

    def start(self, path: str | os.PathLike[str], rank: int, size: int) -> None:
        """Write all further steps to `path`, with ".rankN" before its suffix if there are several ranks.

        Raises ConfigError if the file cannot be written.
        """
        self._timeline = Timeline.at(path, rank, size)

    def start_from_environment(self, rank: int, size: int) -> None:
        """Start the timeline that GRACE_TIMELINE names, unless it is unset or a timeline was started already."""
        path = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
        if path and self._timeline is None:
            self.start(path, rank, size)

    def stop(self) -> None:
        """Stop writing steps."""
        self._timeline = None


class ModuleTimes(Times):
    """Moments of the last step of every module, for a framework that reduces a model module by module."""

    def finish(self, step: Any, plan: Plan, sent: Callable[[str], Any]) -> None:
        marks, self._marks = self._marks, {}
        self._last = {**self._last, **marks}
        self.write(int(step), plan, marks, sent)


def moments_of(plan: Plan) -> list[tuple[str, str]]:
    """Return the moments of a step that exist in a graph, too: those at which arrays become available."""
    found = [("ready", item.spec.name) for item in plan.exchanged]
    for bucket in plan.buckets:
        found += [(moment, unit.spec.name) for moment in ("begun", "merged") for unit in bucket.units]
        negotiates = any(unit.proposed for unit in bucket.units)
        found += [(m, bucket.name) for m in (("proposed", "negotiated") if negotiates else ()) + ("handed", "arrived")]
    return found


def tensors_of(bucket: Bucket) -> list[str]:
    """Return the tensors of which a bucket holds pieces, in its order."""
    return list(dict.fromkeys(piece.tensor for unit in bucket.units for piece in unit.pieces))


def spans(plan: Plan, moments: Moments) -> Spans:
    """Return each bucket's phases as (begin, end), as `Run.stats` defines them; None if unknown."""
    if any(("arrived", bucket.name) not in moments for bucket in plan.buckets):
        return {bucket.name: dict.fromkeys(PHASES) for bucket in plan.buckets}
    idle = max((moments["handed", bucket.name] for bucket in plan.buckets), default=0.0)
    found: Spans = {}
    for bucket in plan.buckets:
        ready = [moments["ready", name] for name in tensors_of(bucket)]
        begun, merged = ([moments[m, unit.spec.name] for unit in bucket.units] for m in ("begun", "merged"))
        handed, arrived = (moments[moment, bucket.name] for moment in ("handed", "arrived"))
        waiting = min(arrived, moments.get(("waiting", bucket.name), idle))
        # A graph may read the clock a little late.
        begin, sent, wait, here, end = itertools.accumulate([min(begun), handed, waiting, arrived, max(merged)], max)
        negotiate = None
        if ("negotiated", bucket.name) in moments:
            proposed, negotiated = (moments[moment, bucket.name] for moment in ("proposed", "negotiated"))
            negotiate = (min(max(proposed, begin), sent), min(max(negotiated, begin), sent))
        found[bucket.name] = {
            "ready": (min(ready), max(ready)),
            "compress": (begin, sent),
            "negotiate": negotiate,
            "send": (sent, wait),
            "wait": (wait, here),
            "merge": (here, end),
        }
    return found


class Timeline:
    """Chrome trace of one process: for each bucket a row of phases and a row for the arrival of its gradients.

    The file is complete JSON after every step. If a step cannot be written, for instance to a full disk, the trace ends
    with the step before, and with a warning.
    """

    # All exchanges of a process share one file per path.
    _open: ClassVar[dict[Path, Timeline]] = {}

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank, self._ended = path, rank, False
        self._rows: dict[str, int] = {}
        name = _metadata("process_name", rank, 0, name=f"rank {rank}")
        with path.open("wb") as file:
            file.write(f"[\n{json.dumps(name)}\n]".encode())

    @classmethod
    def at(cls, path: str | os.PathLike[str], rank: int, size: int) -> Timeline:
        """Return this process's timeline at that path. Raises ConfigError if it cannot be written."""
        try:
            place = Path(path)
            if size > 1:
                place = place.with_name(f"{place.stem}.rank{rank}{place.suffix}")
            place = place.absolute()
            if place not in cls._open or not place.exists():
                cls._open[place] = cls(place, rank)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the timeline '{path}' cannot be written: {getattr(error, 'strerror', None) or error}. Pass "
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
            dense = sum(unit.spec.nbytes for unit in bucket.units)
            details = {"step": step, "bytes": int(sent(bucket.name) or 0), "dense_bytes": dense, "tensors": some}
            for phase, span in phases[bucket.name].items():
                if span is not None:
                    begin, end = (round(moment * 1e6) for moment in span)
                    tid = row + _GRADIENTS if phase == "ready" else row
                    place = {"ts": begin, "dur": end - begin, "pid": self._rank, "tid": tid}
                    events.append({"name": phase, "cat": "grace", "ph": "X", **place, "args": details})
        if events and not self._ended:
            self._write(events)

    def _new_row(self, bucket: Bucket) -> list[dict[str, Any]]:
        row = self._rows[bucket.name] = len(self._rows)
        # Gradients may still arrive while the first unit is compressed; overlapping events need separate rows.
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
        end: int | None = None
        try:
            with self._path.open("r+b") as file:
                # Overwrite the closing bracket.
                end = file.seek(-2, os.SEEK_END)
                file.write(f"{text}\n]".encode())
        except OSError as error:
            if end is not None:
                self._cut(end)
            self._ended = True
            logger().warning(
                "the timeline '%s' cannot be written any more and ends at the last step: %s", self._path, error
            )

    def _cut(self, end: int) -> None:
        """End the file after that many bytes and the closing bracket, which need no more space than it had before."""
        with contextlib.suppress(OSError), self._path.open("r+b") as file:
            file.truncate(end + 2)
            file.seek(end)
            file.write(b"\n]")


# The row of a bucket's gradients is the row of the bucket plus this.
_GRADIENTS = 1_000_000


def _metadata(kind: str, rank: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": tid, "args": args}
