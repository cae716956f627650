"""The GPU kernels on the CPU: a build for tests in which an emulator replaces CUDA."""

from __future__ import annotations

import fcntl
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils.dlpack import to_dlpack

from grace.backends.native_torch import NativeTorchOps
from grace.backends.torch_ops import DTYPES
from grace.core.errors import PayloadError

ROOT = Path(__file__).parents[3]
# The build folder of setup.py, which already contains most of this module.
FOLDER = ROOT / "build" / f"kernels-{sys.implementation.cache_tag}"
POISON = 0xA5  # the content of memory that nothing has written to


@cache
def module():
    """Build and return the module. Skip the test without CMake or a build of the kernels."""
    if not (FOLDER / "CMakeCache.txt").exists() or shutil.which("cmake") is None:
        pytest.skip(f"there is no cmake on the PATH, or no build of the kernels in {FOLDER}: bash scripts/setup.sh")
    command = ["cmake", "--build", FOLDER, "--target", "_emulated", "--parallel", "2"]
    with (FOLDER / "emulated.lock").open("w") as lock:
        # Several pytest processes may build it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1200)
    assert done.returncode == 0, f"the kernels for GPUs do not compile:\n{done.stdout[-6000:]}"
    path = FOLDER / "modules" / ("_emulated" + sysconfig.get_config_var("EXT_SUFFIX"))
    spec = importlib.util.spec_from_file_location("_emulated", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


class EmulatedOps(NativeTorchOps):
    """Array operations that run the GPU kernels on tensors in main memory. `started` holds the kernels that ran."""

    def __init__(self):
        super().__init__("cpu")
        self._on_gpu = True
        self.started = set()

    # As `Native` does for a GPU.
    def _thin(self, *arguments):
        return None

    def thin(self, *arguments):
        return None

    def _run_on_gpu(self, kernel, inputs, integers, numbers):
        made = []

        def allocate(dtype, n):
            # Kernels must not write beyond the requested memory.
            size = n * DTYPES[dtype].itemsize
            memory = torch.full((size + 64,), POISON, dtype=torch.uint8)
            made.append((memory, size))
            return memory[:size].view(DTYPES[dtype]), memory.data_ptr()

        self.started.add(kernel)
        try:
            return module().run_on_gpu(kernel, [to_dlpack(x) for x in inputs], integers, numbers, 0, 0, allocate)
        except module().CorruptPayload as error:
            raise PayloadError(str(error)) from None
        finally:
            assert all(bool((memory[size:] == POISON).all()) for memory, size in made), f"{kernel} wrote too far"
