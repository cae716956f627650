"""torch.distributed.checkpoint, and other numbers of ranks, in real processes."""

from __future__ import annotations

import pytest

from tests.support.launch import TORCH, Launch
from tests.support.ranks import on, same, scenario

pytestmark = pytest.mark.distributed


@on(Launch(TORCH, "torchrun", 4))
def test_a_distributed_checkpoint_is_loaded_on_any_number_of_ranks(launch):
    ranks = scenario("distributed_checkpoint", launch)
    plain = {"4 to 4": 4, "4 to 2": 2, "4 to 3": 3, "2 to 4": 4}
    for name, members in {**plain, "4 to 4, outer": 4, "4 to 3, outer": 3, "2 to 4, outer": 4}.items():
        found = [rank[name] for rank in ranks if name in rank]
        assert len(found) == members
        for one in found:
            # As from a list of files; and the replicas stay equal.
            assert one["same"], name
            assert one["step"] == (3 if name in plain else 1)
            before, after = one["held"]
            assert before == pytest.approx(after, rel=1e-3)
            assert abs(before) > 0.01
        assert same([one["ends"] for one in found])
        assert found[0]["ends"][0] == found[0]["ends"][1]
    for rank in ranks:
        for name in ("4 to 4", "4 to 4, outer"):
            assert rank[name]["went on"] == rank[name]["ends"][0]
        assert "of an exchange at the key 'grace', received none" in rank["elsewhere"]
