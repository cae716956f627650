"""The digits examples, launched as in the documents: every method trains and sends the announced bytes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from grace import make_config
from grace.core.config.registry import compressors
from grace.core.spec import TensorSpec
from grace.core.wire.layout import payload_bytes
from grace.listing import sent_fields
from tests.support.covering import ALL, rest_slow
from tests.support.launch import ROOT, TENSORFLOW, TORCH, Launch, command
from tests.support.ranks import on, scenario

pytestmark = pytest.mark.distributed

KEYS = {
    "framework",
    "compressor",
    "accuracy",
    "wire_bytes_per_step",
    "dense_bytes_per_step",
    "seconds_per_step",
    "replicas_identical",
}

# The weights of at least 1,024 elements, as PowerSGD's matrices: conv2, hidden and output.
MATRICES = {
    "torch": [(64, 288), (128, 1024), (10, 128)],
    "keras": [(288, 64), (1024, 128), (128, 10)],
    "tensorflow": [(288, 64), (1024, 128), (128, 10)],
}
ELEMENTS = 64 * 288 + 128 * 1024 + 10 * 128
# The methods of docs/accuracy.md: one of the literature need not be there.
FILE = ROOT / "docs/results/digits_launchers.json"
MEASURED = [row["method"] for row in json.loads(FILE.read_text("utf-8"))["rows"]]
# The largest share of the dense bytes for methods without an announced size, with the examples' settings.
MOST = {
    "3lc": 1.6 / 32,
    "acpsgd": 2 * 1152 / ELEMENTS * 1.2,  # about half of powersgd's factors, the larger ones
    "adacomp": 0.02,  # a bin of 500 sends some 4 of its elements
    "adaptive": 0.01 * 1.05,  # one index in place of a value
    "atomo": 3 * (352 + 1152 + 138) / ELEMENTS * 1.1,  # three singular triples on average
    "dct": 2 * 0.01 * 3,  # the threshold of up to 10 steps ago
    "dgc": 2 * 0.01 * 1.3,  # the overshoot
    "dme": 2 * 0.1,  # values and indices of a tenth
    "gaussiank": 2 * 0.01 * 1.5,  # up to 4/3
    "hardthreshold": 2 * 0.01 * 2,  # the threshold is fixed after the probe: by seed, 0.8 to 1.7 times the share
    "hgc": 0.25,  # an index and 4 bits for each element of two mean magnitudes
    "inceptionn": 14 / 32,  # some elements take 16 bits, most 8, and each a tag of two
    "redsync": 2 * 0.02,  # up to twice the ratio
    "sbc": 0.02,
    "sdagc": 2 * 0.05,
    "sidco": 2 * 0.01 * 1.2,  # the tolerance
    "sketchml": 0.01,  # much less than a value of 4 bytes per kept element
    "strom": 0.1,
    "threshold": 0.1,
    "variance": 0.1,
    "wangni": 2 * 0.1,  # values and indices of a tenth
}
# Training takes time, and methods send the same payloads in every framework. Without --all, PyTorch therefore trains
# for one epoch, by methods of TYPICAL whose bytes depend on what was sent in the steps before, and of other kinds.
# Keras and the tape train only PowerSGD, whose bytes depend on shapes, which differ between the frameworks.
LONG = {"torch": ["none", "topk"], "keras": ["powersgd"], "tensorflow": ["powersgd"]}
if ALL:
    # The tape shares most code with Keras' optimizer. Its own code does not depend on the method.
    tape = ["none", "fp16", "bf16", "topk", "signsgd", "efsignsgd", "powersgd"]
    LONG = {"torch": MEASURED, "keras": MEASURED, "tensorflow": tape}
TO_THE_END = list(MATRICES) if ALL else ["torch"]
SHORT = ["dgc", "hardthreshold", "threshold", "signsgd", "fp16", "powersgd"]


# To train to the end takes long.
@pytest.fixture(scope="module", params=rest_slow(["keras", "tensorflow", "torch"], 1))
def framework(request):
    return request.param


def train(framework, names, file, *words):
    """Return the final table of one launch, which trains with the methods and the example's settings."""
    words = [f"examples/{framework}_digits.py", "--compressor", *names, "--json", str(file), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("GRACE_CONFIG", None)
    done = subprocess.run(
        [*command("horovodrun-gloo", 2), sys.executable, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=2400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    # The output is no terminal: one line per run in place of a bar, which would be a line per step.
    assert "%|" not in done.stderr
    assert [name for name in names if not re.search(rf"(?<!\w){name}: \d+ steps in", done.stdout)] == []
    return {row["compressor"]: row for row in json.loads(file.read_text())}


@pytest.fixture(scope="module")
def rows(framework, tmp_path_factory):
    """Return the rows of the methods that are trained as in the documents."""
    file = tmp_path_factory.mktemp("example") / "table.json"
    if framework in TO_THE_END:
        return train(framework, LONG[framework], file)
    # The launch is the same for all frameworks, and launcher and ranks would each import TensorFlow.
    return epoch(Launch(TENSORFLOW, "horovodrun-gloo", 2), framework, LONG[framework], file)


def epoch(launch, framework, names, file):
    """Return the table of one epoch in the ranks of a pool."""
    words = ["--compressor", *names, "--epochs", "1", "--json", str(file)]
    assert scenario("digits", launch, framework, words) == [0, 0]
    return {row["compressor"]: row for row in json.loads(file.read_text())}


def check_description(framework, rows):
    for row in rows.values():
        assert set(row) >= KEYS
        assert row["framework"] == framework
        assert row["replicas_identical"] is True
        assert row["seconds_per_step"] > 0


def test_every_method_is_trained_and_described(framework, rows):
    assert set(rows) == set(LONG[framework])
    check_description(framework, rows)


@pytest.mark.slow
@pytest.mark.parametrize("framework", TO_THE_END, indirect=True)
def test_accuracy_with_the_shipped_settings(framework, rows):
    assert rows["none"]["accuracy"] >= 0.97
    # One of the 360 test images counts 0.28 %.
    least = max(0.96, rows["none"]["accuracy"] - 0.02)
    assert {name: row["accuracy"] for name, row in rows.items() if row["accuracy"] < least} == {}


def payload_size(name, framework):
    """Return the announced bytes for the three weights with the example's setting, None if they depend on the data.

    The weights are one unit if the method joins tensors.
    """
    options = compressors.about(name).digits.options
    compressor = make_config({"compressor": name, **options}).method.compressor
    total = 0
    shapes = [(ELEMENTS,)] if compressor.joins else MATRICES[framework]
    for shape in shapes:
        spec = TensorSpec("weight", shape)
        assert compressor.unfit(spec) is None
        size = payload_bytes(sent_fields(compressor, spec))
        if size is None:
            return None
        total += size
    return total


@pytest.mark.parametrize("name", MEASURED)
def test_the_shipped_settings_fit_the_network(name):
    """Every other method is trained with --all."""
    size = payload_size(name, "torch")
    # The bytes of gradiveq depend on the step.
    assert (size is None) == (name in MOST or name == "gradiveq")
    assert size is None or 0 < size <= 4 * ELEMENTS


def check_bytes(framework, rows, most):
    wrong, share = {}, {}
    for name, row in rows.items():
        payload, sent = payload_size(name, framework), row["compressed_wire_bytes_per_step"]
        if payload is None:
            share[name] = sent / 4 / ELEMENTS
        # The header of a bucket contains its stamp, a flag per tensor, and padding to 16 bytes. Some buckets have no
        # header.
        elif name != "none" and not 0 <= sent - payload <= 48:
            wrong[name] = (payload, sent)
    assert wrong == {}
    assert {name: x for name, x in share.items() if not 0 < x <= most.get(name, 0.5)} == {}


def test_bytes_of_the_compressed_tensors_are_those_announced(framework, rows):
    check_bytes(framework, rows, MOST)


def check_share(rows):
    most = {"topk": 0.022, "signsgd": 0.033, "efsignsgd": 0.033, "fp16": 0.501, "bf16": 0.501}
    for name in set(most) & set(rows):
        row = rows[name]
        assert 0 < row["compressed_wire_bytes_per_step"] <= most[name] * row["compressed_dense_bytes_per_step"], name


def test_share_of_the_dense_bytes_of_the_compressed_tensors(rows):
    check_share(rows)


def check_powersgd(framework, row):
    # Rank 2: (rows + columns) * 2 float32 and a float32 flag for each matrix, and six for the stamp of their bucket.
    predicted = sum(4 * 2 * sum(shape) + 4 for shape in MATRICES[framework]) + 4 * 6
    assert row["compressed_wire_bytes_per_step"] == predicted


@pytest.mark.parametrize("framework", MATRICES if ALL else ["keras", "tensorflow"], indirect=True)
def test_powersgd_sends_what_its_ranks_predict(framework, rows):
    check_powersgd(framework, rows["powersgd"])


@pytest.mark.skipif(ALL, reason="with --all, every method is trained to the end")
@on(Launch(TORCH, "horovodrun-gloo", 2))
def test_methods_train_for_an_epoch(launch, tmp_path):
    rows = epoch(launch, "torch", SHORT, tmp_path / "table.json")
    assert set(rows) == set(SHORT)
    check_description("torch", rows)
    check_bytes("torch", rows, MOST)
    check_share(rows)
    check_powersgd("torch", rows["powersgd"])


@on(Launch(TORCH, "torchrun", 2))
def test_the_examples_of_torch_train_alike_without_horovod(launch, tmp_path):
    accuracies = []
    for example in ("torch", "ddp"):
        rows = epoch(launch, example, ["none", "topk"], tmp_path / f"{example}.json")
        check_description(example, rows)
        check_bytes("torch", rows, MOST)
        accuracies.append({name: row["accuracy"] for name, row in rows.items()})
    assert accuracies[0] == accuracies[1]
    sharded = epoch(launch, "fsdp", ["none", "topk"], tmp_path / "fsdp.json")
    check_description("fsdp", sharded)
    assert sharded["none"]["accuracy"] == pytest.approx(accuracies[0]["none"], abs=0.03)
    assert sharded["topk"]["wire_bytes_per_step"] < 0.02 * sharded["topk"]["dense_bytes_per_step"]


def test_none_sends_the_dense_bytes(framework, rows):
    assert framework != "torch" or "none" in rows
    for row in (rows[name] for name in rows if name == "none"):
        assert row["wire_bytes_per_step"] == row["dense_bytes_per_step"] == 4 * 151_306
