"""The array operations of frameworks: the core finds them in the table of backends and imports one at its first use."""
