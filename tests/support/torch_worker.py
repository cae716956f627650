"""One rank of a multi-process test: `torch_worker.py OUT NAME...` runs the named scenarios and writes OUT/rank-R.json.

The result of a scenario is what it returns, or {"error": ..., "trace": ...}. Assertions about results belong to the
tests; a scenario only reports what happened on its rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path

import horovod.torch as hvd
import torch

from tests.adapters.torch import exchange_scenarios, schedule_scenarios, timeline_scenarios, usage_scenarios
from tests.adapters.torch.model import PROCESS_SETS

MODULES = (exchange_scenarios, schedule_scenarios, timeline_scenarios, usage_scenarios)


def main() -> None:
    out, names = Path(sys.argv[1]), sys.argv[2:]
    world = int(os.environ.get("GRACE_TEST_RANKS", "1"))
    torch.set_num_threads(1)
    # Horovod wants process sets when it starts: even and odd ranks.
    PROCESS_SETS[:] = [hvd.ProcessSet(list(range(i, world, 2))) for i in range(2)] if world > 2 else []
    hvd.init(process_sets=PROCESS_SETS)
    results = {}
    for name in names:
        started = time.monotonic()
        try:
            results[name] = next(getattr(module, name) for module in MODULES if hasattr(module, name))()
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
        (out / f"rank-{hvd.rank()}.json").write_text(json.dumps(results))
    hvd.shutdown()


if __name__ == "__main__":
    main()
