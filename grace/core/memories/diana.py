"""Memories of DIANA and EF21: they compress the difference from a shift that each rank learns."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from grace.core.config.registry import About, memories
from grace.core.errors import ConfigError, IncompatibleError
from grace.core.methods.compressor import Compressor, keep_count
from grace.core.methods.memory import Compensated, Memory, Need, needs_of, wide_norm
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Payload, State, TensorSpec

# Levels of 2^(bits - 1) on each side of zero, which `qsgd` can send.
_MOST_BITS = 15
# So many results tell a lazy rank what is new, as in the papers.
_LATEST = 10


@dataclass(frozen=True)
class _Shifted(Memory):
    """Shift that each rank learns by the step `share`, and the mean of all shifts."""

    across_ranks = "joint"

    @cached_property
    def needs(self) -> tuple[Need, ...]:
        return ("mean",)

    @property
    def feeds_back(self) -> bool:
        return False

    @property
    @abstractmethod
    def share(self) -> float:
        """Share of what was sent that joins the shift."""

    @property
    def pace(self) -> float:
        return self.share

    def check(self, compressor: Compressor) -> None:
        check_mean(memories.name_of(self), compressor)

    def init(self, spec: TensorSpec, ops: ArrayOps) -> State:
        return {name: ops.zeros(spec.numel, spec.work_dtype) for name in ("shift", "mean_shift")}

    def compensate(self, grad: Array, state: State, at: Site) -> Compensated:
        x, finite = at.ops.finite_sum(grad, 1, state["shift"], -1)
        return Compensated(x, state, finite)

    def update(self, x_: Array, payload: Payload, compressor: Compressor, state: State, at: Site) -> State:
        sent = compressor.decompress(payload, at)
        return {**state, "shift": at.ops.weighted_sum(state["shift"], 1, sent, self.share)}

    def finish(self, merged: Array, state: State, at: Site) -> tuple[Array, State]:
        return at.ops.weighted_sum(merged, 1, state["mean_shift"], 1), self._follow(merged, state, at)

    def _follow(self, merged: Array, state: State, at: Site) -> State:
        """Return the state whose mean of all shifts has followed the mean of what the ranks sent."""
        return {**state, "mean_shift": at.ops.weighted_sum(state["mean_shift"], 1, merged, self.share)}


@memories.register("diana", About(tests=[{"alpha": 1.0}, {"feedback": True}, {"damped": True}]))
@dataclass(frozen=True)
class Diana(_Shifted):
    r"""Shift that each rank learns: compresses the difference of the gradient from it.

    Formula: x_i = g_i - h_i, \quad \text{send } C(x_i), \quad h_i \leftarrow h_i + \alpha C(x_i), \quad
    \bar g = h + \mathrm{mean}_i\, C(x_i), \quad h \leftarrow h + \alpha\, \mathrm{mean}_i\, C(x_i)

    alpha is `alpha`. Every rank keeps its own shift h_i and the mean h of all shifts, which all start at zero. Where
    the gradients of the ranks come to rest, each at a value of its own, the shifts learn these values, and the
    compressor's error vanishes with the differences. With C unbiased the mean keeps its expectation, and alpha should
    be at most 1 / (1 + omega) with E|C(x) - x|^2 <= omega |x|^2. With `alpha` = 1 it is the memory `ef21`. What the
    compressor drops is not fed back. The memory takes two buffers of the gradient's size.

    With `feedback`, for contractions such as topk, x_i = e_i + g_i - h_i and e_i <- x_i - C(x_i). The shifts take away
    what makes error feedback stall where the ranks differ. EC-SGD-DIANA sends a second, unbiased message for the
    shifts, Q(g_i - h_i). Here they learn from C(x_i), so alpha must be small, or they swing: for topk, at most about
    half of the share that it sends. The memory takes a third buffer.

    With `damped`, the result takes the share alpha as well, so that it is the mean of the new shifts, \bar g = h. It
    is a running mean of what the ranks have sent, with less of C's noise, and lags behind the gradients (SCALLION).

    Reference: Mishchenko et al., "Distributed learning with compressed gradient differences", 2019, Algorithm 1;
    Gorbunov, Kovalev, Makarenko and Richtarik, "Linearly converging error compensated SGD", NeurIPS 2020.
    """

    alpha: float = 0.1
    feedback: bool = False
    damped: bool = False

    def __post_init__(self) -> None:
        check_alpha("diana", self.alpha)

    @property
    def feeds_back(self) -> bool:
        return self.feedback

    @property
    def share(self) -> float:
        return self.alpha

    @property
    def pace(self) -> float:
        # The result is the mean of the new shifts.
        return 1.0 if self.damped else self.alpha

    def init(self, spec: TensorSpec, ops: ArrayOps) -> State:
        state = super().init(spec, ops)
        return {**state, "residual": ops.zeros(spec.numel, spec.work_dtype)} if self.feedback else state

    def compensate(self, grad: Array, state: State, at: Site) -> Compensated:
        if self.feedback:
            grad = at.ops.weighted_sum(grad, 1, state["residual"], 1)
        return super().compensate(grad, state, at)

    def update(self, x_: Array, payload: Payload, compressor: Compressor, state: State, at: Site) -> State:
        new = super().update(x_, payload, compressor, state, at)
        return {**new, "residual": compressor.residual_(x_, payload, at)} if self.feedback else new

    def finish(self, merged: Array, state: State, at: Site) -> tuple[Array, State]:
        if not self.damped:
            return super().finish(merged, state, at)
        new = self._follow(merged, state, at)
        # A copy, because the optimizer may change the gradient that it receives.
        return at.ops.copy(new["mean_shift"]), new


@memories.register(
    "ef21",
    About(
        tests=[
            {"momentum": 0.5},
            {"lazy": 0.1},
            {"lazy": 0.1, "levels": [0.1, 0.5]},
            {"lazy": 0.1, "bits": 4},
        ]
    ),
)
@dataclass(frozen=True)
class EF21(_Shifted):
    r"""Gradient as the other ranks know it: compresses what it lacks. For contractions, such as topk.

    Formula: x_i = g_i - h_i, \quad \text{send } C(x_i), \quad h_i \leftarrow h_i + C(x_i), \quad
    \bar g = \mathrm{mean}_i\, h_i

    With `momentum` mu, the running mean v_i = mu v_i + (1 - mu) g_i of the rank's own gradients takes the place of g_i,
    which averages their noise before it is compressed (EF21-SGDM). It takes one more buffer, and the place of the
    optimizer's momentum.

    With `lazy` xi, a rank that has nothing new to say compresses zeros, so that h_i stays (LAG, and LAQ with a
    quantizer): if |x_i|^2 \le \xi \sum_{d=1}^{10} |\bar g_{t-d}|^2. Norms are those of what is compressed as one.

    With `levels`, ascending shares of the elements, C gets only the largest elements of x_i, and zeros in place of the
    others (AdaCGD): none, or the smallest share that leaves out at most xi |g_i - g_i'|^2 of |x_i|^2, where g_i' is the
    rank's gradient of the step before, and else the largest share. C should send what is not zero as it is. It takes
    one more buffer, and a sort.

    With `bits` B, C gets x_i rounded to multiples of max|x_i| / 2^(b-1), with the fewest bits b <= B whose error is at
    most what a silent rank may leave out, and else with B (AQG). So silence is the case of no bits. C should send these
    multiples as they are, and a `coding` makes them short.

    It is the memory `diana` with `alpha` = 1. No bound on how much the gradients of the ranks differ is needed. An
    unbiased method that is no contraction lets h_i grow: use `diana` with a small alpha. The memory takes two buffers
    of the gradient's size.

    Reference: Richtarik, Sokolov and Fatkhullin, "EF21: a new, simpler, theoretically better, and practically faster
    error feedback", NeurIPS 2021, Algorithm 2; momentum: Fatkhullin, Tyurin and Richtarik, "Momentum provably improves
    error feedback!", NeurIPS 2023, Algorithm 1; lazy: Chen, Giannakis, Sun and Yin, "LAG: lazily aggregated gradient
    for communication-efficient distributed learning", NeurIPS 2018, equation 7a; levels: Makarenko et al., "Adaptive
    compression for communication-efficient distributed training", TMLR 2023; bits: Mao et al., "Communication-efficient
    federated learning with adaptive quantization", ACM TIST 2022, here with the rule of LAG in place of its own.
    """

    momentum: float = 0.0
    lazy: float = 0.0
    levels: tuple[float, ...] = ()
    bits: int = 0

    share = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"memory ef21: momentum must lie in [0, 1), received {self.momentum!r}.")
        if not 0 <= self.lazy < 1:
            raise ConfigError(
                "memory ef21: lazy, the factor of the latest squared norms, must lie in [0, 1), "
                f"received {self.lazy!r}."
            )
        ascending = all(a < b for a, b in pairwise((0.0, *self.levels))) and all(x <= 1 for x in self.levels)
        if not ascending or (self.levels and not self.lazy):
            raise ConfigError(
                "memory ef21: levels are shares of the elements, above 0 and at most 1, in ascending order, and need "
                f"lazy above 0; received levels = {list(self.levels)} and lazy = {self.lazy!r}."
            )
        if not 0 <= self.bits <= _MOST_BITS or (self.bits and (self.levels or not self.lazy)):
            raise ConfigError(
                f"memory ef21: bits, the most bits of an element, must lie in 0 to {_MOST_BITS}, and need lazy above 0 "
                f"and no levels; received bits = {self.bits!r}, lazy = {self.lazy!r} and levels = {list(self.levels)}."
            )

    @cached_property
    def needs(self) -> tuple[Need, ...]:
        return needs_of({"mean": True, "no_momentum": self.momentum})

    def init(self, spec: TensorSpec, ops: ArrayOps) -> State:
        mean = {"running_mean": ops.zeros(spec.numel, spec.work_dtype)} if self.momentum else {}
        latest = {"squared_norms": ops.zeros(_LATEST, "float64")} if self.lazy else {}
        if self.levels:
            latest = {"last_gradient": ops.zeros(spec.numel, spec.work_dtype)}
        return {**super().init(spec, ops), **mean, **latest}

    def compensate(self, grad: Array, state: State, at: Site) -> Compensated:
        ops = at.ops
        if self.momentum:
            grad = ops.weighted_sum(state["running_mean"], self.momentum, grad, 1 - self.momentum)
            state = {**state, "running_mean": grad}
        x, state, finite = super().compensate(grad, state, at)
        if self.levels:
            moved = wide_norm(ops, ops.weighted_sum(grad, 1, state["last_gradient"], -1))
            x = self._fewest(x, self.lazy * moved * moved, at)
            state = {**state, "last_gradient": ops.copy(grad)}
        elif self.lazy:
            norm, allowed = wide_norm(ops, x), self.lazy * ops.sum(state["squared_norms"])
            news = self._coarsest(x, allowed, at) if self.bits else x
            # False for NaN, which must go on to the check.
            silent = norm * norm <= allowed
            x = ops.choose(silent, lambda: ops.zeros(at.spec.numel, at.spec.work_dtype), lambda: news)
        return Compensated(x, state, finite)

    def _fewest(self, x: Array, allowed: Array, at: Site) -> Array:
        """Return x with the largest elements only: none, or the share of a level, so that the error is allowed."""
        ops, n = at.ops, at.spec.numel
        if not n:
            return x
        magnitudes = ops.sort(ops.abs(x))
        wide = ops.cast(magnitudes, "float64")
        # The least magnitude that is kept, and what is then lost: of the largest share, of smaller ones, of nothing.
        counts = [keep_count(level, n) for level in reversed(self.levels)]
        least = magnitudes[n - counts[0]]
        for count in counts[1:]:
            lost = ops.sum(wide[: n - count] * wide[: n - count])
            least = ops.where(lost <= allowed, magnitudes[n - count], least)
        zero = ops.zeros(n, at.spec.work_dtype)
        # NaN is not less than any number, and must go on to the check.
        kept = ops.where(ops.abs(x) < least, zero, x)
        # Infinity is no silence either.
        return ops.choose(ops.sum(wide * wide) < allowed, lambda: zero, lambda: kept)

    def _coarsest(self, x: Array, allowed: Array, at: Site) -> Array:
        """Return x rounded with the fewest bits whose squared error is allowed, or with `bits`."""
        ops, kept = at.ops, x
        if not at.spec.numel:
            return x
        largest = ops.flat_max_abs(x)
        for bits in range(self.bits, 0, -1):
            levels = 1 << bits - 1
            rounded = ops.dequantize(ops.quantize(x, largest, levels, None), largest, levels, at.spec.work_dtype)
            lost = wide_norm(ops, ops.weighted_sum(x, 1, rounded, -1))
            kept = rounded if bits == self.bits else ops.where(lost * lost <= allowed, rounded, kept)
        # NaN and infinity must go on to the check.
        return ops.where(largest - largest == 0, kept, x)

    def finish(self, merged: Array, state: State, at: Site) -> tuple[Array, State]:
        ops, (result, state) = at.ops, super().finish(merged, state, at)
        if self.lazy and not self.levels:
            norm = ops.reshape(wide_norm(ops, result), (1,))
            state = {**state, "squared_norms": ops.concat([norm * norm, state["squared_norms"][:-1]])}
        return result, state


def check_alpha(name: str, alpha: float) -> None:
    """Raise ConfigError unless the step of the shifts lies in (0, 1]."""
    if not 0 < alpha <= 1:
        raise ConfigError(f"memory {name}: alpha must lie in (0, 1], received {alpha!r}.")


def check_mean(name: str, compressor: Compressor) -> None:
    """Raise IncompatibleError if the ranks vote: the shifts follow the mean of what they send."""
    if not compressor.averages:
        raise IncompatibleError(
            f"memory '{name}' needs the mean of the payloads, but {compressor} gives a vote. "
            "Valid memories: none, momentum."
        )
