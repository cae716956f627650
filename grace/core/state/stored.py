"""Residuals in fewer bits between steps: how the state of a memory is stored, and how it is read."""

from __future__ import annotations

from grace.core.codecs.levels import bucket_quantize, dequantize_sum
from grace.core.ops.composites import ArrayOps
from grace.core.plan.unit import Unit
from grace.core.spec import Array, Key, State

# The scales of integers, beside the residual.
_SCALES = "residual_scales"
# Each block of so many elements has a scale.
_BLOCK, _LEVELS, _BITS = 64, 127, 8


def widen(unit: Unit, state: State, ops: ArrayOps) -> State:
    """Return the state of a unit's memory with the residual in the working dtype, as memories read it."""
    if not _shortens(unit, state):
        return state
    residual, dtype = state["residual"], unit.spec.work_dtype
    if _SCALES in state:
        codes, scales = ops.bit_xor(residual, _LEVELS), state[_SCALES]
        wide = dequantize_sum(ops, [codes], [scales], _BLOCK, _LEVELS, _BITS, unit.spec.numel)
    else:
        wide = ops.cast(residual, dtype)
    return {**{key: x for key, x in state.items() if key != _SCALES}, "residual": wide}


def narrow(unit: Unit, state: State, ops: ArrayOps, key: Key | None = None) -> State:
    r"""Return the state of a unit's memory with the residual in its `residual_dtype`, as it is stored between steps.

    For int8: l_i = \mathrm{round}(127 e_i / m), with m the largest |e| of 64 consecutive elements. With a key the
    rounding is stochastic, so that the expected value is e; without, it is to the nearest. bfloat16 is rounded to the
    nearest. Residuals of float64 gradients stay as they are, because their range is larger.
    """
    if not _shortens(unit, state):
        return state
    residual = state["residual"]
    if unit.memory.residual_dtype == "bfloat16":
        return {**state, "residual": ops.cast(residual, "bfloat16")}
    codes, scales = bucket_quantize(ops, residual, _BLOCK, "max", _LEVELS, _BITS, key)
    # Zeros stand for zeros: a state that is cleared holds nothing.
    return {**state, "residual": ops.bit_xor(codes, _LEVELS), _SCALES: scales}


def _shortens(unit: Unit, state: State) -> bool:
    return unit.memory.residual_dtype is not None and unit.spec.work_dtype == "float32" and "residual" in state


def rounding_key(seed: int, step: Array, rank: int) -> Key:
    """Return the key with which a rank rounds the residual of a unit, which has its own seed."""
    return Key(Key.derive(seed, "residual"), step, rank + 1)
