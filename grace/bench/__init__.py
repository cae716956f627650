"""The command `grace bench`: benchmarks of compression on this machine."""
