"""Examples in the documents must work, and links must lead to existing files."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from grace import Config, Simulation, TensorSpec, compressors, make_config
from tests.support.launch import TENSORFLOW, TORCH
from tests.support.ranks import forked, launcher

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
# The Python blocks of each of these pages form one script.
USING = (
    *("two_nodes", "adam", "move", "configuration", "communicators_and_memories", "checkpoints", "statistics"),
    "outer_steps",
)
EXTEND = ("index", "compressor", "memory", "communicator", "transport", "array_operation", "backend")
RUNNABLE = [
    *(
        f"docs/get_started/{page}.md"
        for page in ("index", "pytorch", "ddp", "fsdp", "recipes", "tensorflow", "torchrun")
    ),
    *(f"docs/{page}.md" for page in USING),
    *(f"docs/extend/{page}.md" for page in EXTEND),
    "docs/design/mpi4py.md",
]
# One rank suffices for most pages that initialize torch.distributed, and takes a third of the time.
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
# The pages with PyTorch or TensorFlow, and how many ranks they run on.
ON_RANKS = {f"docs/get_started/{page}.md": 2 for page in ("ddp", "fsdp", "torchrun")}
ON_RANKS |= {"docs/two_nodes.md": 2}
ON_RANKS |= {f"docs/{page}.md": 1 for page in ("get_started/pytorch", "get_started/recipes", "adam", "move")}
ON_RANKS |= {
    "docs/checkpoints.md": 1,
    "docs/statistics.md": 1,
    "docs/outer_steps.md": 1,
    "docs/get_started/tensorflow.md": 1,
}
WITHOUT_PUBLICATION = ("none", "fp16", "bf16", "chain")


def scalars() -> list[str]:
    """Return the names of all numbers for loggers."""
    found: dict[str, None] = {}
    weights = {"w": np.ones((64, 64), np.float32)}
    for outer in (None, {"every": 1}):
        simulation = Simulation(1, {"w": (64, 64)}, {"compressor": "topk", "outer": outer})
        simulation.track_norms = True
        if outer:
            simulation.begin({"w": np.zeros((64, 64), np.float32)})
        for _ in range(2):
            if outer:
                simulation.note_loss(1.0)
            simulation.step([weights])
        found |= simulation.scalars()
    return list(found)


SCALARS = scalars()


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_compressor_of_the_documents_works():
    code = re.search(r"```python\n(.*?)```", read("docs/extend/compressor.md"), re.DOTALL)
    assert code is not None
    # Rounding to 2 * 127 + 1 levels of a normal sample of 2,048 elements: half a level, and max|x| is below 5.
    output = subprocess.check_output([sys.executable, "-c", code.group(1)], text=True)
    assert 0 < float(output) <= 5 / 127 / 2


def test_the_communicator_of_the_documents_keeps_the_contract(tmp_path):
    code = "\n".join(
        re.findall(r"^```python\n(.*?)^```", read("docs/extend/communicator.md"), re.DOTALL | re.MULTILINE)
    )
    (tmp_path / "test_turns.py").write_text(code, encoding="utf-8")
    # On 1 and on 3 ranks.
    words = [sys.executable, "-m", "pytest", "-q", "-k", "1 or 3", "test_turns.py"]
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert "12 passed" in done.stdout


def built_in() -> list[str]:
    return [name for name in compressors if compressors.get(name).__module__.startswith("grace.")]


def test_configuration_page_names_every_key_and_its_default():
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| `([^`|]*)` \|", read("docs/configuration.md"), re.MULTILINE)
    fields = {f.name: f.default for f in dataclasses.fields(Config) if f.name != "method"}
    expected = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    assert {key: json.loads(value) for key, value in rows if key in expected} == expected


def test_configuration_files_of_the_configuration_page_are_valid(tmp_path):
    blocks = re.findall(r"^```toml\n(.*?)^```", read("docs/configuration.md"), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 3
    for block in blocks:
        (tmp_path / "grace.toml").write_text(block, encoding="utf-8")
        config = make_config(str(tmp_path / "grace.toml"))
        assert make_config(config.to_dict()) == config


def papers(page: str = "communicators_and_memories") -> dict[str, str]:
    """Return the configurations of a page's table of papers, as TOML."""
    section = read(f"docs/{page}.md").partition("\n## Configurations of papers\n")[2]
    rows = re.findall(r"^\| ([^|`]+) \| (`[^|]*`) \|", section.partition("\n## ")[0], re.MULTILINE)
    return {paper: "\n".join(re.findall(r"`([^`]+)`", cell)) for paper, cell in rows}


