"""Facts about this machine: installed packages and the processor. No framework is imported."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

FRAMEWORKS = ("torch", "tensorflow")


def installed(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed.

    Builds for one kind of device (`tensorflow-cpu`) count as the package; the version then shows their name.
    """
    for name in (package, f"{package}-cpu", f"{package}-gpu"):
        try:
            return f"{metadata.version(name)}" + (f" ({name})" if name != package else "")
        except metadata.PackageNotFoundError:
            continue
    return None


def processor() -> str:
    """Return the model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
