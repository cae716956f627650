"""Advice before and during training: what the network allows, and what compression would gain."""
