"""Signum: signSGD on a momentum."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core.compressors.signsgd import SignSGD, compress_finite
from grace.core.config.registry import About, Setting, compressors
from grace.core.methods.fusions import compress_checked


@compressors.register(
    "signum",
    About(
        family="quantization",
        adam=False,
        # The memory contains the momentum, so the optimizer must have none.
        digits=Setting(lr=0.001, momentum=0.0),
    ),
)
@dataclass(frozen=True)
class Signum(SignSGD):
    r"""Signum: one sign bit per element of the momentum; the ranks take a majority vote.

    Formula: m \leftarrow \beta m + (1 - \beta) g, \quad C(m)_i = \mathrm{sign}(m_i)

    The ranks vote as in signsgd. The default memory `momentum` keeps m, one per rank, and its option `momentum` is
    beta; set the optimizer's own momentum to 0. One bit per element; exact zeros are treated as in signsgd. Biased; the
    error can exceed |x|, so C is no contraction.

    Error: 0.41 |x|^2 for normal x.

    Cost: one pass for the momentum and one for the signs; one float of state per element; no random numbers.

    When: signsgd trains, but its votes are noisy. The step is the bare sign, so retune the learning rate (smaller).
    With error feedback take efsignsgd instead.

    Reference: Bernstein et al., "signSGD: compressed optimisation for non-convex problems", ICML 2018, Algorithm 2; for
    the vote Bernstein et al., "signSGD with majority vote is communication efficient and fault tolerant", ICLR 2019.
    """

    default_memory = "momentum"


compress_checked.of(Signum)(compress_finite)
