"""One rank without a framework, whose scenarios fail in every way."""

from __future__ import annotations

import os
import sys
import time

from tests.support import rank

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))


def number(added: int) -> int:
    return RANK + added


def one_raises() -> None:
    if RANK == 0:
        raise ValueError("rank 0 does not want to")


def one_dies() -> None:
    print("the last words of a rank", flush=True)
    if RANK == 0:
        os._exit(7)


def one_hangs() -> None:
    print("the last words of a rank", flush=True)
    if RANK == 0:
        time.sleep(600)


if __name__ == "__main__":
    rank.serve(RANK, [sys.modules[__name__]])
