"""The callbacks and the examples of trainers, launched as in the documents."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys

import pytest
import torch

from tests.examples.test_digits import MOST, check_bytes, check_description, check_share
from tests.support.launch import ROOT, TORCH, environment
from tests.support.ranks import forked, launcher

pytestmark = pytest.mark.distributed

EXAMPLES = ["accelerate", "lightning", "transformers"]
TRAINERS = [*EXAMPLES, "composer"]
# What the callbacks share, without a trainer.
SHARED = "shared"
RUN = "tests/examples/resumed_trainer.py"


def skip_without(trainer):
    if trainer != SHARED and importlib.util.find_spec(trainer) is None:
        pytest.skip(f"{trainer} is not installed; see docs/get_started/trainers.md")


@pytest.fixture(scope="module", params=[*TRAINERS, SHARED])
def trainer(request):
    skip_without(request.param)
    return request.param


@pytest.fixture(scope="module")
def whole(trainer, tmp_path_factory):
    """A folder with a checkpoint that two ranks have saved, and what they have found in it."""
    folder = tmp_path_factory.mktemp(trainer)
    return folder, result(launch(2, RUN, trainer, str(folder)))


@pytest.mark.parametrize("trainer", EXAMPLES)
def test_a_trainer_trains_with_compressed_gradients(trainer, tmp_path):
    skip_without(trainer)
    table = tmp_path / "table.json"
    words = ["--compressor", "none", "topk", "--epochs", "3", "--json", str(table)]
    launch(2, f"examples/{trainer}_digits.py", *words)
    rows = {row["compressor"]: row for row in json.loads(table.read_text())}
    check_description(trainer, rows)
    check_bytes("torch", rows, MOST)
    check_share(rows)
    # A network that learns nothing is right about one image in ten.
    assert {name: row["accuracy"] for name, row in rows.items() if row["accuracy"] < 0.5} == {}


def test_a_resumed_run_has_the_weights_and_states_of_a_run_without_a_break(whole):
    _, found = whole
    expected = {"equal": True, "replicas": True, "began": 8, "steps": 12}
    assert {key: found[key] for key in expected} == expected
    assert {"grace/wire_bytes", "grace/dense_bytes", "grace/ratio"} <= set(found["logged"])


def test_another_number_of_ranks_continues_with_what_the_ranks_held_back(trainer, whole):
    folder, before = whole
    found = result(launch(3, RUN, trainer, str(folder), "--resume"))
    assert (found["replicas"], found["began"], found["steps"]) == (True, 8, 12)
    assert found["held back"] == pytest.approx(before["held back"], rel=1e-5)
    assert min(before["held back"].values()) > 0


def test_one_rank_trains_without_compression_and_warns(trainer, whole):
    folder, _ = whole
    done = launch(1, RUN, trainer, str(folder), "--resume")
    assert "there is one rank, so grace compresses nothing." in done.stderr
    assert "what the ranks held back that saved the checkpoint is lost" in done.stderr
    assert result(done) == {"replicas": True, "logged": []}


@pytest.mark.slow
def test_a_checkpoint_without_a_state_warns(trainer, whole, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    for file in folder.rglob("grace-rank-*.pt"):
        file.unlink()
    for file in (*folder.glob("*.ckpt"), *folder.glob("all.pt"), *folder.glob("checkpoint-8.pt")):
        saved = torch.load(file, weights_only=False)
        saved.get("state", {}).get("callbacks", {}).pop("GraceCallback", None)
        torch.save({key: value for key, value in saved.items() if key not in ("grace", "ranks")}, file)
    done = launch(2, RUN, trainer, str(folder), "--resume")
    assert "the checkpoint contains no state of grace: residuals start from zero" in done.stderr
    assert (result(done)["began"], set(result(done)["held back"].values())) == (0, {0.0})


@pytest.mark.slow
def test_a_missing_file_of_a_rank_is_an_error(trainer, whole, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    files = list(folder.rglob("grace-rank-1.pt"))
    if not files:
        pytest.skip("the states of all ranks are in one file")
    for file in files:
        file.unlink()
    done = launch(3, RUN, trainer, str(folder), "--resume", fails=True)
    assert "StateError: checkpoint" in done.stderr
    assert "grace-rank-1.pt: expected the state of a rank, received FileNotFoundError" in done.stderr


def test_composer_refuses_an_exchange_without_ddp(tmp_path):
    skip_without("composer")
    module = ("-m", "tests.examples.trainers.composer")
    launch(2, *module, str(tmp_path / "with"), "multi_auto_sync")
    done = launch(2, *module, str(tmp_path / "without"), "forced_sync", fails=True)
    assert "ConfigError" in done.stderr
    assert "DDP has not exchanged the gradients of this batch" in done.stderr


def result(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    """Return what rank 0 has printed last."""
    return json.loads(done.stdout.splitlines()[-1])


def launch(ranks: int, *words: str, fails: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a script on several ranks, without a trainer by those that have imported PyTorch."""
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    if SHARED in words:
        started = [*launcher("torchrun", ranks), *forked(TORCH, "run")]
    done = subprocess.run(
        [*started, *words],
        cwd=ROOT,
        env=environment(HF_HUB_OFFLINE="1"),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stdout[-4000:] + done.stderr[-4000:]
    return done
