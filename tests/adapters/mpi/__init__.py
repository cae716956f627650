"""Tests of `grace.core.mpi`."""
