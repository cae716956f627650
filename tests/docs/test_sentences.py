"""Figures in sentences: they are those of the measurements, sizes, defaults and versions that they speak of."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import grace
from grace import compressors, make_config, memories
from grace.bench import command as codec_command
from grace.bench.step import command as step_command
from grace.bench.step import models, run
from grace.core.communicators import sparse_allreduce
from grace.core.config.config import Config, default_rules
from grace.core.guards.replicas import SUMMARY_BYTES, summary
from grace.core.guards.waiting import WARN_SECONDS
from grace.core.ops import get_ops
from grace.core.plan.plan import make_plan
from grace.core.plan.unit import SHARD_GRAIN
from grace.core.spec import MAX_MAGNITUDE, Ranks, TensorSpec
from grace.core.transport.transport import TIMEOUT
from grace.core.wire import indices, lanes, rans
from tests.support.fuzz import COUNTS
from tests.support.launch import ROOT

MIB = 2**20
TEST_IMAGES = 360


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def results(name):
    return json.loads(read(f"docs/results/{name}.json"))


def rows(name):
    return results(name)["rows"]


def row(name, method, setting=None):
    (found,) = (r for r in rows(name) if r["method"] == method and setting in (None, r.get("setting", "")))
    return found


def points(a, b):
    """Return a difference of accuracies, which are numbers of the 360 test images."""
    return round((a - b) * 3.6) / 3.6


def below(name, column, *others):
    """Return how many points the worst method is below `none`, except for those named."""
    accuracies = {r["method"]: r[column] for r in rows(name) if column in r}
    return max(points(accuracies["none"], x) for method, x in accuracies.items() if method not in others)


def error(method, setting, of="normal"):
    return row("errors", method, setting)[of]


def over(a, b, *gradients):
    """Return the ratios of two errors."""
    return [error(*a, of) / error(*b, of) for of in gradients]


EDEN, MAX, L2 = ("eden", "bits 4"), ("qsgd", "quantum_num 7"), ("qsgd", "quantum_num 7 norm l2")
ALQ, NUQSGD = ("alq", "quantum_num 7"), ("nuqsgd", "quantum_num 7")
EVERY = ("normal", "laplace", "lognormal", "recorded")


def errors():
    normal, lognormal = over(MAX, EDEN, "normal", "lognormal")
    yield f"has {normal:.0f} times the error of `eden` at 4 bits for normal numbers, and {lognormal:.0f} times"
    (at_4,) = over(L2, MAX, "normal")
    (at_8,) = over(("qsgd", "quantum_num 127 norm l2"), ("qsgd", "quantum_num 127"), "normal")
    yield f"the error is {at_4:.0f} to {at_8:.0f} times as large for normal numbers"
    nf4 = over(("blockwise", "format nf4"), EDEN, *EVERY)
    yield f"has {min(nf4):.1f} to {max(nf4):.1f} times the error of `eden` at 4 bits, for half a bit more"
    normal, lognormal = over(ALQ, MAX, "normal", "lognormal")
    assert (round(3 * normal), round(5 * lognormal)) == (2, 1)
    yield "two thirds of the error of `qsgd` at 4 bits for normal numbers, a fifth for log-normal ones"
    (normal,) = over(NUQSGD, MAX, "normal")
    yield f"at 4 bits {normal:.1f} times that of `qsgd` for normal numbers"
    assert [round(2 * r) for r in over(("uveqfed", "bits 4"), MAX, *EVERY)] == [1] * 4
    yield "half the error of `qsgd` with nearly the same bits"
    vqsgd = over(("vqsgd", ""), ("eden", "bits 2"), *EVERY)
    yield f"at {row('errors', 'vqsgd', '')['bits']} bits its error is {min(vqsgd):.0f} to {max(vqsgd):.0f} times"
    low_rank = [r for r in rows("errors") if r["method"] in ("powersgd", "acpsgd", "gradzip", "truncatedsvd", "atomo")]
    assert all(r["recorded"] < 0.2 and r["normal"] > 0.9 for r in low_rank if r["setting"] in ("", "compress_rank 4"))
    yield "They keep little of normal numbers, which have none, but most of a recorded gradient."
    yield f"its error for normal numbers is {error('atomo', ''):.0f} |x|^2"
    share = row("errors", "m22", "compress_ratio 0.1")["bits"] / row("errors", "topk", "compress_ratio 0.1")["bits"]
    yield f"for {100 * share:.0f} % of the bits"


def accuracy():
    keras, torch = row("accuracy", "dgc")["keras_0"], row("accuracy", "dgc")["torch_1"]
    columns = ("torch_0", "torch_1", "keras_0")
    furthest = max(below("accuracy", column) for column in columns)
    assert furthest <= 2
    yield "No method is more than 2 points below `none`"
    others = max(below("accuracy", column, "dgc") for column in columns)
    yield f"`dgc` is furthest below, {furthest:.2f} points, with Keras ({keras:.2f} %) and with PyTorch and seed 1"
    yield f"seed 1 ({torch:.2f} %). All others are at most {others:.2f} points below."
    dense = row("accuracy", "none")["torch_0_bucket"]
    dgc, scalecom = (points(dense, row("accuracy", method)["torch_0_bucket"]) for method in ("dgc", "scalecom"))
    others = below("accuracy", "torch_0_bucket", "dgc", "scalecom")
    yield f"`dgc` is {dgc:.2f} points below `none`, `scalecom` {scalecom:.2f}, all others at most {others:.2f}."
    found = rows("digits_launchers")
    better = {r["method"]: points(r["fsdp"], r["horovod"]) for r in found if "fsdp" in r}
    yield f"no method is more than {-min(better.values()):.2f} points below the run over Horovod."
    assert max(better, key=better.get) == "scalecom"
    yield f"`scalecom` is {better['scalecom']:.2f} points better."


def example(name, patch):
    """Return the module of an example, which others can import until the patch is undone."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def network():
    """Return the elements of each parameter of the digits example, and the number of images."""
    with pytest.MonkeyPatch.context() as patch:
        data = example("digits", patch).load_data()
        sizes = [p.numel() for p in example("digits_torch", patch).Network().parameters()]
    assert len(data.test.labels) == TEST_IMAGES
    return sizes, TEST_IMAGES + len(data.train.labels)


