"""Allgather: every rank's payload comes to every rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from grace.core.codecs.middle import middle
from grace.core.config.registry import communicators
from grace.core.errors import ConfigError, IncompatibleError
from grace.core.methods.capabilities import Selecting
from grace.core.methods.communicator import Communicator, Result, Route
from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import Memory, Merging, wide_norm
from grace.core.methods.site import Site
from grace.core.plan.unit import Unit, layout_of
from grace.core.spec import Array, Payload, Ranks
from grace.core.step.bucket_step import BucketStep
from grace.core.transport import collectives
from grace.core.transport.collectives import Program
from grace.core.wire.layout import GatherLayout, Received

# What takes the place of the mean.
_RESULTS = {"senders": "over senders", "median": "a median", "trimmed": "a trimmed mean"}


@communicators.register("allgather")
@dataclass(frozen=True)
class Allgather(Communicator):
    r"""Gathering: one collective brings every rank's payload to every rank; payloads may differ in length.

    Formula: g = \mathrm{merge}(\mathrm{payload}_1, \dots, \mathrm{payload}_n), \quad \text{or with senders}\quad
    g_i = \frac{1}{|S_i|} \sum_{r \in S_i} \min(1, \mathrm{median}_q |x_q| / |x_r|) \, x_{r,i}

    With `reduce="senders"`, a coordinate is the mean over the ranks S that have sent it, and not over all ranks: it
    does not shrink because others have chosen other coordinates. This is for sparsifiers. With `clip="median_norm"`,
    the payload x of a rank is first limited to the median of all norms, the lower one of an even number of ranks. Norms
    are those of what is compressed as one; see `granularity`.

    With `reduce="median"`, a coordinate is the median of all ranks' decoded values, of an even number of ranks the mean
    of the two in the middle. With `reduce="trimmed"` it is the mean of those that remain without the `trim` largest and
    the `trim` smallest ones. So a rank that sends anything cannot move the result far. Both are for methods that send
    all coordinates, and sort as many values per element as there are ranks.

    Reference for senders: Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo", 2025, and its code;
    for the median and the trimmed mean: Yin et al., "Byzantine-robust distributed learning: towards optimal statistical
    rates", ICML 2018, Algorithm 1.
    """

    reduce: Literal["mean", "senders", "median", "trimmed"] = "mean"
    clip: Literal["median_norm"] | None = None
    trim: int | None = None

    any_length: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.clip is not None and self.reduce != "senders":
            raise ConfigError(
                f"communicator allgather: clip = '{self.clip}' limits what senders contribute and needs "
                "reduce = 'senders'; set it, or leave clip out."
            )
        if (self.trim is not None) != (self.reduce == "trimmed") or (self.trim is not None and self.trim < 1):
            raise ConfigError(
                "communicator allgather: trim is how many of the largest and of the smallest values reduce = 'trimmed' "
                f"leaves out, at least 1; received reduce = '{self.reduce}' and trim = {self.trim!r}."
            )

    @property
    def result(self) -> Result | None:
        if self.reduce == "mean":
            return None
        return self._mean_of_senders if self.reduce == "senders" else self._middle

    def obstacle(self, compressor: Compressor) -> str | None:
        if self.reduce == "mean":
            return None
        sparse = isinstance(compressor, Selecting) and compressor.selects
        if self.reduce == "senders":
            return None if sparse else "all ranks send all coordinates, so that senders are all ranks"
        if not compressor.averages:
            return "it gives a vote, and takes no median of values"
        return "few ranks send a coordinate, so that the median of all ranks is 0" if sparse else None

    def memory_obstacle(self, memory: Memory) -> str | None:
        if self.reduce != "mean" and isinstance(memory, Merging):
            return f"merges what the ranks have sent itself, without reduce = '{self.reduce}'"
        if self.reduce != "mean" and memory.across_ranks == "joint":
            return f"follows the mean over all ranks, not {_RESULTS[self.reduce]}"
        return None if isinstance(memory, Merging) else super().memory_obstacle(memory)

    def _mean_of_senders(self, compressor: Compressor, payloads: Sequence[Payload], at: Site) -> Array:
        assert isinstance(compressor, Selecting)
        ops, n, dtype, at = at.ops, at.spec.numel, at.spec.work_dtype, at._replace(out=None)
        total, unsent = ops.zeros(n, dtype), ops.zeros(n, dtype)
        for payload, limit in zip(payloads, self._limits(compressor, payloads, at), strict=True):
            x = compressor.decompress(payload, at)
            total = ops.add_(total, x if limit is None else x * limit)
            unsent = ops.add_(unsent, compressor.erase_(ops.full(n, 1, dtype), payload, at))
        senders = ops.cast(len(payloads), dtype) - unsent
        return total / ops.where(senders > 0, senders, ops.cast(1, dtype))

    def _middle(self, compressor: Compressor, payloads: Sequence[Payload], at: Site) -> Array:
        """Return the mean of the values in the middle of each element's values of all ranks."""
        rows = [compressor.decompress(payload, at._replace(out=None)) for payload in payloads]
        return middle(at.ops, rows, self.trim)

    def _limits(self, compressor: Compressor, payloads: Sequence[Payload], at: Site) -> Sequence[Array | None]:
        """Return the factor of each rank, a 0-d array, which limits its norm to the median; None: no limit."""
        if self.clip is None:
            return [None for _ in payloads]
        ops = at.ops
        norms = ops.stack([wide_norm(ops, compressor.decompress(payload, at)) for payload in payloads], axis=0)
        median = ops.sort(norms)[(len(payloads) - 1) // 2]
        above = norms > median
        factors = ops.cast(ops.where(above, median / ops.where(above, norms, 1.0), 1.0), at.spec.work_dtype)
        return [factors[i] for i in range(len(payloads))]

    def route(self, units: Sequence[Unit], ranks: Ranks, checksum: bool = False) -> Route:
        if self.trim is not None and 2 * self.trim >= ranks.size:
            raise IncompatibleError(
                f"communicator allgather: trim = {self.trim} leaves out {2 * self.trim} of {ranks.size} values; "
                "it needs fewer than half of the ranks. Take a smaller trim, or reduce = 'median'."
            )
        layout = layout_of(units, checksum)
        return Route(layout.nbytes, layout.fixed, functools.partial(_gather, layout), buffer=layout.buffer)


def _gather(layout: GatherLayout, bucket: BucketStep) -> Program[Received]:
    equal, lengths = layout.fixed and not bucket.absent, bucket.lengths([layout])
    (data,) = yield [collectives.allgather(bucket.encode(layout), equal=equal, lengths=lengths)]
    return bucket.decode(layout, data)
