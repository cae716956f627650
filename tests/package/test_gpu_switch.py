"""GRACE_CUDA: kernels for GPUs are built if somebody asks for them or a device is there."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest
import setuptools

from tests.support.launch import ROOT

pytestmark = pytest.mark.processes

SETUP = ROOT / "setup.py"
DRIVER = """
extern "C" int cuInit(unsigned) { return %d; }
extern "C" int cuDeviceGetCount(int* count) { *count = %d; return 0; }
"""


@pytest.fixture
def build(monkeypatch):
    """Return the module setup.py, which builds nothing here."""
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: None)
    monkeypatch.delenv("GRACE_CUDA", raising=False)
    monkeypatch.delenv("GRACE_BUILD_KERNELS", raising=False)
    spec = importlib.util.spec_from_file_location("grace_setup", SETUP)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize(
    ("value", "with_device", "without"),
    [
        (None, "AUTO", "OFF"),
        ("", "AUTO", "OFF"),
        ("auto", "AUTO", "OFF"),
        ("ON", "ON", "ON"),
        ("on", "ON", "ON"),
        ("OFF", "OFF", "OFF"),
    ],
)
def test_gpu_kernels_need_a_wish_or_a_device(build, monkeypatch, device, value, with_device, without):
    monkeypatch.setattr(build, "has_cuda_device", lambda: device)
    if value is not None:
        monkeypatch.setenv("GRACE_CUDA", value)
    assert build.cuda() == (with_device if device else without)
    # An optional extension that does not compile is left out; what somebody has asked for is not.
    assert {extension.optional for extension in build.extensions()} == {build.cuda() != "ON"}


def test_another_value_is_refused():
    environment = {**os.environ, "GRACE_CUDA": "yes"}
    environment.pop("GRACE_BUILD_KERNELS", None)
    done = subprocess.run(
        [sys.executable, SETUP, "--version"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == "error: GRACE_CUDA=yes: expected ON, OFF or auto\n"


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ on the PATH")
@pytest.mark.parametrize(
    ("status", "devices", "found"), [(0, 2, True), (0, 0, False), (100, 1, False)], ids=["two", "none", "failing"]
)
def test_the_driver_is_asked_for_devices(tmp_path, status, devices, found):
    (tmp_path / "driver.cpp").write_text(DRIVER % (status, devices))
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, tmp_path / "driver.cpp"], check=True)
    code = (
        "import setuptools, runpy; setuptools.setup = lambda **arguments: None\n"
        f"print(runpy.run_path({str(SETUP)!r})['has_cuda_device']())"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "GRACE_BUILD_KERNELS": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{found}\n"
