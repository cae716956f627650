"""A cell of the study: its run, what it changes of a task's settings, and its file."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
import types

import pytest

import grace
from grace.core.config.registry import compressors, memories
from grace.report import cell as module
from grace.report.cell import CLOSE, FACTORS, TRIES, Cell, read, train, write
from grace.report.methods import BASELINES, DENSE, EQUAL, Method, chosen, methods
from grace.report.task import MODULES, find_task, tasks
from grace.report.tasks import factorization

STEPS = 10


def make(label=DENSE, *, ranks=2, seed=0, steps=STEPS):
    method = next(method for method in reversed(chosen([label])) if method.label == label)
    return Cell("mf", method, ranks, seed, steps)


def without_times(found):
    return {key: value for key, value in found.items() if not key.endswith("seconds")}


@pytest.fixture
def tried(monkeypatch):
    """Return the settings of all runs that begin, by the arguments of `Task.start`."""
    monkeypatch.setattr(module, "_losses", {})
    monkeypatch.setattr(module, "_sent", {})
    task, given = find_task("mf"), []
    start = type(task).start

    def watched(self, seed, ranks, **settings):
        given.append({"seed": seed, "ranks": ranks, **settings})
        return start(self, seed, ranks, **settings)

    monkeypatch.setattr(type(task), "start", watched)
    return given


def test_the_code_of_a_method_from_outside_grace_is_part_of_its_setting(tmp_path, monkeypatch):
    """One edits it between two starts of `grace report`."""
    own = types.ModuleType("own_method")
    own.__file__ = str(tmp_path / "own_method.py")
    monkeypatch.setitem(sys.modules, "own_method", own)
    made = make("topk").method.made.method
    assert module._own(made) == ""
    assert "own" not in make("topk").setting()
    changed = dataclasses.replace(made, compressor=type("Own", (), {"__module__": "own_method"})())
    (tmp_path / "own_method.py").write_text("x = 1\n")
    before = module._own(changed)
    assert len(before) == 12
    (tmp_path / "own_method.py").write_text("x = 2\n")
    assert module._own(changed) not in ("", before)


def test_equal_cells_have_equal_results_but_for_times():
    found = train(make("topk"))
    assert without_times(found) == without_times(train(make("topk")))
    assert found["seconds"] > 0
    assert found["exchange_seconds"] > 0
    assert found["compute_seconds"] > 0
    assert without_times(found) != without_times(train(make("topk", seed=1)))


def test_the_times_of_a_step_leave_out_what_the_process_waits(monkeypatch):
    waits = 0.02
    for owner, name in ((factorization.Ratings, "gradients"), (grace.Simulation, "step")):
        inner = getattr(owner, name)

        def late(*args, inner=inner, **more):
            time.sleep(waits)
            return inner(*args, **more)

        monkeypatch.setattr(owner, name, late)
    found = train(make(steps=5))
    assert found["seconds"] > 5 * 3 * waits
    assert 0 < found["compute_seconds"] < waits / 2
    assert 0 < found["exchange_seconds"] < waits / 4


def test_a_result_has_the_losses_of_the_run_and_its_bytes():
    found = train(make("topk", steps=25))
    points = [0, 2, 5, 8, 10, 12, 15, 18, 20, 22, 25]
    assert [step for step, _, _ in found["curve"]] == points
    assert found["curve"][-1] == [25, found["loss"], found["quality"]]
    # In this task, the loss is the quality.
    assert all(loss == quality <= found["curve"][0][1] for _, loss, quality in found["curve"])
    # Early on, each step leaves more for later ones than it sends of them.
    assert [step for step, _ in found["errors"]] == points[1:]
    assert found["errors"][0][1] < found["errors"][1][1]
    assert not found["diverged"]
    # 8 bytes for each of 56 elements, and the header.
    assert 448 <= found["bytes"] < 480
    assert found["dense_bytes"] == 4 * (400 + 300) * 8
    assert found["collectives"] == {"allreduce": 0, "allgather": found["bytes"], "alltoall": 0, "broadcast": 0}
    assert found["sends"] == {"allreduce": 0, "allgather": 1, "alltoall": 0, "broadcast": 0}
    assert found["setting"]["communicator"] == "allgather"
    assert found["setting"]["config"]["compressor"] == {"name": "topk", "compress_ratio": 0.01}


@pytest.mark.parametrize(
    ("label", "ranks", "sends"),
    [
        ("none", 2, {"allreduce": 1}),
        ("powersgd", 2, {"allreduce": 2}),
        # Sums of 16 bits are made of slices.
        ("bf16", 4, {"alltoall": 1, "allgather": 1}),
        ("topk two_shot", 4, {"alltoall": 1, "allgather": 1}),
        ("none", 1, {}),
    ],
)
def test_a_result_has_the_number_of_collectives_of_a_step(label, ranks, sends):
    found = train(make(label, ranks=ranks, steps=5))
    assert {kind: number for kind, number in found["sends"].items() if number} == sends


def test_a_rank_sends_in_one_of_the_broadcasts_of_a_step():
    method = Method("topk", {"compressor": "topk", "communicator": "broadcast"})
    found = train(Cell("mf", method, 4, 0, 5))
    assert found["sends"] == {"allreduce": 0, "allgather": 0, "alltoall": 0, "broadcast": 1}


def test_outer_steps_train_a_copy_of_each_rank():
    """The mean of the weights after each step is the step with the mean gradient."""
    dense, every = train(make(steps=20)), train(make("none:outer=update", steps=20))
    for (step, loss, _), (other, same, _) in zip(dense["curve"], every["curve"], strict=True):
        assert step == other
        assert same == pytest.approx(loss, rel=1e-4)
    assert every["bytes"] == pytest.approx(dense["bytes"])
    rare = train(make('none:outer={"every":5}', steps=20))
    assert rare["bytes"] == pytest.approx(dense["bytes"] / 5)
    assert rare["sends"]["allreduce"] == 1 / 5
    assert rare["loss"] != pytest.approx(dense["loss"], rel=1e-4)


def test_a_look_at_the_common_weights_leaves_those_of_the_rank(monkeypatch):
    """In the middle of a period, the losses are those of the last sync, and the run goes on."""
    label = 'none:outer={"every":10}'
    often = train(make(label, steps=20))
    monkeypatch.setattr(module, "POINTS", 2)
    seldom = train(make(label, steps=20))
    losses = {step: loss for step, loss, _ in often["curve"]}
    assert losses[8] == losses[0]
    assert losses[12] == losses[10] != losses[20]
    assert [(step, loss) for step, loss, _ in seldom["curve"]] == [(step, losses[step]) for step in (0, 10, 20)]


def test_the_errors_are_those_of_error_feedback(monkeypatch):
    kept = [3.0, 5.0]

    class Simulation:
        size, track_norms = 2, False

        def scalars(self, rank):
            return {"grace/residual_norm": kept[rank]} if self.track_norms else {}

    assert module._error(simulation := Simulation()) == [pytest.approx(17**0.5)]
    assert not simulation.track_norms
    kept[1] = float("nan")
    assert module._error(simulation) == []
    assert train(make("topk, no feedback"))["errors"] == []


def test_where_ranks_vote_the_learning_rate_is_tuned_with_seed_0(tried):
    found, lr = train(make("signsgd", seed=1, steps=50)), find_task("mf").lr
    short, whole, last = tried[: len(FACTORS)], tried[len(FACTORS) : -1], tried[-1]
    assert [(run["lr"], run["steps"], run["seed"]) for run in short] == [(lr * f, 10, 0) for f in FACTORS]
    assert [(run["steps"], run["seed"]) for run in whole] == [(50, 0)] * 2
    assert [run["lr"] for run in whole] == [rate for rate, _ in found["tried"]]
    assert found["lr"] == min(found["tried"], key=lambda pair: pair[1])[0] == last["lr"]
    assert (last["steps"], last["seed"]) == (50, 1)
    assert not found["diverged"]
    # The same runs serve another seed.
    train(make("signsgd", seed=2, steps=50))
    assert len(tried) == len(short) + len(whole) + 2


def test_for_equal_bytes_the_threshold_is_chosen_with_seed_0(tried):
    found, same = train(make(EQUAL, seed=1, steps=50)), train(make("topk", steps=50))["bytes"]
    assert [run["seed"] for run in tried[:-2]] == [0] * (len(tried) - 2)
    tried[-2:] = []
    shorter = [run["steps"] for run in tried].index(50)
    # The first run tells what the other method sends.
    assert [run["steps"] for run in tried] == [1] + [10] * (shorter - 1) + [50] * (len(tried) - shorter)
    assert len(found["tried"]) == len(tried) - shorter < TRIES
    threshold, nbytes = found["tried"][-1]
    assert found["threshold"] == threshold
    assert 1 / CLOSE <= nbytes / same <= CLOSE
    assert 1 / 1.25 < found["bytes"] / same < 1.25
    assert found["setting"]["equal"] == "topk"
    # The same runs serve another seed, but for the first.
    count = len(tried)
    assert train(make(EQUAL, seed=2, steps=50))["threshold"] == threshold
    assert len(tried) == count + 2


def test_of_no_equal_bytes_the_closest_count(tried, monkeypatch):
    monkeypatch.setattr(module, "TRIES", 2)
    monkeypatch.setattr(module, "CLOSE", 1.0)
    found = train(make(EQUAL, steps=50))
    same = train(make("topk", steps=50))["bytes"]
    assert found["threshold"] == min(found["tried"], key=lambda pair: abs(math.log(pair[1] / same)))[0]
    assert len(found["tried"]) == 2


def test_other_methods_have_the_learning_rate_of_the_task_and_run_once(tried):
    assert train(make("efsignsgd"))["lr"] == find_task("mf").lr
    assert tried == [{"seed": 0, "ranks": 2, "steps": STEPS, "lr": 1.5, "momentum": 0.9}]


@pytest.mark.parametrize("name", ["dgc", "signum"])
def test_a_memory_with_momentum_leaves_the_optimizer_none(tried, name):
    assert "no_momentum" in memories.make(compressors.example(name).default_memory).needs
    assert train(make(name))["setting"]["momentum"] == 0
    assert {run["momentum"] for run in tried} == {0}


def test_a_run_that_diverges_ends_early_and_has_no_loss(monkeypatch):
    monkeypatch.setattr(type(find_task("mf")), "lr", 1000.0)
    found = train(make(steps=100))
    assert found["diverged"]
    assert found["loss"] is found["quality"] is None
    assert len(found["curve"]) < 11
    # Other programs than Python know no NaN.
    json.loads(json.dumps(found), parse_constant=pytest.fail)


def test_a_run_that_ends_above_its_first_loss_has_diverged():
    found = train(make("onebit, no feedback", ranks=4, steps=100))
    assert found["curve"][0][1] < found["loss"]
    assert found["diverged"]


def test_a_result_is_read_again_if_its_file_is_whole(tmp_path):
    cell = make("topk")
    assert read(cell, tmp_path) is None
    write(found := train(cell), tmp_path / cell.file)
    assert read(cell, tmp_path) == found
    assert [path.name for path in tmp_path.iterdir()] == [cell.file]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"cell": 1}', "\0"])
def test_a_damaged_file_is_no_result(tmp_path, text):
    (tmp_path / make().file).write_text(text)
    assert read(make(), tmp_path) is None


def test_a_file_that_was_cut_is_no_result(tmp_path):
    cell = make()
    write(train(cell), path := tmp_path / cell.file)
    whole = path.read_text()
    for end in range(0, len(whole) - 2, 97):
        path.write_text(whole[:end])
        assert read(cell, tmp_path) is None


def test_a_file_without_a_key_is_no_result(tmp_path):
    cell = make()
    found = train(cell)
    for key in found:
        write({name: value for name, value in found.items() if name != key}, tmp_path / cell.file)
        assert read(cell, tmp_path) is None, key


@pytest.mark.parametrize("changed", ["lr", "momentum", "batch", "method", "steps", "auto"])
def test_the_result_of_another_setting_is_none_of_the_cell(tmp_path, monkeypatch, changed):
    cell = make("topk")
    write(train(cell), tmp_path / cell.file)
    if changed == "method":
        cell = Cell("mf", Method("topk", {"compressor": "topk", "compress_ratio": 0.02}), 2, 0, STEPS)
    elif changed == "steps":
        cell = make("topk", steps=STEPS + 1)
    elif changed == "auto":
        monkeypatch.setattr(module.communicators, "name_of", lambda _: "two_shot")
    else:
        monkeypatch.setattr(type(find_task("mf")), changed, 0.5)
    assert (tmp_path / cell.file).exists()
    assert read(cell, tmp_path) is None


def test_a_run_on_data_of_a_folder_says_so_and_mixes_with_no_other(tmp_path):
    pytest.importorskip("pandas")
    models = pytest.importorskip("grace.report.models", reason="they are PyTorch's", exc_type=ImportError)
    rows = [f"{user},{item},3.5,{item}" for user in (1, 2, 3) for item in range(user, 300, 10)]
    path = tmp_path / "ratings.csv"
    path.write_text("\n".join(["userId,movieId,rating,timestamp", *rows]))
    own = Cell("ncf", methods()[DENSE], 2, 0, 2)
    cell = dataclasses.replace(own, data=tmp_path)
    found = train(cell)
    assert found["setting"]["data"] == f"MovieLens-20M ({path.stat().st_size:,} bytes)"
    # The paper's model, for 3 users and 90 items.
    assert found["dense_bytes"] == 4 * sum(p.numel() for p in models.Ncf(3, 90).parameters())
    assert own.setting()["data"] == "built in"
    assert own.file != cell.file
    write(found, tmp_path / cell.file)
    assert read(cell, tmp_path) == found
    write(found, tmp_path / own.file)
    assert read(own, tmp_path) is None
    path.write_text(path.read_text() + "\n3,1,1.0,400")
    assert read(cell, tmp_path) is None


def test_cells_have_files_of_their_own():
    labels = [*methods(), "a b", "a_b", "a  b", "A b"]
    cells = [
        Cell("mf", Method(label, {"compressor": "none"}), r, s, 1) for label in labels for r in (2, 4) for s in (0, 1)
    ]
    names = {cell.file for cell in cells}
    assert len(names) == len(cells)
    assert not [name for name in names if set(name) & set(' /\\:*?"<>|,%=')]


def test_every_task_is_registered_by_the_module_that_is_named():
    for name in MODULES:
        pytest.importorskip("torch") if name != "mf" else None
        assert find_task(name).name == name
    assert tasks.keys() == MODULES.keys()


def test_every_method_of_the_study_has_a_configuration_that_fits():
    found = methods()
    assert next(iter(found)) == DENSE
    for label, method in found.items():
        assert label == method.label
        assert method.made.method.compressor
    switched = [method for method in found.values() if method.switched]
    for method in switched:
        usual = found[method.switched].made.method
        assert bool(method.made.method.memory.feeds_back) != bool(usual.memory.feeds_back), method.label
        assert method.made.method.compressor == usual.compressor
    assert {"qsgd, feedback", "topk, no feedback"} <= {method.label for method in switched}
    assert not {method.switched for method in switched} & {"none", "signsgd", "signum"}


def test_methods_are_chosen_by_label_or_with_options():
    assert [method.label for method in chosen(["topk 10 %", "qsgd"])] == [*BASELINES, "topk 10 %", "qsgd"]
    (*_, own) = chosen(["qsgd:quantum_num=7"])
    assert own == Method("qsgd:quantum_num=7", {"quantum_num": 7, "compressor": "qsgd"})
    assert [method.label for method in chosen(["none"])] == [*BASELINES]
    assert [method.label for method in chosen(None)] == list(methods())
