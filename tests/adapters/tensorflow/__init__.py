"""Tests of `grace.tensorflow`."""
