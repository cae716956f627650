"""`Rollback`: the return to the states before a step that will not be finished."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from grace.core.errors import StepError
from grace.core.guards.agreement import check_steps
from grace.core.state.run import Run, Savepoint, step_of


class Rollback:
    """The states before the step under way, kept until the optimizer has applied it, and the return to them."""

    def __init__(self, run: Run, drop: Callable[[int], list[int]], called: str) -> None:
        # Drops what is on its way, on all ranks, and returns the steps of all.
        self._run, self._drop = run, drop
        # The exchange as its users call it.
        self._called = called
        #: The states before the step under way; None between two steps.
        self.before: Savepoint | None = None
        self._failed = False
        self._attempt = _Attempt(self)
        # Makes the adapter forget the step.
        self.forget: Callable[[], None] = lambda: None

    def keep(self) -> None:
        """Keep the states as they are now: a step begins."""
        self.before = self._run.savepoint

    def release(self) -> None:
        """Release the states before the step: it was applied, or its gradients were dropped after the exchange."""
        self.before = None

    def attempt(self) -> AbstractContextManager[None]:
        """Note whether the body fails. Raises StepError if one before has failed in this step."""
        return self._attempt

    def fail(self) -> None:
        """Note that a part of this step has failed."""
        self._failed = True

    def check(self) -> None:
        """Raise StepError if a part of this step has failed."""
        if self._failed:
            raise StepError(
                f"step {self._run.step} has failed with an error before, and cannot go on. Call "
                f"{self._called}.discard() on all ranks to return to the states before it, or end the run."
            )

    def undo(self) -> None:
        """Return to the states before the step on this rank, whatever the others do."""
        if self.before is not None:
            self._run.discard(self.before)
        self.before, self._failed = None, False

    def give_up(self) -> None:
        """Return to the states before the step on this rank, and let the adapter forget it."""
        self.undo()
        self.forget()

    def discard(self) -> None:
        """Return to the states before the step, on all ranks; see `Exchange.discard`."""
        try:
            steps = self._drop(self._run.step if self.before is None else step_of(self.before))
        except Exception:
            # What this rank has announced to others must stay true until they come.
            self.fail()
            raise
        if self.before is None:
            # Other ranks may have begun the step. Without roll-back, memories start from zero on all ranks or on none.
            self.keep()
        self.give_up()
        self._run.reset_completed()
        check_steps(steps)


class _Attempt(AbstractContextManager[None]):
    """Context of `Rollback.attempt`. One object serves all gradients: a generator for each takes four times as long."""

    def __init__(self, rollback: Rollback) -> None:
        self._rollback = rollback

    def __enter__(self) -> None:
        self._rollback.check()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is not None:
            self._rollback.fail()
