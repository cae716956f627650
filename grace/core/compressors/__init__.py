"""Built-in compressors, one module per method; the registry imports every module of this package."""
