"""The command `grace bench step` with real processes: its figures, its network, and its clean-up."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from grace import Simulation, cli
from grace.bench.step import account, network, sweep
from grace.bench.step import command as step_command
from grace.bench.step import table as step_table
from grace.bench.step.command import parse_numbers, parse_options
from grace.bench.step.methods import COMPUTE, Method
from grace.bench.step.own import check_model, load_builder
from grace.bench.step.ranks import START_S, VISIT_S, Ranks
from grace.bench.step.run import Result, Setting
from grace.bench.step.worker import visit
from grace.core.errors import ConfigError, GraceError
from grace.core.ops import native
from grace.core.step.step import Step
from grace.machine import python
from tests.bench.test_variants import MINE
from tests.support.covering import ALL
from tests.support.launch import ROOT
from tests.support.poisoned import imported, poison

pytestmark = pytest.mark.distributed

# As the installed command starts: without the current folder on the path.
COMMAND = "from grace.cli import main; sys.exit(main())"


def bench(*arguments, cwd=ROOT, **options):
    return subprocess.Popen(
        python(COMMAND, "bench", "step", *arguments),
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts tests in the background makes its children ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def finished(*arguments, **options):
    process = bench(*arguments, **options)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors[-4000:]
    return output, errors


@pytest.fixture(scope="module")
def shaping():
    if network.find_namespace_command() is None:
        pytest.skip("no network namespaces with tbf here, not even within a user namespace")


needs_shaping = pytest.mark.usefixtures("shaping")


def descendants(pid):
    found = children(pid)
    return found + [each for child in found for each in descendants(child)]


def namespaces(*pids):
    """Return the network namespaces of processes, without that of this one."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.add(os.stat(f"/proc/{pid}/ns/net").st_ino)
    return found - {os.stat("/proc/self/ns/net").st_ino}


def everywhere():
    """Return the network namespaces of all processes of the machine."""
    return namespaces(*filter(str.isdigit, os.listdir("/proc")))


@pytest.mark.slow
def test_launchers(tmp_path):
    path = tmp_path / "step.json"
    launchers = ["torch", "torch-module", "torch-optimizer", "torch-fsdp-zero2", "torch-one-bit-adam"]
    given = ["--launcher", *launchers, "--baselines", "ddp-fp16,fsdp,fsdp-zero2", "--compressors", "topk"]
    short = ["--link", "none", "--model", "resnet", "--rounds", "1", "--steps", "2"]
    output, _ = finished(*given, *short, "--json", str(path), cwd=tmp_path)
    results = json.loads(path.read_text())
    named = [(result["method"], result["launcher"]) for result in results]
    plain = ["compute", "ddp", "ddp-fp16", "fsdp", "fsdp-zero2"]
    assert named == [*((name, None) for name in plain), *(("topk", launcher) for launcher in launchers)]
    assert "x DDP" in output
    assert "topk (torch-optimizer)" in output
    for result in results:
        assert result["speedup_over_ddp"] == results[1]["median_s"] / result["median_s"]
        assert result["cycle_time_ms"] is None
    of_hook, of_module, of_optimizer, of_shards, of_momenta = (result["reported_bytes"] for result in results[5:])
    assert 0 < of_hook == of_module == of_optimizer == of_momenta < 0.1 * 4 * 269_722
    assert 0 < of_shards < 0.1 * 4 * 269_722


