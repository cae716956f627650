"""Statistics and timelines."""
