"""Base classes of compressors, memories and communicators, and the capabilities that only some compressors have."""
