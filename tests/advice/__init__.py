"""Tests of `grace.advice`."""
