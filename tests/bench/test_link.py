"""The command `grace bench link` under every launcher."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from grace import cli
from grace.bench.link import launcher_of
from grace.core.errors import ConfigError
from tests.support.launch import ROOT, TORCH, environment
from tests.support.ranks import forked, launcher

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("name", ["torchrun", "horovodrun-gloo", "mpirun"])
def test_every_launcher(name, tmp_path):
    path = tmp_path / "link.json"
    started = [*launcher(name, 2), *forked(TORCH, "run"), f"{ROOT}/grace/__main__.py"]
    words = ["bench", "link", "--sizes", "1024", "1048576", "--json", str(path)]
    done = subprocess.run([*started, *words], env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    # Rank 0 alone prints.
    assert done.stdout.count("allreduce of 2 ranks") == 1
    found = json.loads(path.read_text())
    assert found["ranks"] == 2
    assert [point["nbytes"] for point in found["points"]] == [1024, 1048576]
    for point in found["points"]:
        # Of two ranks both bandwidths are equal.
        assert point["busbw"] == point["algbw"] == point["nbytes"] / point["seconds"]
    assert found["bandwidth"] > 0 <= found["latency"]


def test_with_a_link_it_starts_ranks_of_its_own(tmp_path):
    path = tmp_path / "link.json"
    words = ["bench", "link", "--link", "1gbit", "--ranks", "3", "--sizes", "4096", "4194304", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "grace", *words], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("allreduce of 3 ranks")
    small, large = json.loads(path.read_text())["points"]
    # A busy machine may be slower than the link, never faster. The first burst is not limited.
    assert large["busbw"] < 1.1 * 1e9 / 8
    assert small["seconds"] < large["seconds"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--ranks", "2"], "--ranks needs --link"),
        (["--latency", "1ms"], "--latency needs --link"),
        (["--link", "1gbit", "--launcher", "mpi"], "ranks of MPI are started by mpirun"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments, expected, capsys):
    assert cli.main(["bench", "link", *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_the_launcher_is_known_by_its_variables():
    assert launcher_of({"WORLD_SIZE": "2"}) == "torch"
    # horovodrun may start its ranks by mpirun.
    assert launcher_of({"OMPI_COMM_WORLD_SIZE": "2", "HOROVOD_CONTROLLER": "mpi"}) == "horovod"
    assert launcher_of({"PMI_SIZE": "2"}) == "mpi"
    with pytest.raises(ConfigError, match="no launcher has started"):
        launcher_of({})


def test_one_rank_has_no_link(capsys, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        monkeypatch.setenv(name, value)
    assert cli.main(["bench", "link"]) == 2
    assert "at least 2 ranks, received 1" in capsys.readouterr().err
