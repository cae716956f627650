"""The kernels exist wherever they can be built. Otherwise all their tests would be skipped without notice."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys

import pytest

from grace.core.errors import ConfigError
from grace.core.ops import native, serves
from grace.testing.harness import FRAMEWORKS

ADVICE = "`python setup.py build_ext --inplace` builds them, or shows why not"


@pytest.mark.skipif(os.environ.get("GRACE_BUILD_KERNELS") == "0", reason="GRACE_BUILD_KERNELS is 0")
@pytest.mark.skipif(shutil.which(os.environ.get("CXX") or "c++") is None, reason="there is no C++ compiler on the PATH")
@pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no cmake on the PATH")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_kernels_are_built_where_there_is_a_compiler(framework):
    assert serves(framework, "cpu"), f"there are no kernels for {framework}: {ADVICE}"


def test_a_module_that_does_not_load_is_told(monkeypatch, tmp_path, caplog):
    monkeypatch.delenv("GRACE_NATIVE", raising=False)
    monkeypatch.setattr(native, "module_file", lambda: str(tmp_path / "_native.so"))
    # None makes import_module raise ImportError.
    monkeypatch.setitem(sys.modules, "grace._native", None)
    with caplog.at_level(logging.WARNING, logger="grace"):
        assert native._load() is None
    assert "the kernels do not load and are not used; reinstall grace" in caplog.text
    monkeypatch.setattr(native, "module_file", lambda: None)
    caplog.clear()
    assert native._load() is None
    assert not caplog.text


def test_everything_works_without_the_kernels():
    """Without kernels or with GRACE_NATIVE=0, the reference implementation is used, and requiring kernels fails."""
    code = (
        "import sys; sys.modules['grace._native'] = None\n"
        "import importlib.util, numpy as np\n"
        "from grace.core.errors import ConfigError\n"
        "from grace.core.ops import get_ops, native\n"
        "assert type(get_ops('numpy')).__name__ == 'NumpyOps' and native.module is None\n"
        "assert get_ops('numpy').sparsify(np.arange(9.0), 2)[1].tolist() == [7, 8]\n"
        "try: get_ops('numpy', native=True)\n"
        "except ConfigError as error: print(error)\n"
        "print(native.describe())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GRACE_NATIVE"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "there are no kernels for numpy on cpu here. `grace doctor` shows" in done.stdout
    assert "the reference implementation is used" in done.stdout


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("GRACE_NATIVE", "/nowhere/_native.so", "expected 0, or the path of an .so file that exists"),
        ("GRACE_NATIVE", "no", "received 'no'"),
        ("GRACE_ISA", "avx-512", "Did you mean 'avx512'"),
    ],
)
def test_a_variable_that_means_nothing_is_refused(monkeypatch, variable, value, expected):
    monkeypatch.delenv("GRACE_NATIVE", raising=False)
    native.check_environment()
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        native.check_environment()
    # Without the checks of the frameworks, which take long and have a test of their own.
    code = (
        "from grace import cli, doctor; doctor.installed = {'numpy': '2', 'torch': '2'}.get; "
        "cli.main(['doctor', '--no-launch'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert expected in done.stdout.partition("problem(s):")[2]
