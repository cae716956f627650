"""Tests of `grace.core`, in one process."""
