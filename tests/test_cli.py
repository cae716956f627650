"""The command `grace`: its table of methods, and the findings of `grace doctor`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import grace
from grace import cli, listing
from grace.core.ops import native
from grace.machine import FRAMEWORKS, python
from tests.support.covering import ALL
from tests.support.launch import TENSORFLOW, TORCH, Launch
from tests.support.poisoned import imported, poison
from tests.support.ranks import on, scenario

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in another process, in which no test has registered anything."""
    return subprocess.run([sys.executable, "-m", "grace.cli", *arguments], capture_output=True, text=True, timeout=300)


def test_compressors_lists_every_registered_method():
    names = subprocess.check_output([sys.executable, "-c", "import grace; print(*grace.compressors)"], text=True)
    result = run("compressors")
    assert result.returncode == 0
    listed = [line.split()[0] for line in result.stdout.split("\n\n")[0].splitlines()[1:]]
    assert listed == names.split()


def test_compressors_shows_defaults_flags_bits_frameworks_and_options(capsys, monkeypatch):
    monkeypatch.setattr(listing, "installed", lambda package: None if package == "tensorflow" else "9.9")
    assert cli.main(["compressors"]) == 0
    output = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in output.split("\n\n")[0].splitlines()}
    # 10,485 of 1,048,576 elements at 8 bytes; summable, unbiased, fixed-size, sparsifies
    assert rows["topk"][1:3] == ["residual", "allgather"]
    assert rows["qsgd"][1:7] == ["none", "allgather,", "two_shot", "from", "3", "ranks"]
    assert rows["topk"][3:] == ["no", "no", "yes", "yes", "recommended", "0.64", "numpy,", "torch"]
    # P and Q: (1024 + 1024) x rank 4 x 32 bits of 1024 x 1024 elements
    assert rows["powersgd"][8] == "0.25"
    assert rows["none"][7:9] == ["not", "needed"]
    assert rows["signsgd"][2:8] == ["allgather", "no", "no", "yes", "no", "harms"]
    assert rows["qsgd"][-4] == "harms"
    assert rows["fp16"][7] == rows["natural"][-4] == "optional"
    assert "compress_ratio = 0.01" in output
    assert 'norm = "max"' in output
    assert "momentum = 0.9, gradient_clipping = null" in output


def test_compressors_lists_an_outside_method_with_required_options(monkeypatch, capsys):
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Outside(grace.Compressor):
        """Needs to be told how much."""

        how_much: int

    monkeypatch.setattr(grace.compressors, "_classes", {**grace.compressors._classes, "outside": Outside})
    assert cli.main(["compressors"]) == 0
    output = capsys.readouterr().out
    assert "outside: Needs to be told how much." in output
    assert "how_much (required)" in output


