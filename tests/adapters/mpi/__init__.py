"""Tests of `grace.mpi`."""
