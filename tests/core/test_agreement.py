"""Before the first step all ranks must have been told the same, and each is told what differs or which rank failed."""

from __future__ import annotations

import pytest

from grace.core.errors import ConfigError, MismatchError
from grace.core.guards.agreement import Handshake, agree

TOLD = {"configuration": {"compressor": "topk", "ratio": 0.1}, "parameters": {"a": [3], "b": [4]}}
REORDERED = {**TOLD, "parameters": {"b": [4], "a": [3]}}


def meet(*descriptions):
    """Let every rank agree. Return what each gets: the descriptions, or the text of its error."""
    results = []
    for mine in descriptions:
        try:
            results.append(agree(mine, None, lambda _: list(descriptions), "grace.make"))
        except MismatchError as error:
            results.append(str(error))
    return results


def test_equal_descriptions_are_returned_with_what_each_rank_says_of_itself():
    everyone = [{**TOLD, "of this rank": rank} for rank in range(3)]
    assert meet(*everyone) == [everyone] * 3


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({**TOLD, "configuration": {"compressor": "topk", "ratio": 0.2}}, "configuration, ratio is 0.2 and 0.1"),
        ({**TOLD, "parameters": {"a": [3]}}, "parameters, b exists only on rank 0"),
        ({**TOLD, "more": 1}, "more exists only on the former"),
        (REORDERED, "the order of parameters differs"),
    ],
    ids=["value", "missing", "additional", "order"],
)
def test_every_rank_is_told_the_first_difference(other, text):
    first, *others = meet(TOLD, TOLD, other)
    assert others == [first] * 2
    assert first.startswith(f"rank 2 and rank 0 were started differently: {text}. Every rank must")


def test_a_rank_that_fails_gets_its_error_and_the_others_hear_of_it():
    sent = []

    def gather(mine):
        sent.append(mine)
        return [TOLD, mine]

    with pytest.raises(ConfigError, match="no such thing"):
        agree({}, ConfigError("no such thing"), gather, "grace.make")
    with pytest.raises(MismatchError, match=r"^grace\.make failed on rank 1: ConfigError: no such thing$"):
        agree(TOLD, None, lambda mine: [mine, *sent], "grace.make")


def test_an_error_while_a_rank_prepares_is_told_to_the_others():
    sent = []
    with (
        pytest.raises(ConfigError, match="no such thing"),
        Handshake(lambda mine: [TOLD, sent.append(mine) or mine], "grace.make") as handshake,
    ):
        raise ConfigError("no such thing")
    assert sent == [{"error": "ConfigError: no such thing"}]
    assert handshake.everyone == []
    with Handshake(lambda mine: [TOLD, mine], "grace.make") as handshake:
        handshake.local = {**TOLD, "of this rank": 1}
    assert handshake.everyone == [TOLD, {**TOLD, "of this rank": 1}]
