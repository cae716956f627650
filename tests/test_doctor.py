"""The findings of `grace doctor`, with stand-ins for packages and launchers, and with real ones."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import grace
from grace import cli, doctor
from grace.core.ops import native
from grace.doctor import CONTROLLERS, LAUNCHERS, PAIRS, Ended, Pair
from grace.machine import FRAMEWORKS, python
from tests.support.covering import ALL
from tests.support.launch import ROOT, TENSORFLOW, TORCH, Launch
from tests.support.poisoned import imported, poison
from tests.support.ranks import on, scenario

pytestmark = pytest.mark.processes

EVERYTHING = ("numpy", "torch", "tensorflow", "keras", "horovod", "mpi4py")
BOTH = {"torch": ["MPI", "Gloo"], "tensorflow": ["MPI", "Gloo"]}


class Machine:
    """A machine with these packages, launchers and builds of Horovod, in which programs import no framework."""

    def __init__(self, monkeypatch, folder: Path) -> None:
        self._patch, self._folder = monkeypatch, folder
        self.launches = folder / "launches"
        self.launches.write_text("")
        monkeypatch.setattr(doctor, "KERNELS", "tell(kernels='as built')")
        monkeypatch.setattr(doctor, "GLOO", "")

    def has(self, packages=EVERYTHING, launchers=LAUNCHERS, built=BOTH, scripts=None) -> None:
        """Set what is there. A launcher notes its name and runs its program once, unless `scripts` has another text.

        The program fails if Horovod's build lacks what the launcher needs, as ranks do whose rendezvous fails.
        """
        self._patch.setattr(doctor, "installed", lambda name: "9.9" if name in packages else None)
        built_for = f"dict(torch={built['torch']}, tensorflow={built['tensorflow']})['{{0}}']"
        self._patch.setattr(doctor, "BUILD", f"tell(built={built_for})")
        allreduce = f"import os, sys\nsys.exit(os.environ['NEEDS'] not in {built_for})"
        self._patch.setattr(doctor, "ALLREDUCE", allreduce)
        places = {}
        for name in launchers:
            skipped = {"torchrun": 4, "horovodrun": 3, "mpirun": 2}[name]
            text = (scripts or {}).get(name, f'shift {skipped}; exec "$@"')
            version = 'if [ "$1" = --version ]; then echo "HYDRA 4"; exit; fi\n' if name == "mpirun" else ""
            path = self._folder / name
            noted = f"echo {name} >> {self.launches}; export NEEDS={CONTROLLERS.get(name)}"
            path.write_text(f"#!/bin/sh\n{version}{noted}\n{text}\n")
            path.chmod(0o755)
            places[name] = str(path)
        self._patch.setattr(doctor.shutil, "which", lambda name, path=None: places.get(name))


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path)


def pairs(output: str) -> dict[tuple[str, str], str]:
    """Return what is said of each pair of a framework and a launcher."""
    found = re.findall(r"^2-rank allreduce, (\w+), (\w+)[^:]*: (.*)$", output, re.MULTILINE)
    return {(framework, launcher): said for framework, launcher, said in found}


def problems(output: str) -> list[str]:
    return output.partition("problem(s):\n  - ")[2].rstrip("\n").split("\n  - ") if "problem(s):" in output else []


def test_every_framework_and_every_launcher_is_tried_once(machine, capsys):
    machine.has()
    assert cli.main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert pairs(output) == {
        ("torch", "torchrun"): "works",
        ("torch", "horovodrun"): "works",
        ("tensorflow", "mpirun"): "works",
    }
    assert sorted(machine.launches.read_text().split()) == sorted(LAUNCHERS)
    assert "horovod.torch       built with MPI and Gloo\n" in output
    assert "kernels.tensorflow  as built\n" in output
    assert output.endswith("\nno problem found\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--framework", "torch"], [("torch", name) for name in LAUNCHERS]),
        (["--framework", "tensorflow"], [("tensorflow", name) for name in ("mpirun", "horovodrun")]),
        (["--launcher", "torchrun"], [("torch", "torchrun")]),
        (["--launcher", "mpirun"], [("torch", "mpirun"), ("tensorflow", "mpirun")]),
        (["--framework", "tensorflow", "--launcher", "horovodrun"], [("tensorflow", "horovodrun")]),
    ],
    ids=str,
)
def test_only_what_is_named_is_checked(machine, capsys, arguments, expected):
    machine.has()
    assert cli.main(["doctor", *arguments]) == 0
    output = capsys.readouterr().out
    assert sorted(pairs(output)) == sorted(expected)
    told = {line.split()[0] for line in output.splitlines() if line.startswith("horovod.")}
    assert told == {f"horovod.{framework}" for framework, _ in expected}


def test_torchrun_starts_no_ranks_of_tensorflow(machine, capsys):
    machine.has()
    assert cli.main(["doctor", "--launcher", "torchrun", "--framework", "tensorflow"]) == 2
    assert "--launcher torchrun starts ranks of PyTorch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("packages", "launchers", "arguments", "expected"),
    [
        (("numpy", "torch"), ["torchrun"], [], []),
        (("numpy", "torch"), ["torchrun"], ["--launcher", "torchrun"], []),
        (("numpy", "torch", "tensorflow"), ["torchrun"], [], []),
        (EVERYTHING, ["torchrun", "horovodrun"], [], []),
        (("numpy",), [], [], ["horovod is missing", "torch and tensorflow are missing"]),
        (("numpy", "tensorflow"), ["mpirun"], [], ["horovod is missing"]),
        (("numpy", "torch"), ["torchrun"], ["--framework", "tensorflow"], ["tensorflow is missing", "horovod is miss"]),
        (("numpy", "torch"), ["torchrun"], ["--launcher", "mpirun"], ["horovod is missing", "mpirun is not found"]),
        (("numpy", "tensorflow"), [], ["--launcher", "torchrun"], ["torch is missing: install PyTorch"]),
        (("numpy", "tensorflow"), [], ["--framework", "torch"], ["torch is missing: install PyTorch"]),
        (EVERYTHING, ["torchrun"], ["--launcher", "mpirun"], ["mpirun is not found: install it"]),
        (("torch",), ["torchrun"], [], ["numpy is missing: install it"]),
    ],
    ids=str,
)
def test_the_status_is_that_of_what_was_asked(machine, capsys, packages, launchers, arguments, expected):
    machine.has(packages, launchers)
    status = cli.main(["doctor", *arguments])
    found = problems(capsys.readouterr().out)
    assert status == bool(expected)
    assert all(any(text in problem for problem in found) for text in expected), found
    assert not [problem for problem in found if not any(text in problem for text in expected)]


@pytest.mark.parametrize(
    ("built", "expected"),
    [
        # The other launcher is tried for TensorFlow, and for mpirun the other framework.
        (
            {"torch": ["Gloo"], "tensorflow": ["Gloo"]},
            {
                ("torch", "torchrun"): "works",
                ("torch", "horovodrun"): "works",
                ("tensorflow", "mpirun"): "not possible, Horovod's build for tensorflow has no MPI",
                ("torch", "mpirun"): "not possible, Horovod's build for torch has no MPI",
                ("tensorflow", "horovodrun"): "works",
            },
        ),
        (
            {"torch": [], "tensorflow": ["MPI"]},
            {
                ("torch", "torchrun"): "works",
                ("torch", "horovodrun"): "not possible, Horovod's build for torch has no Gloo",
                ("tensorflow", "mpirun"): "works",
                ("tensorflow", "horovodrun"): "not possible, Horovod's build for tensorflow has no Gloo",
            },
        ),
    ],
    ids=str,
)
def test_a_launcher_that_does_not_fit_is_no_problem_if_another_does(machine, capsys, built, expected):
    machine.has(built=built)
    assert cli.main(["doctor"]) == 0
    assert pairs(capsys.readouterr().out) == expected


def test_no_launcher_that_fits_is_a_problem(machine, capsys):
    machine.has(launchers=["mpirun"], built={"torch": ["Gloo"], "tensorflow": ["Gloo"]})
    assert cli.main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert "2-rank allreduce, torch, mpirun: not possible, Horovod's build for torch has no MPI\n" in output
    assert [text[:40] for text in problems(output)] == [
        "no installed launcher fits torch (mpirun",
        "no installed launcher fits tensorflow (m",
    ]


def test_the_output_of_a_failed_launch_is_shown(machine, capsys):
    scripts = {"mpirun": 'echo "no slots for $1 $2"; exit 3'}
    machine.has(("numpy", "tensorflow", "horovod"), ["mpirun"], scripts=scripts)
    assert cli.main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert "2-rank allreduce, tensorflow, mpirun: FAILED, exit status 3\n    | no slots for -np 2\n" in output
    # The ranks have not told it.
    assert "horovod.tensorflow  built with MPI and Gloo" in output
    assert problems(output) == ["the 2-rank allreduce failed (tensorflow, mpirun): see its output above"]


def test_open_mpi_gets_flags_of_its_own(machine, capsys):
    version = 'case "$*" in *--version*) echo "mpirun (Open MPI) 5.0";; *) echo "flags $*"; exit 3;; esac'
    machine.has(("numpy", "torch", "horovod"), ["mpirun"])
    path = Path(doctor.shutil.which("mpirun"))
    path.write_text(f"#!/bin/sh\n{version}\n")
    assert cli.main(["doctor"]) == 1
    assert "| flags --allow-run-as-root --oversubscribe --bind-to none -np 2" in capsys.readouterr().out


def test_a_launch_that_hangs_is_stopped(machine, capsys):
    machine.has(("numpy", "torch"), ["torchrun"], scripts={"torchrun": 'echo "waiting for $1"; sleep 60'})
    assert cli.main(["doctor", "--timeout", "3"]) == 1
    output = capsys.readouterr().out
    assert "2-rank allreduce, torch, torchrun: FAILED, no answer in 3 s\n    | waiting for --standalone\n" in output


def test_a_build_of_horovod_that_does_not_load_is_one_problem(machine, monkeypatch, capsys):
    machine.has(("numpy", "torch", "horovod"))
    monkeypatch.setattr(doctor, "BUILD", "raise ImportError('no symbol for {0}')")
    for arguments in ([], ["--no-launch"]):
        assert cli.main(["doctor", *arguments]) == 1
        output = capsys.readouterr().out
        assert "horovod.torch       does not load\n" in output
        assert "| ImportError: no symbol for torch" in output
        assert problems(output) == ["horovod.torch cannot be imported: rebuild Horovod (scripts/setup.sh)"]
    assert "2-rank allreduce    not checked (--no-launch)" in output


def test_a_fault_of_the_kernels_is_none_of_horovod(machine, monkeypatch, capsys):
    machine.has()
    broken = "raise OSError('no such symbol')"
    monkeypatch.setattr(doctor, "KERNELS", f"try:\n    {broken}\nexcept OSError:\n    pass")
    assert cli.main(["doctor", "--no-launch"]) == 0
    output = capsys.readouterr().out
    assert "horovod.tensorflow  built with MPI and Gloo" in output
    assert "kernels.tensorflow  unknown: the check failed" in output


def test_checks_run_side_by_side(machine, tmp_path, capsys):
    """Each launcher waits for the other to start."""
    scripts = {
        name: f"touch {tmp_path}/{name}.on; until [ -e {tmp_path}/{other}.on ]; do sleep 0.05; done; exit 0"
        for name, other in (("torchrun", "horovodrun"), ("horovodrun", "torchrun"))
    }
    machine.has(("numpy", "torch", "horovod"), scripts, scripts=scripts)
    assert cli.main(["doctor", "--timeout", "60"]) == 0
    assert {*pairs(capsys.readouterr().out).values()} == {"works"}


@pytest.mark.parametrize("number", [signal.SIGINT])
def test_an_interruption_leaves_no_children(tmp_path, number):
    code = (
        "import sys, signal; from grace import cli, doctor\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"launch = ['sh', '-c', 'echo $$ > {tmp_path}/child; exec sleep 600']\n"
        "doctor._command = lambda *given: launch\n"
        "doctor.installed = lambda name: '9.9' if name in ('numpy', 'torch') else None\n"
        "sys.exit(cli.main(['doctor', '--framework', 'torch']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    note, deadline = tmp_path / "child", time.monotonic() + 60
    while not (note.exists() and note.read_text().strip()):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "grace: interrupted\n")
    assert not Path(f"/proc/{note.read_text().strip()}").exists()


def test_facts_are_read_from_lines_of_launchers():
    output = (
        '[1,0]<stdout>:grace doctor: {"built": ["MPI"]}\n[1,1]<stdout>:grace doctor: {"built": ["M'
        'grace doctor: {"kernels": "avx2"}\n warning\ngrace doctor: not JSON\n'
    )
    assert doctor._facts(output) == {"built": ["MPI"]}
    assert doctor._facts('x grace doctor: {"kernels": "avx2"}') == {"kernels": "avx2"}


def subsets(things):
    return list(itertools.chain.from_iterable(itertools.combinations(things, n) for n in range(len(things) + 1)))


@pytest.mark.parametrize("launchers", subsets(LAUNCHERS), ids=str)
@pytest.mark.parametrize("packages", subsets(["torch", "tensorflow", "horovod"]), ids=str)
def test_training_works_if_every_installed_framework_has_a_launcher(monkeypatch, capsys, packages, launchers):
    """For every build of Horovod: what is tried, what is said, and the status."""
    monkeypatch.setattr(doctor, "installed", lambda name: "9.9" if name in (*packages, "numpy") else None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name, path=None: name if name in launchers else None)
    frameworks = [name for name in FRAMEWORKS if name in packages]
    for of_torch, of_tensorflow in itertools.product(subsets(["MPI", "Gloo"]), repeat=2):
        built, tried = {"torch": of_torch, "tensorflow": of_tensorflow}, []

        def fits(pair, built=built):
            if pair.launcher == "torchrun":
                return True
            return "horovod" in packages and CONTROLLERS[pair.launcher] in built[pair.framework]

        def run(self, command, built=built, tried=tried, fits=fits):
            framework = "tensorflow" if "tensorflow" in command[-1] else "torch"
            facts = {"built": built[framework], "kernels": ""} if "horovod" in packages else {"kernels": ""}
            if command[0] not in LAUNCHERS or "--version" in command:
                return Ended(0, "", facts)
            pair = Pair(framework, command[0])
            tried.append(pair)
            return Ended(0 if fits(pair) else 1, "", facts)

        monkeypatch.setattr(doctor.Doctor, "_run", run)
        status = doctor.Doctor(60).examine(launch=True)
        output = capsys.readouterr().out
        possible = [pair for pair in PAIRS if {*pair} <= {*frameworks, *launchers} and fits(pair)]
        served = {pair.framework for pair in possible}
        needed = {name for name in frameworks if name == "torch" or "horovod" in packages}
        works = "torch" in packages or {"tensorflow", "horovod"} <= {*packages}
        assert status == (0 if works and needed <= served else 1), (built, output)
        assert len(tried) == len({*tried})
        # Every framework and launcher that can be served has been, and nothing more than needed was started.
        done = [pair for pair in tried if fits(pair)]
        every = {name for pair in possible for name in pair}
        assert every == {name for pair in done for name in pair}
        assert len(done) <= len(every)
        assert (output.count(": works\n"), output.count("FAILED")) == (len(done), 0)


# --- the real machine -----------------------------------------------------------------------------------------------


def test_this_environment_is_complete(capsys):
    from grace.backends import native_tensorflow

    assert cli.main(["doctor", "--no-launch"]) == 0
    found = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line)
    assert found["grace"] == grace.__version__
    assert "Gloo" in found["horovod.torch"]
    assert "Gloo" in found["horovod.tensorflow"]
    assert found["kernels"] == native.describe()
    assert found["kernels.tensorflow"] == native_tensorflow.describe()
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
    monkeypatch.setattr(doctor, "installed", lambda name: "9.9" if name in ("numpy", "torch") else None)
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
    assert native.describe() == "avx2, CPU only"
    monkeypatch.setattr(native, "module", None)
    assert native.describe().startswith(f"not built: {reference}")
    monkeypatch.setattr(native, "module_file", lambda: "native.so")
    assert native.describe().startswith(f"built for another version and cannot be loaded: {reference}")
    for there, where in ((False, "CPU; built for CUDA too, but there is no CUDA device"), (True, "CPU and CUDA")):
        built = SimpleNamespace(isa=lambda: "avx512", cuda=True, serves_gpu=lambda device, there=there: there)
        monkeypatch.setattr(native, "module", built)
        assert native.describe() == f"avx512, {where}"
    monkeypatch.setenv("GRACE_NATIVE", "0")
    assert native.describe() == "avx512, CPU and CUDA; not used, because GRACE_NATIVE is 0"


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
        assert native_tensorflow.describe().startswith(said)


@pytest.mark.distributed
def test_doctor_starts_two_ranks_and_imports_nothing_from_the_current_folder(tmp_path):
    # Every process imports a framework. Without --all, PyTorch shows how ranks are launched; see below for TensorFlow.
    arguments = [] if ALL else ["--framework", "torch"]
    command = python("from grace import cli; sys.exit(cli.main())", "doctor", *arguments)
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=poison(tmp_path), env=path, capture_output=True, text=True, timeout=300)
    assert imported(tmp_path) == ""
    assert result.returncode == 0, result.stdout + result.stderr
    expected = {("torch", "torchrun"), ("torch", "horovodrun")}
    expected |= {("tensorflow", "mpirun")} if ALL else {("torch", "mpirun")}
    assert pairs(result.stdout) == dict.fromkeys(expected, "works")


@pytest.mark.distributed
@on(Launch(TORCH, "horovodrun-gloo", 2), Launch(TENSORFLOW, "horovodrun-gloo", 2))
def test_the_allreduce_of_the_doctor_fits_both_frameworks(launch):
    framework = "torch" if launch.worker == TORCH else "tensorflow"
    assert scenario("program", launch, doctor.ALLREDUCE.format(framework)) == ["ended", "ended"]
