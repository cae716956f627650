"""An environment that holds NumPy, ml_dtypes and what else a test names, without a download.

It is a virtual environment without pip. A .pth file adds a folder of symbolic links to its path; the links lead to the
packages of the environment that runs the tests. Nothing else of that environment can be imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement


def needed(names: tuple[str, ...]) -> set[str]:
    """Return the names of the distributions and of all that they need, without extras."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            for text in distribution(name).requires or ():
                requirement = Requirement(text)
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    waiting.append(requirement.name)
    return found


class Environment:
    """A virtual environment in a folder, and the programs that run in it."""

    def __init__(self, folder: Path, packages: tuple[str, ...]) -> None:
        self._bin = folder / "bin"
        # Programs run here: nothing of the checkout is in reach.
        self._elsewhere = folder / "elsewhere"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
        self.site = next(folder.glob("lib/python3*/site-packages"))
        links = folder / "links"
        for path in (links, self._elsewhere):
            path.mkdir()
        for name in needed(packages):
            files = distribution(name).files or ()
            for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
                if not (links / top).exists():
                    (links / top).symlink_to(Path(str(distribution(name).locate_file(top))))
        (self.site / "links.pth").write_text(f"{links}\n", encoding="utf-8")

    def install(self, wheel: Path) -> None:
        """Install a wheel without its dependencies, by the pip of the environment that runs the tests."""
        command = [sys.executable, "-m", "pip", "--python", self._bin / "python", "install", "--quiet", "--no-deps"]
        self._run([*map(str, command), "--no-index", str(wheel)])

    def run(self, program: str, *arguments: str) -> str:
        """Return what a program of this environment prints."""
        return self._run([str(self._bin / program), *arguments])

    def _run(self, command: list[str]) -> str:
        hidden = ("PYTHON", "GRACE_", "VIRTUAL_ENV")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        done = subprocess.run(
            command, cwd=self._elsewhere, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout
