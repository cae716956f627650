"""The program `torchrun`, as a script for forks of ranks that have imported PyTorch (fork.py)."""

if __name__ == "__main__":
    from torch.distributed.run import main

    main()
