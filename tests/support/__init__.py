"""What the tests share: methods under test, simulated steps, and the start of real processes."""
