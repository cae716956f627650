"""Optimizers for many ranks: 1-bit Adam, 1-bit LAMB and 0/1 Adam, which exchange momenta themselves; LAMB and LANS."""

from __future__ import annotations

from grace.tensorflow.optim.local import Lamb, Lans
from grace.tensorflow.optim.one_bit import OneBitAdam, OneBitLamb
from grace.tensorflow.optim.zero_one import ZeroOneAdam

__all__ = ["Lamb", "Lans", "OneBitAdam", "OneBitLamb", "ZeroOneAdam"]