def test_bits_of_run_time_length_are_those_of_kept_elements_or_by_the_data(capsys):
    assert cli.main(["compressors"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.split("\n\n")[0].splitlines()}
    assert all("64 per kept element" in rows[name] for name in ("dgc", "hardthreshold", "threshold"))
    assert "32 per kept element" in rows["variance"]
    # Methods with several lengths, or with a length that is not the number of kept elements.
    for name in ("3lc", "adaptive", "atomo", "gradiveq", "inceptionn", "sketchml", "wangni"):
        assert "data-dependent" in rows[name]


def test_the_command_imports_no_framework():
    code = (
        "import sys; from grace import cli; cli.main(['compressors']); "
        "assert not {'torch', 'tensorflow', 'keras', 'horovod', 'mpi4py'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"grace {grace.__version__}\n"


def test_the_package_runs_as_the_command():
    def run(*arguments):
        return subprocess.run([sys.executable, "-m", "grace", *arguments], capture_output=True, text=True)

    assert run("--version").stdout == f"grace {grace.__version__}\n"
    assert run("bogus").returncode == 2


@pytest.mark.parametrize("arguments", [[], ["bogus"], ["doctor", "--bogus"]])
def test_wrong_use_gives_usage_and_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("usage: grace")


# --- doctor ---------------------------------------------------------------------------------------------------------


def test_doctor_without_launch_finds_this_environment_complete(capsys):
    from grace.backends import native_tensorflow

    assert cli.main(["doctor", "--no-launch"]) == 0
    found = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line)
    assert found["grace"] == grace.__version__
    assert "Gloo" in found["horovod.torch"]
    assert "Gloo" in found["horovod.tensorflow"]
    assert found["kernels"] == native.described()
    assert found["kernels.tensorflow"] == native_tensorflow.described()
    assert found["2-rank"] == "allreduce    not checked (--no-launch)"


def test_doctor_lists_what_other_packages_bring(tmp_path, monkeypatch, capsys):
    metadata = tmp_path / "outside-1.0.dist-info"
    metadata.mkdir()
    (tmp_path / "outside.py").write_text("class Part: pass")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[grace.memories]\ngood = outside:Part\n[grace.backends]\nbad = outside.missing:Ops\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setattr(cli.Doctor, "_horovod", lambda self: {})
    assert cli.main(["doctor", "--no-launch"]) == 1
    told = capsys.readouterr().out
    assert "\nplugin              good (grace.memories) of outside 1.0: works\n" in told
    assert "\nplugin              bad (grace.backends) of outside 1.0: cannot be loaded\n" in told
    assert "\n1 problem(s):\n  - the entry point 'bad = outside.missing:Ops' of outside 1.0, in the group" in told


def test_doctor_says_which_kernels_are_in_use(monkeypatch):
    built = SimpleNamespace(isa=lambda: "avx2", cuda=False)
    monkeypatch.delenv("GRACE_NATIVE", raising=False)
    monkeypatch.setattr(native, "module_file", lambda: None)
    reference = "the reference implementation is used. To build the kernels, run "
    monkeypatch.setattr(native, "module", built)
    assert native.described() == "avx2, CPU only"
    monkeypatch.setattr(native, "module", None)
    assert native.described().startswith(f"not built: {reference}")
    monkeypatch.setattr(native, "module_file", lambda: "native.so")
    assert native.described().startswith(f"built for another version and cannot be loaded: {reference}")
    for there, where in ((False, "CPU; built for CUDA too, but there is no CUDA device"), (True, "CPU and CUDA")):
        built = SimpleNamespace(isa=lambda: "avx512", cuda=True, serves_gpu=lambda device, there=there: there)
        monkeypatch.setattr(native, "module", built)
        assert native.described() == f"avx512, {where}"
    monkeypatch.setenv("GRACE_NATIVE", "0")
    assert native.described() == "avx512, CPU and CUDA; not used, because GRACE_NATIVE is 0"


def test_doctor_says_which_kernels_for_tensorflow_are_in_use(monkeypatch):
    native_tensorflow = pytest.importorskip("grace.backends.native_tensorflow")
    monkeypatch.delenv("GRACE_NATIVE", raising=False)
    reference = "the reference implementation is used. To build the kernels, run "
    other = "built for TensorFlow 2.19.0, but 2.21.0 is installed"
    for module, fault, said in [
        (SimpleNamespace(isa=lambda: "avx2", cuda=True), None, "avx2, CPU only"),
        (SimpleNamespace(isa=lambda: "avx2", cuda=False), other, f"{other}: {reference}"),
        (None, None, "CPU only"),
    ]:
        monkeypatch.setattr(native, "module", module)
        monkeypatch.setattr(native_tensorflow, "fault", lambda fault=fault: fault)
        assert native_tensorflow.described().startswith(said)


def test_doctor_names_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(cli, "installed", lambda package: "9.9" if package == "numpy" else None)
    assert cli.main(["doctor", "--no-launch"]) == 1
    output = capsys.readouterr().out
    assert "2 problem(s):" in output
    assert "torch and tensorflow are missing" in output
    assert "horovod is missing" in output


def test_doctor_needs_no_horovod_for_pytorch(monkeypatch, capsys):
    monkeypatch.setattr(cli, "installed", lambda package: "9.9" if package in ("numpy", "torch") else None)
    assert cli.main(["doctor", "--no-launch"]) == 0
    output = capsys.readouterr().out
    assert "horovod             not installed" in output
    assert "torchrun            /" in output


def test_doctor_shows_why_horovod_does_not_load(monkeypatch, capsys):
    monkeypatch.setattr(cli, "installed", lambda package: None if package == "tensorflow" else "9.9")
    monkeypatch.setattr(cli, "BUILD", "raise ImportError('no symbol for {0}')")
    assert cli.main(["doctor", "--no-launch"]) == 1
    output = capsys.readouterr().out
    assert "| ImportError: no symbol for torch" in output
    assert "horovod.torch cannot be imported" in output


@pytest.fixture
def only_mpirun(monkeypatch, tmp_path):
    """Make the doctor find only MPI. Return a function that puts a stand-in for mpirun on the PATH."""

    def install(script: str) -> None:
        stand_in = tmp_path / "mpirun"
        stand_in.write_text(f"#!/bin/sh\n{script}\n")
        stand_in.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(cli, "installed", lambda package: None if package == "torch" else "9.9")
    monkeypatch.setattr(cli, "KERNELS", "raise SystemExit('no kernels')")
    monkeypatch.setattr(cli.Doctor, "_horovod", lambda self: {"tensorflow": ["MPI"]})
    return install


def test_doctor_shows_the_output_of_a_failed_launch(only_mpirun, capsys):
    only_mpirun('case "$1" in --version) echo "mpirun (Open MPI) 5.0" ;; *) echo "no slots for $*"; exit 3 ;; esac')
    assert cli.main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert "kernels.tensorflow  unknown: the check failed" in output
    assert "2-rank allreduce, tensorflow, mpirun: FAILED, exit status 3" in output
    assert "| no slots for --allow-run-as-root --oversubscribe --bind-to none -np 2" in output


def test_doctor_stops_a_launch_that_hangs(only_mpirun, capsys):
    only_mpirun('case "$1" in --version) echo "HYDRA" ;; *) echo "waiting for $1"; sleep 60 ;; esac')
    assert cli.main(["doctor", "--timeout", "1"]) == 1
    output = capsys.readouterr().out
    assert "2-rank allreduce, tensorflow, mpirun: FAILED, no answer in 1 s" in output
    assert "| waiting for -np" in output  # Open MPI's flags are used only with Open MPI


def test_doctor_says_when_no_launcher_fits(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cli, "installed", lambda package: "9.9")
    monkeypatch.setattr(cli, "KERNELS", "print('built')")
    monkeypatch.setattr(cli.Doctor, "_horovod", lambda self: {"torch": ["Gloo"]})
    monkeypatch.setattr(cli.shutil, "which", lambda name, path=None: None)
    assert cli.main(["doctor"]) == 1
    assert "no installed launcher fits Horovod's build for torch (Gloo)" in capsys.readouterr().out


@pytest.mark.distributed
def test_doctor_starts_two_ranks_and_imports_nothing_from_the_current_folder(tmp_path):
    # Every process imports a framework. Without --all, PyTorch shows how ranks are launched; see below for TensorFlow.
    fewer = "" if ALL else "cli.FRAMEWORKS, cli.KERNELS = ('torch',), 'print(\"tested above\")'; "
    command = python(f"from grace import cli; {fewer}sys.exit(cli.main())", "doctor")
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=poison(tmp_path), env=path, capture_output=True, text=True, timeout=300)
    assert imported(tmp_path) == ""
    assert result.returncode == 0, result.stdout + result.stderr
    for framework in FRAMEWORKS if ALL else ("torch",):
        assert f"2-rank allreduce, {framework}, horovodrun --gloo: works" in result.stdout
        assert f"2-rank allreduce, {framework}, mpirun: works" in result.stdout
    assert "2-rank allreduce, torch, torchrun: works" in result.stdout


@pytest.mark.distributed
@on(Launch(TORCH, "horovodrun-gloo", 2), Launch(TENSORFLOW, "horovodrun-gloo", 2))
def test_the_allreduce_of_the_doctor_fits_both_frameworks(launch):
    framework = "torch" if launch.worker == TORCH else "tensorflow"
    assert scenario("program", launch, cli.ALLREDUCE.format(framework)) == ["ended", "ended"]
