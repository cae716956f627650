"""Methods with options of their own on a command line, and components from modules of the user."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grace import compressors
from grace.bench import variants
from grace.bench.variants import Variant, parse_variants
from grace.core.config.config import make_config
from grace.core.errors import ConfigError
from tests.support.covering import ALL
from tests.support.launch import ROOT

MINE = """
from dataclasses import dataclass
import grace
import {helper}
@grace.register_compressor("mine")
@dataclass(frozen=True)
class Mine(grace.Compressor):
    '''Clips.'''
    clip: float
    def wire(self, spec):
        return (grace.Field("values", "float32", spec.numel),)
    def compress(self, x, at):
        return {{"values": at.ops.cast(at.ops.clip(x, -self.clip, self.clip), "float32")}}
    def decompress(self, payload, at):
        return at.ops.cast(payload["values"], at.spec.work_dtype)
"""


@pytest.fixture
def mine(tmp_path):
    """Write a module with a method, which imports a module beside it. Return its path."""
    (tmp_path / "beside_mine.py").write_text("")
    # Must not stand in for the installed one.
    (tmp_path / "numpy.py").write_text("raise RuntimeError('shadowed')")
    path = tmp_path / "mine.py"
    path.write_text(MINE.format(helper="beside_mine"))
    return path


def test_names_options_and_separators():
    assert parse_variants(["topk", "qsgd:quantum_num=7:norm=l2", "eden:bits=2,fp16"]) == [
        Variant("topk"),
        Variant("qsgd", {"quantum_num": 7, "norm": "l2"}),
        Variant("eden", {"bits": 2}),
        Variant("fp16"),
    ]


def test_a_value_may_be_any_json():
    table = {"name": "topk", "compress_ratio": 0.01}
    (found,) = parse_variants([f"chain:sparsifier={json.dumps(table)}:quantizer=qsgd"])
    assert found == Variant("chain", {"sparsifier": table, "quantizer": "qsgd"})
    assert make_config(found.config()).method.compressor.sparsifier.compress_ratio == 0.01


def test_options_are_keys_of_a_configuration_and_win_over_shared_ones():
    (own, shared) = parse_variants(["topk:memory=none:compress_ratio=0.5", "topk"], compress_ratio=0.1)
    made = [make_config(each.config(compress_ratio=0.1)) for each in (own, shared)]
    assert [config.method.compressor.compress_ratio for config in made] == [0.5, 0.1]
    assert [type(config.method.memory).__name__ for config in made] == ["NoMemory", "Residual"]


def test_a_variant_counts_once():
    assert parse_variants(["topk,topk", "topk:compress_ratio=0.1", "topk"]) == [
        Variant("topk"),
        Variant("topk", {"compress_ratio": 0.1}),
    ]


@pytest.mark.parametrize("name", list(compressors))
def test_every_method_is_read(name):
    default = compressors.example(name)
    options = {key: value for key, value in compressors.config_of(default).items() if key != "name"}
    variant = Variant(name, json.loads(json.dumps(options)))
    assert parse_variants([variant.label]) == [variant]
    assert make_config(variant.config()).method.compressor == default


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
OPTIONS = st.dictionaries(st.from_regex(r"[a-z_]+", fullmatch=True).filter(lambda key: key != "compressor"), VALUES)


@settings(max_examples=1000 if ALL else 100, deadline=None)
@given(st.lists(st.tuples(st.from_regex(r"[a-z0-9]+", fullmatch=True), OPTIONS), min_size=1, max_size=3))
def test_labels_are_read_as_what_they_name(given_variants):
    labels = [Variant(*each).label for each in given_variants]
    assert variants._parts(",".join(labels)) == given_variants


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--compressors: expected NAME or NAME:OPTION=VALUE:OPTION=VALUE, such as qsgd"),
        (":bits=2", "received ':bits=2'"),
        ("qsgd:quantum_num", "received 'qsgd:quantum_num'"),
        ("qsgd:quantum_num=", "received 'qsgd:quantum_num='"),
        ("qsgd quantum_num=7", "received 'qsgd quantum_num=7'"),
        ("qsgd:norm=l2:norm=max", "'norm' is given twice"),
        ("qsgd:compressor=topk", "'compressor' is the name itself"),
        ("chain:sparsifier={topk}", "is not valid JSON"),
        ("tokp", "unknown compressor 'tokp'. Did you mean 'topk'?"),
        ("qsgd:quantum_nim=7", "'quantum_nim' is no option of compressor 'qsgd'"),
        ("qsgd:quantum_num=many", "option 'quantum_num': expected int, received 'many'"),
    ],
)
def test_other_forms_are_refused(text, message):
    with pytest.raises(ConfigError) as caught:
        parse_variants([text])
    assert message in str(caught.value)


# --- modules of the user --------------------------------------------------------------------------------------------


def in_new_process(code, folder, **environment):
    """Run code after an import of the parser, in a process in which no test has registered anything."""
    head = "import os; from grace.bench.variants import *\n"
    return subprocess.run(
        [sys.executable, "-c", head + code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.processes
def test_a_file_registers_a_method_and_imports_what_lies_beside_it(mine):
    code = (
        "assert import_own(['mine.py', 'mine.py']) == [os.path.abspath('mine.py')] * 2\n"
        "import_own([os.path.abspath('mine.py')])\n"
        "print(parse_variants(['mine:clip=2'])[0].label)\n"
        "import numpy"
    )
    done = in_new_process(code, mine.parent)
    assert (done.returncode, done.stdout) == (0, "mine:clip=2\n"), done.stderr


@pytest.mark.processes
def test_a_module_registers_a_method(mine):
    folder = mine.parent / "modules"
    folder.mkdir()
    for name in ("mine.py", "beside_mine.py"):
        (mine.parent / name).rename(folder / name)
    code = "assert import_own(['mine']) == ['mine']; print(parse_variants(['mine:clip=2'])[0].label)"
    done = in_new_process(code, mine.parent, PYTHONPATH=os.pathsep.join([str(ROOT), str(folder)]))
    assert (done.returncode, done.stdout) == (0, "mine:clip=2\n"), done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere.py", "--import: there is no file 'nowhere.py'."),
        ("nowhere_at_all", "No module named 'nowhere_at_all'. Give the path of its file, such as ./mine.py, or"),
        ("json.py", "--import: another module is named 'json'; rename the file"),
        ("broken.py", "--import: 'broken.py' cannot be imported: ZeroDivisionError: division by zero."),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "json.py").write_text("")
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ConfigError) as caught:
        variants.import_own([text])
    assert message in str(caught.value)
    assert "broken" not in sys.modules