def digits():
    sizes, images = network()
    yield f"of {sum(sizes):,} parameters on scikit-learn's {images:,} images, {TEST_IMAGES} of them for testing"
    yield f"One test image is {100 / TEST_IMAGES:.2f} %"
    compressed = 4 * sum(n for n in sizes if n >= 1024)
    assert compressed == results("accuracy")["dense_bytes"]
    yield f"their share of the {compressed:,} bytes of these weights"
    versions = results("accuracy")["versions"]
    yield f"PyTorch {versions['PyTorch']}, TensorFlow {versions['TensorFlow']} and Keras {versions['Keras']}, all on"


def perceptron():
    source = read("benchmarks/adamw.py")
    layers = [(int(a), int(b)) for a, b in re.findall(r"Linear\((\d+), (\d+)\)", source)]
    yield f"a small perceptron ({sum(a * b + b for a, b in layers):,} parameters)"
    ranks, batch, epochs = map(int, re.search(r"RANKS, BATCH, EPOCHS, SEEDS = (\d+), (\d+), (\d+),", source).groups())
    train = network()[1] - TEST_IMAGES
    yield f"was trained for {epochs * (train // (ranks * batch))} steps"
    yield f"one of the {TEST_IMAGES} test images is {100 / TEST_IMAGES:.2f} %"


def adam():
    named = ("qsgd", "eden", "powersgd")
    worst = max(row("adamw", "none")["accuracy"] - row("adamw", method)["accuracy"] for method in named)
    yield f"Their test accuracies are at most {worst:.1f} points below that of `none`."


def many_ranks():
    dense, signs = row("many_ranks", "none")["allreduce"], row("many_ranks", "efsignsgd")
    yield f"one bit costs {dense - signs['two_shot']:.1f} points here, and with 4 bits {dense - signs['finer']:.1f}."


def counted():
    yield f"in units of which a rank sends fewer than {sparse_allreduce._COUNTED_FROM:,} entries, the k / N largest"
    yield f"With counts, that is from {sparse_allreduce._COUNTED_FROM:,} entries per rank on"


def choose():
    none, qsgd, tenth, hundredth = (row("adamw", name)["loss"] for name in ("none", "qsgd", "topk, 10 %", "topk"))
    yield f"its training loss on digits is {qsgd / none:.2f} times that of `none`"
    yield f"that of `topk` {tenth / none:.1f} times with 10 % and {hundredth / none:.1f} times with 1 %"
    dense, signs = row("many_ranks", "none")["allreduce"], row("many_ranks", "efsignsgd")
    yield f"lost {dense - signs['two_shot']:.1f} points on digits, or {dense - signs['finer']:.1f} if the mean"


