"""MUCSC: soft clustering, stochastic rounding to the centroids of the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from grace.core.codecs.centroids import both_signs, fit
from grace.core.codecs.listed import levels_sum, round_packed
from grace.core.config.registry import About, Setting, compressors
from grace.core.errors import ConfigError
from grace.core.methods.capabilities import Selecting
from grace.core.methods.compressor import Compressor, beyond_int32
from grace.core.methods.site import Site
from grace.core.ops.base import packed_size
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Field, Payload, TensorSpec


@compressors.register(
    "mucsc",
    About(
        family="quantization",
        adam=True,
        tests=[{"bits": 1}, {"bits": 3, "super_cluster": 0.7}],
        errors=[*({"bits": bits} for bits in (2, 3, 4)), {"super_cluster": 0.9}],
        digits=Setting(options={"bits": 3}),
    ),
)
@dataclass(frozen=True)
class MUCSC(Compressor, Selecting):
    r"""MUCSC: each element becomes one of the two centroids beside it, at random and without a bias.

    Formula: C(x)_i \in \{c_j, c_{j+1}\}, \; P(c_{j+1}) = \frac{x_i - c_j}{c_{j+1} - c_j}, \; c_j \le x_i < c_{j+1}

    c_1 to c_K are K = 2^bits centroids of the elements by k-means; `bits` is 1 to 4. The first and the last are the
    least and the largest element, so that every element has two neighbours and the result is unbiased. Each rank fits
    the others in every step, to 4,096 random elements, and sends all. The variance is the sum of (c_{j+1} - x_i) (x_i -
    c_j).
    Compared with `alq`: there, the elements of a bucket are divided by its norm, and the levels are equal for both
    signs and have the least variance of rounding. Here, one table serves all elements of the tensor, and the centroids
    have the least squared distance to their clusters.
    `super_cluster` (B-MUCSC): this share of the elements, those nearest to zero, becomes zero and is not sent. The
    others travel with int32 indices. Their magnitudes have K/2 centroids, the least and the largest magnitude among
    them, so `bits` is at least 2. The result is biased; it is unbiased only for the elements that travel.

    Error: 0.026 |x|^2 for normal x; 0.14 |x|^2 with `bits=3`.

    Cost: two passes for the ends, one random number and a search among 2^bits centroids per element, bit packing;
    some 250 small operations on the sample, and sorting it, fit the centroids. With `super_cluster` a partial sort.

    When: one scale for the whole tensor is enough and its elements are not symmetric about zero. `alq` and `eden` have
    less variance if elements are, or if their size differs within the tensor. `super_cluster` for fewer bytes, with
    error feedback.

    Reference: Cui et al., "Slashing communication traffic in federated learning by transmitting clustered model
    updates", IEEE JSAC 39, 2021.
    """

    bits: int = 4
    super_cluster: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.super_cluster < 1:
            raise ConfigError(
                f"mucsc: super_cluster must be the share of elements that become zero, in [0, 1); received "
                f"{self.super_cluster!r}."
            )
        least = 2 if self.super_cluster else 1
        if not least <= self.bits <= 4:
            raise ConfigError(
                f"mucsc: bits must be a number from {least} to 4 with super_cluster={self.super_cluster!r}, received "
                f"{self.bits!r}."
            )

    @property
    def unbiased(self) -> bool:
        return not self.super_cluster

    @property
    def selects(self) -> bool:
        return bool(self.super_cluster)

    @property
    def default_memory(self) -> str:
        return "residual" if self.super_cluster else "none"

    @cached_property
    def linear_in(self) -> tuple[str, ...]:
        return ("centroids",)

    def unfit(self, spec: TensorSpec) -> str | None:
        return beyond_int32(spec)

    def _kept(self, n: int) -> int:
        """Return the number of elements that travel."""
        return n - min(n - 1, int(self.super_cluster * n)) if n else 0

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        kept = self._kept(spec.numel)
        codes = Field("codes", "uint8", packed_size(kept, self.bits))
        if not self.super_cluster:
            return Field("centroids", spec.work_dtype, 1 << self.bits), codes
        centroids = Field("centroids", spec.work_dtype, 1 << (self.bits - 1))
        return centroids, Field("indices", "int32", kept, below=spec.numel), codes

    def compress(self, x: Array, at: Site) -> Payload:
        ops, key = at.ops, at.private_key
        payload = {}
        if self.super_cluster:
            x, payload["indices"] = ops.sparsify(x, self._kept(at.spec.numel))
            sizes = ops.abs(x)
            centroids = fit(ops, sizes, *_ends(ops, sizes), 1 << (self.bits - 1), key, 0, ends=True)
        else:
            centroids = fit(ops, x, *_ends(ops, x), 1 << self.bits, key, 0, ends=True)
        levels = self._levels({"centroids": centroids}, at)
        codes = round_packed(ops, x, ops.full(1, 1.0, ops.dtype(x)), levels, max(1, ops.length(x)), key, at.out)
        return {"centroids": centroids, **payload, "codes": codes}

    def _levels(self, payload: Payload, at: Site) -> Array:
        """Return all 2^bits levels, ascending."""
        centroids = payload["centroids"]
        return both_signs(at.ops, centroids) if self.super_cluster else centroids

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        return self._sum(payloads, 1.0, at)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        return self._sum([payload], -1.0, at, onto=x)

    def erase_(self, x: Array, payload: Payload, at: Site) -> Array:
        return at.ops.put_(x, payload["indices"], 0.0)

    def _sum(self, payloads: Sequence[Payload], factor: float, at: Site, onto: Array | None = None) -> Array:
        ops, n = at.ops, at.spec.numel
        if not self.super_cluster:
            return self._values(payloads, factor, at, onto, at.out)
        values = [self._values([payload], factor, at) for payload in payloads]
        return ops.sparse_sum(values, [payload["indices"] for payload in payloads], n, onto, at.out)

    def _values(
        self,
        payloads: Sequence[Payload],
        factor: float,
        at: Site,
        onto: Array | None = None,
        out: Array | None = None,
    ) -> Array:
        """Return the sum of what the codes stand for, times a factor."""
        ops, kept = at.ops, self._kept(at.spec.numel)
        scales = [ops.full(1, factor, at.spec.work_dtype)] * len(payloads)
        levels = [self._levels(payload, at) for payload in payloads]
        return levels_sum(ops, [p["codes"] for p in payloads], scales, levels, max(1, kept), kept, onto, out)


def _ends(ops: ArrayOps, x: Array) -> tuple[Array, Array]:
    """Return the least and the largest element; frameworks differ in the sign of zero, so it gets none."""
    low, high = (ops.where(end < 0, end, ops.abs(end)) for end in (ops.min(x), ops.max(x)))
    return low, high
