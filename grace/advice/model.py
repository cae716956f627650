"""The cost model: the time of a training step from the times of its parts, by a small event simulation.

A rank computes on one thread: forward pass, backward pass, codecs, the update. Buckets leave it one after the other
over one link. What is simulated is one rank; the others are taken to do the same at the same time, so that the cost of
a prediction does not grow with their number.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from grace.core.errors import ConfigError
from grace.core.transport.collectives import Kind, copies

#: Who takes part in a collective: all ranks, those of a node, or those with the same place in every node.
Scope: TypeAlias = Literal["all", "node", "nodes"]
#: How ranks add a buffer: Gloo has rings; NCCL and MPI have trees, or what takes as few messages, for many ranks.
Allreduce: TypeAlias = Literal["ring", "tree"]


@dataclass(frozen=True)
class Link:
    """A link: bytes per second that a node sends in one direction, and seconds of a message beside its bytes."""

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or not self.latency >= 0:
            raise ConfigError(
                f"Link: expected a bandwidth above 0 and a latency of at least 0, received {self.bandwidth!r} bytes "
                f"per second and {self.latency!r} seconds."
            )


#: Seconds that a message takes beside its bytes, if nothing else is known: those of a common Ethernet.
LATENCY = 25e-6
# Bytes per second between which bandwidths are sought.
SLOWEST, FASTEST = 1e3, 1e15
# What a node does within itself, if nothing else is known: a third of what a PCIe 4.0 slot carries.
INSIDE = Link(10e9, 5e-6)


@dataclass(frozen=True)
class Machine:
    """Ranks and what joins them: nodes of `local_size` ranks share `link`, and `inside` joins the ranks of a node.

    `sharing` is the number of ranks per processor core, at least 1: what a rank computes takes so many times as long.
    """

    ranks: int
    link: Link
    local_size: int = 1
    inside: Link = INSIDE
    sharing: float = 1.0
    allreduce: Allreduce = "ring"

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.local_size < 1 or self.ranks % self.local_size:
            raise ConfigError(
                f"Machine: expected ranks in whole nodes, received {self.ranks} ranks and {self.local_size} per node."
            )

    def size(self, scope: Scope) -> int:
        """Return how many ranks take part in a collective of a scope."""
        return {"all": self.ranks, "node": self.local_size, "nodes": self.ranks // self.local_size}[scope]

    def messages(self, kind: Kind, scope: Scope = "all") -> int:
        r"""Return how many messages of a collective follow each other.

        2 (n - 1) in an allreduce in a ring, 2 \lceil\log_2 n\rceil in one in a tree, else n - 1.
        """
        n = self.size(scope)
        if kind != "allreduce":
            return n - 1
        return 2 * ((n - 1).bit_length() if self.allreduce == "tree" else n - 1)

    def seconds(self, kind: Kind, nbytes: float, scope: Scope = "all", count: int = 1) -> float:
        r"""Return the time of `count` collectives to which each rank passes `nbytes` in all.

        Formula: m \alpha + c B / \beta

        m are their messages, and c B the bytes that leave a rank. Collectives of the groups of a scope run side by
        side. In a ring of all ranks, one of each node sends to another node. In an alltoall, and between nodes, all of
        them do.
        """
        n, local = self.size(scope), self.local_size
        if n == 1:
            return 0.0
        messages = count * self.messages(kind, scope)
        leaving = float(copies(kind, n)) * nbytes
        if scope == "node" or self.ranks == local:
            return messages * self.inside.latency + leaving / self.inside.bandwidth
        if scope == "nodes":
            return messages * self.link.latency + local * leaving / self.link.bandwidth
        if kind == "alltoall":
            # A rank passes on all but its own part; of this, what is for other nodes shares the link.
            leaving *= local * (n - local) / (n - 1)
        # The slower of the two kinds of hops bounds a ring. Without neighbours, a rank has no other hops.
        within = 0.0 if local == 1 else leaving / self.inside.bandwidth / 2
        return messages * self.link.latency + max(leaving / self.link.bandwidth, within)


@dataclass(frozen=True)
class Round:
    """A collective of a bucket, or `count` that start together: kind, bytes that a rank passes, and who takes part."""

    kind: Kind
    nbytes: float
    scope: Scope = "all"
    count: int = 1


@dataclass(frozen=True)
class Bucket:
    """A bucket: when it is ready, in seconds of the backward pass, its codec before and after, and its rounds.

    `nbytes` are those of its gradients.
    """

    ready: float
    before: float
    after: float
    rounds: tuple[Round, ...]
    nbytes: float = 0.0


@dataclass(frozen=True)
class Overhead:
    """The seconds that an exchange takes of a rank beside its codec and the link.

    `copying` counts per byte of gradients, in the thread that trains, `handling` per byte that a rank sends, for system
    calls, copies and sums of the transport, and `serving` per collective and rank that takes part. These are processor
    time, where no other core takes it. `waking` counts per rank that takes part in a round that finds the link idle:
    the ranks wait for each other, and wake threads that sleep.
    """

    copying: float = 0.0
    handling: float = 0.0
    serving: float = 0.0
    waking: float = 0.0

    def processor(self, one: Round, machine: Machine) -> float:
        """Return the seconds of processor time that the transport of a rank takes for a round."""
        size = machine.size(one.scope)
        sent = float(copies(one.kind, size)) * one.nbytes
        return self.handling * sent + self.serving * size * one.count


@dataclass(frozen=True)
class Step:
    """A training step of one rank: seconds of its parts on a core or device of its own, and its buckets.

    `backwards` passes accumulate gradients before one exchange, and `every` counts the optimizer steps from one
    exchange to the next. The rank goes on with a bucket during the backward pass: over a transport with so many `lanes`
    (`Transport.lanes`) with that many rounds in the order of the buckets, and the others after the pass, round by
    round; with None as they arrive. One lane, as on a GPU, leaves all but the first rounds.
    """

    forward: float
    backward: float
    update: float
    buckets: tuple[Bucket, ...]
    overhead: Overhead = Overhead()
    backwards: int = 1
    every: int = 1
    lanes: int | None = 1

    @property
    def compute(self) -> float:
        """Seconds of a step without exchange."""
        return self.backwards * (self.forward + self.backward) + self.update


@dataclass(frozen=True)
class Prediction:
    """The predicted step, in seconds: the whole, compute alone, codecs, the busy link, and what nothing hides of it.

    `sent` are the bytes that leave a rank per step. All are means over steps where exchanges are rare.
    """

    seconds: float
    compute: float
    codec: float
    wire: float
    sent: float

    @property
    def exposed(self) -> float:
        """Seconds of communication during which the rank waits."""
        return max(0.0, self.seconds - self.compute - self.codec)

    @property
    def utilisation(self) -> float:
        """The share of the step in which the model is computed."""
        return self.compute / self.seconds if self.seconds else 1.0


def predict(step: Step, machine: Machine) -> Prediction:
    """Return the time of a step, by simulating its events.

    The backward pass makes one bucket after the other ready. Each is compressed at once, which delays the rest of the
    pass, and its first round joins the queue of the link. When the next bucket is ready, and when the pass has ended,
    the rank looks after arrived rounds: it then starts their next round, or merges what has come. What has no lane
    follows after the pass, bucket by bucket: first all second rounds, then all third ones.
    """
    slower = max(1.0, machine.sharing)
    alone = step.compute * slower
    if machine.ranks == 1 or not step.buckets:
        return Prediction(alone, alone, 0.0, 0.0, 0.0)
    run = _Run(machine, step.overhead, slower, step.lanes)
    buckets = sorted(step.buckets, key=lambda bucket: bucket.ready)
    run.now = slower * (step.forward + (step.backwards - 1) * (step.forward + step.backward))
    last = codec = 0.0
    for place, bucket in enumerate(buckets):
        run.compute(bucket.ready - last)
        last = bucket.ready
        run.look()
        run.compute(bucket.before + step.overhead.copying * bucket.nbytes / 2)
        codec += slower * (bucket.before + bucket.after)
        run.start(place, bucket, 0)
    run.compute(step.backward - last)
    run.drain()
    run.compute(step.update)
    rare = 1 / step.every
    return Prediction(
        seconds=alone + (run.now - alone) * rare,
        compute=alone,
        codec=codec * rare,
        wire=run.wire * rare,
        sent=run.sent * rare,
    )


def taken_in_pass(step: Step, machine: Machine) -> list[tuple[float, float]]:
    """Return when each bucket is ready, and the seconds that its codec and transport then take of a measured pass."""
    run, found = _Run(machine, step.overhead, 1.0, step.lanes), []
    for place, bucket in enumerate(sorted(step.buckets, key=lambda bucket: bucket.ready)):
        run.now = bucket.ready
        run.busy.clear()
        run.start(place, bucket, 0)
        handled = sum(share * max(0.0, min(end, step.backward) - begin) for begin, end, share in run.busy)
        found.append((bucket.ready, bucket.before + handled))
    return found


class _Run:
    """The state of a simulated rank: its clock, the queue of its link, and the rounds under way."""

    def __init__(self, machine: Machine, overhead: Overhead, slower: float, lanes: int | None) -> None:
        self._machine, self._overhead, self._slower = machine, overhead, slower
        self._lanes = math.inf if lanes is None else lanes
        self.now = self._free = self.wire = self.sent = 0.0
        #: Begin and end of rounds on the link that the transport handles, and the part of this time that it computes.
        self.busy: deque[tuple[float, float, float]] = deque()
        # The number of the round under way of each bucket, the place of the bucket, when the round arrives, and the
        # bucket; in the order in which the rank takes them.
        self._under_way: list[tuple[int, int, float, Bucket]] = []
        # Most rounds of a large model are alike.
        self._costs: dict[Round, tuple[float, float, float, float]] = {}

    def start(self, place: int, bucket: Bucket, number: int) -> None:
        """Hand a round of a bucket to the link."""
        one = bucket.rounds[number]
        seconds, handling, waking, sent = self._costs.get(one) or self._cost(one)
        idle, begin, taken = self._free <= self.now, max(self._free, self.now), max(seconds, handling)
        self._free = begin + taken + waking * idle
        if handling:
            self.busy.append((begin, begin + taken, handling / taken))
        self.wire += seconds
        self.sent += sent
        heapq.heappush(self._under_way, (number, place, self._free, bucket))

    def _cost(self, one: Round) -> tuple[float, float, float, float]:
        """Return the seconds of a round on the link, of its handling and of waking the ranks, and the bytes sent."""
        machine, overhead, size = self._machine, self._overhead, self._machine.size(one.scope)
        seconds = machine.seconds(one.kind, one.nbytes, one.scope, one.count)
        handling, sent = self._slower * overhead.processor(one, machine), float(copies(one.kind, size)) * one.nbytes
        self._costs[one] = seconds, handling, overhead.waking * size, sent
        return self._costs[one]

    def compute(self, seconds: float) -> None:
        """Compute for so many seconds of a core of its own, beside what the transport takes of it meanwhile."""
        left = self._slower * seconds
        while self.busy and left:
            begin, end, share = self.busy[0]
            before = min(left, max(0.0, begin - self.now))
            self.now, left = self.now + before, left - before
            room = max(0.0, end - self.now) * (1 - share)
            if not left or left < room:
                self.now += left / (1 - share) if left else 0.0
                return
            self.now, left = max(self.now, end), left - room
            self.busy.popleft()
        self.now += left

    def look(self) -> None:
        """Go on with the rounds that have arrived by now and whose next one has a lane."""
        while self._under_way:
            number, _, arrival, _ = self._under_way[0]
            if arrival > self.now or number + 1 >= self._lanes:
                return
            self._go_on()

    def drain(self) -> None:
        """Wait for all rounds, in the order in which the rank takes them."""
        while self._under_way:
            self.now = max(self.now, self._under_way[0][2])
            self._go_on()

    def _go_on(self) -> None:
        number, place, _, bucket = heapq.heappop(self._under_way)
        # What lies between two rounds is a part of `after`.
        self.compute((bucket.after + self._overhead.copying * bucket.nbytes / 2) / len(bucket.rounds))
        if number + 1 < len(bucket.rounds):
            self.start(place, bucket, number + 1)


def bandwidth_for(step: Step, machine: Machine, share: float) -> float | None:
    """Return the bytes per second of the link at which a share of the step is compute; None if none is enough.

    Raises ConfigError unless the share lies in (0, 1).
    """
    if not 0 < share < 1:
        raise ConfigError(f"bandwidth_for: expected a share above 0 and below 1, received {share!r}.")
    return _least(lambda there: predict(step, there).utilisation >= share, machine)


def remembered(step: Step) -> Callable[[Machine], float]:
    """Return the function from machines to the seconds of a step, which simulates each only once."""
    return functools.cache(lambda machine: predict(step, machine).seconds)


def break_even(step: Step, dense: Callable[[Machine], float], machine: Machine) -> float | None:
    """Return the bytes per second of the link from which on the dense step, of so many seconds, is as fast.

    The result is 0 if it is so on any link, and None if it is so on none.
    """
    found = _least(lambda there: dense(there) <= predict(step, there).seconds, machine)
    return 0.0 if found == SLOWEST else found


def pays_below(bandwidth: float | None) -> str:
    """Return the result of `break_even` in words: the link below which a step pays."""
    return "always" if bandwidth is None else "never" if bandwidth == 0 else rate(bandwidth)


def rate(bandwidth: float) -> str:
    """Return bytes per second as bits per second, with a unit."""
    gbit = 8 * bandwidth / 1e9
    return f"{gbit:.3g} Gbit/s" if gbit < 1000 else f"{gbit / 1000:.3g} Tbit/s"


def _least(holds: Callable[[Machine], bool], machine: Machine) -> float | None:
    """Return the least bytes per second of the link for which a condition holds, to a tenth of a percent."""

    def there(bandwidth: float) -> Machine:
        return dataclasses.replace(machine, link=Link(bandwidth, machine.link.latency))

    low, high = SLOWEST, FASTEST
    if not holds(there(high)):
        return None
    if holds(there(low)):
        return low
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if holds(there(middle)) else (middle, high)
    return high
