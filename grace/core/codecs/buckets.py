"""Base of quantizers with a scale for each bucket of consecutive elements."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property

from grace.core.errors import ConfigError
from grace.core.methods.compressor import Compressor
from grace.core.methods.site import Site
from grace.core.ops.base import packed_size
from grace.core.spec import Array, Field, Payload, TensorSpec


class BucketQuantizer(Compressor):
    """Base of quantizers with a scale for each bucket of `bucket_size` elements (0: one bucket for the tensor).

    They define `bits`, `compress`, whose payload has `norms` and packed `codes`, and `_sum`. Raises ConfigError for a
    negative bucket_size.
    """

    bucket_size: int

    def __post_init__(self) -> None:
        if self.bucket_size < 0:
            raise ConfigError(
                f"{type(self).__name__.lower()}: bucket_size must be at least 0, received {self.bucket_size!r}."
            )

    @property
    def of_any_length(self) -> bool:
        # A bucket for the whole tensor would depend on its length.
        return self.bucket_size > 0

    @cached_property
    def linear_in(self) -> tuple[str, ...]:
        return ("norms",)

    @property
    @abstractmethod
    def bits(self) -> int:
        """Return the bits per code."""

    def width(self, n: int) -> int:
        """Return the number of elements in a bucket of a tensor of n."""
        return self.bucket_size or max(1, n)

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        buckets = -(-spec.numel // self.width(spec.numel))
        return Field("norms", spec.work_dtype, buckets), self._codes(spec)

    def _codes(self, spec: TensorSpec) -> Field:
        return Field("codes", "uint8", packed_size(spec.numel, self.bits), bits=self.bits)

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.merge([payload], at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        return self._sum(payloads, [self._scale(payload, at) for payload in payloads], at)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        return self._sum([payload], [-self._scale(payload, at)], at, onto=x)

    def _scale(self, payload: Payload, at: Site) -> Array:
        """Return the scales of the buckets in the working dtype."""
        return payload["norms"]

    @abstractmethod
    def _sum(self, payloads: Sequence[Payload], scales: list[Array], at: Site, onto: Array | None = None) -> Array:
        """Return the sum of the payloads, decoded with these scales; it starts from `onto`, which is consumed."""
