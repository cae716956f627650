"""Collectives, and what starts them."""