@pytest.mark.parametrize("framework", ["torch", pytest.param("tensorflow", marks=pytest.mark.slow)])
def test_without_shaping(framework, tmp_path):
    path, picture = tmp_path / "step.json", tmp_path / "step.png"
    baselines, rounds, steps = (
        ["horovod", "horovod-fp16", "ddp", "ddp-powersgd"] if ALL else ["horovod"],
        1 + ALL,
        2,
    )
    figure, model, numbers = ["--plot", str(picture), "--launcher", "horovod"], "resnet", 269_722
    if framework == "tensorflow":
        # Every round of a method traces its graph again, which takes seconds. test_models.py has TensorFlow's resnet.
        # Its launcher is Horovod without being named.
        baselines, rounds, steps, figure = ["horovod"], 1, 2, []
        if not ALL:
            model, numbers = "mlp", 25_175_040
    methods = ["topk", "none"] if ALL else ["topk"]
    given = ["--link", "none", "--model", model, "--compressors", ",".join(methods), "--framework", framework]
    given += ["--rounds", str(rounds), "--steps", str(steps), "--baselines", ",".join(baselines)]
    given += ["--options", "bucket_bytes=65536", "seed=3"]
    folder = tmp_path / "poisoned"
    folder.mkdir()
    output, _ = finished(*given, *figure, "--json", str(path), cwd=poison(folder))
    assert imported(folder) == ""
    results = json.loads(path.read_text())
    assert [result["method"] for result in results] == ["compute", *baselines, *methods]
    for result in results:
        assert result["method"] in output
        assert result["ranks"] == 2
        assert result["link"] == "none"
        assert result["model"] == model
        assert len(result["times"]) == rounds * steps
        assert 0 < result["spread"][0] <= result["median_s"] <= result["spread"][1]
        assert result["compute_s"] == results[0]["median_s"]
        assert result["speedup_over_horovod"] == results[1]["median_s"] / result["median_s"]
        assert result["wire_bytes"] is None
        chosen = {"bucket_bytes": 65536, "seed": 3} if result["method"] in methods else {}
        assert result["options"] == chosen
        assert result["cycle_time_ms"] == (None if result["method"].startswith("ddp") else 1.0)
        assert not any("peak" in key for key in result)
    assert "bucket_bytes=65536; seed=3" in output.splitlines()[0]
    said = {result["method"]: result["reported_bytes"] for result in results}
    # 1 % of the values, 8 bytes each, and small tensors whole, which are many in ResNet-20.
    assert said.get("none", 4 * numbers) == 4 * numbers
    assert 0.02 * 4 * numbers < said["topk"] < (0.1 if model == "resnet" else 0.021) * 4 * numbers
    if figure:
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_sweep(tmp_path):
    path = tmp_path / "sweep.json"
    given = ["--link", "none", "--model", "resnet", "--compressors", "topk", "--rounds", "1", "--steps", "1"]
    given += ["--options", "compress_ratio=0.1", "--sweep", "--bucket-bytes", "0,4194304", "--launcher", "horovod"]
    cycles = [1, 2.5] if ALL else [1]
    given += ["--split-bytes", "0", "--cycle-times", *map(str, cycles)]
    output, _ = finished(*given, "--json", str(path))
    trials = json.loads(path.read_text())
    tried = {"bucket_bytes": [0, 4194304], "split_bytes": [0]}
    tried |= {"granularity": list(sweep.GRANULARITIES), "cycle_time_ms": cycles}
    assert [(trial["swept"], trial["options"].get(trial["swept"], trial["cycle_time_ms"])) for trial in trials] == [
        (kind, value) for kind, values in tried.items() for value in values
    ]
    kinds = [kind for kind, values in tried.items() if values]
    best = {kind: [trial for trial in trials if trial["swept"] == kind and trial["best"]] for kind in kinds}
    assert all(len(found) == 1 for found in best.values())
    size = best["bucket_bytes"][0]["options"]["bucket_bytes"]
    for trial in trials:
        assert trial["method"] == "topk"
        assert trial["options"]["compress_ratio"] == 0.1
        assert trial["speedup_over_horovod"] > 0
        # 10 % of 0.27 M values, 8 bytes each, and the rest of ResNet-20 whole.
        assert 0.2 * 4 * 269_722 < trial["reported_bytes"] < 0.25 * 4 * 269_722
        if trial["swept"] != "bucket_bytes":
            assert trial["options"]["bucket_bytes"] == size
    # A header for each tensor.
    assert trials[0]["reported_bytes"] > trials[1]["reported_bytes"]
    assert output.count("  best\n") == len(kinds)


def test_a_sweep_goes_on_with_the_best(monkeypatch):
    """A stand-in returns times that depend on bucket size, split size, granularity and cycle time."""
    seconds = {
        10: 0.3,
        20: 0.1,
        40: 0.2,
        0: 0.2,
        70: 0.1,
        "layer": 0.3,
        "bucket": 0.1,
        "model": 0.2,
        0.5: 0.03,
        1.0: 0.02,
        5.0: 0.01,
    }
    setting = Setting("torch", "mlp", 2, "none", None, 1, 1)
    made = functools.partial(Method, launcher="horovod")
    asked = []

    class Bed:
        def __init__(self, setting, progress): ...
        def __enter__(self):
            return self

        def __exit__(self, *exception): ...

        def measure(self, methods):
            asked.append(methods)
            found = []
            for method in methods:
                slower = 1 if method.name == "topk" else 2
                taken = [*(seconds[value] for value in method.options.values()), seconds[method.cycle_ms]]
                found.append(Result(method, setting, [slower * sum(taken)]))
            return found

    monkeypatch.setattr(sweep, "Bed", Bed)
    monkeypatch.setattr(sweep, "GRANULARITIES", ("layer", "bucket", "model"))
    tuned, tried = [made("topk"), made("none")], sweep.choices([10, 20, 40], [0, 70], [0.5, 1.0, 5.0])
    trials = sweep.sweep(setting, tuned, tried, lambda text: None)
    assert all(methods[:2] == [made(COMPUTE), Method("horovod")] for methods in asked)
    of_topk = [method for methods in asked for method in methods if method.name == "topk"]
    sizes = [made("topk", {"bucket_bytes": size}) for size in (10, 20, 40)]
    cuts = [made("topk", {"bucket_bytes": 20, "split_bytes": size}) for size in (0, 70)]
    best = {"bucket_bytes": 20, "split_bytes": 70}
    grains = [made("topk", {**best, "granularity": name}) for name in ("layer", "bucket", "model")]
    cycles = [made("topk", {**best, "granularity": "bucket"}, cycle_ms=ms) for ms in (0.5, 1.0, 5.0)]
    assert of_topk == [*sizes, *cuts, *grains, *cycles]
    assert {trial.of for trial in trials} == {"topk (horovod)", "none (horovod)"}
    labels = ["bucket_bytes=20", "split_bytes=70", "granularity=bucket", "cycle_time_ms=5.0"]
    for name in ("topk", "none"):
        assert [trial.label for trial in trials if trial.best and trial.result.method.name == name] == labels
    assert len(sweep.lines(trials)) == 1 + 2 * (2 + 11)


