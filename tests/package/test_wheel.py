"""`python -m build` makes a source distribution, and from that a wheel which works in a clean environment.

The kernels are built with little optimization and without CUDA, to save time; scripts/setup.sh builds them as users do.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

import grace
from grace.core.config.registry import compressors
from grace.core.ops import native
from tests.package.environment import Environment
from tests.support.launch import ROOT

pytestmark = [
    pytest.mark.distributed,  # builds with all cores
    pytest.mark.skipif(native.module_file() is None, reason="the kernels were not built here"),
]

# Steps of two ranks, by kernels and by the reference code; prints which kernels ran.
SIMULATION = """
import importlib, importlib.util, json, os, sys
import numpy as np
import grace
from grace.core.ops import get_ops, native

framework = sys.argv[1]
ran = set()
cls = type(get_ops(framework, native=True))
run = cls.run
cls.run = lambda self, kernel, *args, **options: (ran.add(kernel), run(self, kernel, *args, **options))[1]

def steps(compressor):
    convert = importlib.import_module("torch").from_numpy if framework == "torch" else lambda x: x
    config = {"compressor": compressor, "default_rules": False}
    simulation = grace.Simulation(2, {"w": (64, 32)}, config, framework=framework)
    rng = np.random.default_rng(1)
    for _ in range(3):
        gradients = [rng.standard_normal((64, 32)).astype(np.float32) for _ in range(2)]
        merged = simulation.step([{"w": convert(x)} for x in gradients])
    return [np.asarray(rank["w"]).tobytes() for rank in merged]

fast = [steps(name) for name in ("qsgd", "topk")]
used = sorted(ran)
os.environ["GRACE_NATIVE"] = "0"
ran.clear()
plain = [steps(name) for name in ("qsgd", "topk")]
print(json.dumps({
    "files": [grace.__file__, native.module.__file__],
    "used": used,
    "used without kernels": sorted(ran),
    "equal": fast == plain,
    "importable": [name for name in ("torch", "tensorflow", "horovod", "tests") if importlib.util.find_spec(name)],
}))
"""


class Built(NamedTuple):
    wheel: Path
    source: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Built:
    folder = tmp_path_factory.mktemp("dist")
    # -O1, because vector instructions need constants that the compiler has folded.
    environment = {**os.environ, "GRACE_CUDA": "OFF", "CMAKE_BUILD_TYPE": "None", "CXXFLAGS": "-O1"}
    environment.pop("GRACE_BUILD_KERNELS", None)
    # The compiler cache knows a file by its path relative to the checkout: so the build must be inside.
    within = ROOT / "build" / "wheels"
    within.mkdir(parents=True, exist_ok=True)
    environment["TMPDIR"] = str(within)
    # Without --sdist or --wheel the wheel is built from the unpacked source distribution.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "kernels were not built" not in done.stdout, done.stdout[-6000:]
    assert {path.suffix for path in folder.iterdir()} == {".whl", ".gz"}
    return Built(next(folder.glob("*.whl")), next(folder.glob("*.tar.gz")))


@pytest.fixture(scope="module")
def numpy_only(built, tmp_path_factory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("numpy") / "env", ("numpy", "ml_dtypes", *TOMLI))
    environment.install(built.wheel)
    return environment


# Of the standard library since Python 3.11.
TOMLI = ("tomli",) if sys.version_info < (3, 11) else ()
NAME = f"grace_compression-{grace.__version__}"


def test_the_wheel_holds_the_package_and_the_kernels_and_nothing_else(built):
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "grace").rglob("*.py")}
    expected |= {"grace/py.typed", f"grace/_native{suffix}"}
    if importlib.util.find_spec("grace._tensorflow_ops") is not None:
        expected.add(f"grace/_tensorflow_ops{suffix}")
    with zipfile.ZipFile(built.wheel) as wheel:
        files = set(wheel.namelist())
        metadata = wheel.read(f"{NAME}.dist-info/METADATA").decode()
    assert {name for name in files if ".dist-info/" not in name} == expected
    assert built.wheel.name.startswith(f"{NAME}-cp3{sys.version_info.minor}-")
    assert f"{NAME}.dist-info/licenses/LICENSE" in files
    for line in ("Name: grace-compression", f"Version: {grace.__version__}", "Provides-Extra: horovod"):
        assert f"{line}\n" in metadata


def test_the_source_distribution_holds_the_package_and_the_sources_of_the_kernels(built):
    with tarfile.open(built.source) as archive:
        files = {name.partition("/")[2]: archive.getmember(name) for name in archive.getnames()}
        for path in (ROOT / "kernels").rglob("*"):
            if path.is_file():
                stored = archive.extractfile(files[str(path.relative_to(ROOT))])
                assert stored is not None
                assert stored.read() == path.read_bytes(), path
    wanted = {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "setup.py", "grace/py.typed"}
    wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / "grace").rglob("*.py")}
    assert wanted <= set(files)
    assert not [name for name in files if name.startswith(("tests", "docs")) or name.endswith((".so", ".pyc"))]


def test_the_command_works_with_numpy_alone(numpy_only):
    assert numpy_only.run("grace", "--version") == f"grace {grace.__version__}\n"
    lines = numpy_only.run("grace", "compressors", *compressors).splitlines()
    # The frameworks that are installed.
    found = [line.split(maxsplit=1)[1] for line in lines if line.startswith("  frameworks ")]
    assert found == ["numpy"] * len(list(compressors))


def _check(environment: Environment, framework: str, importable: list[str]) -> None:
    found = json.loads(environment.run("python", "-c", SIMULATION, framework))
    assert all(Path(path).is_relative_to(environment.site) for path in found["files"]), found["files"]
    # Both codecs at least, and no kernel where the environment variable says so.
    assert {"bucket_quantize", "sum_top"} <= set(found["used"])
    assert found["used without kernels"] == []
    assert found["equal"]
    assert found["importable"] == importable


def test_a_simulation_runs_by_kernels_with_numpy_alone(numpy_only):
    _check(numpy_only, "numpy", [])


def test_a_simulation_runs_by_kernels_with_pytorch(built, tmp_path_factory):
    pytest.importorskip("torch")
    environment = Environment(tmp_path_factory.mktemp("torch") / "env", ("torch", "numpy", "ml_dtypes", *TOMLI))
    environment.install(built.wheel)
    _check(environment, "torch", ["torch"])
