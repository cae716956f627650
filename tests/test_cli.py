"""The command `grace`: its lists and descriptions of methods, its errors, and the completion in shells."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import grace
from grace import cli, communicators, compressors, listing, memories
from grace.bench.variants import candidates
from grace.core.config.recommended import STARTS
from tests.bench.test_variants import MINE

pytestmark = pytest.mark.processes


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in another process, in which no test has registered anything."""
    return subprocess.run([sys.executable, "-m", "grace.cli", *arguments], capture_output=True, text=True, timeout=300)


def listed(*arguments: str) -> str:
    """Return what the command prints here."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert cli.main(["compressors", *arguments]) == 0
    return output.getvalue()


def rows(text: str) -> dict[str, list[str]]:
    """Return the rows of the tables of a list by their first words."""
    found = (re.split(r"  +", line[2:]) for line in text.splitlines() if re.match(r"[* ] \S+  +\S", line))
    return {cells[0]: cells[1:] for cells in found if len(cells) == len(listing.HEAD)}


def test_compressors_lists_every_registered_method():
    names = subprocess.check_output([sys.executable, "-c", "import grace; print(*grace.compressors)"], text=True)
    result = run("compressors", "--all")
    assert result.returncode == 0
    assert sorted({*rows(result.stdout)} - {"name"}) == names.split()


def advice(text: str) -> dict[str, str]:
    """Return the advice of an overview by method."""
    found = (re.split(r"  +", line[2:], maxsplit=2) for line in text.splitlines())
    return {cells[0]: cells[2] for cells in found if cells[1:2] in (["any"], ["SGD"], ["?"])}


def test_the_overview_has_a_line_of_advice_for_each_method_to_look_at_first():
    found = advice(listed())
    assert found.keys() == {name for name in compressors if not listing.of_literature(name)}
    assert found["topk"] == "slow networks and few ranks"
    assert found["uniform"] == "many ranks whose gradients are alike in size"
    assert not [name for name, said in found.items() if said.endswith("...")]
    assert "--all" in listed()


def test_the_methods_to_look_at_first_are_those_of_grace_and_of_the_recommendations():
    table = "eightbit onebit signsgd signum qsgd lpc natural terngrad efsignsgd inceptionn randomk topk threshold dgc "
    table += "wangni variance sketchedsgd adaptive sketchml 3lc qsparse atomo gradiveq powersgd gradzip"
    assert {*table.split(), *(start.config["compressor"] for start in STARTS)} <= advice(listed()).keys()


def test_the_description_of_a_method_says_its_tier():
    assert "Sparsification, literature" in listed("gaussiank")


def test_everything_fits_a_terminal_of_80_columns():
    texts = [listed(), listed("--all"), *(listed(name) for name in listing.names())]
    texts += [listed("--family", family.page) for family in listing.FAMILIES]
    assert max(len(line) for text in texts for line in text.splitlines()) <= 80


def test_the_list_has_optimizer_bits_memory_communicator_and_marks():
    found = listed("--all")
    cells = rows(found)
    # 10,485 of 1,048,576 elements at 8 bytes
    assert cells["topk"] == ["SGD", "0.64", "residual", "allgather", "no"]
    assert cells["qsgd"] == ["any", "8.06", "none", "allgather, two_shot", "yes"]
    # P and Q: (1024 + 1024) x rank 4 x 32 bits of 1024 x 1024 elements
    assert cells["powersgd"][1] == "0.25"
    marked = {line[2:].split()[0] for line in found.splitlines() if line.startswith(listing.MARK)} - {"start"}
    assert marked == {start.config["compressor"] for start in STARTS}
    assert cells.keys() - {"name"} == set(compressors)
    for name, (optimizer, *_) in cells.items():
        assert name == "name" or (optimizer == "any") == (compressors.about(name).adam is True)


def test_the_list_begins_with_where_to_start():
    beginning = listed().partition("\n\n")[0]
    assert listed("--all").startswith(beginning)
    assert beginning.startswith("Start with\n")
    words = " ".join(beginning.split())
    for start in STARTS:
        assert f"network: {start.network} bytes: {start.bytes}; trains {start.trains}" in words


@pytest.mark.parametrize("name", ["Low rank", "low_rank", "LOW-RANK", "lowrank"])
def test_a_family_is_listed_alone(name):
    assert {*rows(listed("--family", name))} - {"name"} == {
        "powersgd", "acpsgd", "gradzip", "gradiveq", "atomo", "truncatedsvd"
    }  # fmt: skip
    assert "Start with" not in listed("--family", name)


def test_named_methods_are_described_with_flags_and_options(monkeypatch):
    monkeypatch.setattr(listing, "installed", lambda package: None if package == "tensorflow" else "9.9")
    topk, qsgd = listed("TopK", "qsgd", "topK").split("\n\n")[:2]
    assert topk.startswith("topk (compressor): Top-k sparsifier: the k elements of largest magnitude;")
    facts = dict(re.findall(r"^  (\S+(?: \S+)*)  +(.*)$", topk, re.MULTILINE))
    assert facts["family"] == "Sparsification"
    assert facts["flags"] == "summable: no, unbiased: no, fixed-size: yes, sparsifies: yes"
    assert facts["memory"] == "residual; error feedback: recommended"
    assert facts["frameworks"] == "numpy, torch"
    assert facts["options"] == "compress_ratio = 0.01"
    assert "allgather, two_shot from 3 ranks" in qsgd
    assert 'norm = "max"' in qsgd
    assert "threshold (required), capacity = null" in listed("threshold")
    assert "to be named; error feedback: depends on the model" in listed("randomk")
    assert "error feedback: harms" in listed("signsgd")
    assert "error feedback: optional" in listed("fp16")
    assert "error feedback: not needed" in listed("none")


def test_a_name_stands_for_all_components_that_have_it():
    compressor, memory = listed("dgc").split("\n\n")
    assert compressor.startswith("dgc (compressor)")
    assert memory.startswith("dgc (memory): Momentum correction")
    assert "momentum = 0.9, gradient_clipping = null" in memory
    assert "second = null" in listed("Two-Shot")


@pytest.mark.parametrize("name", listing.names())
def test_a_description_has_every_option_with_its_default(name):
    words = " ".join(listed(name).split())
    for registry in (compressors, memories, communicators):
        if name in registry:
            for each in dataclasses.fields(registry.get(name)):
                required = each.name in compressors.required(name) if registry is compressors else False
                shown = "(required)" if required else f"= {json.dumps(each.default)}"
                assert f"{each.name} {shown}" in words


def test_wrong_names_are_told_with_what_would_be_right(capsys):
    for arguments, told in (
        (["tokp"], "unknown method 'tokp'. Did you mean 'topk'?"),
        (["--family", "sparsify"], "--family: unknown family 'sparsify'. Did you mean 'sparsification'?"),
        (["topk", "--family", "other"], "leave one of them out"),
        (["--import", "nowhere.py"], "there is no file 'nowhere.py'"),
    ):
        assert cli.main(["compressors", *arguments]) == 2
        assert told in capsys.readouterr().err


def test_compressors_lists_an_outside_method_with_required_options(monkeypatch):
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Outside(grace.Compressor):
        """Needs to be told how much."""

        how_much: int

    monkeypatch.setattr(compressors, "_classes", {**compressors._classes, "outside": Outside})
    assert re.search(r"From outside of grace\n  name .*\n  outside  depends on options\n", listed("--all"))
    assert advice(listed())["outside"] == "Needs to be told how much"
    assert "outside (compressor): Needs to be told how much." in listed("outside")
    assert "how_much (required)" in listed("outside")


def test_the_optimizer_of_a_method_from_outside_is_unknown(monkeypatch):
    class Outside(compressors.get("topk")):
        """Keep the largest elements, too."""

    monkeypatch.setattr(compressors, "_classes", {**compressors._classes, "outside": Outside})
    assert rows(listed("--all"))["outside"][0] == "?"
    assert "optimizer         ?\n" in listed("outside")


def test_a_method_of_a_users_own_is_described(tmp_path):
    (tmp_path / "mine.py").write_text(MINE.format(helper="json"))
    found = run("compressors", "--import", str(tmp_path / "mine.py"), "mine")
    assert found.stdout.startswith("mine (compressor): Clips.\n  family            from outside of grace\n"), (
        found.stderr
    )
    assert "clip (required)" in found.stdout


def test_bits_of_run_time_length_are_those_of_kept_elements_or_by_the_data():
    bits = {name: cells[1] for name, cells in rows(listed("--all")).items()}
    assert all(bits[name] == "64 x kept" for name in ("dgc", "hardthreshold", "threshold"))
    assert bits["variance"] == "32 x kept"
    # Methods with several lengths, or with a length that is not the number of kept elements.
    for name in ("3lc", "adaptive", "atomo", "gradiveq", "inceptionn", "sketchml", "wangni"):
        assert bits[name] == "by data"


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


USAGES = {
    "grace": [[], ["bogus"], ["--bogus", "doctor"]],
    "grace compressors": [["compressors", "--bogus"], ["compressors", "--family"]],
    "grace doctor": [
        ["doctor", "--bogus"], ["doctor", "torch"], ["doctor", "--launcher", "slurm"],
        ["doctor", "--no-launch", "--launcher", "mpirun"], ["doctor", "--timeout", "long"],
    ],
    "grace bench": [["bench"], ["bench", "bogus"]],
    "grace bench codec": [["bench", "codec", "--bogus"], ["bench", "codec", "x"], ["bench", "codec", "--ranks", "two"]],
    "grace bench link": [["bench", "link", "--bogus"], ["bench", "link", "--sizes", "x"]],
    "grace bench run": [["bench", "run"], ["bench", "run", "--ranks", "x", "--", "true"]],
    "grace bench step": [["bench", "step", "--bogus", "1"], ["bench", "step", "--steps", "x"]],
    "grace completion": [["completion"], ["completion", "tcsh"], ["completion", "bash", "--bogus"]],
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "arguments"), [(command, each) for command, found in USAGES.items() for each in found], ids=str
)
def test_wrong_use_gives_the_usage_of_the_subcommand_and_status_2(command, arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    usage, _, error = capsys.readouterr().err.rstrip().rpartition("\n")
    assert re.match(rf"usage: {command}( \[| COMMAND| BENCHMARK|$)", usage)
    assert error.startswith(f"{command}: error: ")


def test_a_misspelled_option_gets_a_hint(capsys):
    for arguments, hint in (
        (["bench", "codec", "--compresors", "topk"], "unrecognized arguments: --compresors topk (did you mean --compr"),
        (["bench", "step", "--launchers", "torch"], "(did you mean --launcher?)"),
        (["bench", "codec", "--zzz"], "unrecognized arguments: --zzz\n"),
    ):
        with pytest.raises(SystemExit):
            cli.main(arguments)
        assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["compressors"], ["--help"], ["bench", "step", "--help"], ["compressors", "topk"]]
)
def test_a_reader_that_goes_away_is_no_error(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "grace", *arguments], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    # argparse itself ignores it.
    assert done.returncode in (128 + signal.SIGPIPE, 0 if "--help" in arguments else 128 + signal.SIGPIPE)
    assert done.stderr == ""


def test_without_standard_output_nothing_fails():
    done = subprocess.run(f"{sys.executable} -m grace compressors >&-", shell=True, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_missing_package_is_told_in_a_line(monkeypatch, capsys):
    def missing(args):
        raise ModuleNotFoundError("No module named 'left_out'", name="left_out.part")

    monkeypatch.setattr(cli, "_compressors", missing)
    assert cli.main(["compressors"]) == 2
    assert capsys.readouterr().err == "grace: error: the package 'left_out.part' is not installed; install it.\n"


def test_a_missing_module_of_grace_is_a_fault_with_a_traceback(monkeypatch):
    def missing(args):
        raise ModuleNotFoundError("No module named 'grace.left_out'", name="grace.left_out")

    monkeypatch.setattr(cli, "_compressors", missing)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["compressors"])


def test_the_configuration_in_the_environment_is_not_that_of_the_commands():
    """Else the benchmarks would warn that they ignore it."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "grace",
            "bench",
            "codec",
            "--compressors",
            "topk",
            "--numel",
            "10",
            "--repetitions",
            "1",
        ],
        env={**os.environ, "GRACE_CONFIG": '{"compressor": "qsgd"}'},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- completion -----------------------------------------------------------------------------------------------------


