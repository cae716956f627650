"""Outer optimizers, one file each."""
