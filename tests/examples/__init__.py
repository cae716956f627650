"""Tests of the programs under examples/."""
