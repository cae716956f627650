"""Tests of grace; `grace.testing` holds the contracts that they share with outside parts."""
