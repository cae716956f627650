"""A rank that is killed during a step ends the others with an error, in bounded time."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from grace.bench.step.ranks import RENDEZVOUS
from grace.machine import python
from tests.support.covering import ALL
from tests.support.launch import ROOT, TORCH
from tests.support.ranks import forked, launcher

pytestmark = pytest.mark.distributed

# Horovod's timeout for a missing rank, and the time for start and end on a busy machine.
TIMEOUT_S, SLACK_S = 5, 90
CONFIGS = {
    "layer": {"compressor": "topk", "compress_ratio": 0.1, "granularity": "layer", "bucket_bytes": 0},
    "bucket": {"compressor": "terngrad", "shared_scale": True, "bucket_bytes": 20_000, "split_bytes": 16_384},
    "model": {"compressor": "powersgd", "granularity": "model"},
}


def words(granularity: str) -> list[str]:
    config = {**CONFIGS[granularity], "default_rules": False}
    return [*forked(TORCH, "run"), f"{ROOT}/tests/adapters/torch/killed_rank.py", json.dumps(config)]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "GRACE_CONFIG"))}
    patience = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(TIMEOUT_S)}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **patience, **more}


@contextmanager
def rendezvous(size: int) -> Iterator[str]:
    """Start Horovod's rendezvous server for ranks without a launcher, and yield its port."""
    server = subprocess.Popen(
        python(RENDEZVOUS, "127.0.0.1", f"127.0.0.1:{size}"),
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
    finally:
        server.kill()
        server.communicate()


def of_horovod(rank, size, port):
    """Return the environment of a rank of Horovod."""
    place = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size, "CROSS_RANK": 0}
    place |= {"CROSS_SIZE": 1, "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "HOSTNAME": "127.0.0.1"}
    place |= {"GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "GLOO_RENDEZVOUS_PORT": port, "GLOO_IFACE": "lo"}
    return {f"HOROVOD_{name}": str(value) for name, value in place.items()}


def of_torch(rank, size, port):
    """Return the environment of a rank of torch.distributed."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(size)}


@contextmanager
def free_port(size):
    """Yield a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    yield port


LIBRARIES = {"horovod": (rendezvous, of_horovod), "torch": (free_port, of_torch)}


def lose_one(library, granularity, size):
    """Start ranks without a launcher and kill the last one. Return exit statuses, outputs and seconds to the end."""
    meeting, place = LIBRARIES[library]
    command_of_rank = words(granularity)
    with ExitStack() as stack:
        port = stack.enter_context(meeting(size))
        ranks, said = [], []
        for rank in range(size):
            said.append(stack.enter_context(tempfile.TemporaryFile("w+")))
            ranks.append(
                subprocess.Popen(
                    command_of_rank,
                    cwd=ROOT,
                    env=environment(**place(rank, size, port)),
                    stdout=said[-1],
                    stderr=subprocess.STDOUT,
                )
            )
            stack.callback(ranks[-1].kill)
        # A rank that waits forever would hang here.
        codes = [ranks[-1].wait(timeout=120)]
        started = time.monotonic()
        codes = [process.wait(timeout=TIMEOUT_S + SLACK_S) for process in ranks[:-1]] + codes
        seconds = time.monotonic() - started
        outputs = []
        for file in said:
            file.seek(0)
            outputs.append(file.read())
        return codes, outputs, seconds


def launch_and_lose_one(horovodrun):
    """Let horovodrun start the ranks."""
    return subprocess.run(
        [*horovodrun, *words("bucket")],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120 + TIMEOUT_S + SLACK_S,
        check=False,
    )


CASES = [("horovod", "bucket", 2), ("horovod", "model", 3), ("torch", "layer", 3)]
if ALL:
    CASES = [(library, *case) for library in LIBRARIES for case in (("bucket", 2), ("layer", 2), ("model", 4))]


@pytest.fixture(scope="module")
def losses():
    """Start all runs at once, because they mostly wait, and yield their futures by case."""
    # The threads below share the servers.
    forked(TORCH, "run")
    horovodrun = launcher("horovodrun-gloo", 2)
    with ThreadPoolExecutor() as pool:
        runs = {case: pool.submit(lose_one, *case) for case in CASES}
        yield {**runs, "horovodrun": pool.submit(launch_and_lose_one, horovodrun)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_others_end_by_themselves(losses, case):
    """There is no launcher to end the ranks, so each must notice the loss."""
    codes, outputs, seconds = losses[case].result()
    assert codes[-1] == -signal.SIGKILL, outputs[-1]
    for code, output in zip(codes[:-1], outputs[:-1], strict=True):
        assert "lost" in output, output
        assert code != 0, output
        assert "trained to the end" not in output
        assert "Error" in output, "a training script says why it ends"
        assert case[0] != "torch" or "cannot complete step 3, the gradient of '" in output, output
    assert seconds < TIMEOUT_S + SLACK_S


def test_horovodrun_ends_with_an_error(losses):
    done = losses["horovodrun"].result()
    assert done.returncode != 0, done.stdout + done.stderr
    assert "trained to the end" not in done.stdout
