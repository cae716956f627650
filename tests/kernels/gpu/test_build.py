"""If there is a CUDA compiler, the build contains the GPU kernels."""

from __future__ import annotations

import os
import shutil

import pytest

from grace.core.ops import native, serves
from tests.kernels import needs_kernels


@needs_kernels
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc on the PATH")
@pytest.mark.skipif(os.environ.get("GRACE_CUDA") == "OFF", reason="GRACE_CUDA is OFF")
def test_cuda_is_built_where_there_is_nvcc():
    assert native.module.cuda, "the CUDA sources did not compile: `python setup.py build_ext --inplace` shows why"


@needs_kernels
def test_a_device_that_is_not_there_is_not_served():
    assert not serves("torch", "cuda:63")
    assert not serves("numpy", "cuda:63")
    assert not serves("torch", "mps")
