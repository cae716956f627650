"""Base classes of compressors, memories and communicators, and what several methods share."""
