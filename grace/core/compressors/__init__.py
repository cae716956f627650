"""Built-in compressors, one module per method: those to look at first, and in `contrib` the literature.

The registry imports every module.
"""
