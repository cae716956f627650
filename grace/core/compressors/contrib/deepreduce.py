"""DeepReduce: the indices of a sparse gradient in a Bloom filter, and its values as they are or as a fitted curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from grace.core.codecs.bloom import BloomFilter, filter_for, filter_positions, insert, smallest_conflict
from grace.core.codecs.curve import along, free_knots
from grace.core.compressors.topk import check_ratio
from grace.core.config.registry import About, Setting, compressors
from grace.core.errors import ConfigError, PayloadError
from grace.core.methods.capabilities import Selecting
from grace.core.methods.compressor import Compressor, beyond_int32, keep_count
from grace.core.methods.site import Site
from grace.core.ops.base import packed_size
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Field, Payload, TensorSpec

_POLICIES = ("p0", "p1", "p2")
_MOST_PIECES = 1024
# The most bits of an order. Beyond, neighbors in the order share a code.
_MOST_BITS = 16
# The random stream of the choice. The filter's hash functions draw from stream 0.
_CHOICE = 1


@compressors.register(
    "deepreduce",
    About(
        family="hybrid",
        adam=False,
        tests=[
            {"policy": "p0", "compress_ratio": 0.1, "false_positives": 0.1},
            {"policy": "p0", "compress_ratio": 0.1, "false_positives": 0.1, "pieces": 5},
            {"policy": "p1", "compress_ratio": 0.3, "false_positives": 0.5, "pieces": 1},
            {"compress_ratio": 0.1, "false_positives": 0.25, "pieces": 8},
        ],
        errors=[*({"policy": policy} for policy in ("p0", "p1", "p2")), {"pieces": 16}],
        digits=Setting(options={"pieces": 16}),
    ),
)
@dataclass(frozen=True)
class DeepReduce(Compressor, Selecting):
    r"""DeepReduce: top-k with its indices in a Bloom filter, and its values exact or on a fitted curve.

    Formula: C(x)_i = x_i \, 1_{i \in R}, \; R \subseteq P = \{i : B[h_1(i)] = \dots = B[h_j(i)] = 1\} \supseteq S

    The bits h_1(i) to h_j(i) of a filter B are set for each i in S, the k = max(1, int(compress_ratio * d)) largest
    magnitudes. The receiver asks B for all d positions. It reports P: S, and `false_positives` (eps) of the others. The
    filter takes log2(1/eps) / ln 2 bits per kept element, 14.4 for 0.001, or d bits for the tensor, as a bitmap, where
    these are fewer. The `policy` says which reported positions R travel, always with their own values:

    p0: all of P, so everything that top-k sends arrives, and the values of the false positives, too;
    p1: k random ones of P, by the key that all ranks share;
    p2: k, too; first those that share a bit with the fewest others, at random among equals. A position with a bit of
    its own is certain to be in S.

    With `pieces` 0, a value is a float of the working dtype, and the error never exceeds |x|. Otherwise the values are
    sorted, and a curve of so many straight pieces runs through pieces + 1 of them: the ends, and in each round the
    value farthest from the curve. Its knots travel, 8 bytes each, and each value's place in the order, in log2 k bits,
    at most 16. Straight pieces, in place of the paper's polynomials or exponentials, give every framework equal bits.

    Error: 0.92 |x|^2 for normal x; 0.92 |x|^2 with `pieces=16`; 0.95 |x|^2 with `policy="p1"`, `false_positives=0.01`.

    Cost: the selection of `topk`; about two hashes and lookups per element for the filter, and as many for the residual
    and for each rank's payload; for a curve, a sort of the kept values and a dozen passes over them for every piece.

    When: 46 bits per kept element at the defaults, 28 with `pieces=16`. With Golomb's code for the indices (the option
    `index_coding`), `topk` sends 40 of 1 % kept, exactly, and `m22` 12. p2 needs `false_positives` far below
    `compress_ratio`; p0 loses no more than top-k with any.

    Reference: Xu et al., "DeepReduce: a sparse-tensor communication framework for federated deep learning", NeurIPS
    2021.
    """

    compress_ratio: float = 0.01
    policy: str = "p2"
    false_positives: float = 0.001
    pieces: int = 0

    default_memory = "residual"

    def __post_init__(self) -> None:
        check_ratio("deepreduce", self.compress_ratio)
        if self.policy not in _POLICIES:
            raise ConfigError(f"deepreduce: policy must be one of {', '.join(_POLICIES)}, received {self.policy!r}.")
        if not 0 < self.false_positives <= 0.5:
            raise ConfigError(
                "deepreduce: false_positives must be the share of other elements that the filter reports, in (0, 0.5]; "
                f"received {self.false_positives!r}."
            )
        if not 0 <= self.pieces <= _MOST_PIECES:
            raise ConfigError(
                f"deepreduce: pieces must be a number from 0 (exact values) to {_MOST_PIECES}, "
                f"received {self.pieces!r}."
            )

    @property
    def _fixed(self) -> bool:
        return self.policy != "p0"

    @cached_property
    def linear_in(self) -> tuple[str, ...]:
        return ("heights",) if self.pieces else ("values",)

    def contraction(self, spec: TensorSpec) -> float | None:
        if self.pieces:
            return None
        return 0.0 if self._fixed else keep_count(self.compress_ratio, spec.numel) / max(1, spec.numel)

    def unfit(self, spec: TensorSpec) -> str | None:
        return beyond_int32(spec)

    def _filter(self, spec: TensorSpec) -> BloomFilter:
        return filter_for(keep_count(self.compress_ratio, spec.numel), spec.numel, self.false_positives)

    def _pieces(self, spec: TensorSpec) -> int:
        """Return the pieces of a tensor's curve: at most as many as join k values."""
        return max(1, min(self.pieces, keep_count(self.compress_ratio, spec.numel) - 1))

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        k = keep_count(self.compress_ratio, spec.numel)
        places = Field("filter", "uint8", self._filter(spec).nbytes)
        if not self.pieces:
            return places, Field("values", spec.work_dtype, k if self._fixed else "reported")
        return (
            places,
            Field("knots", "int32", self._pieces(spec) + 1),
            Field("heights", spec.work_dtype, self._pieces(spec) + 1),
            Field("order", "uint8", packed_size(k, self._bits(spec)) if self._fixed else "order"),
        )

    def _bits(self, spec: TensorSpec) -> int:
        """Return the bits of a place in the order of all values: of k, or, with p0, of as many as are likely."""
        k = keep_count(self.compress_ratio, spec.numel)
        most = k if self._fixed else k + int(2 * self.false_positives * (spec.numel - k))
        return max(1, min(_MOST_BITS, most.bit_length()))

    def _step(self, ops: ArrayOps, count: Any, spec: TensorSpec) -> Array:
        """Return how many neighbors in the order share a code, as a 0-d int64 array."""
        return ops.cast(count // (1 << self._bits(spec)) + 1, "int64")

    def compress(self, x: Array, at: Site) -> Payload:
        ops, spec = at.ops, at.spec
        top = ops.top_indices(x, keep_count(self.compress_ratio, spec.numel))
        sent = {"filter": insert(ops, self._filter(spec), top, at.key)}
        values = ops.gather(x, self._indices(sent, at))
        return {**sent, **(self._fitted(values, at) if self.pieces else {"values": values})}

    def _fitted(self, values: Array, at: Site) -> Payload:
        ops, pieces = at.ops, self._pieces(at.spec)
        # Frameworks sort zeros of both signs in different ways.
        ordered = ops.sort(ops.where(values == 0, 0.0, values))
        ranks = ops.cast(ops.search_sorted(ordered, values), "int64") - 1
        codes = ranks // self._step(ops, ops.length(values), at.spec)
        order = ops.pack(codes, self._bits(at.spec))
        if at.spec.numel == 0:
            knots = {"knots": ops.zeros(pieces + 1, "int32"), "heights": ops.zeros(pieces + 1, at.spec.work_dtype)}
        else:
            found = free_knots(ops, ops.cast(ordered, "float64"), pieces)
            knots = {"knots": found, "heights": ops.gather(ordered, found)}
        return {**knots, "order": order}

    def _indices(self, payload: Payload, at: Site) -> Array:
        """Return the positions that travel, ascending."""
        ops, form, k = at.ops, self._filter(at.spec), keep_count(self.compress_ratio, at.spec.numel)
        found = filter_positions(ops, form, payload["filter"], at.spec.numel, at.key)
        if not self._fixed:
            return found
        error = PayloadError(
            f"deepreduce: expected a filter that reports at least {k} positions, received one of fewer; "
            "the payload is damaged."
        )
        found = ops.require(ops.length(found) >= k, error, found)
        first = ops.cast(ops.uniform(ops.length(found), at.key, _CHOICE), "float64")
        if self.policy == "p2" and form.hashes:
            conflict = smallest_conflict(ops, form, found, at.key)
            first = first + (ops.max(conflict) + 1.0 - conflict)
        return ops.reshape(ops.gather(found, ops.top_indices(first, k)), (k,))

    def _decode(self, payload: Payload, at: Site) -> tuple[Array, Array]:
        """Return the values and their indices."""
        ops, indices = at.ops, self._indices(payload, at)
        count, bits = ops.length(indices), self._bits(at.spec)
        name, length = ("order", packed_size(count, bits)) if self.pieces else ("values", count)
        error = PayloadError(
            "deepreduce: expected as many values as the filter reports positions, received another number; "
            "the payload is damaged."
        )
        received = ops.require(ops.length(payload[name]) == length, error, payload[name])
        if not self.pieces:
            return received, indices
        step = self._step(ops, count, at.spec)
        places = ops.clip(ops.unpack(received, bits, count) * step + (step - 1) // 2, 0, count - 1)
        curve = along(ops, payload["knots"], payload["heights"], ops.cast(places, "int32"))
        return ops.cast(curve, at.spec.work_dtype), indices

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        values, indices = zip(*(self._decode(payload, at) for payload in payloads), strict=True)
        return at.ops.sparse_sum(values, indices, at.spec.numel, out=at.out)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        if not self.pieces:
            return self.erase_(x, payload, at)
        values, indices = self._decode(payload, at)
        return at.ops.sparse_sum([-values], [indices], at.spec.numel, onto=x)

    def erase_(self, x: Array, payload: Payload, at: Site) -> Array:
        return at.ops.put_(x, self._indices(payload, at), 0.0)
