"""The kernels for GPUs on the CPU: a build for tests, in which an emulator takes the place of CUDA."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import pytest
import torch

from grace.core.ops import native
from grace.core.ops.native import corrupt
from grace.core.ops.native_torch import NativeTorchOps
from grace.core.ops.torch_ops import DTYPES
from tests.kernels import once

ROOT = Path(__file__).parents[2]
POISON = 0xA5  # what memory holds that nobody has written to


@cache
def module():
    """The module, built first in the folder where setup.py has built the others."""
    folder = ROOT / "build" / f"kernels-{sys.implementation.cache_tag}"
    if native.module is None or not folder.exists() or shutil.which("cmake") is None:
        pytest.skip("the kernels were not built here: there is no folder to build the emulator in")
    name = "_emulated" + sysconfig.get_config_var("EXT_SUFFIX")
    with once(folder / "emulated.lock"):
        done = subprocess.run(
            ["cmake", "--build", folder, "--target", "_emulated"], capture_output=True, text=True, timeout=1200
        )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    spec = importlib.util.spec_from_file_location("_emulated", folder / "modules" / name)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


class EmulatedOps(NativeTorchOps):
    """Tensors in main memory that take the way of those on a GPU; what is allocated holds garbage at first."""

    def _start(self, kernel, inputs, integers, numbers, consumes):
        def allocate(dtype, n):
            made = torch.empty(n, dtype=DTYPES[dtype])
            made.view(torch.uint8).fill_(POISON) if n else None
            return made, made.data_ptr()

        try:
            return module().run_on_gpu(kernel, inputs, integers, numbers, 0, 0, allocate)
        except module().CorruptPayload as error:
            raise corrupt(error) from None