def completed(line: str) -> set[str]:
    """Return what bash offers at the end of a line, by the script that the command prints."""
    script = (
        'eval "$(python -m grace completion bash)"\n'
        'grace() { python -m grace "$@"; }\n'
        f"COMP_LINE={shlex.quote(line)}; COMP_POINT=${{#COMP_LINE}}; _python_argcomplete grace\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], env={**os.environ, **path}, capture_output=True, text=True, check=True
    )
    return {word.strip() for word in done.stdout.splitlines()} - {""}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("grace b", {"bench"}),
        ("grace compressors qs", {"qsgd", "qsparse"}),
        ("grace compressors two", {"two_shot"}),
        ("grace compressors --family sp", {"sparsification"}),
        ("grace doctor --launcher h", {"horovodrun"}),
        ("grace bench codec --compressors none qs", {"qsgd", "qsparse"}),
        ("grace bench step --launcher torch-f", {"torch-fsdp", "torch-fsdp-zero2"}),
        ("grace completion z", {"zsh"}),
    ],
)
def test_bash_completes(line, words):
    pytest.importorskip("argcomplete")
    assert completed(line) == words


def test_options_of_a_method_are_completed():
    assert candidates("qsgd:qu") == [
        "qsgd:quantum_num=", "qsgd:bucket_size=", "qsgd:norm=", "qsgd:memory=", "qsgd:communicator="
    ]  # fmt: skip
    assert "QSGD:norm=l2:quantum_num=" in candidates("QSGD:norm=l2:")
    assert candidates("bogus:") == []
    assert {*candidates("")} == {*compressors}


@pytest.mark.parametrize("shell", cli.SHELLS)
def test_every_shell_has_a_script(shell, capsys):
    pytest.importorskip("argcomplete")
    assert cli.main(["completion", shell]) == 0
    assert "grace" in capsys.readouterr().out


def test_without_argcomplete_the_way_out_is_told(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "argcomplete" else find_spec(name))
    assert cli.main(["completion", "bash"]) == 2
    assert "pip install argcomplete" in capsys.readouterr().err
