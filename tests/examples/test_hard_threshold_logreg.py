"""The example hard_threshold_logreg.py at small size: the paper's claims, its algorithm, and the same run with MPI."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.special import expit
from sklearn.datasets import dump_svmlight_file

from tests.support.launch import ROOT, command

# The runs of the example take long, and use nothing of grace that other tests do not.
pytestmark = [pytest.mark.slow, pytest.mark.first]
SCRIPT = ROOT / "examples" / "hard_threshold_logreg.py"
WORKERS, FEATURES = 10, 200


@pytest.fixture(scope="module")
def logreg():
    spec = importlib.util.spec_from_file_location("hard_threshold_logreg", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def outcome(logreg):
    """Return the problem and the runs of both splits: no compression, top-2, threshold 4.2, and equal volume."""
    args = logreg.parse_arguments(["--quick", "--match", "--workers", str(WORKERS)])
    return logreg.run(args, logreg.Simulated(WORKERS))


@pytest.fixture(scope="module")
def runs(outcome):
    """Return the runs by split."""
    problem, results = outcome
    assert problem.samples.shape == (400, FEATURES)
    return {how: [result for result in results if result.split == how] for how in ("iid", "sorted")}


def test_the_problem_is_that_of_the_paper(outcome):
    problem, _ = outcome
    assert problem.smoothness == pytest.approx(np.linalg.norm(problem.samples, 2) ** 2 / (4 * 400), rel=1e-9)
    assert problem.l2 == problem.smoothness / 1e4
    assert problem.step_size == 1 / (problem.smoothness + problem.l2)
    margins = problem.labels * (problem.samples @ problem.solution)
    slopes = -problem.labels / (1 + np.exp(margins))
    gradient = problem.samples.T @ slopes / 400 + problem.l2 * problem.solution
    assert np.abs(gradient).max() < 1e-4
    loss = np.log1p(np.exp(-margins)).mean() + problem.l2 / 2 * np.sum(problem.solution**2)
    assert problem.minimum == pytest.approx(loss, rel=1e-12)
    assert problem.losses(np.stack([problem.solution, 0 * problem.solution])) == pytest.approx([loss, np.log(2)])


def test_made_data_resemble_gisette(logreg):
    samples, labels = logreg.make_data(1000, 300, seed=3)
    assert samples.min() == -1
    assert samples.max() <= 1
    assert 0.7 < (samples == -1).mean() < 0.9
    assert labels.sum() == 0
    # Probes do not depend on the label; the original pixels do.
    difference = np.abs(samples[labels > 0].mean(axis=0) - samples[labels < 0].mean(axis=0))
    assert difference[:150].mean() > 2 * difference[150:].mean()


@pytest.mark.parametrize("how", ["iid", "sorted"])
def test_every_worker_gets_as_many_samples(logreg, how):
    labels = np.where(np.arange(400) % 2 == 0, 1.0, -1.0)
    shards = logreg.split(labels, WORKERS, how, seed=0)
    assert sorted(np.concatenate(shards)) == list(range(400))
    assert {len(shard) for shard in shards} == {40}
    mixed = [len(set(labels[shard])) == 2 for shard in shards]
    assert mixed == [how == "iid"] * WORKERS


def test_every_sample_is_drawn_once_per_epoch(logreg):
    drawn = logreg.draw(np.arange(7) + 5, 17, (0, 3))
    assert [sorted(drawn[i : i + 7]) for i in (0, 7)] == [list(range(5, 12))] * 2
    assert len(set(drawn[14:])) == 3


@pytest.mark.parametrize("how", ["iid", "sorted"])
def test_errors_of_hard_threshold_are_bounded_at_every_step_and_worker(logreg, runs, how):
    _, topk, *hard = runs[how]
    assert len(hard) == 2
    for result in hard:
        threshold = np.float32(result.method.threshold)
        assert result.residuals.shape == (400, WORKERS)
        assert (result.largest <= threshold).all()
        assert (result.residuals <= FEATURES * float(threshold) ** 2).all()
        assert (result.residuals > 0).all()
        assert logreg.within_bound(result, FEATURES) is True
    # The check is not trivial: at equal volume, top-k exceeds the bound.
    assert (topk.residuals.mean(axis=1) > FEATURES * hard[1].method.threshold ** 2).any()
    worse = hard[0].residuals.copy()
    worse[7, 3] = FEATURES * 4.3**2
    assert logreg.within_bound(dataclasses.replace(hard[0], residuals=worse), FEATURES) is False
    assert logreg.within_bound(topk, FEATURES) is None


def test_claims_hold_in_the_small(logreg, outcome):
    problem, results = outcome
    rows = [logreg.summarise(problem, result) for result in results]
    found = logreg.claims(rows)
    assert len(found) == 4
    for label, claim in found.items():
        assert claim["tracks"], (label, claim["tracks_by"])
        assert claim["topk_lags"], (label, claim["topk_lags_by"])
        assert claim["bounded"], (label, claim["bounded_by"])
    assert [claim["topk_diverges"] for claim in found.values()] == [False, False, True, True]
    text = logreg.report(rows, found)
    assert "DOES NOT HOLD" not in text
    assert "it diverges" in text
    topk, matched = rows[1], rows[3]
    assert matched["total_error"] < topk["total_error"] / 5
    assert rows[0]["sent_bytes"] / rows[2]["sent_bytes"] > 15


@pytest.mark.parametrize("how", ["iid", "sorted"])
def test_volume_is_matched(runs, how):
    _, topk, _, matched = runs[how]
    assert topk.kept.min() == topk.kept.max() == 2
    assert matched.kept.sum() == pytest.approx(topk.kept.sum(), rel=0.06)
    assert matched.kept.min() == 0
    assert "volume of top-2" in matched.method.label


@pytest.mark.parametrize("method", ["none", "topk", "threshold"])
def test_runs_are_algorithm_1_of_the_paper(logreg, outcome, method):
    """The runs follow the paper's algorithm: p = e + gamma g, Delta = gamma C(p / gamma), e = p - Delta."""
    problem, _ = outcome
    steps, gamma = 60, problem.step_size
    args = SimpleNamespace(iterations=steps, seed=5, offset=0.1)
    made = {
        "none": logreg.Method("none", {"compressor": "none"}),
        "topk": logreg.Method("topk", {"compressor": "topk", "compress_ratio": 3.5 / FEATURES}),
        "threshold": logreg.hard_threshold(4.2, "threshold"),
    }[method]
    result = logreg.train(problem, made, "iid", logreg.Simulated(4), args)
    shards = logreg.split(problem.labels, 4, "iid", 5)
    drawn = [logreg.draw(shards[worker], steps, (5, worker)) for worker in range(4)]
    x, e = problem.solution + 0.1, np.zeros((4, FEATURES))
    kept = np.zeros((steps, 4))
    gaps = [problem.losses(x[None])[0] - problem.minimum]
    for t in range(steps):
        update = np.zeros(FEATURES)
        for worker in range(4):
            row, label = problem.samples[drawn[worker][t]], problem.labels[drawn[worker][t]]
            p = e[worker] + gamma * (-label * expit(-label * (row @ x)) * row + problem.l2 * x)
            scaled = p / gamma
            mask = {
                "none": np.ones(FEATURES, bool),
                "topk": np.abs(scaled) >= np.sort(np.abs(scaled))[-3],
                "threshold": np.abs(scaled) >= 4.2,
            }[method]
            delta = gamma * np.where(mask, scaled, 0)
            e[worker], update, kept[t, worker] = p - delta, update + delta / 4, mask.sum()
        x = x - update
        gaps.append(problem.losses(x[None])[0] - problem.minimum)
    assert result.recorded.tolist() == list(range(steps + 1))
    assert result.gaps == pytest.approx(gaps, rel=1e-3, abs=1e-5)
    assert (result.kept == kept).mean() > 0.98
    assert gamma**2 * result.residuals[-1] == pytest.approx((e**2).sum(axis=1), rel=1e-2, abs=1e-12)


