"""python -m tests.golden: (re)write the stored payloads. Do so only for a new method, or a new format by intent."""

from __future__ import annotations

from tests.golden import write

for name in write():
    print(f"written: {name}")
