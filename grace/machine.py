"""What this machine has: installed packages and the processor, told without importing a framework."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

FRAMEWORKS = ("torch", "tensorflow")


def installed(package: str) -> str | None:
    """Version of an installed package; builds for one kind of device have names of their own."""
    for name in (package, f"{package}-cpu", f"{package}-gpu"):
        try:
            return f"{metadata.version(name)}" + (f" ({name})" if name != package else "")
        except metadata.PackageNotFoundError:
            continue
    return None


def processor() -> str:
    """The processor's model."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
