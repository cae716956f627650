"""`grace bench step`: the time of whole training steps over a shaped network."""
