"""The command `grace bench`: what compression costs on this machine."""
