"""Compare the processor time of a step with that of another commit, for every method of GRACE's Table I.

    python benchmarks/commits.py COMMIT [METHOD...]

Both commits run in turn, each time in a new process: two simulated ranks exchange the gradients of the `mlp` of `grace
bench step` on one thread. The time is that of the process, without any network. A line has the ratio of the fastest
steps, which vary least, and the range of each commit over the turns. Run nothing beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
METHODS = ["none", "fp16", "eightbit", "onebit", "signsgd", "signum", "efsignsgd", "qsgd", "natural", "terngrad"]
METHODS += ["randomk", "topk", "threshold", "dgc", "adaptive", "inceptionn", "sketchml", "powersgd"]
# Older commits have no `compressors.required`.
NEEDED = {"randomk": {"memory": "residual"}, "threshold": {"threshold": 0.01}}
TURNS, STEPS = 10, 8
# Freed pages stay with the process, as in `grace bench step`.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**33)}
RUN = f"""
import json, sys, time
import torch
torch.set_num_threads(1)
import grace
shapes = {{"0.weight": (4096, 1024), "0.bias": (4096,), "1.weight": (4096, 4096), "1.bias": (4096,)}}
given = [{{name: torch.randn(shape) for name, shape in shapes.items()}} for _ in range(2)]
found = {{}}
for name in sys.argv[1:]:
    config = {{"compressor": name, **{NEEDED}.get(name, {{}})}}
    simulation, times = grace.Simulation(2, shapes, config, framework="torch"), []
    for _ in range({STEPS}):
        start = time.process_time()
        simulation.step(given)
        times.append(time.process_time() - start)
    found[name] = min(times[1:])
print(json.dumps(found))
"""


def measure_steps(tree: Path, methods: list[str]) -> dict[str, float]:
    """Return the seconds of the fastest step of each method in a tree."""
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-P", "-c", RUN, *methods]
    done = subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def main(commit: str, methods: list[str]) -> None:
    """Measure both commits in turn and print a line for each method."""
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(other), commit], check=True)
        try:
            build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
            subprocess.run(build, cwd=other, env={**os.environ, "GRACE_CUDA": "OFF"}, check=True, capture_output=True)
            turns = [(measure_steps(other, methods), measure_steps(ROOT, methods)) for _ in range(TURNS)]
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True)
    for name in methods:
        before, now = ([turn[side][name] for turn in turns] for side in (0, 1))
        spread = "   ".join(f"{1e3 * min(x):.1f} to {1e3 * max(x):.1f} ms" for x in (before, now))
        print(f"{name:12} {min(now) / min(before):6.3f}   {spread}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or METHODS)
