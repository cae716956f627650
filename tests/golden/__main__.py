"""Store the payloads of new methods: `python -m tests.golden`; after an intended new format, name the case as well."""

from __future__ import annotations

import sys

from tests.golden import write

for name in write(sys.argv[1:]):
    print(f"written: {name}")
