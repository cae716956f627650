"""Packaging of grace. Tool settings are in pyproject.toml."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

HERE = Path(__file__).parent


def read(name: str) -> str:
    path = HERE / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


def version() -> str:
    """``__version__`` of grace/__init__.py, read as text: importing the package would need its dependencies."""
    found = re.search(r'^__version__ = "([^"]+)"$', read("grace/__init__.py"), re.MULTILINE)
    if found is None:
        raise RuntimeError('grace/__init__.py must hold a line of the form: __version__ = "1.2.3"')
    return found.group(1)


TENSORFLOW_OPS = "grace._tensorflow_ops"
UNBUILT = "the kernels were not built, and the reference bodies will be used"


def tensorflow_options() -> dict[str, str]:
    """How the TensorFlow that is installed here wants operations to be compiled and linked, for CMake."""
    # In a process of its own: the import is slow and talkative, and what it loads is not wanted here.
    code = (
        "import json, tensorflow as tf; f = tf.sysconfig;"
        "print(json.dumps([f.get_include(), f.get_compile_flags(), f.get_link_flags()]))"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    include, flags, link = json.loads(found.stdout.splitlines()[-1])
    standard = next((flag.rpartition("+")[2] for flag in flags if "std=c++" in flag), "17")
    return {
        "GRACE_TENSORFLOW_INCLUDE": include,
        "GRACE_TENSORFLOW_DEFINES": ";".join(flag for flag in flags if flag.startswith("-D")),
        "GRACE_TENSORFLOW_LINK": ";".join(link),
        "GRACE_TENSORFLOW_STANDARD": standard,
    }


class BuildKernels(build_ext):
    """Builds the extensions with kernels/CMakeLists.txt; all of them are optional, as the package works without."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        # Kept between builds, so that only what changed is compiled.
        folder = HERE / "build" / f"kernels-{sys.implementation.cache_tag}"
        options = {"GRACE_PYTHON": sys.executable, "GRACE_SUFFIX": "".join(target.suffixes)}
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        name = ext.name.rpartition(".")[2]
        try:
            if ext.name == TENSORFLOW_OPS:
                options.update(tensorflow_options())

            def build(cuda: str) -> None:
                define = [f"-D{option}={value}" for option, value in {**options, "GRACE_CUDA": cuda}.items()]
                subprocess.run(["cmake", "-S", HERE / "kernels", "-B", folder, *generator, *define], check=True)
                subprocess.run(["cmake", "--build", folder, "--target", name, "--parallel"], check=True)

            cuda = os.environ.get("GRACE_CUDA", "ON")
            try:
                build(cuda)
            except subprocess.CalledProcessError:
                if cuda == "OFF":
                    raise
                self.warn("the kernels were not built; trying again without those for GPUs")
                build("OFF")
        except subprocess.CalledProcessError as error:
            # The command itself is long, and says less than what it has printed.
            raise CompileError(f"{UNBUILT}; the output above says why (pip shows it with -v)") from error
        except OSError as error:
            raise CompileError(f"{UNBUILT}: {error}; is there a C++ compiler, and CMake?") from error
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(folder / "modules" / target.name, target)


def extensions() -> list[Extension]:
    """The module of kernels, and TensorFlow's operations where that is installed; none with GRACE_BUILD_KERNELS=0."""
    if os.environ.get("GRACE_BUILD_KERNELS") == "0":
        return []
    names = ["grace._native", *([TENSORFLOW_OPS] if importlib.util.find_spec("tensorflow") else [])]
    return [Extension(name, sources=[], optional=True) for name in names]


setup(
    name="grace",
    version=version(),
    description="Gradient compression for distributed training with Horovod",
    long_description=read("README.md"),
    long_description_content_type="text/markdown",
    author="The grace authors",
    license="Apache-2.0",
    packages=find_packages(include=["grace", "grace.*"]),
    package_data={"grace": ["py.typed"]},
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildKernels},
    python_requires=">=3.10",
    install_requires=["ml_dtypes>=0.4", "numpy>=1.26", 'tomli>=2.0; python_version < "3.11"'],
    extras_require={
        "torch": ["torch>=2.0", "horovod>=0.28.1"],
        "tensorflow": ["tensorflow>=2.16", "keras>=3", "horovod>=0.28.1"],
        "mpi": ["mpi4py>=4"],
        "bench": ["matplotlib", "tqdm"],
        "test": [
            "hypothesis",
            "matplotlib",
            "mypy",
            "pytest>=9",
            "pytest-xdist>=3.8",
            "ruff",
            "scikit-learn",
            "tensorboard",
            "tqdm",
        ],
    },
    entry_points={"console_scripts": ["grace = grace.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    zip_safe=False,
)
