"""The package as a user gets it: wheel, source distribution, and kernels that do not fit what is installed."""