def codecs():
    data = results("codec")
    python, *others = (f"{name} {version}" for name, version in data["versions"].items())
    yield f"with {python}, {', '.join(others[:-1])} and {others[-1]}."
    low, high = data["copy_ms"]
    yield f"The gradient has {data['elements'] / 1e6:.0f} million float32, a copy of which takes {low} to {high} ms."
    slow = {r["method"] for r in data["rows"] if r.get("break_even", 9) < 1.3}
    assert slow == {"deepreduce", "fedqcs", "homomorphic", "qcs"}
    yield "`deepreduce`, `fedqcs`, `homomorphic` and `qcs` pay on slow links only."


def goals_of_codecs():
    data = results("codec")
    goals = (data["columns"][f"small_{framework}"]["goal"] for framework in ("numpy", "torch"))
    yield "the goal is {} with NumPy and {} with PyTorch.".format(*goals)
    products, step = {r["products"]: r["together"] for r in rows("products")}, row("codec", "powersgd")
    theirs, mine = (
        f"{step['numpy'] / products[a]:.1f} (NumPy) and {step['torch'] / products[b]:.1f} (PyTorch) of the time of the"
        for a, b in (("NumPy", "PyTorch"), ("kernels", "kernels"))
    )
    yield f"takes {theirs} frameworks' products, and {mine} kernels' products."


def model_of_the_steps():
    sides = list(zip(models.MLP, models.MLP[1:], strict=False))
    specs = [TensorSpec(f"layer{i}.weight", side) for i, side in enumerate(sides)]
    yield f"Steps of the `mlp` ({sum(spec.numel for spec in specs) / 1e6:.1f} M parameters, four examples"


def large_matrices():
    yield f"The `mlp` has {('no', 'one', 'two', 'three')[len(models.MLP) - 1]} large matrices"


def hard_threshold():
    plain, topk, paper, equal = (rows("hard_threshold")[i::4] for i in range(4))
    (iid, by_label), lam = paper, 4.2
    assert {r["run"] for r in paper} == {f"threshold {lam}"}
    fewer = [p["bytes"] / r["bytes"] for p, r in zip(plain, paper, strict=True)]
    # The density is rounded.
    assert plain[0]["density"] / iid["density"] == pytest.approx(648, abs=0.6)
    yield f"holds: at lambda = {lam} with {fewer[0]:.0f} times fewer bytes and 648 times fewer values"
    yield f"holds at lambda = {lam}, with {fewer[1]:.0f} times fewer bytes"
    yield f"its late mean stays at {equal[1]['late'] / plain[1]['late']:.1f} times that of SGD"
    yield (
        f"holds: {topk[0]['late'] / equal[0]['late']:.0f} times the late mean, {topk[0]['steps']} steps instead of "
        f"{equal[0]['steps']}, errors of up to {topk[0]['largest']}"
    )
    yield f"holds, also for each single worker (at lambda = {lam}: {iid['worker']} of {iid['bound']})"
    worst = "; ".join(f"{r['worker']} of {r['bound']}" for r in (by_label, equal[1]))
    yield f"holds, also for each single worker ({worst})"
    yield f"It sends {iid['density']:.2f} % on one split and {by_label['density']:.1f} % on the other"
    with pytest.MonkeyPatch.context() as patch:
        logreg = example("hard_threshold_logreg", patch)
    args = logreg.parse_arguments([])
    n, d, steps = logreg.SAMPLES, logreg.FEATURES, args.iterations
    yield f"N = {n:,}, d = {d:,} |"
    each = n // args.workers
    yield f"{args.workers}, each with {each} samples; one sample per step"
    yield f"T = {steps:,} steps, which is {steps // each} epochs"
    text = read("docs/hard_threshold.md")
    smoothness, start, minimum = (
        float(re.search(rf"{name} = ([\d.]+\d)", text)[1]) for name in ("4N\\)", "x_0\\)", "f\\*")
    )
    gamma = 1 / (smoothness * (1 + 1e-4))
    yield f"step size gamma = 1/(L + l2) = {gamma * 1e3:.3f}e-3"
    yield f"L = {smoothness} and f* = {minimum} are close to"
    yield f"f - f* grows from {start - minimum:.0f} to {topk[1]['gap']}"
    for r in (*paper, *equal):
        assert r["bound"] == pytest.approx(gamma**2 * d * float(r["run"].split()[1]) ** 2, rel=5e-3)
    assert {r["bytes"] for r in plain} == {4 * d * steps}
    # Ten values and indices, and a header of 16 bytes.
    assert {r["bytes"] for r in topk} == {(8 * args.k + 16) * steps}