@pytest.mark.parametrize("paper", papers())
def test_the_configuration_of_a_paper_takes_a_step(paper, tmp_path):
    """On four ranks, in two nodes where there are nodes; 1-bit Adam goes to its second stage."""
    text, file = papers()[paper], tmp_path / "grace.toml"
    file.write_text(text.replace("step = 100", "step = 1"), encoding="utf-8")
    nodes = {"local_size": 2} if "hierarchical" in text else {}
    simulation = Simulation(4, {"weight": (64, 48)}, str(file), **nodes)
    given = [{"weight": np.random.default_rng(rank).standard_normal((64, 48)).astype(np.float32)} for rank in range(4)]
    for _ in range(2):
        second = given if simulation.plan.period and not simulation.full_round else None
        first, *others = (merged["weight"] for merged in simulation.step(given, lr=0.1, references=second))
        assert np.abs(first).max() > 0
        assert all(np.array_equal(first, other) for other in others)


def test_the_table_of_papers_has_them_all():
    expected = "DoubleSqueeze, dist-EF-SGD, DORE, 1-bit Adam, STC, Ok-Topk, SparCML, gTop-k, HiTopKComm, ZeRO++, EF21, "
    expected += "LAG, LAQ, CLAG, LE-SignGD, AQG, AdaCGD, EC-SGD-DIANA, MARINA, QSVRG, VR-DIANA, EC-LSVRG, EF21-SGDM, "
    expected += "dist-EF-blockSGD, GMC, ECQ-SGD, LoCo, SEGA, FedZip, C-Coll, parameter server, Optimus-CC, Byz-EF21, "
    expected += "coordinate-wise median, trimmed mean, FedDLR, IBCD"
    assert list(papers()) == expected.split(", ")


@pytest.mark.parametrize("paper", papers("outer_steps"))
def test_ranks_sync_as_the_configuration_of_a_paper_says(paper, tmp_path):
    """A simulation takes what the option `state` finds in an optimizer as tensors."""
    (tmp_path / "grace.toml").write_text(papers("outer_steps")[paper], encoding="utf-8")
    config = make_config(str(tmp_path / "grace.toml"))
    states = {} if isinstance(config.outer.state, str) else dict(config.outer.state)
    config = dataclasses.replace(config, outer=dataclasses.replace(config.outer, state="local"))
    specs = [TensorSpec("w", (64, 48)), *(TensorSpec(key, (3,), rounds=rounds) for key, rounds in states.items())]
    simulation = Simulation(4, specs, config)
    simulation.begin({spec.name: np.zeros(spec.shape, np.float32) for spec in specs})
    draws = np.random.default_rng(0)
    ranks = [{spec.name: draws.standard_normal(spec.shape).astype(np.float32) for spec in specs} for _ in range(4)]
    for step in range(1, config.outer.phases[-1][1] * max(states.values(), default=1) + 1):
        moved = [{name: x + np.float32(0.01 * rank) for name, x in own.items()} for rank, own in enumerate(ranks)]
        simulation.note_loss(1.0, 1.0, 1.0, 1.0)
        ranks = simulation.step(moved, lr=0.1)
        met = simulation.stats()["outer"]["rounds"]
        for name, rounds in {"w": 1, **states}.items():
            together = all(np.array_equal(own[name], ranks[0][name]) for own in ranks)
            syncs = simulation.outers[0].state.synced_at == step and met % rounds == 0
            assert together == (syncs and not config.outer.keeps_own), (step, name)


def run(code, folder, ranks):
    """Run a script: on ranks that have imported its framework, or, with 0 of them, in a Python of its own."""
    (folder / "script.py").write_text(code, encoding="utf-8")
    worker = TENSORFLOW if "import tensorflow" in code else TORCH
    python = forked(worker, "run") if ranks else [sys.executable]
    started = launcher("torchrun", ranks) if ranks > 1 else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(ONE_RANK if ranks < 2 else {})}
    subprocess.run([*started, *python, "script.py"], check=True, cwd=folder, env=environment)


# Ranks run beside other tests of ranks, whose servers have imported the frameworks.
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.distributed) for name in RUNNABLE if name in ON_RANKS),
        *(pytest.param(name, marks=pytest.mark.first) for name in RUNNABLE if name not in ON_RANKS),
    ],
)
def test_the_python_of_a_page_runs(name, tmp_path):
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", read(name), re.DOTALL | re.MULTILINE))
    assert code
    run(code, tmp_path, ON_RANKS.get(name, 0))


@pytest.mark.distributed
def test_the_example_of_a_distributed_checkpoint_runs(tmp_path):
    page = read("docs/checkpoints.md").partition("## torch.distributed.checkpoint\n")[2]
    code = page.partition("```py\n")[2].partition("```")[0]
    check = "assert sum(float(x.abs().sum()) for entry in app.exchange.state_dict()['tensors'].values()"
    run(f"{code}{check} for x in entry['memory'].values()) > 0\n", tmp_path, 2)


