"""Communicators: one file each."""