def speed():
    ddp = {r["method"]: r["two"] for r in rows("step_ddp")}
    assert round(4 * ddp["topk"] / ddp["ddp-fp16"]) == 1
    assert round(3 * ddp["powersgd"] / ddp["ddp-powersgd"]) == 2
    yield "top-k takes about a quarter of the time of PyTorch's fp16 hook, and `powersgd` about two thirds of"
    plain, bits8 = row("step_fsdp", "fsdp")["mb"], row("step_fsdp", "eightbit")["mb"]
    yield f"Of the {plain:.0f} MB of a plain step, half are gradients"
    yield f"The {plain / 2:.0f} MB of gradients become {bits8 - plain / 2:.0f}."


def fsdp():
    plain, bits8 = row("step_fsdp", "fsdp")["mb"], row("step_fsdp", "eightbit")["mb"]
    yield f"sends {plain:.0f} MB in a step of the `mlp`"
    yield f"and {bits8:.0f} MB with `eightbit`"


def index_codings():
    ops, n, every = get_ops("numpy", "cpu"), 64 * 2**14, 64
    chosen = np.sort(np.random.default_rng(0).permutation(n)[: n // every]).astype(np.int32)
    shown = {"delta": "10", "golomb": "7.5", "bitmap": "64", "smallest": "7.5"}
    for coding, text in shown.items():
        word = indices.choose(ops, chosen, n, coding)
        bits = 8 * len(indices.encode(ops, chosen, word, n)) / len(chosen)
        assert bits == pytest.approx(float(text), abs=0.1), coding
        yield f'| `"{coding}"` | {text} |'


def configuration():
    yield from index_codings()
    yield f"`rans` has a loop of up to {rans._PER_LANES // rans._LANES:,} rounds."
    # An object of JSON takes 8 more bytes for its length.
    text = len(json.dumps(summary({}).hex()))
    yield f"The digest has {SUMMARY_BYTES} bytes, with mpi4py {8 + text}."
    small, _, vector, _ = default_rules()
    yield f"tensors with fewer than {small.max_numel + 1:,} elements"
    yield f"vectors with fewer than {vector.max_numel + 1:,} elements"


def units():
    yield f"tensors above `split_bytes` ({Config.split_bytes // MIB} MiB) are cut"
    yield f"up to `bucket_bytes` ({Config.bucket_bytes // MIB} MiB) of dense gradients"
    yield f"in steps of {SHARD_GRAIN} elements"
    n, rng = 1000, np.random.default_rng(0)
    parts = [(size * rng.standard_normal(n)).astype(np.float32) for size in (1, 0.1, 0.01)]
    config = {"compressor": "efsignsgd", "memory": "none", "default_rules": False, "granularity": "layer"}

    def lost(tensors):
        decoded = grace.Simulation(1, {name: x.shape for name, x in tensors.items()}, config).step([tensors])[0]
        return {name: np.sum((decoded[name] - x)[-n:] ** 2) for name, x in tensors.items()}

    errors = lost({"all": np.concatenate(parts), "own": parts[-1]})
    times = round(errors["all"] / errors["own"], -2)
    yield f"makes the error of the smallest one {times:,.0f} times as large as a scale of its own"


def sums():
    for ranks, count in ((2, "three"), (4, "three"), (5, "two"), (258, "two"), (259, "one")):
        assert lanes.lanes(127 * ranks) == ("", "one", "two", "three").index(count)
    yield "For integers of 8 bits, these are three on 2 to 4 ranks and two on up to 258."
    yield f"`rans` sends {4 * rans._LANES} bytes per {rans._PER_LANES:,} symbols"
    # Three digests and their squares in float32; a digest of b bits is equal by chance with probability 2^-b.
    yield "three digests of the step and their squares, 24 bytes"
    low, high = (3 * ((24 - (ranks - 1).bit_length()) // 2) for ranks in (4, 256))
    yield f"with probability 2^-{low} on 2 to 4 ranks, and 2^-{high} on 256"


def magnitudes():
    single, double, half = (MAX_MAGNITUDE[dtype] for dtype in ("float32", "float64", "float16"))
    assert (single, double) == (2.0**104, 2.0**512)
    yield f"beyond 2^104 ({single:.0e}; float64: 2^512, float16: {half:.0f})".replace("e+", "e")


def fuzzer():
    ordinary, everything = (sum(counts) for counts in zip(*COUNTS.values(), strict=True))
    assert 1000 < ordinary < 10_000
    assert everything == 10**6
    yield "An ordinary run draws thousands of cases, `--all` a million."


def agreement():
    yield f"After {WARN_SECONDS:.0f} seconds, or half of the limit if that is shorter"


def launchers():
    yield f"After {WARN_SECONDS:.0f} seconds, a rank that waits for others says"
    yield f"that is {TIMEOUT} by default"


def recipes():
    yield f"after `timeout` seconds, {TIMEOUT} by default."


def arguments(add):
    """Return the defaults of a command's arguments."""
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers())
    return vars(parser.parse_args([add.__name__.removeprefix("add_")]))


def probes():
    def volumes(method):
        return [r["volume"] for r in rows("hard_threshold_volume") if r["method"] == method]

    probe, short = volumes("hardthreshold"), volumes("hardthreshold, tune_steps 20")
    yield f"The probe predicts {probe[0]:.2f} and {probe[1]:.2f} times the asked volume"
    yield f"a probe of 20 steps {short[0]:.2f} and {short[1]:.2f} times"
    by_task = [
        {r["method"]: r for r in rows("hard_threshold_volume") if r["task"] == task}
        for task in ("logistic regression", "matrix factorization")
    ]
    densities = by_task[1]["hardthreshold"]["densities"].split()
    yield f"it is {densities[1]} times what was asked in the second eighth of the run, and {densities[-1]} times in the"
    for found in by_task:
        topk = found["topk, volume of hardthreshold"]["loss"]
        assert abs(found["hardthreshold"]["loss"] / topk - 1) < 0.005
    yield "the losses differ by less than 0.5 %"


def measure():
    for name, make in importlib.import_module("grace.bench.step.models_torch").MODELS.items():
        size = sum(p.numel() for p in make().parameters()) / 1e6
        shown = f"{size:.2f}" if size < 1 else f"{size:.1f}".removesuffix(".0")
        yield f"`{name}` ({shown} M{' parameters' * (name == 'mlp')})"
    codec, step = arguments(codec_command.add_codec), arguments(step_command.add_step)
    yield f"the payloads of `--ranks` ranks ({codec['ranks']})"
    yield f"| `--threads` | {codec['threads']} by default |"
    yield f"| `--repetitions` | {codec['repetitions']} by default;"
    yield f"`--rounds` turns ({step_command.ROUNDS}) of `--steps` steps ({step['steps']}), after three steps to warm up"
    assert run.WARM_UP == 3


def moved():
    topk, randomk, qsgd, powersgd, inceptionn = map(
        compressors.make, ("topk", "randomk", "qsgd", "powersgd", "inceptionn")
    )
    yield f"| `compress_ratio=0.3` | `{topk.compress_ratio}`; `{randomk.compress_ratio}` for `randomk` |"
    yield f"| `quantum_num={qsgd.quantum_num}` | the same, with a scale for every {qsgd.bucket_size} elements |"
    threshold, momentum = compressors.make("threshold").threshold, memories.make("momentum").momentum
    yield f"| `threshold={threshold}`, `momentum={momentum}` | the same |"
    yield f"| `compress_rank=1` | `{powersgd.compress_rank}` |"
    yield f"| `matrix_approximation_rank=1` | `compress_rank={powersgd.compress_rank}` |"
    yield f"| `lr={memories.make('efsignsgd').lr}` of `efsignsgd` | the same"
    assert inceptionn.relative
    assert inceptionn.error_bound == 2**-10
    yield "| `2**-10`, relative to the largest element |"
    yield f"tensors below {default_rules()[0].max_numel + 1:,} elements stay in float32"


def homomorphic():
    config, spec = make_config(compressor="homomorphic"), TensorSpec("w", (10**6,))
    (unit,), others = (make_plan([spec], config, ranks=Ranks(ranks)).units for ranks in (4, 7))
    assert unit.fields == others[0].fields
    sketch, counters = unit.fields
    bits = 32 // counters.lanes
    yield f"a rank of 4 to 7 sends {sketch.length:,} floats and {counters.length:,} counters of {bits} bits"
    share = (4 * sketch.length + counters.length * bits / 8) / spec.nbytes
    yield f"{100 * share:.1f} % of the dense gradient, with room for {100 * unit.compressor.compress_ratio:.0f} %."


def statistics():
    simulation, sizes = grace.Simulation(1, {"w": (64, 64)}, {"compressor": "topk"}), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        simulation.start_timeline(str(path))
        for _ in range(20):
            simulation.step([{"w": np.ones((64, 64), np.float32)}])
            sizes.append(path.stat().st_size)
        simulation.stop_timeline()
    yield f"grows by about {(sizes[-1] - sizes[0]) / 19 / 1000:.1f} KB per bucket and step"


def required(package, file="requirements"):
    """Return the version of a package that a file of requirements names, the first one of several."""
    return re.search(rf"^{package}==([\w.]+)", read(f"scripts/{file}.txt"), re.MULTILINE)[1]


def trainers():
    named = ("accelerate", "transformers", "lightning")
    accelerate, transformers, lightning = (required(name, "requirements_trainers") for name in named)
    yield f"with Accelerate {accelerate}, Transformers {transformers} and Lightning {lightning},"
    yield f"PyTorch {required('torch')} and 2 ranks on CPUs. The"


def versions():
    older = re.search(r'^numpy==([\d.]+); python_version < "3.11"', read("scripts/requirements.txt"), re.MULTILINE)[1]
    torch, tensorflow, numpy = map(required, ("torch", "tensorflow-cpu", "numpy"))
    yield f"PyTorch {torch}, TensorFlow {tensorflow} and NumPy {numpy} ({older} with Python 3.10)."
    named = ("accelerate", "lightning", "transformers")
    accelerate, lightning, transformers = (required(name, "requirements_trainers") for name in named)
    yield f"The examples of Accelerate {accelerate}, Lightning {lightning} and Transformers {transformers} passed with"
    yield f"PyTorch {torch} on"


def two_nodes():
    """The arithmetic of an exchange of two ranks, and measured steps."""
    for million in (25, 124, 350, 1300):
        sent = 4 * million * 1e6
        cells = [f"{8 * sent / (gbit * 1e9):#.2g}".rstrip(".") for gbit in (1, 10, 25, 100)]
        yield f"| {million:,} M | {sent / 1e6:,.0f} | {' | '.join(cells)} |"
    yield f"On 16 ranks in a ring, each link carries {2 * 15 / 16:.1f} times as much."
    yield f"the exchange takes {32 * 124e6 / 10e9:.2f} s."
    yield f"With 8 bits per element, the exchange takes {8 * 124e6 / 10e9:.2f} s"
    million = results("step_original")["parameters"] / 1e6
    ddp, qsgd, compute = (row("step_original", method) for method in ("ddp", "qsgd", "compute"))
    yield f"With a perceptron of {million:.1f} M parameters on two ranks"
    yield f"a step took {ddp['1gbit']} ms with DDP at 1 Gbit/s and {qsgd['1gbit']} ms with `qsgd`"
    yield f"at 10 Gbit/s it took {ddp['10gbit']} ms and {qsgd['10gbit']} ms. Without exchange it took"
    yield f"Without exchange it took {compute['1gbit']} to {compute['10gbit']} ms."


@pytest.mark.parametrize(
    ("page", "sentences"),
    [
        ("errors.md", errors),
        ("accuracy.md", accuracy),
        ("accuracy.md", digits),
        ("adam.md", adam),
        ("adam.md", perceptron),
        ("communicators_and_memories.md", many_ranks),
        ("communicators_and_memories.md", counted),
        ("choose.md", choose),
        ("configuration.md", configuration),
        ("hard_threshold.md", hard_threshold),
        ("hard_threshold.md", probes),
        ("measure.md", measure),
        ("move.md", moved),
        ("speed.md", codecs),
        ("speed.md", model_of_the_steps),
        ("speed.md", speed),
        ("statistics.md", statistics),
        ("two_nodes.md", two_nodes),
        ("versions.md", versions),
        ("get_started/fsdp.md", fsdp),
        ("get_started/launchers.md", launchers),
        ("get_started/recipes.md", recipes),
        ("get_started/trainers.md", trainers),
        ("design/agreement.md", agreement),
        ("design/speed.md", goals_of_codecs),
        ("design/speed.md", large_matrices),
        ("design/error_feedback.md", magnitudes),
        ("design/tests.md", fuzzer),
        ("design/units_and_buckets.md", units),
        ("design/wire_format.md", sums),
        ("../grace/core/compressors/contrib/homomorphic.py", homomorphic),
    ],
)
def test_figures_in_sentences_are_those_of_the_measurements(page, sentences):
    text = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
    assert [sentence for sentence in sentences() if sentence not in text] == []
