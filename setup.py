"""The compiled parts of the package. Everything else about it is in pyproject.toml."""

import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

HERE = Path(__file__).parent
TENSORFLOW_OPS = "grace._tensorflow_ops"
UNBUILT = "the kernels were not built"


def tensorflow_options() -> dict[str, str]:
    """Return CMake options with the installed TensorFlow's flags for compiling and linking operations."""
    # Import TensorFlow in another process, because the import is slow and logs a lot.
    code = (
        "import json, tensorflow as tf; f = tf.sysconfig;"
        "print(json.dumps([tf.__version__, f.get_include(), f.get_compile_flags(), f.get_link_flags()]))"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    version, include, flags, link = json.loads(found.stdout.splitlines()[-1])
    standard = next((flag.rpartition("+")[2] for flag in flags if "std=c++" in flag), "17")
    return {
        "GRACE_TENSORFLOW_VERSION": version,
        "GRACE_TENSORFLOW_INCLUDE": include,
        "GRACE_TENSORFLOW_DEFINES": ";".join(flag for flag in flags if flag.startswith("-D")),
        "GRACE_TENSORFLOW_LINK": ";".join(link),
        "GRACE_TENSORFLOW_STANDARD": standard,
    }


def has_cuda_device() -> bool:
    """Return whether the CUDA driver is there and finds a device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def cuda() -> str:
    """Return CMake's GRACE_CUDA: ON, OFF, or AUTO for where there is nvcc.

    The environment variable GRACE_CUDA may be ON or OFF. Without it, or with auto, only a machine with a CUDA device
    gets kernels for GPUs: they take minutes to compile, and many machines have nvcc but no GPU.
    """
    wanted = os.environ.get("GRACE_CUDA") or "auto"
    if wanted.upper() not in ("ON", "OFF", "AUTO"):
        sys.exit(f"error: GRACE_CUDA={wanted}: expected ON, OFF or auto")
    if wanted.upper() == "AUTO":
        return "AUTO" if has_cuda_device() else "OFF"
    return wanted.upper()


def tool(name: str) -> str | None:
    """Return the path of a build tool: on the PATH, or in the folder of this Python, where pip installs it."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])
    return shutil.which(name, path=path)


def build_folder(cmake: str, ninja: str | None) -> Path:
    """Return CMake's build folder. It is kept between builds, so that only changed files are compiled.

    CMake remembers the paths of its tools. An isolated build has its tools in a temporary folder, so a folder that was
    made with other tools is deleted.
    """
    folder = HERE / "build" / f"kernels-{sys.implementation.cache_tag}"
    packages = [importlib.util.find_spec(name) for name in ("nanobind", "numpy")]
    tools = json.dumps([sys.executable, cmake, ninja, *[spec.origin if spec else None for spec in packages]])
    record = folder / "grace-tools.json"
    if not record.exists() or record.read_text(encoding="utf-8") != tools:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        record.write_text(tools, encoding="utf-8")
    return folder


class BuildKernels(build_ext):
    """Build command for the extensions, with kernels/CMakeLists.txt. They are optional, unless GRACE_CUDA is ON."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        options = {"GRACE_PYTHON": sys.executable, "GRACE_SUFFIX": "".join(target.suffixes)}
        name = ext.name.rpartition(".")[2]
        cmake, ninja = tool("cmake"), tool("ninja")
        if cmake is None:
            raise CompileError(f"{UNBUILT}: cmake is missing; pip install cmake")
        folder = build_folder(cmake, ninja)
        generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
        try:
            if ext.name == TENSORFLOW_OPS:
                options.update(tensorflow_options())

            def build(gpus: str) -> None:
                define = [f"-D{option}={value}" for option, value in {**options, "GRACE_CUDA": gpus}.items()]
                subprocess.run([cmake, "-S", HERE / "kernels", "-B", folder, *generator, *define], check=True)
                subprocess.run([cmake, "--build", folder, "--target", name, "--parallel"], check=True)

            wanted = cuda()
            try:
                build(wanted)
            except subprocess.CalledProcessError:
                if wanted != "AUTO":
                    raise
                self.warn(f"{UNBUILT}; trying again without those for GPUs")
                build("OFF")
        except subprocess.CalledProcessError as error:
            # Do not show the command itself: it is long, and its output explains more.
            raise CompileError(f"{UNBUILT}; the output above says why (pip shows it with -v)") from error
        except OSError as error:
            raise CompileError(f"{UNBUILT}: {error}; is there a C++ compiler?") from error
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(folder / "modules" / target.name, target)


def extensions() -> list[Extension]:
    """Return the module of kernels, and the TensorFlow operation if TensorFlow is installed.

    GRACE_BUILD_KERNELS=0 gives none. Kernels for GPUs that somebody asks for must build.
    """
    if os.environ.get("GRACE_BUILD_KERNELS") == "0":
        return []
    names = ["grace._native", *([TENSORFLOW_OPS] if importlib.util.find_spec("tensorflow") else [])]
    return [Extension(name, sources=[], optional=cuda() != "ON") for name in names]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildKernels})
