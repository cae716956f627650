"""Tests of `grace bench`."""
