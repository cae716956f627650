"""Write the stored payloads: `python -m tests.golden`. Use it only for a new method, or an intended new format."""

from __future__ import annotations

from tests.golden import write

for name in write():
    print(f"written: {name}")