@pytest.mark.slow
def test_memory(tmp_path):
    """The mlp needs memory for parameters, gradients and momentum; top-k also for the residual, here once."""
    path = tmp_path / "memory.json"
    given = ["--link", "none", "--compressors", "topk", "--options", "rollback=false", "--steps", "1"]
    output, _ = finished(*given, "--memory", "--launcher", "horovod", "--json", str(path))
    compute, dense, topk = found = json.loads(path.read_text())
    assert [weight["method"] for weight in found] == ["compute", "horovod", "topk"]
    for weight in found:
        assert weight["method"] in output
        assert weight["gradient_bytes"] == 4 * 25_175_040
        assert 3 < weight["peak_over_gradients"] == weight["peak_bytes"] / weight["gradient_bytes"] < 12
        assert weight["exchange_bytes"] == weight["peak_bytes"] - compute["peak_bytes"]
        assert weight["exchange_over_gradients"] == weight["exchange_bytes"] / weight["gradient_bytes"]
        assert "times" not in weight
    assert topk["options"] == {"rollback": False}
    assert dense["options"] == compute["options"] == {}
    # With roll-back it is about 2.
    assert 0.6 < topk["exchange_over_gradients"] < 1.7


def test_peak_is_that_of_one_visit():
    class Side:
        def barrier(self): ...

        def train(self, method, launcher, options):
            return Training(options["numbers"])

    class Training:
        def __init__(self, numbers):
            self._numbers = numbers

        def step(self):
            np.ones(self._numbers)

        def reported_bytes(self):
            return None

        def gradient_bytes(self):
            return 8

    large, small = (
        visit(Side(), "topk", "horovod", {"numbers": n}, 0, 1, None).peak_bytes for n in (8_000_000, 5_000_000)
    )
    # The kernel counts pages per processor and updates the total only occasionally. The C library maps arrays of more
    # than 32 MB again, and may take smaller ones from pages that it kept.
    assert 62_000_000 < large < 72_000_000
    assert 38_000_000 < small < 48_000_000


def test_a_metered_visit_says_where_the_time_went():
    """Kernels and steps are watched in the timed steps only, and everything else stays outside of them."""

    class Side:
        def barrier(self): ...

        def train(self, method, launcher, options):
            return Training()

    class Training:
        def __init__(self):
            self._exchange = Simulation(2, {"w": (n,)}, {"compressor": "topk"}, framework="torch")
            self._gradients = [{"w": torch.randn(n)} for rank in range(2)]

        def step(self):
            self._exchange.step(self._gradients)
            time.sleep(0.01)

        def reported_bytes(self):
            return None

        def gradient_bytes(self):
            return 4 * n

        def kept_bytes(self):
            return 5

    n, before = 500_000, (native.module.run, Step.ready)
    spent = visit(Side(), "topk", "horovod", {}, 1, 3, None, metered=True).spent
    assert (native.module.run, Step.ready) == before
    assert 0 < spent["kernels"] < spent["steps"] < spent["cpu"] < spent["wall"] - 0.009
    # Of both ranks: the sum of gradient and residual, in which elements are chosen and checked, reads two arrays and
    # writes one; the merge writes one. Payloads and indices are small.
    assert 2 * 4 * n * 4 <= spent["kernel_bytes"] < 2 * 4 * n * 5
    assert spent["faults"] >= spent["kernel_faults"] >= 0
    assert spent["copy_bandwidth"] > 1e8
    assert 1e-8 < spent["fault_s"] < 1e-3
    assert spent["kept_bytes"] == 5


@pytest.mark.parametrize(("local_size", "share"), [(1, "80.0%"), (2, "-")])
def test_the_share_of_reported_bytes_has_no_meaning_for_nodes(local_size, share):
    """A rank reports its own bytes, also those within the node; the link of a node carries those of all its ranks."""
    setting = Setting("torch", "mlp", 4, "1gbit", None, 1, 1, local_size)
    compute, dense, topk = (Result(Method(name), setting) for name in (COMPUTE, "horovod", "topk"))
    for result, reported in ((compute, None), (dense, None), (topk, 800)):
        result.add([{"times": [0.1], "sent": 1000, "reported": reported, "spent": None, "gradient_bytes": 4000}] * 4)
    found = dict(zip(step_table.HEAD, step_table.cells(topk, compute, dense), strict=True))
    assert found["reported"] == share
    assert found["sent/step"] == step_table.cells(dense, compute, dense)[3]


