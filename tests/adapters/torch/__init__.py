"""Tests of `grace.torch`."""
