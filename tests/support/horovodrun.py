"""The program `horovodrun`, to be forked (fork.py).

For every launch it imports Horovod for TensorFlow in a fork of itself, to see how Horovod was built. This takes 5 s,
but no time if it is already imported.
"""

import horovod.tensorflow  # noqa: F401
from horovod.runner.launch import run_commandline as main

__all__ = ["main"]
