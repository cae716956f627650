"""RedSync: a threshold between mean and maximum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grace.core.codecs.estimated import EstimatedThreshold, mean_above, reaching, tried, unsearched
from grace.core.compressors.topk import check_ratio
from grace.core.config.registry import About, Setting, compressors
from grace.core.methods.compressor import keep_count
from grace.core.methods.site import Site
from grace.core.spec import Array, Payload

# Halvings, until the interval is 2^-10 of the distance from mean to maximum; and the steps of the trimmed search.
_HALVINGS, _STEP = 10, 0.2


@compressors.register(
    "redsync",
    About(
        family="sparsification",
        adam=True,
        tests=[{"compress_ratio": 0.1, "search": "trimmed"}],
        digits=Setting(options={"compress_ratio": 0.01}),
    ),
)
@dataclass(frozen=True)
class RedSync(EstimatedThreshold):
    r"""RedSync: elements above a threshold between mean and maximum, at least k and at most 2 k of them.

    Formula: C(x)_i = x_i \, 1_{|x_i| \ge \tau}, \quad \tau = \bar m + r (\max_i |x_i| - \bar m)

    m is the mean magnitude, `k = max(1, int(compress_ratio * d))`. `search="binary"` halves the interval of r until k
    to 2 k elements reach tau; if ten halvings find no such tau, the k largest travel. `search="trimmed"` lowers r from
    0.8 by 0.2 until at least k elements reach tau, and sends the k largest of them: exactly topk, on a trimmed array.
    The paper takes topk for small layers, trimmed for medium and binary for large ones; rules do so here. Zeros never
    travel.

    Error: 0.87 |x|^2 for normal x; 0.91 |x|^2 with `search="trimmed"`.

    Cost: a pass each for mean and maximum, one per trial and one of comparisons; trimmed also sorts what is left.

    When: devices that sort slowly. On a CPU topk is as fast, and exact.

    Reference: Fang et al., "RedSync: reducing synchronization bandwidth for distributed deep learning training system",
    Journal of Parallel and Distributed Computing 2019.
    """

    compress_ratio: float = 0.01
    search: Literal["binary", "trimmed"] = "binary"

    def __post_init__(self) -> None:
        check_ratio("redsync", self.compress_ratio)

    def bound(self, x: Array, at: Site) -> Array:
        ops, n = at.ops, at.spec.numel
        k, most = keep_count(self.compress_ratio, n), ops.cast(ops.max_abs(x), "float64")
        mean = mean_above(ops, x, 0.0)
        if self.search == "trimmed":
            return ops.while_loop(
                lambda s: ops.bit_and(s[0] == 0, s[3] < 5),
                lambda s: tried(ops, x, k, s, mean + (1 - _STEP * (s[3] + 1)) * (most - mean)),
                unsearched(ops, n, most),
            )[0]
        return ops.while_loop(
            lambda s: ops.bit_and(s[1] > 2 * k, s[3] < _HALVINGS),
            lambda s: tried(ops, x, k, s, (ops.where(s[0] > 0, s[0], mean) + s[2]) / 2),
            unsearched(ops, n, most),
        )[0]

    def compress(self, x: Array, at: Site) -> Payload:
        ops, n = at.ops, at.spec.numel
        if n == 0:
            return {"values": x, "indices": ops.zeros(0, "int32")}
        k = keep_count(self.compress_ratio, n)
        values, indices = reaching(ops, x, self.bound(x, at))

        def largest() -> list[Array]:
            found, best = ops.sparsify(values, ops.min_size(ops.length(values), k))
            return [found, ops.gather(indices, best)]

        most = k if self.search == "trimmed" else 2 * k
        values, indices = ops.choose(ops.count(indices) > most, largest, lambda: [values, indices])
        return {"values": values, "indices": indices}
