"""Ranks that contribute nothing to a step, or to a sync of outer steps: what they send, and what they keep."""

import copy

import numpy as np
import pytest

import grace
from grace.core.config.config import Method
from grace.core.config.registry import communicators, compressors, memories
from grace.core.errors import ConfigError, IncompatibleError
from grace.core.session.simulation import poll_all
from grace.testing.harness import FRAMEWORKS, array, host
from tests.core.test_outer_steps import NONE, SHAPES, Training, assert_close, draw, held_back
from tests.support import steps

HEADER = 16
SHAPE = (48, 20)
# Of 2, 3 and 4 ranks, those that are out.
OUT = {2: [0], 3: [1], 4: [0, 2]}
SPARSE = [f"sparse_allreduce, {reduction}" for reduction in ("union", "split", "tree")]


def communicator_of(name):
    name, _, reduction = name.partition(", ")
    return communicators.make({"name": name, **({"reduction": reduction} if reduction else {})})


def made(compressor, communicator, ranks):
    method = Method(compressor, memories.make("none"), communicator_of(communicator))
    return grace.Simulation(ranks, {"w": SHAPE}, steps.config(method))


def exchanged(sim, gradients, out=()):
    """Let all ranks take a step; return the merged gradients of the first one, and the bits of all."""
    absent = [rank in out for rank in range(sim.size)]
    ops = sim.run.ops("cpu")
    for rank, run in enumerate(sim.runs):
        run.current.leave_out(absent if out else (), out=absent[rank])
        run.current.ready("w", ops.reshape(array(ops, gradients[rank], "float32"), SHAPE))
    poll_all(sim.runs)
    for run, outcome in [(run, run.current.finish()) for run in sim.runs]:
        run.commit(outcome)
        yield host(ops, outcome.merged["w"])


def served(communicator, ranks):
    """Yield the compressors that a communicator carries without a memory, by name, but for votes."""
    for name in compressors:
        compressor = compressors.example(name)
        try:
            sim = made(compressor, communicator, ranks)
        except (ConfigError, IncompatibleError):
            continue
        if compressor.averages and not sim.run.plan.delegated and not sim.run.plan.assignments[0].dense:
            yield name, compressor


@pytest.mark.parametrize("ranks", list(OUT))
@pytest.mark.parametrize("communicator", ["allgather", "two_shot", "broadcast", *SPARSE])
def test_who_is_out_sends_a_header_with_every_method_and_changes_no_bit(communicator, ranks):
    """The result is that of ranks that send zeros in full."""
    names = []
    for name, compressor in served(communicator, ranks):
        names.append(name)
        there, full = (made(compressor, communicator, ranks) for _ in "ab")
        for step in range(3):
            given = [draw(SHAPE, step, rank) * (rank not in OUT[ranks]) for rank in range(ranks)]
            found, expected = list(exchanged(there, given, OUT[ranks])), list(exchanged(full, given))
            assert len({x.tobytes() for x in found}) == 1, name
            # Of the other sums, fewer come back if the ranks send fewer entries on average.
            if communicator not in SPARSE[1:]:
                assert found[0].tobytes() == expected[0].tobytes(), name
        for rank in range(ranks):
            sent, zeros = there.stats(rank), full.stats(rank)
            if rank not in OUT[ranks]:
                assert sent["wire_bytes"] == zeros["wire_bytes"] or communicator in SPARSE, name
                continue
            (unit, *_), moved = there.run.plan.units, sent["collectives"]
            negotiated = sum(each.negotiated_bytes for each in there.run.plan.units)
            if communicator == "two_shot":
                assert moved["alltoall"] == HEADER * (ranks - 1), name
            elif communicator in SPARSE:
                assert sent["tensors"]["w"]["wire_bytes"] == 0, name
            else:
                assert moved == {**dict.fromkeys(moved, 0), communicator: HEADER, "allreduce": negotiated}, name
                assert sent["tensors"]["w"]["wire_bytes"] == unit.negotiated_bytes, name
    assert len(names) > (3 if communicator in SPARSE else 20), names