def test_the_parts_of_an_account_add_up(monkeypatch):
    base = {
        "wall": 0.1, "cpu": 0.08, "delayed": 0.01, "others": 0.0, "steps": 0.0, "kernels": 0.0, "kernel_bytes": 0,
        "faults": 10, "kernel_faults": 0, "copy_bandwidth": 1e10, "fault_s": 1e-5, "kept_bytes": 0,
    }  # fmt: skip
    topk = {
        "wall": 0.2, "cpu": 0.14, "delayed": 0.03, "others": 0.02, "steps": 0.055, "kernels": 0.041,
        "kernel_bytes": 3e8, "faults": 120, "kernel_faults": 100, "copy_bandwidth": 1e10, "fault_s": 1e-5,
        "kept_bytes": 1e8,
    }  # fmt: skip
    setting = Setting("torch", "mlp", 2, "10gbit", None, 1, 1)

    def visits(spent, sent):
        times, gradient = [spent["wall"]], int(1e8)
        return [{"times": times, "sent": sent, "reported": None, "spent": spent, "gradient_bytes": gradient}] * 2

    def measure(self, methods):
        assert self._metered
        found = [Result(method, setting) for method in methods]
        for result, spent, sent in zip(found, (base, topk), (0, 12_500_000), strict=True):
            result.add(visits(spent, sent))
        return found

    monkeypatch.setattr("grace.bench.step.run.Bed.measure", measure)
    monkeypatch.setattr("grace.bench.step.run.Bed.__enter__", lambda self: self)
    compute, (found,) = account.account(setting, [Method(COMPUTE), Method("topk")], lambda text: None)
    assert found.parts == pytest.approx(
        {
            "passes": 0.03,
            "arithmetic": 0.01,
            "Python": 0.014,
            "compute": 0.14 - 0.055 - 0.08 - 1e-4,
            "waiting": 0.03 - 0.01,
            "threads": 0.02,
            "faults": 0.0011,
        }
    )
    assert sum(found.parts.values()) == pytest.approx(found.overhead) == pytest.approx(0.1)
    assert found.copies == pytest.approx(0.1 / 0.02)
    assert (found.limit, found.wire) == pytest.approx((0.04, 0.01))
    title, head, row = account.lines(compute, [found])
    assert "copy 20.0 ms (10.0 GB/s per rank)" in title
    figures = ["200.0", "100.0", "5", "30.0", "10.0", "14.0", "4.9", "20.0", "20.0", "1.1", "40.0", "10.0"]
    assert row.split() == ["topk", *figures]
    assert len(head.split()) == len(row.split())


def test_environment_of_ranks(monkeypatch):
    """Timed ranks keep freed pages, and a pause does not exceed Gloo's timeout. Stand-ins import no framework."""
    monkeypatch.setattr(
        "grace.bench.step.ranks.WORKER", "print('{\"ready\": 1}', flush=True); import sys; sys.stdin.read()"
    )
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "7")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "9")
    for keep_pages in (True, False):
        with (
            network.Network(2, "none") as made,
            Ranks(made, "torch", "resnet", "horovod", 2.5, keep_pages=keep_pages) as ranks,
        ):
            text = Path(f"/proc/{ranks._workers[0].pid}/environ").read_text()
            environment = dict(entry.split("=", 1) for entry in text.split("\0") if entry)
        assert environment["HOROVOD_CYCLE_TIME"] == "2.5"
        assert int(environment["HOROVOD_GLOO_TIMEOUT_SECONDS"]) > 10 * (START_S + VISIT_S)
        assert environment.get("MALLOC_MMAP_MAX_") == ("0" if keep_pages else None)
        assert ("MALLOC_TRIM_THRESHOLD_" in environment) == keep_pages


def test_options_are_json_or_text():
    given = ["bucket_bytes=8388608", "compress_ratio=0.01", "index_coding=delta", "default_rules=false", "memory=a=b"]
    assert parse_options(given) == {
        "bucket_bytes": 8388608,
        "compress_ratio": 0.01,
        "index_coding": "delta",
        "default_rules": False,
        "memory": "a=b",
    }
    assert parse_options([]) == {}


def test_numbers_of_a_sweep():
    assert parse_numbers("--bucket-bytes", ["0,1024", "1024", "2048"], int) == [0, 1024, 2048]
    assert parse_numbers("--cycle-times", ["0.5", "1,2"], float) == [0.5, 1.0, 2.0]
    for given, kind in ((["x"], int), (["1.5"], int), (["-1"], int), ([","], int), (["nan"], float), (["inf"], float)):
        with pytest.raises(ConfigError, match="numbers, 0 or more, received"):
            parse_numbers("--bucket-bytes", given, kind)


@needs_shaping
@pytest.mark.parametrize("ranks", [2, 4] if ALL else [3])
def test_bytes_on_a_shaped_link_are_those_that_are_reported(ranks, tmp_path):
    path = tmp_path / "step.json"
    # Large enough that what Horovod's ranks exchange all the time does not matter.
    (tmp_path / "wide.py").write_text(
        "import torch\ndef build():\n    model = torch.nn.Linear(2048, 2048)\n"
        "    return model, lambda: model(torch.randn(4, 2048)).square().mean()\n"
    )
    given = ["--ranks", str(ranks), "--link", "10gbit", "--rounds", "1", "--steps", "1", "--launcher", "horovod"]
    given += ["--model", "mlp" if ALL else "wide.py:build"]
    # One whose payloads are summed and one whose payloads are gathered. With two ranks, both would send the same share.
    methods = "none,topk,fp16" if ALL else "topk:compress_ratio=0.1,fp16"
    finished(*given, "--compressors", methods, "--json", str(path), cwd=tmp_path)
    for result in json.loads(path.read_text()):
        sent, said = result["wire_bytes"], result["reported_bytes"]
        if said is not None:
            assert abs(sent - said) < 0.05 * said, result["method"]
        if result["method"] == "compute":
            # Horovod's ranks exchange messages all the time.
            assert sent < 200_000


