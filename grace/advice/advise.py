"""`Advice`: whether compression pays in a running job, and which method, from what its ranks have measured."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from grace.advice import probe
from grace.advice.accuracy import ACCURACY, OVERHEAD
from grace.advice.candidates import LOCAL_STEPS, LOW, NONE, RISKS, candidates, changes, risk_of
from grace.advice.cost import ddp_buckets
from grace.advice.forecast import buckets_of
from grace.advice.model import (
    Link,
    Machine,
    Overhead,
    Round,
    Step,
    break_even,
    pays_below,
    predict,
    remembered,
    taken_in_pass,
)
from grace.advice.watch import Watch
from grace.core.communicators.hierarchical import Hierarchical
from grace.core.config.recommended import Optimizer
from grace.core.errors import ConfigError, IncompatibleError, StepError
from grace.core.observe.announcement import in_units
from grace.core.observe.table import align
from grace.core.plan.plan import Plan

if TYPE_CHECKING:
    from grace.core.session.exchange import Exchange

# Sizes of the allreduces that measure the link, in bytes. Links let some hundred KiB pass at once after a pause.
SIZES = (16 * 1024, 4 * 1024 * 1024)
# Of candidates whose times differ by less than this share, the gentlest is the best: the figures are no better.
CLOSE = 0.03
_UNKNOWN = (
    "when a GPU has a gradient: the times of gradients are those of the host, which runs ahead",
    "how the ranks share a link, nodes and switches: the link was measured with all of them at once",
    "what a method does to the accuracy of your model: compare a short run with `none`",
)


@dataclass(frozen=True)
class Row:
    """A candidate: seconds of a step, bytes that a rank sends in it, risk, and what a configuration changes for it.

    `changes` is empty for what is no configuration. `error` is |x - C(x)|^2 / |x|^2 on gradients of the job; None if it
    is not known. `break_even` are the bytes per second of a link from which on `none` is as fast: 0 if it always is,
    None if it never is. `measured` says that `seconds` were measured rather than predicted.
    """

    label: str
    seconds: float
    nbytes: float
    grade: int
    reason: str
    error: float | None
    changes: Mapping[str, Any]
    break_even: float | None = None
    measured: bool = False

    @property
    def band(self) -> tuple[float, float] | None:
        """The seconds between which a step that is predicted will probably lie; None if it was measured."""
        return None if self.measured else ACCURACY.band(self.seconds)


@dataclass(frozen=True)
class Advice:
    """The answer to whether compression pays in a job, equal on all ranks.

    `rows` are the candidates, `best` the label of the fastest one of no or low risk, and `link` has the bytes per
    second that a rank sends and the seconds per message. `compute` are the seconds of a step without an exchange, and
    `band` has the 10th and 90th percentile of the step as it was. `left_out` says why other candidates are no rows.
    """

    rows: tuple[Row, ...]
    best: str
    compute: float
    band: tuple[float, float]
    ranks: int
    link: Link
    left_out: Mapping[str, str]

    @property
    def config(self) -> dict[str, Any]:
        """The keys of a configuration that choose the best candidate, ready for `grace.toml`."""
        return dict(self.row(self.best).changes)

    @property
    def toml(self) -> str:
        """The text of a file `grace.toml` with the best candidate."""
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in self.config.items())

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        best, dense = self.row(self.best), self.row(NONE)
        share = f"the exchange takes {100 * max(0.0, 1 - self.compute / dense.seconds):.0f} % of a step"
        if self.best == NONE:
            return f"Compression does not pay on this network: {share} of {dense.seconds * 1e3:.4g} ms."
        return (
            f"Compression pays {dense.seconds / best.seconds:.2g}x on this network with {best.label}: {share}, "
            f"{best.seconds * 1e3:.4g} ms instead of {dense.seconds * 1e3:.4g} ms."
        )

    @property
    def table(self) -> str:
        """The candidates by time, with their risks."""
        cells = [("method", "step", "band", "bytes", "efficiency", "pays below", "error", "risk")]
        for row in sorted(self.rows, key=lambda row: row.seconds):
            band = None if row.band is None else "{:.4g} to {:.4g} ms".format(*(1e3 * seconds for seconds in row.band))
            cells.append(
                (
                    row.label,
                    f"{row.seconds * 1e3:.4g} ms",
                    band or "measured",
                    in_units(round(row.nbytes)),
                    f"{100 * min(1.0, self.compute / row.seconds):.0f} %",
                    # Without an error it is no candidate, of which a break-even is sought.
                    "" if row.label == NONE or row.error is None else pays_below(row.break_even),
                    "" if row.error is None else f"{row.error:.2e}",
                    f"{RISKS[row.grade]}: {row.reason}",
                )
            )
        return "\n".join(align(cells, right=range(1, 7)))

    def row(self, label: str) -> Row:
        """Return a candidate by its label."""
        return next(row for row in self.rows if row.label == label)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as an object for JSON."""
        return {
            "sentence": self.sentence,
            "best": self.best,
            "config": self.config,
            "rows": [{**asdict(row), "band": row.band} for row in self.rows],
            "compute_s": self.compute,
            "band_s": list(self.band),
            "ranks": self.ranks,
            "link": {"bytes_per_s": self.link.bandwidth, "latency_s": self.link.latency},
            "left_out": dict(self.left_out),
            "unknown": list(_UNKNOWN),
            "accuracy": ACCURACY._asdict(),
        }

    def __str__(self) -> str:
        link = f"{8 * self.link.bandwidth / 1e9:.3g} Gbit/s and {self.link.latency * 1e6:.0f} us per message"
        low, high = (f"{1e3 * seconds:.4g}" for seconds in self.band)
        left_out = [f"Left out: {label}, because {reason}" for label, reason in self.left_out.items()]
        unknown = [f"Not known: {text}." for text in _UNKNOWN]
        measured = f"Measured on {self.ranks} ranks: steps of {low} to {high} ms, a link of {link}."
        return "\n".join([self.sentence, "", self.table, "", measured, *ACCURACY.lines, *left_out, *unknown])


