"""The program `horovodrun`, as a script for forks of ranks that have imported TensorFlow (fork.py).

For every launch it imports Horovod for TensorFlow in a fork of itself, to see how Horovod was built. This takes 5 s,
but no time if it is already imported. The processes that it spawns for ranks load this script, which imports nothing.
"""

if __name__ == "__main__":
    from horovod.runner.launch import run_commandline

    run_commandline()