@needs_shaping
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("compressor", ["qsgd", "topk"])
def test_the_interface_sends_no_more_than_the_program_promises(compressor, ranks, tmp_path):
    """two_shot: 1.03 x 2 (N - 1) / N payloads; sparse_allreduce: 6 k (N - 1) / N words; and what Horovod itself sends.

    The tests of these programs count the same in simulations.
    """
    path, n = tmp_path / "step.json", 25_175_040
    communicator = "two_shot" if compressor == "qsgd" else "sparse_allreduce"
    given = ["--ranks", str(ranks), "--link", "10gbit", "--rounds", "1", "--steps", "2", "--compressors", compressor]
    given += ["--launcher", "horovod", "--json", str(path)]
    finished(*given, "--options", f"communicator={communicator}", "default_rules=false")
    found = {result["method"]: result for result in json.loads(path.read_text())}
    # Horovod's ranks exchange messages all the time, also while a step takes longer.
    control = found["compute"]["wire_bytes"] * found[compressor]["median_s"] / found["compute"]["median_s"]
    # A byte per element and a scale per 512, or one of a hundred elements.
    promised = 1.03 * 2 * (n + n / 512 * 4) if compressor == "qsgd" else 6 * 4 * 0.01 * n
    assert found[compressor]["wire_bytes"] - control <= promised * (ranks - 1) / ranks


@pytest.mark.slow
@needs_shaping
def test_ranks_of_a_node_share_a_link_that_they_use_between_nodes_only(tmp_path):
    """Two nodes of two ranks: each rank sends the payload of its half, the node as much as one rank alone."""
    path = tmp_path / "step.json"
    given = ["--nodes", "2x2", "--link", "10gbit", "--model", "resnet", "--rounds", "1", "--steps", "1"]
    given += ["--launcher", "horovod", "--compressors", "topk:communicator=hierarchical"]
    finished(*given, "--json", str(path))
    found = {result["method"]: result for result in json.loads(path.read_text())}
    # Horovod's ranks exchange messages all the time, also while a step takes longer.
    control = found["compute"]["wire_bytes"] * found["topk"]["median_s"] / found["compute"]["median_s"]
    # 1 % of the elements at 8 bytes each, and small dense tensors.
    assert found["topk"]["wire_bytes"] - control < 0.1 * found["horovod"]["wire_bytes"]


@pytest.mark.slow
@needs_shaping
def test_a_slower_link_takes_longer():
    """2 MB of gradients take at least 0.16 s at 100 Mbit/s, on a busy machine too."""
    with network.Network(2, "100mbit") as made:
        receiver = (
            "import socket; s = socket.create_server(('', 7001)); print('ready', flush=True); c = s.accept()[0]\n"
            "n = 0\nwhile n < 2_000_000: n += len(c.recv(1 << 16))\nc.sendall(b'.')"
        )
        sender = (
            "import socket, time; c = socket.create_connection((HOST, 7001)); start = time.perf_counter()\n"
            "c.sendall(bytes(2_000_000)); c.recv(1); print(time.perf_counter() - start)"
        ).replace("HOST", repr(made.nodes[0].address))
        with subprocess.Popen(
            made.nodes[0].command([sys.executable, "-c", receiver]), stdout=subprocess.PIPE, text=True
        ) as one:
            assert one.stdout.readline() == "ready\n"
            command = made.nodes[1].command([sys.executable, "-c", sender])
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert float(done.stdout) > 0.9 * 8 * 2_000_000 / 1e8


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@needs_shaping
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_nothing_is_left_after_an_interruption(number):
    process = bench("--link", "1gbit", "--model", "resnet", "--rounds", "1000")
    try:
        deadline, made = time.monotonic() + 60, set()
        # Those of the hub and of two nodes, and the workers in them.
        while len(made) < 3 or len(descendants(process.pid)) < 5:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.1)
            made = namespaces(*descendants(process.pid))
        time.sleep(1.0)
        started = descendants(process.pid)
        process.send_signal(number)
        errors = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait()
    if number != signal.SIGKILL:
        assert process.returncode == 130, errors
        assert "all ranks and namespaces are removed" in errors
    else:
        # The hub sees the end of its input, and the kernel kills the ranks.
        while made & everywhere():
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert not made & everywhere()
    assert all(state(pid) in (None, "Z") for pid in started)


