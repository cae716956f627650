"""Shared parts of compressors: rounding to levels, signs, rotations, sketches, estimated thresholds, low rank."""
