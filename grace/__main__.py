"""The command `grace`, for environments whose scripts are not on the PATH: `python -m grace`."""

from __future__ import annotations

import sys

from grace.cli import main

if __name__ == "__main__":
    sys.exit(main())
