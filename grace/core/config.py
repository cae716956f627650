"""Configuration: which parts serve which tensors, from a dictionary, keywords, a TOML file or GRACE_CONFIG."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grace.core.communicator import Communicator
from grace.core.compressor import Compressor
from grace.core.errors import ConfigError, nearest
from grace.core.memory import Memory
from grace.core.registry import build, communicators, compressors, fields_of, memories
from grace.core.spec import GRADIENT_DTYPES, TensorSpec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENVIRONMENT_VARIABLE = "GRACE_CONFIG"
_PARTS = ("compressor", "memory", "communicator")
_REGISTRIES: dict[str, Any] = {"compressor": compressors, "memory": memories, "communicator": communicators}


@dataclass(frozen=True)
class Parts:
    """A compressor with the memory and the communicator that serve it. Raises IncompatibleError if they cannot."""

    compressor: Compressor
    memory: Memory
    communicator: Communicator

    def __post_init__(self) -> None:
        self.memory.check(self.compressor)
        self.communicator.check(self.compressor)


@dataclass(frozen=True)
class Rule:
    """Which parts serve the tensors that fit: by name pattern, size, number of dimensions and dtype.

    `match` holds shell patterns, of which one must fit the name; `min_numel <= elements <= max_numel`,
    `min_ndim <= dimensions <= max_ndim`. `reason` is what the start-up report says.
    """

    parts: Parts
    match: tuple[str, ...] = ("*",)
    min_numel: int = 0
    max_numel: int | None = None
    min_ndim: int = 0
    max_ndim: int | None = None
    dtype: str | None = None
    reason: str = "a rule of the configuration"

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in GRADIENT_DTYPES:
            raise ConfigError(
                f"{self.reason}: no gradient has dtype '{self.dtype}'.{nearest(self.dtype, GRADIENT_DTYPES)}"
            )

    def fits(self, spec: TensorSpec) -> bool:
        """Whether the rule applies to the tensor."""
        return (
            any(fnmatch.fnmatchcase(spec.name, pattern) for pattern in self.match)
            and self.min_numel <= spec.numel
            and (self.max_numel is None or spec.numel <= self.max_numel)
            and self.min_ndim <= spec.ndim
            and (self.max_ndim is None or spec.ndim <= self.max_ndim)
            and self.dtype in (None, spec.dtype)
        )


_RULE_CONDITIONS = {f: t for f, t in fields_of(Rule).items() if f not in ("parts", "reason")}


def dense_parts() -> Parts:
    """What an uncompressed tensor gets: compressor none, no memory, allreduce."""
    return Parts(compressors.make("none"), memories.make("none"), communicators.make("allreduce"))


def default_rules() -> tuple[Rule, ...]:
    """The rules behind the user's: biases, norms and tensors under 1,024 elements go dense."""
    dense = dense_parts()
    small = "default rule: fewer than 1,024 elements"
    named = "default rule: a bias or norm by its name"
    vector = "default rule: a vector under 65,536 elements, as biases and norms are"
    names = ("*bias*", "*norm*", "*bn*", "*gamma*", "*beta*")
    return (
        Rule(dense, max_numel=1023, reason=small),
        Rule(dense, match=names, max_ndim=1, reason=named),
        Rule(dense, max_ndim=1, max_numel=65535, reason=vector),
    )


