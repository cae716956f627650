"""Waits for other ranks: a rank that waits long says what it waits for, and ends after the time limit."""

from __future__ import annotations

import time
from collections.abc import Callable

from grace.core.errors import WaitError
from grace.core.observe.log import logger
from grace.core.observe.timeline import tensors_of
from grace.core.plan.plan import Bucket, Plan

# A rank that has waited this many seconds, or half of its limit, logs what it waits for, and again each time that the
# wait has doubled.
WARN_SECONDS = 25.0
# What a look at the collective counts at most. More seconds pass only if this process was stopped, which is no wait.
_LOOK_SECONDS = 10.0


def wait_until(
    done: Callable[[], bool],
    what: Callable[[], str],
    *,
    rank: int,
    size: int,
    timeout: float,
    pause: Callable[[float], None] | None = None,
    others: Callable[[], str] = str,
) -> None:
    """Call `done` until it returns True, and `pause` with the seconds waited in between.

    `what` says what this rank waits for, and `others` in a sentence what other ranks wait for, or nothing; they are
    called only if the wait is long. Raises WaitError after `timeout` seconds.
    """
    if done():
        return
    pause = pause or _sleep
    waited, last = 0.0, time.monotonic()
    warn_at = min(WARN_SECONDS, timeout / 2)
    while not done():
        now = time.monotonic()
        waited, last = waited + min(now - last, _LOOK_SECONDS), now
        if waited >= timeout:
            raise WaitError(
                f"{_waiting_text(rank, size, waited, what())}. Expected all ranks to make the same calls within "
                f"'timeout' = {timeout:g} s: look for the rank that failed, ended, took another number of steps or "
                f"waits for something else. If it is only slow, set a larger 'timeout'. {others()}".rstrip()
            )
        if waited >= warn_at:
            warn_at *= 2
            text = f"{_waiting_text(rank, size, waited, what())}, and ends at 'timeout' = {timeout:g} s. {others()}"
            logger().warning("%s", text.rstrip())
        pause(waited)


def explain(plan: Plan, step: int, name: str, module: str | None = None) -> str:
    """Return what a collective of a plan, or of the plan of a module, carries, in words."""
    bucket = bucket_of(plan, name)
    if bucket is None:
        return f"step {step}, {name}"
    tensors = tensors_of(bucket)
    more = f" and {len(tensors) - 1} other tensors" if len(tensors) > 1 else ""
    within = "" if module is None else f" of module '{module}'"
    return f"step {step}{within}, the gradient of '{tensors[0]}'{more} (collective '{name}')"


def bucket_of(plan: Plan, name: str) -> Bucket | None:
    """Return the bucket to which a collective of this name belongs."""
    for bucket in plan.buckets:
        if name.startswith(bucket.name) and not name[len(bucket.name) :][:1].isdigit():
            return bucket
    return None


def _waiting_text(rank: int, size: int, waited: float, what: str) -> str:
    others = f"rank {1 - rank}" if size == 2 else f"one or more of the other {size - 1} ranks"
    return f"rank {rank} of {size} has waited {waited:.0f} s for {others}: {what}"


def _sleep(waited: float) -> None:
    # A twentieth of the wait, so that sleeping prolongs no wait by much, and takes little of the processor.
    time.sleep(min(waited / 20, 0.005))
