"""Shared code of the tests: methods under test, simulated steps, and the start of real processes."""
