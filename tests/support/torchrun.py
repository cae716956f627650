"""The program `torchrun`, to be forked (fork.py): it imports PyTorch, which takes seconds."""

from torch.distributed.run import main

__all__ = ["main"]
