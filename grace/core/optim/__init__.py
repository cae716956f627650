"""Optimizers of Adam's kind as pure steps per tensor, for the frameworks' optimizer classes."""