@steps.each(
    framework=FRAMEWORKS,
    options={
        "plain": {},
        "checksum": {"checksum": True},
        "rans": {"coding": "rans"},
        "golomb": {"index_coding": "golomb"},
    },
)
def test_headers_of_checksums_and_codings(framework, options):
    config = {"compressor": "topk", "compress_ratio": 0.1, "default_rules": False, "communicator": "allgather"}
    if "coding" in options:
        config["compressor"] = "qsgd"
        del config["compress_ratio"]
    outer = {"every": 1, "participation": 0.4}
    plain, training = (Training(outer, {**config, **more}, 4, framework) for more in ({}, options))
    for _ in range(5):
        inside = [training.sim.stats(rank)["outer"]["participates"] for rank in range(4)]
        for each in (plain, training):
            each.step()
        assert [training.sim.stats(rank)["wire_bytes"] == HEADER for rank in range(4)] == [not x for x in inside]
        assert training.equal_tensors() == set(SHAPES)
    assert all(x.tobytes() == training.values()[name].tobytes() for name, x in plain.values().items())


def test_between_nodes_a_node_sends_what_its_ranks_contribute():
    """Within a node, who is out sends a header. The residual of the node belongs to the owner, and goes on."""
    config = {"compressor": "topk", "compress_ratio": 0.1, "default_rules": False}
    hierarchical = {"name": "hierarchical", "local_size": 2, "between": "allgather"}
    training = Training({"every": 1, "participation": 0.25}, {**config, "communicator": hierarchical}, 4)
    full = Training({"every": 1}, {**config, "communicator": hierarchical}, 4)
    for each in (training, full):
        each.step(3)
    (inside,) = (r for r in range(4) if training.sim.stats(r)["wire_bytes"] == full.sim.stats(r)["wire_bytes"])
    assert training.equal_tensors() == set(SHAPES)
    for rank in set(range(4)) - {inside}:
        sent, usual = (each.sim.stats(rank)["collectives"]["alltoall"] for each in (training, full))
        # At least a fifth of the model is a shard of the other rank.
        assert HEADER < sent < usual - 4 * sum(map(int, map(np.prod, SHAPES.values()))) // 5


def behind(training):
    """Return the mean of what all ranks hold back, and of what owners hold back of means."""
    each = held_back(training)
    found = {name: sum(own[name] for own in each) / training.ranks for name in SHAPES}
    for run in training.sim.runs:
        for unit in run.plan.units:
            residual = unit.onward and run.units.get(unit.onward.spec.name, {}).get("memory", {}).get("residual")
            at = 0
            for piece in unit.pieces if residual is not None else ():
                part = host(training.ops, residual)[at : at + piece.numel]
                found[piece.tensor].reshape(-1)[piece.start : piece.stop] += part
                at += piece.numel
    return found


@steps.each(
    framework=FRAMEWORKS,
    communicator=["allgather", "two_shot", "sparse_allreduce"],
    outer={"at once": {}, "delayed": {"delay": 1}, "after a warm-up": {"delay": 1, "warmup": 2}},
)
def test_what_is_held_back_and_what_was_sent_is_what_those_inside_have_moved(framework, communicator, outer):
    """A rank that is out keeps the residual. An owner goes on with what a mean lacks, also if it is out itself."""
    config = {"compressor": "topk", "compress_ratio": 0.1, "default_rules": False, "granularity": "layer"}
    outer = {"every": 2, "participation": 0.5, **outer}
    training = Training(outer, {**config, "communicator": communicator}, ranks=3, framework=framework)
    warmup, delay = outer.get("warmup", 0), outer.get("delay", 0)
    moved, common, drawn = {name: np.zeros(shape) for name, shape in SHAPES.items()}, training.start, []
    for step in range(1, 15):
        inside = [rank for rank in range(3) if training.sim.stats(rank)["outer"]["participates"]]
        own = [
            {n: training.inner(rank, n, x, training.steps) for n, x in training.values(rank).items()}
            for rank in range(3)
        ]
        training.step()
        if step % 2 == 0 or step <= warmup:
            drawn.append(tuple(inside))
            for name in SHAPES:
                moved[name] += sum(common[name] - own[rank][name].astype(np.float64) for rank in inside) / len(inside)
        applied = step <= warmup or (step > warmup + delay and (step - delay) % 2 == 0)
        assert (training.equal_tensors() == set(SHAPES)) == applied
        if applied:
            common, held = training.values(), behind(training)
            for name, x in common.items():
                np.testing.assert_allclose(training.start[name] - x, moved[name] - held[name], rtol=0, atol=2e-5)
    assert all(len(inside) == 2 for inside in drawn[warmup:])
    assert all(len(inside) == 3 for inside in drawn[:warmup])
    assert len(set(drawn[warmup:])) > 1


