"""Built-in memories, one module per memory; the registry imports every module of this package."""
