"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer: the same cases, and the same wrong arguments.

They are built into build/sanitized. Another process loads them by GRACE_NATIVE.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grace.core.ops import native
from tests.kernels import needs_kernels
from tests.kernels.__main__ import digests
from tests.support import fuzz
from tests.support.covering import ALL

pytestmark = [needs_kernels, pytest.mark.first]
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "sanitized"
MODULE = FOLDER / "modules" / "_native.so"
FLAGS = "-fsanitize=address,undefined"
# The kinds of the fuzzer's cases that reach kernels, with the number of an ordinary run: a second or two of work each.
FUZZED = {"wire numpy": 1000, "checksum numpy": 500, "gradient": 100, "state": 1000}
# Memory that CPython keeps until it ends is not a leak of the kernels.
ASAN = "detect_leaks=0:detect_stack_use_after_return=1:strict_init_order=1:check_initialization_order=1"


def tell(command, **options):
    # Keep stdout and stderr separate: the results go to stdout, TensorFlow's log goes to stderr.
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, **options)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return the environment variables of a process that loads the sanitized kernels."""
    compiler = os.environ.get("CXX") or "c++"
    program = tmp_path_factory.mktemp("sanitizers") / "program"
    command = [compiler, FLAGS, "-x", "c++", "-", "-o", program]
    try:
        subprocess.run(command, input=b"int main() {}", capture_output=True, check=True)
        subprocess.run([program], capture_output=True, check=True, env=os.environ | {"ASAN_OPTIONS": ASAN})
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"{compiler} has no sanitizers (install libasan and libubsan of its version): {error}")
    if shutil.which("cmake") is None:
        pytest.skip("there is no cmake on the PATH: activate .venv")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        # Several pytest processes may build it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        # The tests below run the best instruction set and the baseline.
        others = {"avx512": "avx2", "avx2": "avx512"}.get(native.module.isa(), "avx2;avx512")
        define = ["-DGRACE_SANITIZE=ON", f"-DGRACE_UNTESTED={others}"]
        define += [f"-DGRACE_PYTHON={sys.executable}", "-DGRACE_SUFFIX=.so"]
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        tell(["cmake", "-S", ROOT / "kernels", "-B", FOLDER, *generator, *define])
        tell(["cmake", "--build", FOLDER, "--target", "_native", "--parallel", "2"])
    # The sanitizers' runtimes must be loaded first, and with them libstdc++, whose exceptions they intercept.
    libraries = re.findall(r"=> (\S*/lib(?:asan|ubsan|stdc\+\+)\.so\S*)", tell(["ldd", MODULE]))
    assert len(libraries) == 3, libraries
    own = {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": ASAN, "UBSAN_OPTIONS": "print_stacktrace=1"}
    return os.environ | own | {"GRACE_NATIVE": str(MODULE), "OMP_NUM_THREADS": "4"}


@pytest.mark.parametrize(("isa", "half"), [("best", "odd"), pytest.param("baseline", "even", marks=pytest.mark.slow)])
def test_no_case_is_reported_and_the_bytes_are_the_same(environment, isa, half):
    choice = {} if isa == "best" else {"GRACE_ISA": isa}
    command = [sys.executable, "-m", "tests.kernels", half, "endure"]
    there = json.loads(tell(command, cwd=ROOT, env=environment | choice))
    assert there["endured"] > 0
    assert there["digests"] == digests(half)


def test_threads_share_memory_and_work_without_races(tmp_path):
    program, compiler = tmp_path / "stress", os.environ.get("CXX") or "c++"
    command = [compiler, "-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread", "-o", program, "-x", "c++"]
    try:
        subprocess.run([*command, "-"], input=b"int main() {}", capture_output=True, check=True)
        subprocess.run([program], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"{compiler} has no ThreadSanitizer that runs here (install libtsan of its version): {error}")
    sources = [ROOT / "tests" / "kernels" / "pool_stress.cpp", ROOT / "kernels" / "cpu" / "pool.cpp"]
    tell([*command, *sources, f"-I{ROOT / 'kernels' / 'include'}"])
    assert tell([program], env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}) == "all right\n"


def test_no_broken_argument_is_reported(environment):
    files = [f"tests/kernels/test_{name}.py" for name in ("refusals", "corrupt_buffers", "properties", "threads")]
    # Do not capture output (-s), or the sanitizer's report would be lost when it ends the process.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "--noconftest", "-p", "no:cacheprovider"]
    # What forked processes and other numbers of threads do is no matter of arguments, and takes seconds.
    command += ["-k", "not torch and not tensorflow" + ("" if ALL else " and not forked and not many_buckets")]
    assert " passed" in tell([*command, *files], cwd=ROOT, env=environment)


@pytest.mark.parametrize("kind", FUZZED)
def test_no_case_of_the_fuzzer_is_reported(environment, kind):
    """The fuzzer, which asks for no more memory than its own limit."""
    number = fuzz.count(kind) // 2 if ALL else FUZZED[kind]
    limits = {"ASAN_OPTIONS": f"{ASAN}:max_allocation_size_mb={fuzz.MEMORY >> 20}"}
    command = [sys.executable, "-m", "tests.support.fuzz", kind, "0", str(number)]
    told = tell(command, cwd=ROOT, env=environment | limits)
    assert f" of {number} cases had a result" in told
