"""Tests of the package: wheel, source distribution, and kernels that were built for other versions."""
