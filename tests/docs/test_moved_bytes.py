"""The table of bytes over the number of ranks: what it says is what simulated ranks send."""

from __future__ import annotations

import importlib.util
import json
from typing import get_args, get_type_hints

import pytest

from grace.core.communicators.auto import _obstacle
from grace.core.communicators.sparse_allreduce import SparseAllreduce
from grace.core.communicators.two_shot import TwoShot
from grace.core.config.config import make_config
from grace.core.config.registry import communicators, compressors
from tests.support.covering import ALL
from tests.support.launch import ROOT

spec = importlib.util.spec_from_file_location("moved_bytes", ROOT / "benchmarks/moved_bytes.py")
moved_bytes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(moved_bytes)

FOUND = json.loads((ROOT / "docs/results/moved_bytes.json").read_text(encoding="utf-8"))
OVER_STEPS = {
    row["method"]: row
    for row in json.loads((ROOT / "docs/results/bytes_by_data.json").read_text(encoding="utf-8"))["rows"]
}
BY_METHOD: dict[str, dict[str, dict]] = {}
for row in FOUND:
    BY_METHOD.setdefault(row["method"], {})[row["communicator"]] = row
# It sends only headers in the first step, and more in the second shot.
OTHERS = {"variance"}


def cells():
    """Return what to count again: a program and a number of ranks for each method, by turns; all under `--all`."""
    known = [(r["method"], r["communicator"], int(n)) for r in FOUND for n, sent in r["bytes"].items() if sent]
    if ALL:
        return known
    chosen = [("qsgd", "two_shot", 16), ("qsgd", "hierarchical", 16), ("topk", "sparse_allreduce, tree", 16)]
    for i, name in enumerate(BY_METHOD):
        programs = list(BY_METHOD[name])
        few = [cell for cell in known if cell[:2] == (name, programs[i % len(programs)]) and cell[2] <= 8]
        chosen.append(few[0] if name in moved_bytes.FEWER_STEPS else few[i % len(few)])
    return chosen


def test_every_method_and_every_program_is_in_it():
    assert set(BY_METHOD) == {name for name, _ in compressors.ready()}
    configured = moved_bytes.PROGRAMS.values()
    assert {program["name"] for program in configured} == set(communicators) - {"auto"}
    reductions = get_args(get_type_hints(SparseAllreduce)["reduction"])
    assert {program.get("reduction", "split") for program in configured} == set(reductions)
    for name, programs in BY_METHOD.items():
        assert set(programs) == {program for program in moved_bytes.PROGRAMS if moved_bytes.fits(name, program, 8)}
    assert {program for _, program, _ in cells()} == set(moved_bytes.PROGRAMS)


@pytest.mark.parametrize(("name", "communicator", "size"), cells())
def test_it_says_what_ranks_send(name, communicator, size):
    row = BY_METHOD[name][communicator]
    assert row["bytes"][str(size)] == pytest.approx(moved_bytes.measure_bytes(name, communicator, size), rel=0.01)
    assert (size in row["auto"]) == (moved_bytes.find_choice_of_auto(name, size) == communicator)


def test_methods_whose_bytes_depend_on_the_data_have_more_steps():
    assert list(OVER_STEPS) == moved_bytes.list_data_dependent()


@pytest.mark.parametrize(("name", "size"), [("adaptive", 4), ("gradiveq", 2), ("variance", 4), ("atomo", 2)])
def test_more_steps_say_what_ranks_send(name, size):
    assert OVER_STEPS[name][str(size)] == pytest.approx(moved_bytes.measure_mean_bytes(name, size), rel=0.01)


@pytest.mark.parametrize("name", sorted(set(BY_METHOD) - OTHERS))
def test_auto_moves_the_fewest_bytes(name):
    """Of the programs that lose next to nothing: on two ranks, two_shot would compress twice for a few bytes."""
    plain = {"allreduce", "allgather", "broadcast", "two_shot"}
    if _obstacle(TwoShot(), make_config(compressor=name, **compressors.required(name)).method):
        plain.remove("two_shot")
    for size in (4, 8, 16, 64):
        sent = {program: row["bytes"][str(size)] for program, row in BY_METHOD[name].items() if program in plain}
        (taken,) = (program for program, row in BY_METHOD[name].items() if size in row["auto"])
        sent[taken] = BY_METHOD[name][taken]["bytes"][str(size)]
        assert sent[taken][0] <= 1.01 * min(x for (x,) in filter(None, sent.values())), size
