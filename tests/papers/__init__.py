"""One file per method: numbers that follow from its paper, worked out here without the code under test."""
