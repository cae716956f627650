"""Configurations: every form of a configuration means the same, and every error is reported at once."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest

from grace.core.communicators.auto import Auto
from grace.core.compressors.qsgd import QSGD
from grace.core.compressors.topk import TopK
from grace.core.config.config import Config, Method, Rule, change_config, dense_method, make_config
from grace.core.config.registry import communicators, compressors, fields_of, memories
from grace.core.errors import MOST, SYNONYMS, ConfigError, GraceError, GraceWarning, IncompatibleError, meant
from grace.core.memories.none import NoMemory
from grace.core.memories.residual import Residual
from grace.core.wire.codings import AS_IT_IS
from tests.support import registered

KINDS = {"compressor": compressors, "memory": memories, "communicator": communicators}
TOPK = Config(Method(TopK(0.05), Residual(beta=0.9), Auto()), seed=7)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv("GRACE_CONFIG", raising=False)


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "grace.toml"
    path.write_text('compressor = "topk"\ncompress_ratio = 0.05\nbeta = 0.9\nseed = 7\n', encoding="utf-8")
    return path


# --- the same configuration in every form -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"compressor": "topk", "compress_ratio": 0.05, "beta": 0.9, "seed": 7},
        {"compressor": {"name": "topk", "compress_ratio": 0.05}, "memory": {"name": "residual", "beta": 0.9}}
        | {"seed": 7},
        {"compressor": TopK(0.05), "memory": Residual(beta=0.9), "communicator": Auto(), "seed": 7},
        {"compressor": TopK(0.05), "beta": 0.9, "seed": 7},
        {"compressor": {"name": "topk"}, "memory": "residual", "compress_ratio": 0.05, "beta": 0.9, "seed": 7},
        TOPK,
    ],
)
def test_a_mapping_says_it_flat_nested_or_with_ready_parts(config):
    assert make_config(config) == TOPK


def test_keywords_say_it():
    assert make_config(compressor="topk", compress_ratio=0.05, beta=0.9, seed=7) == TOPK


def test_keywords_win_over_the_mapping():
    assert make_config({"compressor": "topk", "compress_ratio": 0.5, "beta": 0.9}, compress_ratio=0.05, seed=7) == TOPK
    assert make_config(TOPK, seed=8).seed == 8
    assert make_config(TOPK, bucket_bytes=0).method == TOPK.method


def test_a_toml_file_says_it(toml):
    assert make_config(toml) == make_config(str(toml)) == TOPK
    assert make_config(toml, seed=9).seed == 9


def test_toml_tables_nest(tmp_path):
    path = tmp_path / "nested.toml"
    path.write_text(
        """
        default_rules = false
        [compressor]
        name = "topk"
        compress_ratio = 0.05
        [memory]
        name = "residual"
        [[rules]]
        match = ["*.bias", "*.scale"]
        compressor = "none"
        [[rules]]
        match = "embedding.*"
        min_numel = 1000
        compressor = "qsgd"
        quantum_num = 7
        """,
        encoding="utf-8",
    )
    config = make_config(path)
    assert not config.default_rules
    assert config.method.compressor == TopK(0.05)
    assert [rule.match for rule in config.rules] == [("*.bias", "*.scale"), ("embedding.*",)]
    assert config.rules[0].method.compressor == dense_method().compressor
    assert config.rules[1].method.compressor == QSGD(quantum_num=7)
    assert (config.rules[1].min_numel, config.rules[1].reason) == (1000, "rule 2 of the configuration")


def test_the_environment_says_it_by_path_or_inline(monkeypatch, toml):
    monkeypatch.setenv("GRACE_CONFIG", str(toml))
    assert make_config() == TOPK
    assert make_config(bucket_bytes=0).bucket_bytes == 0
    inline = {"compressor": "topk", "compress_ratio": 0.05, "beta": 0.9, "seed": 7}
    monkeypatch.setenv("GRACE_CONFIG", json.dumps(inline))
    assert make_config() == TOPK
    # What the program says wins.
    for given in ({"compressor": "none"}, {"compressor": "none", "seed": 7}):
        with pytest.warns(
            GraceWarning, match=r"^GRACE_CONFIG=.* is ignored, because .* names a compressor, NoComp"
        ) as told:
            assert make_config(given).method.compressor == dense_method().compressor
        assert len(told) == 1
        assert told[0].filename == __file__


@pytest.mark.parametrize("value", ["missing.toml", "{", '{"compressor": "topkk"}'])
def test_an_environment_that_is_ignored_may_be_broken(monkeypatch, value):
    monkeypatch.setenv("GRACE_CONFIG", value)
    with pytest.warns(GraceWarning, match="is ignored"):
        assert make_config(compressor="topk").method.compressor == TopK()


def test_nothing_is_ignored_if_the_environment_says_the_same(monkeypatch, toml):
    """A saved optimizer names the compressor that it had got from the environment."""
    monkeypatch.setenv("GRACE_CONFIG", str(toml))
    made = make_config()
    assert make_config(made.to_dict()) == make_config(made) == made


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("missing.toml", r"^the configuration file 'missing.toml' cannot be read: No such file .*"),
        ("{", r"^the configuration is not a valid JSON object: .*"),
        ('{"compressor": "topk", "ratio": 0.1}', r"'ratio' is no option of compressor 'topk'.*'compress_ratio'.*"),
        ('{"compressor": "qsgd", "communicator": "allreduce"}', r"cannot carry QSGD.*"),
    ],
)
def test_an_error_names_the_environment_if_the_configuration_came_from_there(monkeypatch, value, told):
    monkeypatch.setenv("GRACE_CONFIG", value)
    with pytest.raises((ConfigError, IncompatibleError), match=told) as got:
        make_config(seed=3)
    assert str(got.value).endswith(f" The configuration is that of GRACE_CONFIG={value}.")
    monkeypatch.delenv("GRACE_CONFIG")
    with pytest.raises((ConfigError, IncompatibleError)) as got:
        make_config(value if value.endswith("toml") else {"compressor": "topk", "ratio": 0.1})
    assert "GRACE_CONFIG" not in str(got.value)


@pytest.mark.parametrize("part", registered.all_compressors(), ids=registered.name)
def test_every_configuration_survives_a_round_trip(part):
    chosen = registered.default_method(part)
    rule = Rule(chosen, match=("a", "b*"), max_numel=5, dtype="float16", reason="rule 1 of the configuration")
    config = Config(chosen, (rule,), default_rules=False, seed=3, bucket_bytes=0)
    assert make_config(config.to_dict()) == config
    assert make_config(json.loads(json.dumps(config.to_dict()))) == config
    assert hash(make_config(config.to_dict())) == hash(config)


# --- defaults ---------------------------------------------------------------------------------------------------


def test_everything_follows_from_the_compressor():
    config = make_config(compressor="topk")
    assert config == Config(Method(TopK(), Residual(), Auto()))
    assert (config.seed, config.default_rules, config.bucket_bytes) == (0, True, 4 * 2**20)


@pytest.mark.parametrize("name", list(compressors))
def test_every_compressor_has_parts_that_suit_it(name):
    config = make_config(compressor=name, **compressors.required(name))
    assert memories.name_of(config.method.memory) == config.method.compressor.default_memory
    assert communicators.name_of(config.method.communicator) == "auto"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"compressor": "dgc", "momentum": 0.8, "gradient_clipping": 1.5}, {"momentum": 0.8, "gradient_clipping": 1.5}),
        ({"compressor": "efsignsgd", "lr": 0.01}, {"lr": 0.01}),
        ({"compressor": "qsgd", "quantum_num": 64}, {"quantum_num": 64}),
        ({"compressor": "threshold", "threshold": 0.02}, {"threshold": 0.02}),
        ({"compressor": "powersgd", "compress_rank": 2}, {"compress_rank": 2}),
        ({"compressor": "randomk", "compress_ratio": 0.3, "memory": "none"}, {"compress_ratio": 0.3}),
    ],
)
def test_the_keys_of_the_original_framework_mean_what_they_mean_there(config, expected):
    made = make_config(config)
    fields = {**vars(made.method.compressor), **vars(made.method.memory)}
    assert {key: fields[key] for key in expected} == expected


@pytest.mark.parametrize("name", [name for name in compressors if compressors.about(name).needs])
def test_what_must_be_named_has_an_example(name):
    """Tables, benchmarks and tests take the example, and a change of an option asks for nothing again."""
    needed = compressors.required(name)
    config = make_config({"compressor": name, **needed})
    assert config.method.compressor == compressors.example(name) == dict(compressors.ready())[name]
    for key in needed:
        with pytest.raises(ConfigError, match=f"needs a value for {key}: expected .*, received "):
            make_config({"compressor": name, **{k: value for k, value in needed.items() if k != key}})
    changes = {f: getattr(config.method.compressor, f) for f in fields_of(type(config.method.compressor))}
    assert change_config(config, changes) == config


def test_where_one_memory_is_known_to_be_good_none_must_be_named():
    assert make_config(compressor="randomk", scaled=True).method.memory == NoMemory()


def test_a_named_memory_replaces_the_default():
    assert make_config(compressor="topk", memory="none").method.memory == NoMemory()


# --- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            {"compressor": "topkk"},
            r"unknown compressor 'topkk'.*Did you mean 'topk'\?.*of \d+ valid.*: topk, .*lists all",
        ),
        ({"compressor": "topk", "memory": "residul"}, r"unknown memory.*Did you mean 'residual'\?"),
        ({"compressor": "topk", "communicator": "allgater"}, r"unknown communicator.*Did you mean 'allgather'\?"),
        ({"compressor": "topk", "compress_ration": 0.1}, r"'compress_ration'.*topk.*Did you mean 'compress_ratio'\?"),
        ({"compressor": "topk", "quantum_num": 7}, r"'quantum_num' is no option of compressor 'topk'"),
        ({"compressor": "topk", "fragment_sync_delay": 2}, "'fragment_sync_delay' is 'delay' in the table 'outer'"),
        ({"compressor": "topk", "error_decay": 0.9}, "'error_decay' is no option .* Did you mean 'beta'"),
        ({"compressor": "topk", "tau": 2}, "'tau' is no option of [^.]*\\. The closest"),
        ({"compressor": "topk", True: 1}, "'True' is no option"),
        ({"sync_every": 20}, "names no compressor.*'sync_every' is 'every' in the table 'outer' here"),
        ({"compressor": {"name": "topk", True: 0.1}}, r"compressor 'topk' has no option 'True'"),
        ({"compressor": {"name": "topk", "ratio": 0.1}}, r"compressor 'topk' has no option 'ratio'"),
        ({"compressor": {"compress_ratio": 0.1}}, r"compressor: expected a table with the key 'name'"),
        ({"compressor": "none", "memory": {"name": "none", "beta": 1.0}}, r"memory 'none' has no option 'beta'.*none"),
        ({"memory": "residual"}, r"names no compressor\. Write for instance compressor = 'qsgd'.*grace compressors"),
        (
            {"method": "topk"},
            r"names no compressor\. It has the keys 'method'\. Did you mean 'compressor' by 'method'\?",
        ),
        ({"seed": 3, "compresor": "topk"}, r"Did you mean 'compressor' by 'compresor'\?"),
        ({"compressor": 5}, r"'compressor': expected a name, a table or a compressor, received 5"),
        ({"compressor": "topk", "compress_ratio": "0.1"}, r"'compress_ratio': expected float, received '0.1' of"),
        ({"compressor": "topk", "compress_ratio": True}, r"expected float, received True of type bool"),
        ({"compressor": "topk", "compress_ratio": 0.0}, r"compress_ratio.*\(0, 1\].*received 0.0"),
        ({"compressor": "topk", "compress_ratio": 1.5}, r"received 1.5"),
        ({"compressor": "topk", "compress_ratio": float("nan")}, r"received nan"),
        ({"compressor": "qsgd", "quantum_num": 7.0}, r"'quantum_num': expected int, received 7.0"),
        ({"compressor": "qsgd", "quantum_num": 0}, r"from 1 to 32767, received 0"),
        ({"compressor": "qsgd", "quantum_num": 32768}, r"received 32768"),
        ({"compressor": "qsgd", "norm": "l1"}, r"'norm'.*l2.*max.*received 'l1'"),
        ({"compressor": "qsgd", "bucket_size": -1}, r"received -1"),
        ({"compressor": "powersgd", "compress_rank": 0}, r"at least 1, received 0"),
        (
            {"compressor": "threshold", "capacity": 0.1},
            r"compressor 'threshold' needs a value for threshold: expected .*, received none.*Write threshold =",
        ),
        ({"compressor": "strom"}, r"compressor 'strom' needs a value for threshold: expected .*, received none.*Write"),
        ({"compressor": "chain", "sparsifier": "threshold"}, r"compressor 'threshold' needs a value for threshold"),
        (
            {"compressor": "randomk"},
            r"configuration: compressor 'randomk' needs a value for memory: expected 'none' or 'residual'.*With SGD",
        ),
        ({"compressor": "topk", "rules": [{"compressor": "randomk"}]}, r"rule 1: .*needs a value for memory"),
        (
            {"compressor": "topk", "schedule": [{"step": 9, "compressor": "randomk"}]},
            r"stage 1 of the schedule: .*needs a value for memory",
        ),
        ({"compressor": "threshold", "threshold": -1.0}, r"at least 0, received -1.0"),
        ({"compressor": "threshold", "threshold": 0.1, "capacity": 0.0}, r"capacity.*received 0.0"),
        ({"compressor": "terngrad", "clip_factor": 0.0}, r"positive or null, received 0.0"),
        ({"compressor": "dgc", "sample_ratio": 0.0}, r"sample_ratio.*received 0.0"),
        ({"compressor": "dgc", "overshoot": 0.5}, r"overshoot.*0.5"),
        ({"compressor": "dgc", "momentum": 1.0}, r"momentum must lie in \[0, 1\), received 1.0"),
        ({"compressor": "dgc", "gradient_clipping": 0.0}, r"gradient_clipping.*received 0.0"),
        ({"compressor": "topk", "beta": 2.0}, r"residual: beta must lie in \[0, 1\].*received 2.0"),
        ({"compressor": "topk", "beta": -1.0}, r"beta.*received -1.0"),
        ({"compressor": "topk", "gamma": 0.0}, r"residual: gamma must be positive, received 0.0"),
        ({"compressor": "efsignsgd", "lr": 0.0}, r"lr.*received 0.0"),
        ({"compressor": "topk", "seed": -1}, r"seed.*received -1"),
        ({"compressor": "topk", "seed": "1"}, r"'seed': expected int, received '1'"),
        ({"compressor": "topk", "bucket_bytes": -1}, r"bucket_bytes.*received -1"),
        ({"compressor": "topk", "default_rules": 1}, r"'default_rules': expected bool, received 1"),
        ({"compressor": "topk", "rules": {"match": "x"}}, r"'rules': expected a list of tables"),
        ({"compressor": "topk", "rules": ["x"]}, r"'rules': expected a list of tables"),
        ({"compressor": "topk", "rules": [{"match": "x"}]}, r"rule 1 changes nothing\. Write what is different"),
        (
            {"compressor": "topk", "rules": [{"match": "x", "bits": 4}]},
            r"rule 1: 'bits' is no option of compressor 'topk'",
        ),
        ({"compressor": "topk", "rules": [{"mach": "x", "beta": 1.0}]}, r"rule 1: 'mach'.*mean 'match'"),
        ({"compressor": "topk", "rules": [{"compressor": "none", "mach": "x"}]}, r"rule 1: 'mach'.*mean 'match'"),
        ({"compressor": "topk", "rules": [{"compressor": "none", "min_numel": "9"}]}, r"'min_numel': expected int"),
        ({"compressor": "topk", "rules": [{"compressor": "none", "match": [1]}]}, r"'match'.*received \[1\]"),
        ({"compressor": "topk", "rules": [{"compressor": "none", "match": []}]}, r"rule 1.*match is empty"),
        (
            {"compressor": "topk", "rules": [{"compressor": "none", "min_numel": 9, "max_numel": 8}]},
            r"received 9 and 8",
        ),
        ({"compressor": "topk", "rules": [{"compressor": "none", "min_ndim": -1}]}, r"received -1 and None"),
        (
            {"compressor": {"name": "topk", "compress_ratio": 0.1}, "compress_ratio": 0.2},
            r"'compress_ratio' is given twice",
        ),
        ({"compressor": TopK}, r"'compressor': expected|received the class TopK"),
        ({"compressor": "topk", "compress_ratio": float("inf")}, r"received inf"),
        ({"compressor": "topk", "rules": [{"compressor": "none", "seed": 3}]}, r"'seed' belongs to the top level"),
        ({"compressor": "topk", "rules": [{"compressor": "none", "dtype": "float8"}]}, r"'float8'.*mean 'float"),
    ],
    ids=str,
)
def test_a_wrong_configuration_is_refused_with_what_would_be_right(config, told):
    with pytest.raises(ConfigError, match=told):
        make_config(config)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            {"compressor": "qsgd", "communicator": "allreduce"},
            r"Allreduce\(\).*QSGD.*Valid .*: allgather, auto, broadcast, hierarchical, two_shot\.",
        ),
        (
            {"compressor": "dgc", "communicator": "allreduce"},
            r"Allreduce\(\).*DGC.*Valid .*: allgather, auto, hierarchical, sparse_allreduce, two_shot\.",
        ),
        (
            {"compressor": "topk", "memory": "diana", "communicator": "allreduce"},
            r"Allreduce\(\).*TopK.*Valid .*: allgather, auto, broadcast, hierarchical\.",
        ),
        (
            {"compressor": "threshold", "threshold": 0.1, "communicator": "broadcast"},
            r"Broadcast\(\).*the size of .*Valid .*: allgather",
        ),
        ({"compressor": "qsgd", "memory": "dgc"}, r"'dgc'.*QSGD.*Valid memories: none, residual"),
        ({"compressor": "topk", "rules": [{"compressor": "signsgd", "communicator": "allreduce"}]}, r"Allreduce"),
    ],
    ids=str,
)
def test_parts_that_cannot_work_together_are_refused_with_those_that_can(config, told):
    with pytest.raises(IncompatibleError, match=told):
        make_config(config)


def test_what_an_incompatibility_calls_valid_is_valid():
    """Every name that an error message suggests works."""
    told = 0
    for compressor in compressors:
        for kind, registry in (("memory", memories), ("communicator", communicators)):
            for name in registry:
                try:
                    make_config({"compressor": compressor, **compressors.required(compressor), kind: name})
                except IncompatibleError as error:
                    for valid in str(error).partition("Valid ")[2].partition(": ")[2].rstrip(".").split(", "):
                        make_config({"compressor": compressor, **compressors.required(compressor), kind: valid})
                        told += 1
    assert told > 10


def test_nothing_at_all_is_told_what_to_do():
    with pytest.raises(ConfigError, match=r"compressor.*GRACE_CONFIG.*grace compressors"):
        make_config()


@pytest.mark.parametrize("value", ["{not json", '{"compressor": "topk",}', '["topk"]'])
def test_broken_json_in_the_environment_is_named(monkeypatch, value):
    monkeypatch.setenv("GRACE_CONFIG", value)
    with pytest.raises(ConfigError, match="GRACE_CONFIG"):
        make_config()


def test_a_name_where_a_path_belongs_is_told_how_to_write_it():
    with pytest.raises(ConfigError, match=r"'topk' cannot be read.*\{'compressor': 'topk'\}"):
        make_config("topk")


def test_numbers_of_numpy_are_numbers():
    config = make_config(
        compressor="qsgd", quantum_num=np.int64(7), rules=[{"compressor": "topk", "compress_ratio": np.float64(0.5)}]
    )
    assert make_config(json.loads(json.dumps(config.to_dict()))) == config


def test_the_environment_is_put_under_options_without_a_compressor(monkeypatch, toml):
    monkeypatch.setenv("GRACE_CONFIG", str(toml))
    assert make_config({"seed": 9}).seed == 9
    assert make_config({"seed": 9}).method == TOPK.method
    assert make_config(compress_ratio=0.5).method.compressor == TopK(0.5)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.toml.*No such file"):
        make_config(tmp_path / "missing.toml")
    (tmp_path / "broken.toml").write_text("compressor = topk", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"broken\.toml.*TOML"):
        make_config(tmp_path / "broken.toml")


@pytest.mark.parametrize("config", [5, ["topk"], b"topk"])
def test_what_is_no_configuration_is_refused(config):
    with pytest.raises(ConfigError, match="expected a mapping"):
        make_config(config)


def test_options_of_parts_cannot_be_changed_beside_a_ready_config():
    with pytest.raises(ConfigError, match=r"'compress_ratio'.*dictionary"):
        make_config(TOPK, compress_ratio=0.5)
    with pytest.raises(ConfigError, match="'seed': expected int"):
        make_config(TOPK, seed="1")


# --- names ------------------------------------------------------------------------------------------------------


def spellings(name):
    """Return other ways to write a name, as papers and other libraries do."""
    return {name.upper(), name.capitalize(), name.replace("_", "-"), f"{name[:2]}-{name[2:]}", name.replace("_", "")}


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, registry in KINDS.items() for name in registry],
)
def test_names_are_compared_without_case_hyphens_and_underscores(kind, name):
    registry = KINDS[kind]
    for spelling in spellings(name):
        assert spelling in registry
        made = registry.example(spelling)
        assert made == registry.make({**registry.config_of(made), "name": spelling}) == registry.example(name)
        assert registry.config_of(made)["name"] == name
        if not registry.about(name).needs:
            assert registry.make(spelling) == made


def test_names_in_other_forms_make_the_same_configuration():
    given = {"compressor": "EF-SignSGD", "communicator": {"name": "Two-Shot", "second": "QSGD"}, "memory": "EFsignSGD"}
    given["rules"] = [{"match": "*", "compressor": {"name": "Chain", "sparsifier": "Top-K", "quantizer": "TernGrad"}}]
    plain = {"compressor": "efsignsgd", "communicator": {"name": "two_shot", "second": "qsgd"}, "memory": "efsignsgd"}
    plain["rules"] = [{"match": "*", "compressor": {"name": "chain", "sparsifier": "topk", "quantizer": "terngrad"}}]
    assert make_config(given) == make_config(plain)
    assert make_config(given).to_dict() == make_config(plain).to_dict()


def test_every_synonym_names_options_that_exist():
    options = {key for registry in KINDS.values() for name in registry for key in fields_of(registry.get(name))}
    for known in SYNONYMS.values():
        assert set(known) <= options | {*make_config(compressor="none").to_dict(), "warmup_steps"}


@pytest.mark.parametrize("name", list(compressors))
def test_a_synonym_gets_the_option_of_the_chosen_method(name):
    """Suggestions are options that the method, its memory or its communicator has, and the suggestion works."""
    needed = compressors.required(name)
    method = make_config(compressor=name, **needed).method
    valid = {key for part in (method.compressor, method.memory, method.communicator) for key in fields_of(type(part))}
    for word, known in SYNONYMS.items():
        if word in valid:
            continue
        with pytest.raises(ConfigError) as caught:
            make_config({"compressor": name, **needed, word: 1})
        suggested = meant(word, {*valid, *make_config(compressor="none").to_dict(), "warmup_steps"})
        for option in {*known} & valid:
            assert option in suggested
            assert f"'{option}'" in str(caught.value)
        if suggested:
            assert set(suggested) <= valid | {*make_config(compressor="none").to_dict(), "warmup_steps"}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"compressor": "topk", "k": 100}, "Did you mean 'compress_ratio', the share of the elements that is sent?"),
        ({"compressor": "topk", "ratio": 0.1}, "Did you mean 'compress_ratio', the share"),
        ({"compressor": "qsgd", "bits": 4}, "Did you mean 'quantum_num', the number of levels?"),
        ({"compressor": "blockwise", "bits": 4}, "Did you mean 'format'?"),
        ({"compressor": "lpc", "bits": 4}, "Did you mean 'width'?"),
        ({"compressor": "powersgd", "rank": 4}, "Did you mean 'compress_rank'?"),
        ({"compressor": {"name": "powersgd", "rank": 4}}, "Did you mean 'compress_rank'?"),
        ({"compressor": "topk", "error_feedback": True}, "Did you mean 'memory'?"),
        ({"compressor": "qsgd", "compressRatio": 1}, "is no option of compressor 'qsgd'"),
        ({"compressor": "topk", "Compress-Ratio": 1}, "Did you mean 'compress_ratio'?"),
        (
            {"compressor": "eden", "rank": 4},
            "is no option of compressor 'eden', memory 'none', communicator 'auto'. The",
        ),
    ],
    ids=str,
)
def test_what_other_libraries_call_it_is_understood(config, told):
    with pytest.raises(ConfigError) as caught:
        make_config(config)
    assert told in str(caught.value)


def test_a_message_has_at_most_five_candidates():
    """Wrong names of components, options, codings and keys, and components that do not fit."""
    messages = []
    wrong = [{"compressor": "x"}, {"compressor": "topk", "memory": "x"}, {"compressor": "topk", "communicator": "x"}]
    wrong += [{"compressor": "topk", "rules": [{"x": 1}]}, {"compressor": "topk", "coding": "x"}]
    wrong += [{"compressor": "topk", key: "x"} for key in ("index_coding", "granularity")]
    wrong += [{"compressor": name, **compressors.required(name), "x": 1} for name in compressors]
    wrong += [{"compressor": {"name": name, "x": 1}} for name in compressors]
    for kind in ("memory", "communicator"):
        wrong += [
            {"compressor": n, **compressors.required(n), kind: other} for n in compressors for other in KINDS[kind]
        ]
    for config in wrong:
        try:
            make_config(config)
        except GraceError as error:
            messages.append(str(error))
    listed = [re.findall(r"(?:[Vv]alid|have) [\w ]+: ([^.]*)\.", message) for message in messages]
    assert sum(map(len, listed)) > 200
    assert max(len(names.split(", ")) for found in listed for names in found) == MOST


# --- rules that change an option --------------------------------------------------------------------------------


def test_a_rule_may_change_an_option_only():
    config = make_config(
        {
            "compressor": "topk",
            "compress_ratio": 0.01,
            "beta": 0.9,
            "communicator": "two_shot",
            "coding": {"indices": "golomb"},
            "rules": [
                {"match": "*.weight", "compress_ratio": 0.05},
                {"min_numel": 5, "memory": "none"},
                {"max_numel": 5, "beta": 0.5, "communicator": "allgather"},
                {"min_ndim": 2, "compressor": "qsgd"},
                {"dtype": "float16", "coding": "none"},
            ],
        }
    )
    first, second, third, fourth, fifth = (rule.method for rule in config.rules)
    base = config.method
    assert first == dataclasses.replace(base, compressor=TopK(0.05))
    assert second == dataclasses.replace(base, memory=NoMemory())
    assert third == dataclasses.replace(base, memory=Residual(beta=0.5), communicator=communicators.make("allgather"))
    assert fourth == make_config(compressor="qsgd").method
    assert fifth == dataclasses.replace(base, coding=AS_IT_IS)
    assert make_config(config.to_dict()) == config


@pytest.mark.parametrize("part", registered.all_compressors(), ids=registered.name)
def test_a_rule_keeps_everything_that_it_does_not_name(part):
    """A rule that names one option of a method with all its options, as it is, gives the same method."""
    method = registered.default_method(part)
    described = Config(method).to_dict()
    for kind in KINDS:
        for key, value in described[kind].items():
            # Other components may have an option of this name, which takes other values.
            if key != "name" and sum(key in described[other] for other in KINDS) == 1:
                rule = {"match": "a", key: value}
                assert make_config({**described, "rules": [rule]}).rules[0].method == method


def test_a_rule_changes_the_final_method_of_a_warm_up():
    config = make_config(compressor="topk", compress_ratio=0.01, warmup_steps=100, rules=[{"match": "a", "beta": 0.5}])
    assert config.method.compressor == TopK(0.25)
    assert config.rules[0].method == Method(TopK(0.01), Residual(beta=0.5), Auto())


def test_every_error_is_a_grace_error():
    assert issubclass(ConfigError, GraceError)
    assert issubclass(IncompatibleError, GraceError)
    assert issubclass(ConfigError, ValueError)
