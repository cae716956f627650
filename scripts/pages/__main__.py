"""Command line of the generator; `pages.py` says what it does."""

import sys

from pages import main

sys.exit(main())
