"""One rank that runs the PyTorch scenarios."""

from __future__ import annotations

import os
import time

import torch

# Optimizers import it in their first step, and torchrun imports the other. Both are forks of this process.
import torch._dynamo
import torch.distributed.run
from horovod.torch import mpi_ops

from tests.adapters.torch import (
    applied_scenarios,
    checkpoint_scenarios,
    ddp_scenarios,
    discard_scenarios,
    elastic_scenarios,
    exchange_scenarios,
    fsdp_scenarios,
    launched,
    module_scenarios,
    optim_scenarios,
    pair_scenarios,
    prepared_scenarios,
    promise_scenarios,
    replica_scenarios,
    scaler_scenarios,
    schedule_scenarios,
    timeline_scenarios,
    usage_scenarios,
)
from tests.support import rank

# A quarter of the time of Horovod's own cycle.
POLL_S = 0.00025


def sleep_while_waiting() -> None:
    """Let a rank sleep while it waits for Horovod, which otherwise calls sched_yield() all the time.

    Four ranks that do so on two cores keep Horovod's threads from working: a step takes five times as long.
    """
    library = mpi_ops.mpi_lib
    wait_and_clear = library.horovod_torch_wait_and_clear

    def wait(handle: int) -> None:
        while not library.horovod_torch_poll(handle):
            time.sleep(POLL_S)
        wait_and_clear(handle)

    library.horovod_torch_wait_and_clear = wait


def main() -> None:
    torch.set_num_threads(1)
    world = rank.ranks()
    # Even ranks, odd ranks, and a number that is not a power of two.
    groups = [[0, 2], [1, 3], [0, 2, 3]] if world == 4 else []
    launched.start(groups, torchrun="TORCHELASTIC_RUN_ID" in os.environ)
    rank.let_gloo_give_way()
    if not launched.by_torchrun():
        sleep_while_waiting()
    modules = (
        applied_scenarios,
        checkpoint_scenarios,
        ddp_scenarios,
        discard_scenarios,
        elastic_scenarios,
        exchange_scenarios,
        fsdp_scenarios,
        module_scenarios,
        optim_scenarios,
        pair_scenarios,
        prepared_scenarios,
        promise_scenarios,
        replica_scenarios,
        scaler_scenarios,
        schedule_scenarios,
        timeline_scenarios,
        usage_scenarios,
    )
    rank.serve(launched.my_rank(), modules)
    launched.end()


if __name__ == "__main__":
    main()
