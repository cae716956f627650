"""The command `grace advise`: it measures scripts of the user under their launchers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from grace import cli
from grace.advice import hook, launch
from grace.advice.candidates import changes
from grace.core.config.config import make_config
from tests.support.launch import command, environment

DDP = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(int(os.environ.get("TRAINED", 1000))):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
print("trained to the end")
dist.destroy_process_group()
"""
WITH_GRACE = DDP.replace("optimizer = ", "import grace; grace.torch.register(model, compressor='qsgd'); optimizer = ")
HOROVOD = """
import torch, horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(64, 64)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for step in range(1000):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
print("trained to the end")
"""
FAILING = DDP.replace(
    "model = ",
    """from grace.advice.watch import Watch
def fails(*_):
    raise RuntimeError("broken here")
if os.environ["RANK"] == "1":
    Watch.figures = fails
model = """,
)
# What ranks leave for the command.
LEAVE = """import os
for kind in {}:
    with open(os.path.join(os.environ['GRACE_ADVISE'], kind), "w") as file:
        file.write("left by a rank")
"""
KERAS = """
import keras, numpy as np, horovod.tensorflow.keras as hvd
hvd.init()
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(64)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)), "mse", jit_compile=False)
x = np.random.default_rng(0).standard_normal((800, 64), np.float32)
model.fit(x, x, batch_size=8, epochs=10, verbose=0)
print("trained to the end")
"""
KERAS_WITH_GRACE = (
    KERAS.replace("hvd.Dist", "import_grace.tensorflow.Dist")
    .replace("import_grace", "__import__('grace')")
    .replace("1e-3)", "1e-3), compressor='qsgd'")
)
SHARDED = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(1000):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
print("trained to the end")
"""
REPLICAS = (
    SHARDED.replace("(layer)", "(layer, mesh=mesh)")
    .replace("(model)\n", "(model, mesh=mesh)\n")
    .replace("model =", "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('r', 's'))\nmodel =")
)
FSDP1 = SHARDED.replace("import fully_shard", "import FullyShardedDataParallel as fully_shard")


ADVISE = [sys.executable, "-m", "grace", "advise"]


def advised(folder, script, launcher, *options, ranks=2, **variables):
    return run(folder, script, [*ADVISE, *options, "--", *command(launcher, ranks), sys.executable], **variables)


def run(folder, script, words, **variables):
    (folder / "train.py").write_text(script)
    return subprocess.run(
        [*words, "train.py"],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.mark.distributed
def test_a_script_with_ddp_is_measured_unchanged(tmp_path):
    done = advised(tmp_path, DDP, "torchrun", "--json", "advice.json")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr[-4000:]
    assert "trained to the end" not in done.stdout
    found = json.loads((tmp_path / "advice.json").read_text())
    assert done.stdout.startswith(found["sentence"])
    rows = {row["label"]: row for row in found["rows"]}
    assert set(rows) == {*changes(), "8 local steps"}
    assert rows["none"]["measured"]
    assert "AdamW" in rows["topk"]["reason"]
    written = tmp_path / "grace.toml"
    assert written.exists() == (found["best"] != "none")
    assert ("    import grace\n\n    grace.torch.register(model" in done.stdout) == written.exists()


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "launcher", "ranks", "measured"),
    [
        (WITH_GRACE, "torchrun", 2, "qsgd"),
        (HOROVOD, "horovodrun-gloo", 2, "none"),
        (HOROVOD, "mpirun", 2, "none"),
        (KERAS, "horovodrun-gloo", 2, "none"),
        (KERAS_WITH_GRACE, "horovodrun-gloo", 2, "qsgd"),
        (SHARDED, "torchrun", 2, "none"),
        (REPLICAS, "torchrun", 4, "none"),
    ],
    ids=["grace", "horovodrun", "mpirun", "keras", "keras-grace", "fsdp", "replicas"],
)
def test_other_scripts_and_launchers(script, launcher, ranks, measured, tmp_path):
    done = advised(tmp_path, script, launcher, "--json", "advice.json", ranks=ranks)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "trained to the end" not in done.stdout
    found = json.loads((tmp_path / "advice.json").read_text())
    assert [row["label"] for row in found["rows"] if row["measured"]] == [measured]
    labels = {row["label"] for row in found["rows"]}
    # Ranks with parts of the model cannot step on their own.
    assert labels & {"less sharding", "8 local steps"} == {"less sharding" if script == SHARDED else "8 local steps"}
    # Graphs of all methods may take too long to trace.
    late = "s to measure" in found["left_out"].get("powersgd", "")
    assert ("powersgd" in labels or late) == (script != SHARDED)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["horovodrun-gloo", "mpirun"])
def test_a_launcher_may_start_the_command_on_every_rank(launcher, tmp_path):
    done = run(tmp_path, HOROVOD, [*command(launcher, 2), *ADVISE, "--", sys.executable])
    assert done.returncode == 0, done.stderr[-4000:]
    assert "trained to the end" not in done.stdout
    assert done.stdout.count(" on this network") == 1
    assert "The command that has started rank 0 prints the advice." in done.stdout


@pytest.mark.distributed
@pytest.mark.slow
def test_scripts_that_cannot_be_measured_are_refused(tmp_path):
    done = advised(tmp_path, FSDP1, "torchrun")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr[-4000:]
    assert "grace: error: a model in FSDP1 cannot be measured in a script" in done.stderr
    done = advised(tmp_path, DDP, "torchrun", TRAINED="9")
    assert done.returncode == 2
    assert "the script ended before enough steps were measured" in done.stderr


@pytest.mark.distributed
def test_an_error_of_one_rank_ends_all_of_them(tmp_path):
    done = advised(tmp_path, FAILING, "torchrun")
    assert done.returncode == 2
    assert "grace: error: rank 1 failed while it was measured: RuntimeError: broken here" in done.stderr


def test_the_lines_for_a_script_import_grace(tmp_path, monkeypatch):
    monkeypatch.setenv(hook.FOLDER, str(tmp_path))
    hook.tell("Add these lines", "grace.torch.register(model, {file})")
    told = (tmp_path / hook.LINE).read_text().format(file='"grace.toml"')
    assert told == 'Add these lines:\n\n    import grace\n\n    grace.torch.register(model, "grace.toml")'


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "options", "status", "expected"),
    [
        ("print(1)", [], 2, "the script ended, and no exchange of gradients was seen"),
        ("import sys; sys.exit(7)", [], 7, "the script ended with status 7 before it was measured"),
        ("import os; os.kill(os.getpid(), 9)", [], 137, "the script ended with status 137"),
        ("import time; time.sleep(60)", ["--timeout", "1"], 2, "the script took more than 1 s, and no exchange"),
        # One rank has left a reason, and the others wait for it.
        (LEAVE.format(["refused"]) + "import time; time.sleep(60)", [], 2, "grace: error: left by a rank"),
        # All but rank 0 were measured.
        (LEAVE.format(["seen", "first", "measured"]), [], 2, "the script ended before enough steps were measured"),
        (LEAVE.format(["seen", "measured"]) + "import sys; sys.exit(3)", [], 3, "the script ended with status 3"),
    ],
)
def test_a_script_without_an_exchange_ends_with_a_message(program, options, status, expected, tmp_path, capfd):
    output = ["--output", str(tmp_path / "grace.toml")]
    assert cli.main(["advise", *output, *options, "--", sys.executable, "-c", program]) == status
    assert expected in capfd.readouterr().err


@pytest.mark.processes
def test_a_method_of_an_earlier_advice_does_not_stay_if_none_is_best(tmp_path, capfd):
    output = tmp_path / "grace.toml"
    command = ["advise", "--output", str(output), "--", sys.executable, "-c"]
    for method, written in (("none", None), ("qsgd", "qsgd"), ("none", "none")):
        found = {"text": "the advice", "best": method, "toml": f'compressor = "{method}"\n'}
        program = LEAVE.format(["seen", "first", "advice.json"]).replace('"left by a rank"', repr(json.dumps(found)))
        assert cli.main([*command, program]) == 0
        assert (make_config(output).method.compressor if output.exists() else None) == (
            written and make_config(compressor=written).method.compressor
        )
    assert f"{output}, of an earlier advice, now says so." in capfd.readouterr().out


@pytest.mark.processes
def test_the_command_of_another_node_says_who_has_the_advice(tmp_path, capfd):
    program = LEAVE.format(["seen", "measured"])
    assert cli.main(["advise", "--output", str(tmp_path / "new"), "--", sys.executable, "-c", program]) == 0
    assert "The command that has started rank 0 prints the advice." in capfd.readouterr().out


@pytest.mark.processes
def test_the_users_sitecustomize_and_variables_reach_the_script(tmp_path, monkeypatch, capfd):
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['MINE'] = 'loaded'")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{environment()['PYTHONPATH']}")
    monkeypatch.setenv("GRACE_CONFIG", "mine.toml")
    program = "import os; print(os.environ['MINE'], os.environ['GRACE_CONFIG'])"
    assert cli.main(["advise", "--output", str(tmp_path / "new"), "--", sys.executable, "-c", program]) == 2
    assert capfd.readouterr().out == "loaded mine.toml\n"


def test_wrong_arguments_are_refused(tmp_path, capsys):
    assert cli.main(["advise", "--", "no-such-program"]) == 2
    assert "the program 'no-such-program' was not found" in capsys.readouterr().err
    (tmp_path / "grace.toml").write_text('compressor = "topk"\n')
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("grace.toml", "binary"):
        assert cli.main(["advise", "--output", str(tmp_path / name), "--", sys.executable]) == 2
        assert "exists, and grace advise has not written it" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--output", "--json"])
@pytest.mark.parametrize("name", ["missing/file", "."])
def test_files_that_cannot_be_written_are_refused_before_the_run(option, name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "_run", lambda *_: pytest.fail("the script has run"))
    assert cli.main(["advise", option, name, "--", sys.executable]) == 2
    assert f"'{name}' cannot be written" in capsys.readouterr().err