def test_command_line_with_a_file_of_data(logreg, tmp_path, capsys):
    samples, labels = logreg.make_data(103, 30, seed=1)
    data, figure, table = tmp_path / "small.svm", tmp_path / "figure.png", tmp_path / "table.json"
    dump_svmlight_file(samples, (labels > 0).astype(int), str(data))
    options = ["--iterations", "30", "--workers", "5", "--k", "2", "--output", str(figure), "--json", str(table)]
    assert logreg.main(["--data", str(data), *options]) == 0
    printed = capsys.readouterr().out
    # Samples that do not divide evenly among the workers are left out.
    assert "N = 100, d = 30, 5 workers" in printed
    assert figure.read_bytes().startswith(b"\x89PNG")
    written = json.loads(table.read_text())
    assert [row["method"] for row in written["rows"]] == ["no compression", "top-2", "hard threshold 4.2"] * 2
    read, signs = logreg.read_data(data)
    assert (signs == labels).all()
    assert read == pytest.approx(samples)


@pytest.mark.parametrize(
    "words", [["--iterations", "0"], ["--threshold", "-1"], ["--mpi", "--workers", "3"], ["--quick", "--data", "x"]]
)
def test_wrong_arguments_are_refused(logreg, words, capsys):
    with pytest.raises(SystemExit):
        logreg.parse_arguments(words)
    assert "error:" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.distributed
def test_processes_train_as_the_simulation_does(logreg, tmp_path):
    options = ["--quick", "--iterations", "80", "--match"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("GRACE_CONFIG", None)
    words = [sys.executable, "-m", "mpi4py", str(SCRIPT), "--mpi", *options, "--json", str(tmp_path / "mpi.json")]
    done = subprocess.run(
        [*command("mpirun", 2), *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    # Only rank 0 prints.
    assert done.stdout.count("2 workers") == 1
    assert logreg.main([*options, "--workers", "2", "--json", str(tmp_path / "simulated.json")]) == 0
    tables = [json.loads((tmp_path / f"{name}.json").read_text())["rows"] for name in ("mpi", "simulated")]
    for mine, theirs in zip(*tables, strict=True):
        for row in (mine, theirs):
            del row["milliseconds_per_step"]
        assert mine == theirs
        assert mine["loss"] > 0