@dataclass(frozen=True)
class Config:
    """A whole run. The first rule that fits a tensor names its parts; where none fits, `parts` serve it.

    `default_rules=False` drops the rules that keep biases, norms and small tensors dense. `seed` feeds the
    counter-based random numbers. `bucket_bytes` is how many bytes of gradients share one wire buffer and collective
    (0: every tensor has its own).
    """

    parts: Parts
    rules: tuple[Rule, ...] = ()
    default_rules: bool = True
    seed: int = 0
    bucket_bytes: int = 4 * 1024 * 1024

    def __post_init__(self) -> None:
        if self.bucket_bytes < 0:
            raise ConfigError(f"bucket_bytes is a number of bytes, or 0; received {self.bucket_bytes!r}.")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must lie in [0, 2^63), received {self.seed!r}.")

    def parts_for(self, spec: TensorSpec) -> tuple[Parts, str]:
        """The parts that serve a tensor, and why if they are not the configuration's own."""
        for rule in self.rules + (default_rules() if self.default_rules else ()):
            if rule.fits(spec):
                return rule.parts, rule.reason
        return self.parts, ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able and complete: make_config(config.to_dict()) == config."""
        rules = []
        for rule in self.rules:
            conditions = {name: getattr(rule, name) for name in _RULE_CONDITIONS}
            rules.append({**conditions, "match": list(rule.match), **_describe(rule.parts)})
        rest = {name: getattr(self, name) for name in _TOP_LEVEL}
        return {**_describe(self.parts), "rules": rules, **rest}


_TOP_LEVEL = {f: t for f, t in fields_of(Config).items() if f not in ("parts", "rules")}


def _describe(parts: Parts) -> dict[str, Any]:
    return {kind: _REGISTRIES[kind].config_of(getattr(parts, kind)) for kind in _PARTS}


def make_config(config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None, **options: Any) -> Config:
    """A Config from a mapping, a TOML file, or keywords, which win over it.

    Where neither names a compressor, GRACE_CONFIG is the mapping: the path of a TOML file, or a JSON object.

    Keys: `compressor`, `memory`, `communicator` (a name, a table with `name`, or a ready part), `rules` (a list of
    tables with conditions and the same keys), `default_rules`, `seed`, `bucket_bytes`, and the options of the chosen
    parts, such as `compress_ratio`.
    Raises ConfigError for unknown or mistyped keys and values, IncompatibleError for parts that do not fit.
    """
    if config is None and "compressor" not in options:
        config = os.environ.get(ENVIRONMENT_VARIABLE)
        if not config:
            raise ConfigError(
                "no configuration: name a compressor, for instance config={'compressor': 'topk'}, "
                f"or set {ENVIRONMENT_VARIABLE} to a TOML file.{nearest('', compressors)}"
            )
        if config.lstrip().startswith("{"):
            try:
                config = dict(json.loads(config))
            except json.JSONDecodeError as error:
                raise ConfigError(f"{ENVIRONMENT_VARIABLE} holds no valid JSON object: {error}.") from None
    if isinstance(config, Config):
        return _replace(config, options)
    if isinstance(config, (str, os.PathLike)):
        config = _read_toml(Path(config))
    elif config is not None and not isinstance(config, Mapping):
        raise ConfigError(
            f"config: expected a mapping, a Config, or the path of a TOML file, received {type(config).__name__}."
        )
    return _from_mapping({**(config or {}), **options})


def _replace(config: Config, options: Mapping[str, Any]) -> Config:
    for key, value in options.items():
        if key not in _TOP_LEVEL:
            raise ConfigError(
                f"option '{key}' cannot be changed beside a ready Config.{nearest(key, _TOP_LEVEL)} "
                "Pass a dictionary instead of the Config."
            )
        _check_option(key, value)
    return dataclasses.replace(config, **options)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the configuration file '{path}' cannot be read: {error.strerror}.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the configuration file '{path}' is no valid TOML: {error}.") from None


def _check_option(key: str, value: Any) -> None:
    expected = _TOP_LEVEL[key]
    if type(value) is not expected:
        raise ConfigError(f"option '{key}': expected {expected.__name__}, received {value!r}.")


def _from_mapping(config: Mapping[str, Any]) -> Config:
    values = dict(config)
    top = {key: values.pop(key) for key in list(values) if key in _TOP_LEVEL}
    for key, value in top.items():
        _check_option(key, value)
    rules = values.pop("rules", [])
    if not isinstance(rules, Sequence) or isinstance(rules, str) or not all(isinstance(r, Mapping) for r in rules):
        raise ConfigError(f"option 'rules': expected a list of tables, received {rules!r}.")
    parts = _make_parts(values, [*_TOP_LEVEL, "rules"], "the configuration")
    return Config(parts, tuple(_make_rule(rule, i) for i, rule in enumerate(rules)), **top)


def _make_rule(table: Mapping[str, Any], index: int) -> Rule:
    values = dict(table)
    where = f"rule {index + 1}"
    conditions = {key: values.pop(key) for key in list(values) if key in _RULE_CONDITIONS}
    if isinstance(conditions.get("match"), str):
        conditions["match"] = (conditions["match"],)
    parts = _make_parts(values, list(_RULE_CONDITIONS), where)
    rule = build(Rule, {**conditions, "parts": parts, "reason": f"{where} of the configuration"}, where)
    return dataclasses.replace(rule, match=tuple(rule.match))


def _make_parts(values: Mapping[str, Any], other_keys: list[str], where: str) -> Parts:
    """Choose the parts and deal the flat options out to those that have a field of that name."""
    options = {key: value for key, value in values.items() if key not in _PARTS}
    if "compressor" not in values:
        raise ConfigError(f"{where} names no compressor.{nearest('', compressors)}")
    chosen: dict[str, Any] = {"compressor": values["compressor"]}
    used: set[str] = set()
    known: set[str] = set()
    made: dict[str, Any] = {}
    for kind in _PARTS:
        if kind not in chosen:
            default = getattr(made["compressor"], f"default_{kind}")
            chosen[kind] = values.get(kind, default)
        registry, choice = _REGISTRIES[kind], chosen[kind]
        if isinstance(choice, str):
            choice = {"name": choice}
        if isinstance(choice, Mapping):
            fields = fields_of(registry.get(choice["name"])) if isinstance(choice.get("name"), str) else {}
            known |= set(fields)
            mine = {key: value for key, value in options.items() if key in fields}
            used |= set(mine)
            choice = {**mine, **choice}
        elif not dataclasses.is_dataclass(choice):
            raise ConfigError(f"{where}, '{kind}': expected a name, a table or a {kind}, received {choice!r}.")
        made[kind] = registry.make(choice)
    for key in options:
        if key not in used:
            valid = [*_PARTS, *other_keys, *known]
            raise ConfigError(f"{where}: '{key}' is no option of {_chosen(made)}.{nearest(key, valid)}")
    return Parts(**made)


def _chosen(made: Mapping[str, Any]) -> str:
    return ", ".join(f"{kind} '{_REGISTRIES[kind].name_of(part)}'" for kind, part in made.items())
