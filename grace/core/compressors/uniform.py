"""Uniform quantization with a scale that all ranks share, so that integers are added on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grace.core.config.registry import About, compressors
from grace.core.errors import ConfigError, IncompatibleError
from grace.core.methods.capabilities import Negotiating
from grace.core.methods.compressor import Compressor
from grace.core.methods.site import Proposal, Site
from grace.core.ops.composites import ArrayOps, plus
from grace.core.ops.table import composite
from grace.core.spec import Array, Field, Key, Payload, TensorSpec
from grace.core.wire.lanes import MOST

if TYPE_CHECKING:
    from grace.core.ops.native import Native


@compressors.register(
    "uniform",
    About(
        family="quantization",
        adam=True,
        tests=[{"bits": 2}, {"bits": 12, "stochastic": True}, {"bits": 24}, {"stochastic": True}],
        errors=[{"bits": bits} for bits in (4, 8)],
    ),
)
@dataclass(frozen=True)
class Uniform(Compressor, Negotiating):
    r"""Uniform quantization: integers of `bits` bits with a scale that all ranks share, added exactly by allreduce.

    Formula: C(x)_i = \mathrm{round}(f x_i) / f, \quad f = (2^{b-1} - 1) / \max_{r, j} |x_{rj}|

    b is `bits`. The ranks r first negotiate the largest magnitude: one float of the working dtype. Each of them rounds
    to the nearest integer, so its error is at most 1 / (2 f) per element, and so is that of the mean. `stochastic=True`
    rounds up or down at random instead: unbiased, with a variance of at most 1 / (4 f^2) per element.
    An allreduce adds the integers exactly, in any order. As many share a 32-bit word as the bits of the largest sum
    over N ranks allow: floor(32 / w), where w - 1 is the number of bits of N (2^(b-1) - 1). With 8 bits these are 3 on
    2 to 4 ranks, and 2 on up to 258; with 4 bits 6 on 2 ranks, 5 on 4, and 4 on up to 18. Ranks whose sum would not fit
    into 32 bits are refused. Where gathering moves fewer bytes, `auto` gathers the integers, and each rank adds them: 8
    bits on 2 ranks, for example. The result is the same.

    Error: 0.0001 |x|^2 for normal x; 0.033 |x|^2 with `bits=4`; 0.0002 |x|^2 with `stochastic=true`.

    Cost: one pass each for the maximum, to round, to pack and to unpack integers, and to decode; one random number per
    element if stochastic; no sorting, no state.

    When: many ranks whose gradients are alike in size. Allreduce adds the integers, so that they are rounded once only.
    A rank whose gradient is small compared with that of another sends few levels; there take qsgd. With fewer than 8
    bits the memory is residual unless `stochastic` is set, and otherwise none. SwitchML's aggregation is `bits=24`: one
    integer per word, with an error like that of float32, on up to 256 ranks. SwitchML has one scale per packet, this
    method one per tensor, and the switch itself is not part of it.

    Reference: Sapio et al., "Scaling distributed machine learning with in-network aggregation" (SwitchML), NSDI 2021.
    """

    bits: int = 8
    stochastic: bool = False

    summable = True
    linear_in = ("scale",)
    proposal_shows = True

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 24:
            raise ConfigError(f"uniform: bits must be a number of bits from 2 to 24, received {self.bits!r}.")

    @property
    def most(self) -> int:
        """Largest integer: 2^(bits - 1) - 1."""
        return (1 << self.bits - 1) - 1

    @property
    def unbiased(self) -> bool:
        return self.stochastic

    @property
    def default_memory(self) -> str:
        # With 8 bits, error feedback changes nothing in docs/results/study. Fewer bits are much coarser.
        return "none" if self.stochastic or self.bits >= 8 else "residual"

    def contraction(self, spec: TensorSpec) -> float | None:
        # No element is rounded farther than to zero.
        return None if self.stochastic else 0.0

    def check_ranks(self, size: int) -> None:
        if size * self.most > MOST:
            raise IncompatibleError(
                f"uniform: the sum of {self.bits} bits fits into 32 bits on at most {MOST // self.most} ranks, "
                f"received {size}; lower bits."
            )

    @property
    def _dtype(self) -> str:
        return "int8" if self.bits <= 8 else "int16" if self.bits <= 16 else "int32"

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        codes = Field("codes", self._dtype, spec.numel, most=self.most)
        return codes, Field("scale", spec.work_dtype, 1, wire=False)

    def proposed(self, spec: TensorSpec) -> tuple[Field, ...]:
        return (Field("scale", spec.work_dtype, 1),)

    def propose(self, x: Array, at: Site) -> Proposal:
        return Proposal(at.ops.flat_max_abs(x), "max")

    def compress(self, x: Array, at: Site) -> Payload:
        key = at.private_key if self.stochastic else None
        codes = to_integers(at.ops, x, at.negotiated, self.most, key, self._dtype)
        return {"codes": codes, "scale": at.negotiated}

    def decompress(self, payload: Payload, at: Site) -> Array:
        return from_integers(at.ops, payload["codes"], payload["scale"], self.most, out=at.out)

    def merge(self, payloads: Sequence[Payload], at: Site) -> Array:
        if len(payloads) == 1:
            return self.decompress(payloads[0], at)
        # check_ranks() has made sure that the sum fits.
        codes = at.ops.cast(payloads[0]["codes"], "int32")
        for payload in payloads[1:]:
            codes = codes + at.ops.cast(payload["codes"], "int32")
        return self.decompress({**payloads[0], "codes": codes}, at)

    def residual_(self, x: Array, payload: Payload, at: Site) -> Array:
        return from_integers(at.ops, payload["codes"], -payload["scale"], self.most, onto=x)


@composite(one_graph=True)
def to_integers(ops: ArrayOps, x: Array, scale: Array, most: int, key: Key | None, dtype: str) -> Array:
    """Return `quantize` of a flat array by one scale, as integers of 8, 16 or 32 bits."""
    return ops.cast(ops.quantize(x, scale, most, key), dtype)


@to_integers.kernel()
def _(ops: Native, x: Array, scale: Array, most: int, key: Key | None, dtype: str) -> Array | None:
    if ops.floating(x) is None:
        return None
    integers = [most, int(dtype[3:]), *ops.noise_integers(key)]
    return ops.run("to_integers", [x, scale], integers, outputs=[dtype], lengths=[ops.length(x)])[0]


@composite(one_graph=True)
def from_integers(
    ops: ArrayOps, codes: Array, scale: Array, most: int, onto: Array | None = None, out: Array | None = None
) -> Array:
    """Return codes * scale / most in the dtype of the scale, added to `onto` if it is given, which is consumed.

    Kernels take integers of 8, 16 and 32 bits.
    """
    return plus(ops, onto, ops.dequantize(codes, scale, most, ops.dtype(scale)))


@from_integers.kernel()
def _(
    ops: Native, codes: Array, scale: Array, most: int, onto: Array | None = None, out: Array | None = None
) -> Array | None:
    dtype = ops.floating(scale)
    if dtype is None or ops.dtype(codes) == "int64":
        return None
    return ops.total("from_integers", [codes, scale], [most], ops.length(codes), dtype, onto, out=out)
