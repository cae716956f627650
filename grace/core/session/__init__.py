"""The session: the exchange of a process, its start, and the simulation of many ranks."""
