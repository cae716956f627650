"""States between steps, and their form in a checkpoint."""