class Figures:
    """The measurements of all ranks, merged: the means of their times. They make the rows of advice."""

    def __init__(
        self, exchange: Exchange, everyone: Sequence[Mapping[str, Any]], link: Link, inside: Link | None = None
    ) -> None:
        self._exchange, self.link, self.ranks = exchange, link, exchange.size
        #: What joins the ranks of a node; None if the ranks are on one node, or if it is not known on which.
        self.inside = inside
        self.left_out = {
            label: reasons[0]
            for label in everyone[0]["codecs"]
            if (reasons := [rank["codecs"][label]["reason"] for rank in everyone if "reason" in rank["codecs"][label]])
        }
        self.codecs = {
            label: {key: _mean(rank["codecs"][label][key] for rank in everyone) for key in codec}
            for label, codec in everyone[0]["codecs"].items()
            if label not in self.left_out
        }
        # Of the rank that knows most: some may have seen no step of an optimizer.
        self.optimizers = [Optimizer(*o) for o in max((rank["optimizers"] for rank in everyone), key=len)]
        made = candidates(exchange.config, has_nodes(exchange))
        self._plans: dict[str, Plan] = {}
        for label in [NONE, *self.codecs]:
            try:
                self._plans[label] = exchange._plan_of(made[label])
            except (ConfigError, IncompatibleError) as reason:
                # What the framework's sharding does not allow.
                self.left_out[label] = str(reason)
        # The measured link includes the time in which ranks wait for each other. A GPU leaves the transport to other
        # processors.
        on_cpu = exchange._specs[0].device == "cpu"
        self._overhead = Overhead(handling=OVERHEAD.handling) if on_cpu else Overhead()
        now = next((label for label in self._plans if made[label].method == exchange.config.method), None)
        self.observe(everyone, now)

    def observe(self, everyone: Sequence[Mapping[str, Any]], label: str | None) -> None:
        """Take what all ranks have seen of steps with a candidate; None if they had another method."""
        #: The candidate with which the steps were measured.
        self.now = label
        self.period = _mean(rank["period"] for rank in everyone)
        self.band = tuple(_mean(rank["band"][i] for rank in everyone) for i in (0, 1))
        self.exposed = _mean(rank["exposed"] for rank in everyone)
        #: Seconds of a step without its exchange.
        self.compute = max(self.period - self.exposed, 0.0)
        self.ready = {name: _mean(rank["ready"].get(name, 0.0) for rank in everyone) for name in everyone[0]["ready"]}
        self.waits = any(rank["waits"] for rank in everyone)
        if self.now is not None and not self.waits:
            # What the codec and the transport take during the backward pass is part of the measured times.
            taken = taken_in_pass(self.step(self.now), self.machine(self.link))
            self.compute = max(self.compute - sum(seconds for _, seconds in taken), 0.0)
            self.ready = {
                name: max(at - sum(seconds for ready, seconds in taken if ready < at), 0.0)
                for name, at in self.ready.items()
            }
        if self.now is not None and self.waits:
            # What the link does not explain, such as ranks that wait for each other, remains with every candidate.
            step = self.step(self.now)
            explained = predict(step, self.machine(self.link)).seconds - step.compute
            self.compute = max(self.compute, self.period - explained)

    def step(self, label: str) -> Step:
        """Return the step with a candidate; what is computed outside of the backward pass counts as its update."""
        plan, codec = self._plans[label], self.codecs.get(label, {})
        modules = self._exchange._modules_for(self._exchange.ranks)
        buckets = buckets_of(plan, self.ready, codec, self._exchange.ranks, modules, waits=self.waits)
        backward, lanes = max(self.ready.values(), default=0.0), self._exchange.transport.lanes
        return Step(0.0, backward, max(self.compute - backward, 0.0), tuple(buckets), self._overhead, lanes=lanes)

    def machine(self, link: Link) -> Machine:
        """Return the ranks with a link between any two of them, or between any two nodes."""
        if self.inside is None:
            return Machine(self.ranks, link)
        return Machine(self.ranks, link, _local_size(self._exchange), self.inside)

    def seconds(self, label: str, link: Link) -> float:
        """Return the predicted seconds of a step with a candidate over a link."""
        return predict(self.step(label), self.machine(link)).seconds

    def advice(self, link: Link | None = None, measured: Mapping[str, float] | None = None) -> Advice:
        """Return the advice for the measured link, or for another; `measured` has known seconds of candidates."""
        known = dict(measured or ({self.now: self.period} if self.now and link is None else {}))
        link = link or self.link
        rows, dense_seconds = [], remembered(self.step(NONE))
        for label, change in changes(has_nodes(self._exchange)).items():
            if label not in self._plans:
                continue
            error = 0.0 if label == NONE else self.codecs[label]["error"]
            risk = risk_of(change, error, self.optimizers)
            seconds, nbytes = known.get(label, self.seconds(label, link)), self._plans[label].wire_bytes
            even = None if label == NONE else break_even(self.step(label), dense_seconds, self.machine(link))
            rows.append(Row(label, seconds, nbytes, *risk, error, change, even, label in known))
        if gathers := self._exchange.gathers():
            dense = known.get(NONE, self.seconds(NONE, link))
            rows.append(self._less_sharding(gathers, dense, link))
            if self.inside is not None:
                rows.append(self._sharding_in_nodes(gathers, dense, link))
        else:
            rows.append(self._local_steps(link))
        return Advice(
            tuple(rows), best_of(rows), self.compute, (self.band[0], self.band[1]), self.ranks, link, self.left_out
        )

    def _local_steps(self, link: Link) -> Row:
        """Return the row of ranks that step on their own, without compression."""
        dense = self._plans[NONE].wire_bytes
        # All weights are exchanged after the step, where nothing hides their exchange.
        seconds = self.compute + self.machine(link).seconds("allreduce", dense) / LOCAL_STEPS
        changes = {"compressor": "none", "outer": {"every": LOCAL_STEPS}}
        reason = "each rank steps on its own in between, see docs/outer_steps.md"
        return Row(f"{LOCAL_STEPS} local steps", seconds, dense / LOCAL_STEPS, 2, reason, None, changes)

    def _less_sharding(self, gathers: Sequence[tuple[int, int]], seconds: float, link: Link) -> Row:
        """Return the row of a model that FSDP shards less, from the seconds of its step without compression.

        Parameters are then gathered once a step instead of twice. If they are already, each rank has all of them.
        """
        machine, twice = self.machine(link), [nbytes for nbytes, times in gathers if times > 1]
        spared = twice or [nbytes for nbytes, _ in gathers]
        saved = sum(machine.seconds("allgather", nbytes / self.ranks) for nbytes in spared)
        more = in_units(round(sum(spared) * (1 - 1 / self.ranks)))
        if twice:
            seconds = max(0.0, seconds - saved)
            reason = f"reshard_after_forward=False trains as before, with {more} more of parameters in memory"
        else:
            step, specs = self.step(NONE), [item.spec for item in self._plans[NONE].assignments]
            update, buckets = max(0.0, step.update - saved), tuple(ddp_buckets(specs, self.ready))
            seconds = predict(replace(step, update=update, buckets=buckets), machine).seconds
            reason = f"DDP trains as before, with {more} more of parameters in memory, and what the optimizer keeps"
        return Row("less sharding", seconds, self._plans[NONE].wire_bytes, 0, reason, None, {})

    def _sharding_in_nodes(self, gathers: Sequence[tuple[int, int]], seconds: float, link: Link) -> Row:
        """Return the row of a model that FSDP shards within each node, from the seconds of its step as it is.

        Parameters are gathered within nodes, gradients are reduced there, and each rank sums its part between nodes.
        """
        machine, step = self.machine(link), self.step(NONE)
        n, local = machine.ranks, machine.local_size

        def by_nodes(one: Round) -> tuple[Round, ...]:
            # Gloo reduces and scatters by an allreduce; else it is a ring, with the bytes of an allgather of parts.
            total = {"allreduce": one.nbytes, "allgather": n * one.nbytes}.get(one.kind)
            if total is None:
                return (one,)
            reduced = total if one.kind == "allreduce" else total / local
            return Round(one.kind, reduced, "node"), Round("allreduce", total / local, "nodes")

        rounds = [tuple(part for one in bucket.rounds for part in by_nodes(one)) for bucket in step.buckets]
        buckets = [replace(bucket, rounds=found) for bucket, found in zip(step.buckets, rounds, strict=True)]
        seconds += predict(replace(step, buckets=tuple(buckets)), machine).seconds - predict(step, machine).seconds
        for nbytes, times in gathers:
            here = machine.seconds("allgather", nbytes / local, "node")
            seconds += times * (here - machine.seconds("allgather", nbytes / n))
        more = in_units(round(sum(nbytes for nbytes, _ in gathers) * (1 / local - 1 / n)))
        reason = (
            f"fully_shard(..., mesh=init_device_mesh(..., ({n // local}, {local}))) trains as before, with {more} more "
            "of parameters in memory, and what the optimizer keeps"
        )
        return Row("hybrid sharding", max(seconds, 0.0), self._plans[NONE].wire_bytes, 0, reason, None, {})


