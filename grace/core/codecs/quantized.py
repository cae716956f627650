"""Sparsifiers whose values are quantized."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from grace.core.errors import PayloadError
from grace.core.methods.capabilities import Learning, Selecting
from grace.core.methods.compressor import Compressor, Sparsifier, fixed_size
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Field, Key, Payload, State, TensorSpec

_PREFIX = "values/"


@dataclass(frozen=True)
class QuantizedSparsifier(Compressor, Selecting, Learning):
    """Base of methods that send the values of a sparsifier through a quantizer; they define `pair`.

    The quantizer sees the k kept values as a separate tensor, `<name>/values`, with its own random numbers. If k
    depends on the data, the quantizer must be `of_any_length`, and fields whose lengths depend on k have lengths of run
    time. The state is that of the sparsifier.
    """

    default_memory = "residual"
    harmed_by_feedback = None

    @property
    @abstractmethod
    def pair(self) -> tuple[Sparsifier, Compressor]:
        """The sparsifier and the quantizer."""

    @cached_property
    def linear_in(self) -> tuple[str, ...]:
        sparsifier, quantizer = self.pair
        return tuple(_PREFIX + name for name in quantizer.linear_in) if sparsifier.linear_in == ("values",) else ()

    @property
    def flat(self) -> bool:
        return all(inner.flat for inner in self.pair)

    @property
    def joins(self) -> bool:
        return all(inner.joins for inner in self.pair)

    def contraction(self, spec: TensorSpec) -> float | None:
        # The kept and the dropped elements are orthogonal. The sparsifier loses |x|^2 - E|S|^2; of E|S|^2, which is at
        # least delta_S |x|^2, the quantizer loses at most a share of 1 - delta_Q.
        left, rounded = self.pair[0].contraction(spec), self.values_contraction(self.values_spec(spec))
        return None if left is None or rounded is None else left * rounded

    def values_contraction(self, values: TensorSpec) -> float | None:
        """Return the quantizer's delta on the kept values."""
        return self.pair[1].contraction(values)

    def values_spec(self, spec: TensorSpec) -> TensorSpec:
        """Return the spec of the kept values as a tensor: of as many as may be kept, if that depends on the data."""
        return _values_spec(self.pair[0], spec)

    def unfit(self, spec: TensorSpec) -> str | None:
        sparsifier, quantizer = self.pair
        return sparsifier.unfit(spec) or quantizer.unfit(self.values_spec(spec))

    def check_ranks(self, size: int) -> None:
        for inner in self.pair:
            inner.check_ranks(size)

    @property
    def keeps_state(self) -> bool:
        return isinstance(self.pair[0], Learning) and self.pair[0].keeps_state

    def init(self, spec: TensorSpec, ops: ArrayOps, key_seed: int) -> State:
        sparsifier = self.pair[0]
        return sparsifier.init(spec, ops, key_seed) if isinstance(sparsifier, Learning) else {}

    def learn(self, payloads: Sequence[Payload], at: Site) -> State:
        sparsifier = self.pair[0]
        if not isinstance(sparsifier, Learning):
            # The values need no decoding, which would take time.
            return at.state
        return sparsifier.learn([self._dequantized(payload, at) for payload in payloads], at)

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        places = (f for f in self.pair[0].wire(spec) if f.name != "values")
        values = self.values_spec(spec)
        fields = self.pair[1].wire(values)
        # A length that differs for more values depends on their number.
        more = fields if fixed_size(self.pair[0]) else self.pair[1].wire(_with_length(values, 2 * values.numel + 4096))
        lengths = (
            f.length if f.length == other.length and isinstance(f.length, int) else f"{_PREFIX}{_count(f)}"
            for f, other in zip(fields, more, strict=True)
        )
        renamed = (f._replace(name=_PREFIX + f.name, length=n) for f, n in zip(fields, lengths, strict=True))
        return *places, *renamed

    def compress(self, x: Array, at: Site) -> Payload:
        sparsifier, quantizer = self.pair
        places = dict(sparsifier.compress(x, at))
        values = places.pop("values")
        sent = quantizer.compress(values, self._values_site(at, at.ops.length(values)))
        return {**places, **{_PREFIX + name: array for name, array in sent.items()}}

    def _values_site(self, at: Site, count: int) -> Site:
        """Return the site of the quantizer; the number of values counts where it depends on the data."""
        spec = self.values_spec(at.spec)
        if not fixed_size(self.pair[0]):
            spec = _with_length(spec, count)
        key = Key(Key.derive(at.key.seed, "values"), at.key.step, at.key.rank)
        return at._replace(spec=spec, key=key, state={}, memory={})

    def values(self, payload: Payload, at: Site) -> Array:
        """Return the kept values as they arrive."""
        fields = {name.removeprefix(_PREFIX): v for name, v in payload.items() if name.startswith(_PREFIX)}
        if fixed_size(self.pair[0]):
            return self.pair[1].decompress(fields, self._values_site(at, 0)._replace(out=None))
        site = self._values_site(at, at.ops.length(payload["indices"]))._replace(out=None)
        for field in self.pair[1].wire(site.spec):
            error = PayloadError(
                f"quantized values: expected {field.name} for as many values as indices, received others; "
                "the payload is damaged."
            )
            received = fields[field.name]
            fields[field.name] = at.ops.require(at.ops.length(received) == field.length, error, received)
        return self.pair[1].decompress(fields, site)

    def _dequantized(self, payload: Payload, at: Site) -> Payload:
        """Return the payload that the sparsifier alone would have sent, except for rounding."""
        places = {name: v for name, v in payload.items() if not name.startswith(_PREFIX)}
        return {**places, "values": self.values(payload, at)}

    def decompress(self, payload: Payload, at: Site) -> Array:
        return self.pair[0].decompress(self._dequantized(payload, at), at)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        return self.pair[0].merge([self._dequantized(payload, at) for payload in payloads], at)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        return at.ops.sparse_sum([-self.values(payload, at)], [payload["indices"]], at.spec.numel, onto=x)

    def erase_(self, x: Array, payload: Payload, at: Site) -> Array:
        return self.pair[0].erase_(x, payload, at)


@cache
def _values_spec(sparsifier: Sparsifier, spec: TensorSpec) -> TensorSpec:
    k = next(f.length for f in sparsifier.wire(spec) if f.name == "values")
    most = k if isinstance(k, int) else spec.numel
    return TensorSpec(f"{spec.name}/values", (most,), spec.work_dtype, spec.device)


def _with_length(spec: TensorSpec, count: int) -> TensorSpec:
    return TensorSpec(spec.name, (count,), spec.dtype, spec.device)


def _count(field: Field) -> str:
    """Return the name of a length of run time."""
    return field.length if isinstance(field.length, str) else field.name