CARRIERS = ["allgather", "broadcast", "two_shot", "sparse_allreduce"]


@steps.each(
    lambda row: row["communicator"] != "sparse_allreduce" or row["method"] == "topk",
    framework=FRAMEWORKS,
    method={
        "topk": {"compressor": "topk", "compress_ratio": 0.5},
        "signs": {"compressor": "efsignsgd", "memory": "residual"},
    },
    communicator=CARRIERS,
)
def test_who_is_irrelevant_sends_a_header_and_keeps_the_residual(framework, method, communicator):
    """Each rank decides itself whether it contributes; what travels is as with ranks that a draw leaves out."""
    # Half of a mean of the largest elements is zero, and of what owners compress again even more.
    bound = 0.5 if "compress_ratio" not in method else 0.2 if communicator == "two_shot" else 0.4
    config = {**method, "default_rules": False, "communicator": communicator}
    training = Training({"every": 1, "relevance": bound}, config, 3, framework, shapes={"w": (16, 6)})
    counts = set()
    for step in range(24):
        values, held = [training.values(rank)["w"].astype(np.float64) for rank in range(3)], residuals_of(training)
        own = [training.inner(rank, "w", values[rank].astype(np.float32), step) for rank in range(3)]
        training.step()
        shares = [training.sim.stats(rank)["outer"]["relevance"] for rank in range(3)]
        inside = [rank for rank in range(3) if shares[rank] is None or shares[rank] >= bound]
        counts.add(len(inside))
        now, left = training.values()["w"].astype(np.float64), residuals_of(training)
        assert all(training.values(rank)["w"].tobytes() == training.values()["w"].tobytes() for rank in range(3))
        for rank in set(range(3)) - set(inside):
            stats = training.sim.stats(rank)
            sent = stats["collectives"]
            if communicator == "two_shot":
                assert sent["alltoall"] == 2 * HEADER
            elif communicator == "sparse_allreduce":
                assert stats["tensors"]["w"]["wire_bytes"] == 0
            else:
                assert sent == {**dict.fromkeys(sent, 0), communicator: HEADER}
            assert left[rank].tobytes() == held[rank].tobytes()
        if communicator in ("allgather", "broadcast"):
            moved = [values[rank] - own[rank] + (held[rank] - left[rank]).reshape(16, 6) for rank in inside]
            np.testing.assert_allclose(values[0] - now, sum(moved) / max(len(inside), 1), rtol=0, atol=2e-5)
    assert len(counts) > 2


def residuals_of(training):
    """Return what each rank holds back of the one tensor."""
    return [host(training.ops, run.memories()["w"]["residual"]).copy() for run in training.sim.runs]


@pytest.mark.parametrize("after", [2, 3, 5])
def test_other_ranks_go_on_with_what_those_inside_have_contributed(after):
    """A pending exchange of 4 ranks, of which 2 have contributed, is applied on another number: with the same mean."""
    outer = {"every": 3, "delay": 2, "participation": 0.5}
    training, other = Training(outer, NONE, 4), Training(outer, NONE, after)
    training.step(4)
    states = copy.deepcopy(training.sim.state_dict()["ranks"])
    assert not other.sim.load_state_dict(states)
    again = Training(outer, NONE, after)
    assert not again.sim.load_state_dict(states)
    for each in (other, again):
        each.weights, each.steps = [dict(training.weights[0]) for _ in range(after)], 4
    # The pending exchange of other ranks is saved and loaded, too.
    assert again.sim.load_state_dict(copy.deepcopy(other.sim.state_dict()))
    for each in (training, other, again):
        each.step()
        assert each.equal_tensors() == set(SHAPES)
    assert_close(other.values(), training.values(), 1e-5)
    assert all(x.tobytes() == again.values()[name].tobytes() for name, x in other.values().items())
    # The next sync is drawn among the ranks that there are now.
    inside = [other.sim.stats(rank)["outer"]["participates"] for rank in range(after)]
    assert inside.count(True) == -(-after // 2)
