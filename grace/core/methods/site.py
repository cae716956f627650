"""Values that methods are called with and return: the site of a call, and a proposal of a rank."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from grace.core.ops.composites import ArrayOps
from grace.core.spec import NO_STATE, Array, Key, State, TensorSpec


class Proposal(NamedTuple):
    """Array that the ranks combine before they compress: element-wise "sum" or "max", or a rotating "leader"'s."""

    array: Array
    op: Literal["sum", "max", "leader"]


class Site(NamedTuple):
    """Surroundings of a compressor or memory: array operations, tensor, random key, rank, state and negotiated values.

    For a compressor, `memory` is the state of the memory in the middle of the step: empty if it keeps nothing. `lr` is
    the learning rate of this step, for memories that need "lr". `norm` is the norm of this rank's gradients of all
    tensors together, for memories that need "norm". Both are 0-d float64 arrays.

    `reference` is this rank's gradient of the same batch at other weights, flat, for memories that need "reference". It
    is None in a full round, in which the gradient is that of all data of this rank.

    `out` is an array that the result of this call may be written to, flat: pass it to one operation that makes an array
    of its dtype and length, as `out=at.out`. For `compress` it is a place for the longest field of the payload, for
    `merge` one for the gradient. For `compensate` it is a tuple of arrays of the state, which the memory
    `overwrites`.
    """

    ops: ArrayOps
    spec: TensorSpec
    key: Key
    rank: int = 0
    size: int = 1
    state: State = NO_STATE
    negotiated: Array | None = None
    memory: State = NO_STATE
    lr: Array | None = None
    norm: Array | None = None
    reference: Array | None = None
    out: Any = None

    @property
    def private_key(self) -> Key:
        """Key that differs between ranks, so that their rounding errors are independent."""
        return Key(self.key.seed, self.key.step, self.rank + 1)
