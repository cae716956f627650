"""Optimizers and methods that are known to train badly together."""

from __future__ import annotations

import pytest

from tests.support.launch import TORCH, Launch
from tests.support.ranks import on, scenario

pytestmark = pytest.mark.distributed

HOROVOD = Launch(TORCH, "horovodrun-gloo", 2)
TWO, THREE, FOUR = (Launch(TORCH, "torchrun", ranks) for ranks in (2, 3, 4))


@pytest.mark.slow
@on(HOROVOD, TWO, THREE, FOUR)
def test_a_poor_pair_is_told_once_by_the_first_rank(launch):
    first, *others = scenario("told_of_pairs", launch)
    for way, (wrapped, stepped, topk, qsgd, later) in first.items():
        assert not qsgd, way
        assert not later, way
        if way.endswith("sgd"):
            assert not wrapped + stepped + topk, way
            continue
        # A registered model learns of its optimizer in the first step.
        (told,) = wrapped + stepped
        assert bool(wrapped) == (way == "optimizer, adam"), way
        assert told.startswith("AdamW trains badly with gradients from EFSignSGD"), way
        (told,) = topk
        assert told.startswith("AdamW trains badly with gradients from TopK(compress_ratio=0.01)"), way
    assert not any(told for other in others for rounds in other.values() for told in rounds)