def best_of(rows: Iterable[Row]) -> str:
    """Return the label of the gentlest row within 3 % of the fastest one, among those of no or low risk."""
    safe = [row for row in rows if row.changes and row.grade <= LOW]
    fastest = min(row.seconds for row in safe)
    return next(row.label for row in safe if row.seconds <= fastest * (1 + CLOSE))


def measure_link(exchange: Exchange, sizes: Sequence[int] = SIZES) -> Link:
    """Measure the link between the ranks of an exchange; all of them must call it."""
    ops = exchange._ops(exchange._specs[0].device)
    points = probe.measure(
        probe.over(exchange.transport), lambda n: ops.zeros(n, "float32"), exchange.size, sizes=sizes
    )
    mine = list(probe.fit(points, exchange.size))
    # Of replicas, each part of a model has a link of its own.
    return Link(*map(_mean, zip(*exchange.everyone(mine, "advice", "the link"), strict=True)))


def measure_inside(exchange: Exchange) -> Link | None:
    """Measure the link within each node as hierarchical uses it, by alltoalls of all ranks; all of them must call it.

    The result is None if the ranks are on one node, or alone on theirs, or if it is not known where they are.
    """
    local_size = _local_size(exchange)
    if local_size < 2 or local_size == exchange.size:
        return None
    ops, node, points = exchange._ops(exchange._specs[0].device), exchange.rank // local_size, []
    for nbytes in SIZES:
        part = ops.zeros(nbytes // 4 // local_size, "float32")
        buffers = [part if rank // local_size == node else part[:0] for rank in range(exchange.size)]
        seconds = []
        for number in range(2 * probe.LEAST):
            begin = time.perf_counter()
            # There and back, as in an allreduce.
            for way in ("there", "back"):
                name = f"grace/inside/{nbytes}/{number}/{way}"
                float(exchange.transport.alltoall(buffers, name=name).wait()[0])
            seconds.append(time.perf_counter() - begin)
        mean = _mean(exchange.everyone(statistics.median(seconds), "advice", "the link within a node"))
        points.append(probe.point(nbytes, mean, local_size))
    return Link(*probe.fit(points, local_size))


def has_nodes(exchange: Exchange) -> bool:
    """Return whether the ranks are on several nodes, and may exchange shards there as hierarchical does."""
    of_framework = exchange._modules_for(exchange.ranks)
    return 1 < exchange.ranks.local_size < exchange.size and of_framework is None


def _local_size(exchange: Exchange) -> int:
    """Return the number of ranks on a node, as hierarchical or the launcher says; 0 if unknown."""
    used = (item.communicator for item in exchange.plan.exchanged)
    sizes = (each.ranks_per_node(exchange.ranks) for each in used if isinstance(each, Hierarchical))
    return next(sizes, exchange.ranks.local_size)


def advise(exchange: Exchange, steps: int) -> Advice | None:
    """Begin to watch an exchange, or return the advice if so many steps were seen; see `Exchange.advise`."""
    where = f"{exchange.called}.advise"
    if steps < 1:
        raise ConfigError(f"{where}: expected at least 1 step, received {steps}.")
    if not exchange.watches or exchange.outers or exchange.config.auto or exchange.size < 2:
        raise StepError(
            f"{where}: expected an exchange of gradients by DDP, FSDP2, a plain model, a wrapped optimizer or mpi4py, "
            "on at least 2 ranks and with a named compressor; received outer steps, the compressor 'auto', a single "
            "rank or a simulation. Measure these by `grace bench step`."
        )
    watch = exchange.advisor
    if watch is None:
        watch = exchange.advisor = Watch(exchange, steps)
    if not watch.complete:
        return None
    exchange.advisor = None
    return measure(watch).advice()


def measure(watch: Watch, most: int = len(RISKS) - 1) -> Figures:
    """Return what all ranks have measured; all of them must call it between the same two steps.

    Candidates whose risk is above `most` with any optimizer are left out.
    """
    exchange = watch.exchange
    link, inside = measure_link(exchange), measure_inside(exchange)
    # Ranks may know of other optimizers, and must measure the same.
    gentle = [
        label for label, change in changes(has_nodes(exchange)).items() if risk_of(change, None, ()).grade <= most
    ]
    compared = candidates(exchange.config, has_nodes(exchange))
    mine = watch.figures({label: compared[label] for label in gentle if label != NONE})
    return Figures(exchange, exchange.everyone(mine, "advice", "the measurements for advice"), link, inside)


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
