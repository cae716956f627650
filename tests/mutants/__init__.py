"""Deliberately wrong implementations that the contracts must reject."""
