"""The waits that ranks tell each other in a store."""

from __future__ import annotations

import threading
import time

import torch.distributed as dist

from grace.torch.distributed import waits
from grace.torch.distributed.waits import Waits


def test_ranks_read_what_the_others_have_told():
    store = dist.HashStore()
    first, second, third, apart = (
        Waits(store, *place) for place in (("a", 0, 3), ("a", 1, 3), ("a", 2, 3), ("b", 0, 2))
    )
    # `get` of the store would wait for what nobody has told.
    assert first.of_others() == "Of the others, ranks 1, 2 report no wait."
    second.report("step 3")
    assert first.of_others() == "Of the others, rank 1 waits for step 3; rank 2 reports no wait."
    third.report("step 3")
    assert first.of_others() == "Of the others, ranks 1, 2 wait for step 3."
    assert third.of_others() == "Of the others, rank 0 reports no wait; rank 1 waits for the same."
    second.clear()
    assert first.of_others() == "Of the others, rank 1 reports no wait; rank 2 waits for step 3."
    assert apart.of_others() == "Of the others, rank 1 reports no wait."


def test_a_store_that_does_not_answer_is_not_waited_for_nor_asked_again(monkeypatch):
    monkeypatch.setattr(waits, "_ANSWER_S", 0.05)
    answer, asked = threading.Event(), []

    class Lost:
        def set(self, place, text):
            asked.append(text)
            answer.wait(60)

    mine = Waits(Lost(), "a", 0, 2)
    mine.report("step 3")
    assert mine.of_others() == ""
    mine.clear()
    assert asked == ["step 3"]
    answer.set()
    # What could not be cleared is cleared later.
    deadline = time.monotonic() + 20
    while asked == ["step 3"] and time.monotonic() < deadline:
        mine.clear()
    mine.clear()
    assert asked == ["step 3", ""]


def test_a_store_that_fails_says_nothing():
    mine = Waits(None, "a", 0, 2)
    mine.report("step 3")
    assert mine.of_others() == ""


def test_very_many_ranks_do_not_ask():
    mine = Waits(dist.HashStore(), "a", 0, 1000)
    mine.report("step 3")
    assert mine.of_others() == ""
