"""The command `grace bench codec`: timed steps, reports and refusals. No test depends on the speed of the machine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from grace import Simulation, cli, compressors
from grace.bench import command, frameworks, measure, table
from grace.bench.codec import LocalStep, make_unit, near_square
from grace.bench.gradients import DEVIATION, Gradients
from grace.core.communicators.two_shot import keeps_state
from grace.core.methods.compressor import usual_communicator
from grace.core.ops import get_ops, serves
from grace.core.spec import Ranks
from grace.core.wire.layout import payload_bytes
from grace.testing.harness import same
from tests.bench.test_variants import MINE
from tests.support.launch import ROOT

KEYS = {"compressor", "numel", "median_s", "copy_s", "ratio_to_copy", "wire_bytes"} | {
    "framework", "device", "ranks", "threads", "native", "repetitions", "spread", "times", "machine", "command",
    "options", "error",
}  # fmt: skip
RANKS = 2


@pytest.fixture
def bench(monkeypatch, tmp_path, capsys):
    """Return a function that runs the command here. It returns status, output, errors and the objects of --json."""
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "GRACE_NATIVE"):
        # monkeypatch restores them after the command has changed them.
        monkeypatch.setenv(variable, "1")

    def run(*arguments):
        path = tmp_path / "results.json"
        status = cli.main(["bench", "codec", *arguments, "--json", str(path)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err, json.loads(path.read_text()) if path.exists() else None

    return run


def check(results, output, names, sizes, repetitions):
    assert [(r["compressor"], r["numel"]) for r in results] == [(name, n) for n in sizes for name in names]
    rows = [line.split()[:2] for line in output.splitlines()[2:]]
    assert rows == [[r["compressor"], f"{r['numel']:,}"] for r in results]
    for r in results:
        assert set(r) >= KEYS
        assert r["repetitions"] == repetitions == len(r["times"]) == len(r["copy_times"])
        assert r["median_s"] == np.median(r["times"]) > 0
        assert r["copy_s"] == np.median(r["copy_times"]) > 0
        assert r["ratio_to_copy"] == r["median_s"] / r["copy_s"]
        assert r["spread"][0] <= r["median_s"] <= r["spread"][1]
        assert r["bits_per_element"] == 8 * r["wire_bytes"] / r["numel"]
        assert r["gb_per_s"] == pytest.approx(4e-9 * r["numel"] / r["median_s"])
        saved = 4 * r["numel"] - r["wire_bytes"]
        pays_below = pytest.approx(8e-9 * saved / r["median_s"]) if saved > 0 else None
        assert r["break_even_gbit_per_s"] == pays_below
        assert r["error"] >= 0
        unit = make_unit(r["compressor"], r["numel"], **r["options"])
        (unit,) = unit.communicator.divide([unit], Ranks(r["ranks"]))
        fixed = payload_bytes([*unit.fields, *unit.proposed])
        assert fixed is None or r["wire_bytes"] == fixed


# --- timed steps ----------------------------------------------------------------------------------------------------


def drawn(numel, step):
    rng = np.random.default_rng(step)
    return [(rng.standard_normal(numel) * 0.01).astype(np.float32) for _ in range(RANKS)]


@pytest.mark.parametrize("name", list(compressors))
def test_the_timed_step_is_that_of_the_engine(name):
    numel = 2000
    unit = make_unit(name, numel)
    step = LocalStep(unit, get_ops("numpy"), RANKS)
    # Where a payload can be added, it is timed as a summed one. On two ranks, "auto" gathers that of `uniform`.
    travels = {"communicator": usual_communicator(compressors.example(name))}
    config = {"compressor": name, **compressors.required(name), "default_rules": False, **travels}
    simulation = Simulation(RANKS, [unit.spec], config)
    # gradiveq starts to compress after ten steps.
    for number in range(12):
        gradients = drawn(numel, number)
        expected = simulation.step([{"tensor": g.reshape(unit.spec.shape)} for g in gradients])[0]["tensor"]
        arrived = step.receive(gradients, number)
        before = [g.copy() for g in gradients]
        done = step.run(gradients[0], number, arrived)
        assert all((a == b).all() for a, b in zip(gradients, before, strict=True))
        assert same(done.gradient, expected.ravel())
        sent = simulation.runs[0].stats()["tensors"]["tensor"]["wire_bytes"]
        assert step.wire_bytes(done) == sent


@pytest.mark.parametrize(
    "name", ["gradiveq", "hardthreshold", "none", "powersgd", "randomk", "signum", "topk", "uniform"]
)
def test_the_graph_of_tensorflow_does_the_same(name):
    tf = pytest.importorskip("tensorflow")
    from grace.bench.traced import TracedStep

    numel, unit = 2000, make_unit(name, 2000)
    eager, traced = LocalStep(unit, get_ops("numpy"), RANKS), TracedStep(unit, get_ops("tensorflow"), RANKS)
    for number in range(12):
        gradients = drawn(numel, number)
        tensors = [tf.constant(g) for g in gradients]
        arrived = [eager.receive(gradients, number), traced.receive(tensors, number)]
        expected, done = eager.run(gradients[0], number, arrived[0]), traced.run(tensors[0], number, arrived[1])
        np.testing.assert_allclose(done.gradient.numpy(), expected.gradient, rtol=1e-4, atol=1e-6)
        assert traced.wire_bytes(done) == eager.wire_bytes(expected)


@pytest.mark.parametrize(
    ("numel", "shape"), [(1, (1, 1)), (1000, (25, 40)), (1009, (1, 1009)), (25_000_000, (5000, 5000))]
)
def test_near_square(numel, shape):
    assert near_square(numel) == shape


def test_gradients_are_heavy_tailed_and_differ_from_step_to_step():
    shape = (200, 250)
    gradients = Gradients(shape, 4)
    first, second = (gradients.array()[gradients.window(i)].astype(np.float64) for i in (0, 1))
    assert np.sqrt(np.mean(first**2)) == pytest.approx(DEVIATION, rel=0.05)
    # The kurtosis of a normal distribution is 3.
    assert np.mean(first**4) / np.mean(first**2) ** 2 > 10
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    scales = [np.sqrt(np.mean(g.reshape(shape) ** 2, axis=0)) for g in (first, second)]
    np.testing.assert_allclose(*scales, rtol=0.05)
    assert len(first) == 200 * 250
    assert gradients.window(3).start * 4 % 64 == 0
    assert gradients.window(3).stop <= len(gradients.array())
    assert (gradients.array() == Gradients(shape, 4).array()).all()


def test_slow_methods_get_fewer_repetitions(bench, monkeypatch):
    def clock(self, work):
        return 10.0, work()

    monkeypatch.setattr(frameworks.Framework, "clock", clock)
    status, output, _, results = bench("--compressors", "topk", "--numel", "100", "--repetitions", "30")
    assert status == 0
    assert results[0]["repetitions"] == len(results[0]["times"]) == measure.BUDGET / 10
    assert output.splitlines()[-1].split()[-1] == "6"


# --- reports --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_table_and_json(bench, framework):
    pytest.importorskip(framework)
    names = ["topk", "powersgd", "threshold", "none"]
    arguments = ["--framework", framework, "--numel", "1000,2K", "--repetitions", "3", "--ranks", "3"]
    status, output, _, results = bench("--compressors", "topk,powersgd", "threshold", "none", *arguments)
    assert status == 0
    check(results, output, names, [1000, 2000], 3)
    assert {(r["framework"], r["device"], r["ranks"], r["threads"]) for r in results} == {(framework, "cpu", 3, 1)}
    assert results[0]["machine"]["cpu"]
    assert results[0]["machine"][framework].startswith(__import__(framework).__version__.split("+")[0])
    none = results[names.index("none")]
    assert none["break_even_gbit_per_s"] is None
    assert "never" in output.splitlines()[2 + names.index("none")]


def test_variants_of_a_method(bench):
    names = ["qsgd:quantum_num=7", "topk:memory=none:index_coding=golomb", "qsgd"]
    status, output, _, results = bench("--compressors", *names, "--numel", "1000", "--repetitions", "2")
    assert status == 0
    assert [line.split()[0] for line in output.splitlines()[2:]] == names
    assert [(r["compressor"], r["options"], r["memory"]) for r in results] == [
        ("qsgd", {"quantum_num": 7}, "none"),
        ("topk", {"memory": "none", "index_coding": "golomb"}, "none"),
        ("qsgd", {}, "none"),
    ]
    # 4 and 8 bits, and float32 scales of blocks of 512
    assert [round(r["wire_bytes"]) for r in results[::2]] == [1000 // 2 + 8, 1000 + 8]
    assert results[0]["error"] > 100 * results[2]["error"]


@pytest.mark.processes
def test_a_method_of_a_users_own(tmp_path):
    (tmp_path / "mine.py").write_text(MINE.format(helper="json"))
    path = tmp_path / "results.json"
    arguments = ["--import", "mine.py", "--compressors", "mine:clip=100", "mine:clip=1e-9", "none"]
    result = subprocess.run(
        [sys.executable, "-m", "grace.cli", "bench", "codec", *arguments, "--numel", "1000", "--json", str(path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr
    results = json.loads(path.read_text())
    assert [line.split()[0] for line in result.stdout.splitlines()[2:]] == ["mine:clip=100", "mine:clip=1e-09", "none"]
    assert results[0]["error"] < 1e-12
    assert results[1]["error"] == pytest.approx(1, abs=1e-3)


def error(name, framework="numpy", ranks=RANKS, numel=2000, **options):
    unit = make_unit(name, numel, **options)
    setting = measure.Setting(frameworks.set_up(framework, "cpu", 1, True), ranks, 1, 1)
    return measure.Bench(unit.spec.shape, setting)._error(unit)


@pytest.mark.parametrize("name", list(compressors))
def test_the_error_is_that_of_a_step_without_memory(name):
    shape = near_square(2000)
    travels = {"communicator": usual_communicator(compressors.example(name))}
    config = {
        "compressor": name,
        **compressors.required(name),
        "memory": "none",
        "default_rules": False,
        **travels,
    }
    simulation = Simulation(RANKS, {"tensor": shape}, config)
    gradients = Gradients(shape, (measure.WARM_UP + 1) * RANKS)
    given = [gradients.array()[gradients.window(rank)].reshape(shape) for rank in range(RANKS)]
    for _ in range(4 if keeps_state(compressors.example(name)) else 1):
        merged = simulation.step([{"tensor": g} for g in given])[0]["tensor"].astype(np.float64)
    mean = sum(g.astype(np.float64) for g in given) / RANKS
    assert error(name) == pytest.approx(np.sum((merged - mean) ** 2) / np.sum(mean**2), rel=1e-9)


def test_the_error_of_one_rank_is_what_the_compressor_drops():
    gradients = Gradients(near_square(2000), measure.WARM_UP + 1)
    squares = np.sort(gradients.array()[gradients.window(0)].astype(np.float64) ** 2)
    dropped = squares[: -int(2000 * 0.05)].sum() / squares.sum()
    assert error("topk", ranks=1, compress_ratio=0.05) == pytest.approx(dropped)
    # A memory that changes the gradient does not count.
    assert error("topk", ranks=1, compress_ratio=0.05, memory="dgc", gradient_clipping=1e-9) == pytest.approx(dropped)
    assert error("none", ranks=3) < 1e-12


def test_the_error_is_added_up_over_all_elements(monkeypatch):
    whole = error("topk")
    monkeypatch.setattr(measure, "CHUNK", 300)
    assert error("topk") == pytest.approx(whole)


def test_the_error_is_the_same_in_pytorch():
    pytest.importorskip("torch")
    for name in ("powersgd", "qsgd", "topk"):
        assert error(name, "torch", ranks=3) == pytest.approx(error(name, ranks=3), rel=1e-3)


@pytest.mark.processes
def test_tensorflow_in_a_process_of_its_own(tmp_path):
    pytest.importorskip("tensorflow")
    path = tmp_path / "results.json"
    arguments = ["--framework", "tensorflow", "--compressors", "topk", "powersgd", "--numel", "1000"]
    more = ["--repetitions", "2", "--threads", "2", "--json", str(path)]
    # The number of threads can be set only before TensorFlow starts. In this process it is already running.
    result = subprocess.run(
        [sys.executable, "-m", "grace.cli", "bench", "codec", *arguments, *more], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    results = json.loads(path.read_text())
    check(results, result.stdout, ["topk", "powersgd"], [1000], 2)
    assert "2 threads" in result.stdout
    for result in results:
        assert result["error"] == pytest.approx(error(result["compressor"], numel=1000), rel=1e-3)
    assert results[0]["command"] == "grace " + " ".join(["bench", "codec", *arguments, *more])


@pytest.mark.processes
def test_the_number_of_threads_is_set_before_numpy_is_imported():
    code = (
        "import os, sys; from grace import cli; from grace.bench import frameworks\n"
        "def stop(*arguments):\n"
        "    assert 'numpy' not in sys.modules and os.environ['OMP_NUM_THREADS'] == '3'; sys.exit(7)\n"
        "frameworks.FRAMEWORKS['numpy'] = stop\n"
        "cli.main(['bench', 'codec', '--threads', '3', '--plot', 'unwritten.png'])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 7


def test_all_methods_are_the_default_but_those_that_need_options(bench, monkeypatch):
    from dataclasses import dataclass

    import grace

    @dataclass(frozen=True)
    class Outside(grace.Compressor):
        """Needs to be told how much."""

        how_much: int

    some = {name: compressors.get(name) for name in ("none", "topk")}
    monkeypatch.setattr(compressors, "_classes", {**some, "outside": Outside})
    _, _, _, results = bench("--numel", "100", "--repetitions", "1")
    assert [r["compressor"] for r in results] == ["none", "topk"]


def test_what_stays_dense_is_said(bench):
    _, output, _, results = bench("--compressors", "powersgd", "--numel", "1009", "--repetitions", "1")
    assert "not compressed: rank 4 factors of a 1 x 1009 matrix" in output
    assert results[0]["dense"].startswith("rank 4 factors")
    assert results[0]["wire_bytes"] == 4 * 1009


@pytest.mark.parametrize("kernels", [True, False])
def test_which_bodies_were_timed(bench, kernels):
    arguments = ["--compressors", "topk", "--numel", "100", "--repetitions", "1", *["--no-native"] * (not kernels)]
    _, output, _, results = bench(*arguments)
    expected = kernels and serves("numpy", "cpu")
    assert results[0]["native"] is expected
    assert ("kernels" if expected else "reference implementation") == output.splitlines()[0].split("; ")[-1]


def test_an_interrupted_run_leaves_what_it_has(bench, monkeypatch):
    measured = measure.Bench.measure

    def interrupted(self, variant, unit, progress):
        if variant.name == "none":
            raise KeyboardInterrupt
        return measured(self, variant, unit, progress)

    monkeypatch.setattr(measure.Bench, "measure", interrupted)
    arguments = ["--compressors", "topk", "none", "fp16", "--numel", "1000", "--repetitions", "2"]
    status, output, errors, results = bench(*arguments)
    assert status == 130
    assert "interrupted after 1 of 3 results" in errors
    check(results, output, ["topk"], [1000], 2)


@pytest.mark.parametrize("count", [1, 3])
def test_plot(bench, tmp_path, count):
    pytest.importorskip("matplotlib")
    path = tmp_path / "times.png"
    sizes = [str(100 * 2**i) for i in range(count)]
    status, *_ = bench("--compressors", "topk", "none", "--numel", *sizes, "--repetitions", "2", "--plot", str(path))
    assert status == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_sizes_of_the_figure(bench, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    seen = []
    monkeypatch.setattr(command, "_measure", lambda parts, setting, results: seen.extend(parts))
    assert bench("--compressors", "none", "--plot", str(tmp_path / "times.svg"))[0] == 0
    # 1 KB to 100 MB
    assert [unit.spec.nbytes for _, unit in seen] == [10**i for i in range(3, 9)]
    seen.clear()
    bench("--compressors", "none")
    assert [unit.spec.numel for _, unit in seen] == [25_000_000]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.34, "12.3 s"), (0.9996, "1 s"), (1.5e-3, "1.5 ms"), (99.96e-6, "100 us"), (999.6e-9, "1 us"), (5e-8, "50 ns")],
)
def test_seconds_are_readable(seconds, text):
    assert table.format_scaled(seconds, table.SECONDS) == text


@pytest.mark.parametrize("seconds", [1.05e-6, 9.996e-5, 0.0105, 0.9994, 1.05, 105.0])
def test_lines_of_the_table_have_one_width(bench, monkeypatch, seconds):
    monkeypatch.setattr(frameworks.Framework, "clock", lambda self, work: (seconds, work()))
    _, output, *_ = bench("--compressors", "none", "sketchedsgd", "--numel", "100", "100K", "--repetitions", "1")
    _, head, *rows = output.splitlines()
    assert {len(line) for line in rows} == {len(head)}


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compressors", "tokp"], "unknown compressor 'tokp'. Did you mean 'topk'?"),
        (["--compressors", ","], "--compressors: expected NAME or NAME:OPTION=VALUE"),
        (["--numel", "0"], "--numel: expected a whole number of elements, at least 1"),
        (["--numel", "2.5"], "received '2.5'"),
        (["--numel", "many"], "received 'many'"),
        (["--numel", "infinity"], "received 'infinity'"),
        (["--numel", ","], "--numel: expected numbers of elements"),
        (["--ranks", "0"], "--ranks: expected at least 1, received 0"),
        (["--threads", "0"], "--threads: expected at least 1"),
        (["--repetitions", "-1"], "--repetitions: expected at least 1"),
        (["--framework", "touch"], "--framework: unknown framework 'touch'. Did you mean 'torch'?"),
        (["--device", "gpu"], "--device: unknown device 'gpu'. Did you mean 'cpu'? Valid names: cpu, cuda."),
        (["--device", "cuda"], "--device cuda works with --framework torch only, received --framework numpy"),
        (["--import", "nowhere.py"], "--import: there is no file 'nowhere.py'"),
        (["--compressors", "qsgd:seed=7"], "--compressors: 'seed' has no effect on the codec of one tensor"),
        (["--compressors", "qsgd:granularity=model"], "'granularity' has no effect"),
        (["--compressors", "topk:communicator=two_shot"], "exchanges shards, and `grace bench codec` times a tensor"),
        (["--plot", "/nowhere/times.png"], "'/nowhere/times.png' cannot be written: No such file or directory"),
    ],
)
def test_faults_are_told_before_the_run(bench, arguments, message):
    status, output, errors, results = bench(*arguments)
    assert (status, output, results) == (2, "", None)
    assert errors.startswith("grace: error: ")
    assert message in errors


def test_older_results_survive_a_fault(bench, tmp_path):
    (tmp_path / "results.json").write_text("[1]")
    assert bench("--framework", "numpi")[3] == [1]


def test_figures_of_unknown_kind_are_refused(bench, tmp_path):
    pytest.importorskip("matplotlib")
    status, _, errors, _ = bench("--plot", str(tmp_path / "times.pgn"))
    assert status == 2
    assert "has no known image format. Did you mean 'png'?" in errors
    assert not (tmp_path / "times.pgn").exists()


@pytest.mark.parametrize(
    ("package", "arguments"), [("torch", ["--framework", "torch"]), ("matplotlib", ["--plot", "times.png"])]
)
def test_missing_packages_are_named(bench, monkeypatch, tmp_path, package, arguments):
    find_spec = importlib.util.find_spec
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find_spec(name))
    status, _, errors, results = bench(*arguments)
    assert (status, results) == (2, None)
    assert package in errors
    assert "is not installed;" in errors


def test_cuda_without_a_gpu_is_refused(bench, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, _, errors, _ = bench("--framework", "torch", "--device", "cuda")
    assert status == 2
    assert "finds no CUDA device" in errors


@pytest.mark.gpu
def test_cuda(bench):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    names = ["topk", "powersgd", "qsgd", "none"]
    arguments = ["--framework", "torch", "--device", "cuda", "--numel", "1000", "--repetitions", "3"]
    status, output, _, results = bench("--compressors", *names, *arguments)
    assert status == 0
    check(results, output, names, [1000], 3)
    assert results[0]["machine"]["gpu"] == torch.cuda.get_device_name()
