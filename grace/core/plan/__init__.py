"""Plans: which units of which tensors travel how, decided once."""