def lacking(name: str, docstring: str) -> list[str]:
    """Return the parts that the docstring of a method lacks."""
    lines = [line.strip() for line in docstring.splitlines()]
    missing = [
        start
        for start in ("Formula:", "Error:", "Cost:", "When:")
        if not any(re.match(f"{start} .", line) for line in lines)
    ]
    # Do not accept the denominator of a fraction, or the number of a preprint.
    if name not in WITHOUT_PUBLICATION and not re.search(r"(?<![\w./:])20[0-2]\d\b", docstring):
        missing.append("year of the publication")
    return missing


@pytest.mark.parametrize("name", list(compressors))
def test_docstring_has_formula_cost_use_and_publication(name):
    assert lacking(name, compressors.get(name).__doc__ or "") == []


def test_a_docstring_that_says_less_is_noticed():
    parts = "Identity.", "Formula: C(x) = x", "Error: 0.", "Cost: one pass.\n    When: never.\n    Somebody, 2019."
    whole = "\n\n    ".join(parts) + "\n    "
    assert lacking("topk", whole) == []
    assert lacking("topk", whole.replace("Formula:", "It is")) == ["Formula:"]
    assert lacking("topk", whole.replace("Error: 0", "Error:")) == ["Error:"]
    assert lacking("topk", whole.replace("Cost:", "The Cost:")) == ["Cost:"]
    assert lacking("topk", whole.replace("When: never.", "When:")) == ["When:"]
    assert lacking("topk", whole.replace(" 2019", " arXiv:2019.00001, steps of 1/2019")) == ["year of the publication"]
    assert lacking("none", whole.replace(" 2019", "")) == []


def test_errors_are_said_of_every_built_in_method():
    rows = json.loads(read("docs/results/errors.json"))["rows"]
    assert {row["method"] for row in rows} == {*built_in()} - {"gradiveq"}


def test_the_study_has_every_built_in_method_with_and_without_adam():
    for task in ("mf", "mf_adam"):
        cells = json.loads(read(f"docs/results/study/{task}.json"))["cells"]
        trained = {cell["method"] for cell in cells if cell["ranks"] == 4}
        assert trained >= {name for name, _ in compressors.ready()}, task


# Pages on extending grace need more of it.
FOR_USERS = [name for name in DOCUMENTS if not name.startswith("docs/extend/")]
FOR_USERS += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*.py"))


def other_imports(text: str) -> list[str]:
    """Return the imports of grace that are not `import grace`, or one of what only a library has."""
    lines = re.findall(r"^ *((?:import|from) grace\b(?!_).*)$", text, re.MULTILINE)
    return [line for line in lines if not re.fullmatch(r"import grace(\.torch\.(distributed|horovod))?", line)]


@pytest.mark.parametrize("name", FOR_USERS)
def test_users_import_grace_in_one_way(name):
    assert other_imports(read(name)) == []


def test_another_import_is_noticed():
    wrong = ["import grace.torch as grace", "from grace import mpi", "from grace.core import errors"]
    assert other_imports("\n".join(["import grace", *wrong, "    from grace_dl import x"])) == wrong


@pytest.mark.parametrize("name", DOCUMENTS)
def test_no_page_installs_another_project(name):
    """On the package index, `grace` is another project."""
    commands = re.findall(r"pip3? install ([^`\n#]*)", read(name))
    assert not [command for command in commands if re.search(r"""(^|[\s"'])grace(?![-\w/])""", command)]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_named_in_prose_exist(name):
    for path in re.findall(r"`((?:benchmarks|docs|examples|grace|kernels|scripts|tests)/[\w./]*\w)`", read(name)):
        assert path in SCALARS or (ROOT / path).exists(), f"{name} names {path}, which does not exist"


def test_every_number_for_loggers_is_explained():
    """The table of scalars() has a row for each, and no other."""
    section = read("docs/statistics.md").partition("\n## Curves")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`grace/.*?) \|", section, re.MULTILINE)
    assert sorted(re.findall(r"`(grace/\w+)`", " ".join(rows))) == sorted(SCALARS)


def long_lines(text: str) -> list[int]:
    """Return the numbers of the lines above 120 characters; tables, images, code and marks cannot be broken."""
    found, in_code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        if len(line) > 120 and not in_code and not line.startswith(("|", "![", "<!-- begin ", "<!-- end ")):
            found.append(number)
    return found


@pytest.mark.parametrize("name", [*DOCUMENTS, "CHANGELOG.md"])
def test_lines_have_at_most_120_characters(name):
    assert long_lines(read(name)) == []


def test_a_long_line_is_noticed():
    word = "word " * 25
    assert long_lines(f"{word[:120]}\n{word}\n- {word}\n") == [2, 3]
    assert long_lines(f"| {word}\n![{word}]\n```bash\n{word}\n```\n") == []


def test_example_configuration_is_valid():
    config = make_config(str(ROOT / "examples" / "grace.toml"))
    assert make_config(config.to_dict()) == config
