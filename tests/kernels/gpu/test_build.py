"""The CUDA sources compile where there is nvcc. A device need not be there, and most builds of grace leave them out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig

import pytest

from grace.core.ops import serves
from tests.kernels import needs_kernels
from tests.support.launch import ROOT

FOLDER = ROOT / "build" / f"cuda-{sys.implementation.cache_tag}"


@pytest.mark.slow
@needs_kernels
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc on the PATH")
def test_kernels_for_gpus_are_built_if_asked_for():
    """One architecture is enough to see that everything compiles and that the module loads without a device."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    options = {"GRACE_CUDA": "ON", "GRACE_CUDA_ARCHITECTURES": "80", "GRACE_PYTHON": sys.executable}
    define = [f"-D{name}={value}" for name, value in {**options, "GRACE_SUFFIX": suffix}.items()]
    ninja = ["-G", "Ninja"] if shutil.which("ninja") else []
    for command in (
        ["cmake", "-S", ROOT / "kernels", "-B", FOLDER, *ninja, *define],
        ["cmake", "--build", FOLDER, "--target", "_native", "--parallel", "2"],
    ):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1200)
        assert done.returncode == 0, f"the kernels for GPUs do not compile:\n{done.stdout[-6000:]}"
    environment = {**os.environ, "GRACE_NATIVE": str(FOLDER / "modules" / f"_native{suffix}")}
    code = "from grace.core.ops import native; print(native.module.cuda)"
    found = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert found.stdout == "True\n"


@needs_kernels
def test_a_device_that_is_not_there_is_not_served():
    assert not serves("torch", "cuda:63")
    assert not serves("numpy", "cuda:63")
    assert not serves("torch", "mps")
