"""A progress bar for benchmarks."""

from __future__ import annotations

import importlib.util
from typing import Any


class Progress:
    """A progress bar, if tqdm is installed and the output is a terminal. Printed lines do not damage it."""

    def __init__(self, steps: int) -> None:
        self._bar: Any = None
        self._begun = False
        if importlib.util.find_spec("tqdm") is not None:
            from tqdm import tqdm

            self._bar = tqdm(total=steps, unit="step", leave=False, disable=None)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def say(self, what: str) -> None:
        """Show a description of the current step."""
        if self._bar is not None:
            self._bar.set_description(what)

    def update(self, steps: int) -> None:
        """Advance the bar by a number of steps."""
        if self._bar is not None:
            self._bar.update(steps)

    def next(self, what: str) -> None:
        """Finish the previous step and begin the next one."""
        self.update(int(self._begun))
        self._begun = True
        self.say(what)

    def write(self, line: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.clear()
        print(line, flush=True)