@pytest.mark.parametrize("way", network.WAYS, ids=["root", "user"])
def test_a_process_that_stays_in_a_node_is_killed_with_the_network(way, monkeypatch):
    """With the rights of root, and within a user namespace, where users keep their number."""
    monkeypatch.setattr(network, "WAYS", [way])
    network.find_namespace_command.cache_clear()
    code = "import os, time; print(os.getuid(), open('/etc/hosts').read().split()[0], flush=True); time.sleep(99)"
    try:
        if network.find_namespace_command() is None:
            pytest.skip("no network namespaces this way here")
        with network.Network(2, "1gbit") as made:
            assert made.environment() == {}
            left = subprocess.Popen(
                made.nodes[1].command([sys.executable, "-c", code]),
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            assert left.stdout.readline() == f"{os.getuid()} 127.0.0.1\n"
            (inside,) = namespaces(left.pid)
    finally:
        network.find_namespace_command.cache_clear()
    with left:
        assert left.wait(10) == -signal.SIGKILL
    assert inside not in everywhere()


@needs_shaping
def test_a_failure_of_the_network_names_the_command(tmp_path, monkeypatch):
    # Otherwise this tc would fail in the trial already, and the ranks would be paced.
    assert network.find_namespace_command() is not None
    (tmp_path / "tc").write_text("#!/bin/sh\necho no tbf today >&2; exit 1\n")
    (tmp_path / "tc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    made, begin = network.Network(1, "1gbit"), descendants(os.getpid())
    with pytest.raises(GraceError, match=r"cannot make the test network: '.*tc qdisc add .* failed: no tbf today"):
        made.__enter__()
    assert descendants(os.getpid()) == begin


def test_without_namespaces_the_connections_are_paced(monkeypatch):
    """40 Mbit take 0.4 s at 100 Mbit/s, less the first burst; on a busy machine longer."""
    monkeypatch.setattr(network, "find_namespace_command", lambda: None)
    receiver = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)\n"
        "c = s.accept()[0]\nn = 0\nwhile n < 5_000_000: n += len(c.recv(1 << 16))\nc.sendall(b'.')"
    )
    sender = (
        "import socket, sys, time; c = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); time.sleep(0.2)\n"
        "start = time.perf_counter(); c.sendall(bytes(5_000_000)); c.recv(1); print(time.perf_counter() - start)"
    )
    with network.Network(2, "100mbit") as made:
        assert {node.namespace for node in made.nodes} == {None}
        environment = {**os.environ, **made.environment()}
        with subprocess.Popen(
            made.nodes[0].command([sys.executable, "-c", receiver]), stdout=subprocess.PIPE, text=True, env=environment
        ) as one:
            command = made.nodes[1].command([sys.executable, "-c", sender, one.stdout.readline()])
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert float(done.stdout) > 0.8 * 8 * 5_000_000 / 1e8
    with network.Network(2, "none") as made:
        assert made.environment() == {}


