"""Training by the DiLoCo of torchft, or by that of grace: the script of one replica group.

Arguments: "torchft" or "grace", the number of the group, of two, a folder for results, the address of the lighthouse.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

library, group, folder, lighthouse = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.1, betas=(0.9, 0.95))


def train() -> None:
    for step in range(20):
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + group))
        optimizer.zero_grad()
        (model(x) - x[:, :4]).square().mean().backward()
        optimizer.step()


if library == "grace":
    import grace

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=group, world_size=2)
    optimizer = grace.DistributedOptimizer(
        optimizer,
        model.named_parameters(),
        compressor="none",
        outer={"every": 5, "lr": 0.7, "momentum": 0.9, "nesterov": True},
    )
    train()
    syncs = optimizer.grace.stats()["outer"]["rounds"]
else:
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    # In its examples, torchrun starts the store of a group.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "RANK": "0", "WORLD_SIZE": "1"}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        min_replica_size=2,
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        replica_id=f"group{group}",
        timeout=timedelta(seconds=60),
        lighthouse_addr=lighthouse,
        use_async_quorum=False,
        init_sync=False,
    )
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with DiLoCo(manager, [model], optimizer, outer, sync_every=5):
        train()
    syncs = manager.current_step()
torch.save({"model": model.state_dict(), "syncs": syncs}, f"{folder}/{library}{group}.pt")
# The threads of torchft's manager would go on.
os._exit(0)
