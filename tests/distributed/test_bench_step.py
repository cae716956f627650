"""`grace bench step` with real processes: its figures, its test bed, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from grace.bench.step import network
from grace.core.errors import ConfigError, GraceError
from tests.distributed.launch import ROOT

pytestmark = pytest.mark.distributed


def bench(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "grace.cli", "bench", "step", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts tests in the background has its children ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def finished(*arguments, status=0):
    process = bench(*arguments)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == status, errors[-4000:]
    return output, errors


def can_shape():
    """Whether this process may make namespaces and shape links."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        return False
    try:
        with network.Network(1, "10gbit"):
            return True
    except GraceError:
        return False


@pytest.fixture(scope="module")
def shaping():
    if not can_shape():
        pytest.skip("no root, no iproute2 or no namespaces with tbf here")


needs_shaping = pytest.mark.usefixtures("shaping")


@pytest.fixture(autouse=True)
def cleared():
    """One failure must not make others."""
    yield
    if os.geteuid() == 0 and shutil.which("ip"):
        network.remove_left_over()


def present():
    return network._present() if shutil.which("ip") else set()


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_without_shaping(framework, tmp_path):
    path, picture = tmp_path / "step.json", tmp_path / "step.png"
    given = ["--link", "none", "--model", "resnet", "--compressors", "topk,none", "--rounds", "2", "--steps", "2"]
    baselines = ["--baselines", "horovod,horovod-fp16" + (",ddp,ddp-powersgd" if framework == "torch" else "")]
    figure = ["--plot", str(picture)] if framework == "torch" else []
    output, _ = finished(*given, *baselines, *figure, "--framework", framework, "--json", str(path))
    results = json.loads(path.read_text())
    wanted = ["compute", "horovod", "horovod-fp16", *(["ddp", "ddp-powersgd"] if figure else []), "topk", "none"]
    assert [result["method"] for result in results] == wanted
    for result in results:
        assert result["method"] in output
        assert result["ranks"] == 2
        assert result["link"] == "none"
        assert result["model"] == "resnet"
        assert len(result["times"]) == 4
        assert 0 < result["spread"][0] <= result["median_s"] <= result["spread"][1]
        assert result["compute_s"] == results[0]["median_s"]
        assert result["speedup_over_horovod"] == results[1]["median_s"] / result["median_s"]
        assert result["wire_bytes"] is None
    said = {result["method"]: result["reported_bytes"] for result in results}
    # 1 % of 0.27 M values, 8 bytes each, and the rest of ResNet-20 whole.
    assert said["none"] == 4 * 269_722
    assert 0.02 * 4 * 269_722 < said["topk"] < 0.1 * said["none"]
    if figure:
        assert picture.read_bytes().startswith(b"\x89PNG")


@needs_shaping
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_on_a_shaped_link_are_those_that_are_reported(ranks, tmp_path):
    path = tmp_path / "step.json"
    given = ["--ranks", str(ranks), "--link", "10gbit", "--rounds", "1", "--steps", "2"]
    finished(*given, "--compressors", "none,topk,fp16", "--json", str(path))
    assert not present()
    for result in json.loads(path.read_text()):
        sent, said = result["wire_bytes"], result["reported_bytes"]
        if said is not None:
            assert abs(sent - said) < 0.05 * said, result["method"]
        if result["method"] == "compute":
            # Horovod's ranks talk to each other all the time.
            assert sent < 200_000


@needs_shaping
def test_a_slower_link_takes_longer():
    """100 Mbit/s for 2 MB of gradients: at least 0.16 s; a bound that a busy machine cannot break."""
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
    assert not present()


@needs_shaping
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_an_interruption(number):
    process = bench("--link", "1gbit", "--model", "resnet", "--rounds", "1000")
    try:
        deadline = time.monotonic() + 60
        while len(present()) < 3:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.1)
        time.sleep(1.0)
        process.send_signal(number)
        errors = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    assert "everything that was made is removed" in errors
    assert not present()


@needs_shaping
def test_what_a_killed_run_left_is_removed_by_the_next_one():
    process = bench("--link", "1gbit", "--model", "resnet", "--rounds", "1000")
    deadline = time.monotonic() + 60
    while len(present()) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.kill()
    process.communicate()
    left = present()
    assert len(left) == 3
    with network.Network(1, "1gbit") as made:
        assert present() == {made.hub.namespace, made.nodes[0].namespace}
    assert not present()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--link", "1gbits"], "Did you mean '1gbit'"),
        (["--link", "none", "--latency", "1ms"], "--latency needs a shaped link"),
        (["--model", "vg"], "Did you mean 'vgg'"),
        (["--ranks", "1"], "--ranks: expected at least 2, received 1"),
        (["--compressors", "topkk"], "topk"),
        (["--baselines", "ddpp"], "Did you mean 'ddp'"),
        (["--baselines", "ddp", "--framework", "tensorflow"], "'ddp' is PyTorch's"),
        (["--json", "/nowhere/x.json", "--link", "none"], "cannot be written"),
    ],
)
def test_refused_before_anything_runs(arguments, expected):
    _, errors = finished(*arguments, status=2)
    assert expected in errors
    assert not present()


def test_without_root_the_message_says_what_to_do(monkeypatch):
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match=r"as root .*--link none"):
        network.check_link("1gbit", None)
    network.check_link("none", None)


def test_a_rank_that_dies_is_told_with_what_it_said(tmp_path):
    """A module that cannot be imported stands in for a broken installation."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise ImportError('no horovod today')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "grace.cli", "bench", "step", "--link", "none", "--model", "resnet"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "no horovod today" in done.stderr
