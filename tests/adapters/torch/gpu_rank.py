"""One rank with a GPU of its own, started by torchrun: it runs the transport's contract and trains over NCCL."""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist

from grace.core.ops import get_ops
from grace.testing.transport_contract import run_transport_contract
from grace.torch.distributed import ProcessGroupTransport
from tests.adapters.torch.ddp_scenarios import on_device


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    ran = run_transport_contract(ProcessGroupTransport(), get_ops("torch", "cuda"))
    weights = on_device("cuda")
    if dist.get_rank() == 0:
        print(json.dumps([ran, weights]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
