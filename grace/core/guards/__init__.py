"""Guards: what the ranks compare, and how long they wait."""