def test_pacing_keeps_the_users_own_sitecustomize(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.mine = 'here'")
    monkeypatch.setattr(network, "find_namespace_command", lambda: None)
    environment = {**os.environ, **network.Network(1, "1gbit").environment({"PYTHONPATH": str(tmp_path)})}
    code = "import sys, threading; print(sys.mine, threading.active_count())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "here 2\n", done.stderr


@pytest.mark.parametrize(
    ("link", "rate"), [("1gbit", 10**9), ("none", None), ("300mbit", 3 * 10**8), ("2.5gbit", 25 * 10**8)]
)
def test_rates(link, rate):
    assert network.rate_of(link) == rate


@pytest.mark.parametrize("link", ["2gbyte", "0mbit", "fast", "gbit", "1gbi"])
def test_other_rates_are_refused(link):
    with pytest.raises(ConfigError, match=r"--link: expected 100mbit, .*, or a rate such as 300mbit, received"):
        network.rate_of(link)


def state(pid):
    """Return the state of a process as the kernel names it, None if it has ended."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None
    return None if found in "ZX" else found


def test_nothing_is_left_of_a_killed_run(tmp_path, monkeypatch):
    """Its workers are stopped at times, and a stopped process notices nothing."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = bench("--link", "none", "--model", "resnet", "--rounds", "1000", "--baselines", "horovod,ddp")
    deadline = time.monotonic() + 180
    started, ports = [], set()
    while len(started) < 5 or len(ports) < 2 or not any(state(pid) == "T" for pid in started):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[1]
        started = children(process.pid)
        ports = {port for pid in started for port in listening(pid)}
        time.sleep(0.1)
    process.kill()
    process.communicate()
    while any(state(pid) for pid in started):
        assert time.monotonic() < deadline, {pid: state(pid) for pid in started}
        time.sleep(0.1)
    assert not [path.name for path in tmp_path.iterdir()]
    # The rendezvous servers of Horovod and of PyTorch.
    assert {address for address, _ in ports} == {"0100007F"}


def listening(pid):
    """Return the addresses and ports, as the kernel writes them, at which a process listens."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(descriptor))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                found.add(tuple(words[1].split(":")))
    return found


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--link", "1gbits"], "Did you mean '1gbit'"),
        (["--link", "none", "--latency", "1ms"], "--latency needs a link with limited bandwidth"),
        (["--model", "vg"], "Did you mean 'vgg'"),
        (["--ranks", "1"], "--ranks: expected at least 2, received 1"),
        (["--account", "--memory"], "--account has no effect with --memory"),
        (["--account", "--framework", "tensorflow"], "does not tell its parts; use --framework torch"),
        (["--ranks", "999999999"], "--ranks: expected at most 253"),
        (["--nodes", "2x4", "--ranks", "8"], "leave --ranks out"),
        (["--nodes", "2by4"], "expected nodes x ranks, such as 2x4, received '2by4'"),
        (["--nodes", "0x4"], "expected nodes x ranks"),
        (["--nodes", "2x2", "--link", "none"], "--nodes needs a link with limited bandwidth"),
        (["--compressors", "topkk"], "topk"),
        (["--baselines", "ddpp"], "Did you mean 'ddp'"),
        (["--baselines", "ddp", "--framework", "tensorflow"], "'ddp' needs PyTorch"),
        (["--baselines", "grace2021-topk"], "the package 'grace_dl' is not installed"),
        (["--baselines", "grace2021-topk", "--framework", "tensorflow"], "'grace2021-topk' needs PyTorch"),
        (["--json", "/nowhere/x.json", "--link", "none"], "cannot be written"),
        (["--compressors", ","], "--compressors: expected NAME or NAME:OPTION=VALUE"),
        (["--compressors", "topk:compress_ratio=2"], "compress_ratio"),
        (["--import", "nowhere.py"], "--import: there is no file 'nowhere.py'"),
        (["--options", "bucket_bytes"], "--options: expected KEY=VALUE"),
        (["--options", "seed=1", "--options", "seed=2"], "'seed' is given twice"),
        (["--options", "compressor=topk"], "'compressor' is not allowed here; use --compressors"),
        (["--compressors", "topk,none", "--options", "compress_ratio=0.1"], "is no option of compressor 'none'"),
        (["--options", "bucket_bytes=1e6"], "'bucket_bytes': expected int"),
        (["--bucket-bytes", "1024"], "--bucket-bytes needs --sweep"),
        (["--cycle-times", "1"], "--cycle-times needs --sweep"),
        (
            ["--sweep", "--launcher", "horovod", "--link", "none", "--cycle-times", "fast"],
            "expected numbers, 0 or more, received 'fast'",
        ),
        (["--sweep", "--link", "none", "--cycle-times", "1"], "--cycle-times are Horovod's; add --launcher horovod"),
        (["--sweep", "--link", "none", "--launcher", "torch,horovod"], "--sweep tunes one launcher at a time"),
        (
            ["--sweep", "--link", "none", "--compressors", "topk:split_bytes=0"],
            "--compressors: --sweep sets 'split_bytes' itself",
        ),
        (["--sweep", "--link", "none", "--options", "bucket_bytes=1"], "--sweep sets 'bucket_bytes' itself"),
        (["--sweep", "--baselines", "ddp"], "--baselines has no effect with --sweep"),
        (["--launcher", "torchrun"], "--launcher: unknown name 'torchrun'. Did you mean 'torch'"),
        (["--launcher", "torch", "--framework", "tensorflow"], "--launcher: 'torch' needs PyTorch"),
        (["--memory", "--sweep"], "--sweep has no effect with --memory"),
        (["--memory", "--rounds", "1"], "--rounds has no effect with --memory"),
    ],
)
def test_refused_before_anything_runs(arguments, expected, capsys):
    assert cli.main(["bench", "step", *arguments]) == 2
    assert expected in capsys.readouterr().err


def without(*packages):
    return lambda package: None if package in packages else "9.9"


@pytest.mark.parametrize(
    ("missing", "arguments", "expected"),
    [
        (("torch", "tensorflow"), [], "grace bench step needs PyTorch or TensorFlow, and neither is installed"),
        (("torch",), ["--framework", "torch"], "--framework: 'torch' is not installed; install it, or choose another"),
        (("torch",), ["--launcher", "torch"], "--launcher: 'torch' needs PyTorch; leave it out"),
        (("torch", "horovod"), [], "--launcher: 'horovod' needs horovod, which is not installed; install it, or use"),
        (("horovod",), ["--launcher", "horovod"], "'horovod' needs horovod, which is not installed; install it, or"),
        (("horovod",), ["--baselines", "horovod-fp16"], "--baselines: 'horovod-fp16' needs horovod"),
        (("tensorflow",), ["--framework", "tensorflow"], "--framework: 'tensorflow' is not installed"),
    ],
)
def test_missing_packages_are_told_in_a_line(monkeypatch, capsys, missing, arguments, expected):
    monkeypatch.setattr(step_command, "installed", without(*missing))
    assert cli.main(["bench", "step", "--link", "none", *arguments]) == 2
    errors = capsys.readouterr().err
    assert expected in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("missing", "arguments", "framework", "launchers"),
    [
        ((), [], "torch", ["torch"]),
        (("horovod", "tensorflow"), [], "torch", ["torch"]),
        (("torch",), [], "tensorflow", ["horovod"]),
        ((), ["--framework", "tensorflow"], "tensorflow", ["horovod"]),
        ((), ["--launcher", "horovod"], "torch", ["horovod"]),
    ],
)
def test_what_is_installed_is_the_default(monkeypatch, missing, arguments, framework, launchers):
    seen = []
    monkeypatch.setattr(step_command, "installed", without(*missing))
    monkeypatch.setattr(step_command, "_time", lambda setting, methods, plot: seen.append((setting, methods)))
    monkeypatch.setattr(step_command, "run_step", step_command._make_run)
    cli.main(["bench", "step", "--link", "none", "--compressors", "topk,none", *arguments])
    ((setting, methods),) = seen
    assert setting.framework == framework
    assert [method.launcher for method in methods if method.compresses] == launchers * 2
    assert methods[0].library == methods[1].library == launchers[0]


@pytest.mark.slow
def test_variants_and_a_method_of_a_users_own_in_training(tmp_path):
    (tmp_path / "mine.py").write_text(MINE.format(helper="json"))
    path = tmp_path / "step.json"
    variants = ["topk:compress_ratio=0.1", "topk:memory=none", "mine:clip=100"]
    given = ["--import", "mine.py", "--compressors", *variants, "--link", "none", "--model", "resnet"]
    output, _ = finished(*given, "--rounds", "1", "--steps", "1", "--json", str(path), cwd=tmp_path)
    results = json.loads(path.read_text())[2:]
    assert [line.split()[0] for line in output.splitlines()[-3:]] == variants
    assert [(result["method"], result["options"]) for result in results] == [
        ("topk", {"compress_ratio": 0.1}),
        ("topk", {"memory": "none"}),
        ("mine", {"clip": 100}),
    ]
    sent = [result["reported_bytes"] for result in results]
    assert sent[1] < sent[0] / 3
    assert sent[2] > 4 * 269_722


OWN = """
import {helper}, torch
def build():
    model = torch.nn.Linear(64, 1000)
    return model, lambda: model(torch.randn(4, 64)).square().mean()
"""


def test_a_model_of_a_users_own(tmp_path):
    """With each way to use grace, and a module beside the file."""
    (tmp_path / "own_train.py").write_text(OWN.format(helper="own_helper"))
    (tmp_path / "own_helper.py").write_text("")
    path = tmp_path / "step.json"
    launchers = ["torch", "torch-module", "torch-optimizer", "torch-fsdp"]
    given = ["--model", "own_train.py:build", "--link", "none", "--compressors", "fp16"]
    given += ["--rounds", "1", "--steps", "1"]
    output, _ = finished(*given, "--launcher", *launchers, "--json", str(path), cwd=tmp_path)
    assert output.startswith("own_train.py:build in torch")
    results = json.loads(path.read_text())
    assert [result["launcher"] for result in results[-4:]] == launchers
    # The bias stays as it is.
    assert {result["reported_bytes"] for result in results[-4:-1]} == {2 * 64_000 + 4 * 1000}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("own.py:build", "--model: there is no file 'own.py'"),
        ("own.py:", "--model: expected FILE.py:FUNCTION, such as train.py:build, received 'own.py:'"),
        ("own.py:a b", "--model: expected FILE.py:FUNCTION"),
        ("mpl", "--model: unknown name 'mpl'. Did you mean 'mlp'"),
    ],
)
def test_models_that_cannot_be_are_refused(text, expected):
    with pytest.raises(ConfigError, match=re.escape(expected)):
        check_model(text)


def test_a_function_that_builds_no_model_is_refused(tmp_path):
    file = tmp_path / "own_wrong.py"
    file.write_text("def build(): return 3\nnothing = None")
    check_model(f"{file}:build")
    with pytest.raises(ConfigError, match=r"--model: build\(\) must return the model and a function .* received int"):
        load_builder(f"{file}:build")()
    with pytest.raises(ConfigError, match="has no function 'nothing'"):
        load_builder(f"{file}:nothing")


def test_what_pacing_cannot_do_is_refused(monkeypatch):
    monkeypatch.setattr(network, "find_namespace_command", lambda: None)
    network.check_link("1gbit", None)
    for latency, local_size, option in (("100us", 1, "--latency"), (None, 2, "--nodes")):
        with pytest.raises(ConfigError, match=rf"{option} needs network namespaces.*as root .*leave {option} out"):
            network.check_link("1gbit", latency, local_size)


def test_a_rank_that_died_before_its_turn_is_named(monkeypatch):
    """Else the command would take the broken pipe to the rank for one of its own output."""
    monkeypatch.setattr("grace.bench.step.ranks.WORKER", "print('{\"ready\": 1}', flush=True); import sys; sys.exit(5)")
    with network.Network(2, "none") as made, Ranks(made, "torch", "resnet", "torch") as ranks:
        for worker in ranks._workers:
            worker.wait(60)
        with pytest.raises(GraceError, match=r"topk: rank \d died"):
            ranks.visit(Method("topk"), {}, 0, 1)


def test_a_rank_that_dies_is_told_with_what_it_said(tmp_path):
    """A module that cannot be imported stands in for a broken installation."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise ImportError('no horovod today')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "grace.cli", "bench", "step", "--link", "none", "--launcher", "horovod"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "no horovod today" in done.stderr
