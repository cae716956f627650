"""Configuration: the method of each tensor, from a dictionary, keywords, a TOML file or GRACE_CONFIG."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import inspect
import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grace.core.config.outer import OuterSteps, foreign, make_outer
from grace.core.config.registry import build, communicators, compressors, fields_of, memories
from grace.core.config.schedule import ladder, warmed_ratio
from grace.core.errors import MOST, SYNONYMS, ConfigError, GraceWarning, IncompatibleError, fold, meant, nearest
from grace.core.methods.communicator import Communicator
from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import Memory
from grace.core.spec import GRADIENT_DTYPES, TensorSpec
from grace.core.transport.transport import TIMEOUT
from grace.core.wire.codings import AS_IT_IS, NONE, Coding, make_coding
from grace.core.wire.indices import CODINGS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENVIRONMENT_VARIABLE = "GRACE_CONFIG"
# The name that stands for the compressor `none` with the option `auto`.
AUTO = "auto"
GRANULARITIES = ("layer", "bucket", "model")
_COMPONENTS = ("compressor", "memory", "communicator")
_REGISTRIES: dict[str, Any] = {"compressor": compressors, "memory": memories, "communicator": communicators}


@dataclass(frozen=True)
class Method:
    """Compressor with its memory, its communicator, and the coding of its payload.

    Raises IncompatibleError if they do not work together.
    """

    compressor: Compressor
    memory: Memory
    communicator: Communicator
    coding: Coding = AS_IT_IS

    def __post_init__(self) -> None:
        self.memory.check(self.compressor)
        if reason := self.communicator.obstacle(self.compressor):
            raise IncompatibleError(
                f"communicator {self.communicator} cannot carry {self.compressor}: {reason}. "
                f"{self._valid_communicators()}"
            )
        if self.coding and not self.communicator.any_length:
            why = "adds payloads on the way" if self.communicator.adds else "cannot carry payloads of other lengths"
            raise IncompatibleError(
                f"coding {self.coding.to_config()!r}: {self.communicator} {why}, and coded fields differ in length and "
                "cannot be added. Set communicator = 'allgather', or leave coding out."
            )

    def check_memory(self) -> None:
        """Raise IncompatibleError if the communicator, as it was chosen for the ranks, cannot serve the memory."""
        if reason := self.communicator.memory_obstacle(self.memory):
            raise IncompatibleError(
                f"communicator {self.communicator} cannot serve {self.memory}, which {reason}. "
                f"{self._valid_communicators()}"
            )

    def _valid_communicators(self) -> str:
        """Return the sentence of an error that names the registered communicators without an obstacle."""
        names = [
            name
            for name, communicator in communicators.ready()
            if not communicator.obstacle(self.compressor) and not communicator.memory_obstacle(self.memory)
        ]
        return (
            f"Valid communicators: {', '.join(names[:MOST])}."
            if names
            else "No communicator can: choose another memory."
        )


@dataclass(frozen=True)
class Rule:
    """Rule that gives a method to the tensors of some name, size, number of dimensions, dtype or kind of gradient.

    `match` holds shell patterns; one of them must fit the name. The other conditions are `min_numel <= elements <=
    max_numel`, `min_ndim <= dimensions <= max_ndim`, `dtype`, and `sparse`, which is True for gradients that come as
    rows (embeddings). The start-up report shows `reason`.
    """

    method: Method
    match: tuple[str, ...] = ("*",)
    min_numel: int = 0
    max_numel: int | None = None
    min_ndim: int = 0
    max_ndim: int | None = None
    dtype: str | None = None
    sparse: bool | None = None
    reason: str = field(default="a rule of the configuration", compare=False)

    def __post_init__(self) -> None:
        if not self.match:
            raise ConfigError(f"{self.reason}: match is empty; give a pattern, or leave it out to fit every name.")
        for low, high in ((self.min_numel, self.max_numel), (self.min_ndim, self.max_ndim)):
            if low < 0 or (high is not None and high < low):
                raise ConfigError(
                    f"{self.reason}: expected 0 <= minimum <= maximum, received {low} and {high} as the limits of the "
                    "elements or dimensions."
                )
        if self.dtype is not None and self.dtype not in GRADIENT_DTYPES:
            raise ConfigError(
                f"{self.reason}: unknown gradient dtype '{self.dtype}'.{nearest(self.dtype, GRADIENT_DTYPES)}"
            )

    def fits(self, spec: TensorSpec) -> bool:
        """Return whether the rule applies to the tensor."""
        return (
            any(fnmatch.fnmatchcase(spec.name, pattern) for pattern in self.match)
            and self.min_numel <= spec.numel
            and (self.max_numel is None or spec.numel <= self.max_numel)
            and self.min_ndim <= spec.ndim
            and (self.max_ndim is None or spec.ndim <= self.max_ndim)
            and self.dtype in (None, spec.dtype)
            and self.sparse in (None, spec.sparse)
        )


_RULE_CONDITIONS = {f: t for f, t in fields_of(Rule).items() if f not in ("method", "reason")}


@functools.cache
def dense_method() -> Method:
    """Return the method of an uncompressed tensor: compressor none, memory none, allreduce."""
    return Method(compressors.make("none"), memories.make("none"), communicators.make("allreduce"))


@functools.cache
def default_rules() -> tuple[Rule, ...]:
    """Return the rules that follow the user's: biases, norms, small tensors and embeddings stay uncompressed."""
    dense = dense_method()
    small = "default rule: fewer than 1,024 elements"
    named = "default rule: a bias or norm by its name"
    vector = "default rule: a vector under 65,536 elements, as biases and norms are"
    rows = "default rule: an embedding, whose gradient is sparse already"
    names = ("*bias*", "*norm*", "*bn*", "*gamma*", "*beta*")
    return (
        Rule(dense, max_numel=1023, reason=small),
        Rule(dense, match=names, max_ndim=1, reason=named),
        Rule(dense, max_ndim=1, max_numel=65535, reason=vector),
        Rule(dense, sparse=True, reason=rows),
    )


@dataclass(frozen=True)
class Stage:
    """Stage of a schedule: the method from `step` on."""

    step: int
    method: Method


@dataclass(frozen=True)
class Config:
    """Configuration of a whole run: the first rule that fits a tensor names its method, else it has `method`.

    `default_rules=False` drops the rules that keep biases, norms, small tensors and embeddings uncompressed. `seed`
    feeds the counter-based random numbers. `schedule` names methods that replace `method` from later steps on.
    `granularity` is the unit of compression: each "layer" by itself; the tensors of one "bucket" together, with layers
    above `split_bytes` of gradients cut into several units (0: never); or the whole "model". Only methods whose tensors
    share no scale compress several tensors together, and those that depend on a tensor's shape cut none. `bucket_bytes`
    is the number of gradient bytes that share one wire buffer and one collective (0: one collective per tensor); with
    "model" there is one per kind of collective. `index_coding` is the coding of gathered sparse indices: int32, delta,
    golomb, bitmap, or the smallest of these. `timeout` is the number of seconds that a rank waits for the others before
    it raises WaitError. `checksum` gives every gathered buffer a checksum. Every `check_replicas` steps the ranks
    compare digests of their weights and shared states (0: never). Without `rollback` a memory is kept once instead of
    twice, and starts from zero when a step is dropped. `outer` lets the ranks step on their own and exchange the
    changes of their weights. `auto` lets the run choose its compressor by measurement.
    """

    method: Method
    rules: tuple[Rule, ...] = ()
    schedule: tuple[Stage, ...] = ()
    default_rules: bool = True
    seed: int = 0
    granularity: str = "bucket"
    bucket_bytes: int = 4 * 1024 * 1024
    split_bytes: int = 32 * 1024 * 1024
    index_coding: str = "int32"
    timeout: int = TIMEOUT
    checksum: bool = False
    check_replicas: int = 0
    rollback: bool = True
    auto: bool = False
    outer: OuterSteps | None = None

    def __post_init__(self) -> None:
        if self.schedule and self.outer is not None and self.outer.dense_every:
            raise ConfigError(
                f"outer: dense_every = {self.outer.dense_every} is a schedule that begins again, and the configuration "
                "has a schedule or warmup_steps of its own; leave one of them out."
            )
        if self.auto and (self.schedule or self.outer is not None):
            raise ConfigError(
                "auto chooses the compressor of exchanged gradients, and the configuration has a schedule, "
                "warmup_steps or outer; leave them out, or name a compressor."
            )
        steps = [0, *(stage.step for stage in self.schedule)]
        if any(b <= a for a, b in itertools.pairwise(steps)):
            raise ConfigError(f"schedule: expected steps above 0 in ascending order, received {steps[1:]}.")
        if self.index_coding not in CODINGS:
            raise ConfigError(f"unknown index_coding '{self.index_coding}'.{nearest(self.index_coding, CODINGS)}")
        if self.granularity not in GRANULARITIES:
            raise ConfigError(f"unknown granularity '{self.granularity}'.{nearest(self.granularity, GRANULARITIES)}")
        for name in ("bucket_bytes", "split_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be a number of bytes, at least 0; received {getattr(self, name)!r}.")
        if self.timeout < 1:
            raise ConfigError(f"timeout must be a number of seconds, at least 1; received {self.timeout!r}.")
        if self.check_replicas < 0:
            raise ConfigError(
                f"check_replicas must be a number of steps, at least 0; received {self.check_replicas!r}."
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must lie in [0, 2^63), received {self.seed!r}.")

    @property
    def stages(self) -> tuple[tuple[int, Config], ...]:
        """Stages of the run: first step (0 for the first stage) and configuration without schedule.

        With `dense_every` of outer steps, they begin again after so many syncs.
        """
        if self.outer is not None and self.outer.dense_every:
            dense = dataclasses.replace(self, method=dense_method(), rules=())
            return (0, self), (self.outer.dense_every - 1, dense)
        later = ((stage.step, dataclasses.replace(self, method=stage.method, schedule=())) for stage in self.schedule)
        return (0, dataclasses.replace(self, schedule=())), *later

    def rule_for(self, spec: TensorSpec) -> Rule | None:
        """Return the first rule that fits a tensor; None if it gets the configuration's own method."""
        rules = self.rules + (default_rules() if self.default_rules else ())
        return next((rule for rule in rules if rule.fits(spec)), None)

    def to_dict(self) -> dict[str, Any]:
        """Return a complete JSON-able description: make_config(config.to_dict()) == config."""
        rules = []
        for rule in self.rules:
            conditions = {name: getattr(rule, name) for name in _RULE_CONDITIONS}
            rules.append({**conditions, "match": list(rule.match), **_describe(rule.method)})
        rest = {name: getattr(self, name) for name in _TOP_LEVEL}
        schedule = [{"step": stage.step, **_describe(stage.method)} for stage in self.schedule]
        outer = self.outer and self.outer.to_config()
        return {**_describe(self.method), "rules": rules, "schedule": schedule, **rest, "outer": outer}


_TOP_LEVEL = {f: t for f, t in fields_of(Config).items() if f not in ("method", "rules", "schedule", "outer")}
# All keys of a configuration that do not describe the method of a tensor.
TOP_LEVEL_KEYS = frozenset({*_TOP_LEVEL, "rules", "schedule", "warmup_steps", "outer"})


def _describe(method: Method) -> dict[str, Any]:
    components = {kind: _REGISTRIES[kind].config_of(getattr(method, kind)) for kind in _COMPONENTS}
    return {**components, "coding": method.coding.to_config()}


def make_config(config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None, **options: Any) -> Config:
    """Build a Config from a mapping, a TOML file, or keywords, which take precedence.

    If none of them names a compressor, the values of GRACE_CONFIG (the path of a TOML file, or a JSON object) fill the
    gaps. If one does, GRACE_CONFIG is ignored, and a GraceWarning says so.

    Keys: `compressor` ("auto" is short for "none" with `auto = true`), `memory`, `communicator` (a name, a table with
    `name`, or a ready component), `coding` (a name, or a table of names by field), `rules` (a list of tables with
    conditions and the same keys; a rule without `compressor` changes the method of the configuration), `schedule` (a
    list of tables with `step` and the options or components that change there), `warmup_steps` (of DGC's falling
    compress_ratio), `default_rules`, `seed`, `granularity`, `bucket_bytes`, `split_bytes`, `index_coding`, `timeout`,
    `checksum`, `check_replicas`, `rollback`, `auto`, `outer` (outer steps: the name of a preset, or a table with
    `every`), and the options of the chosen components, such as `compress_ratio`.
    Raises ConfigError for unknown keys and for values of the wrong type, IncompatibleError for components that do not
    work together.
    """
    if isinstance(config, Config):
        return _replace(config, options)
    if isinstance(config, (str, os.PathLike)):
        config = _read_toml(Path(config))
    elif config is not None and not isinstance(config, Mapping):
        raise ConfigError(
            f"config: expected a mapping, a Config, or the path of a TOML file, received {type(config).__name__}."
        )
    values = {**(config or {}), **options}
    text = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
    if not text:
        return _from_mapping(values)
    if "compressor" not in values:
        return _with_environment(text, values)
    made = _from_mapping(values)
    if _differs(text, made):
        warnings.warn(
            f"{ENVIRONMENT_VARIABLE}={text} is ignored, because the program itself names a compressor, "
            f"{made.method.compressor}. Unset {ENVIRONMENT_VARIABLE}, or name no compressor in the program.",
            GraceWarning,
            stacklevel=2,
        )
    return made


def refuse_typos(options: Mapping[str, Any], function: Callable[..., Any], where: str) -> None:
    """Raise ConfigError for an option that is no key of a configuration, but almost an argument of the function."""
    arguments = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    keys = {*TOP_LEVEL_KEYS, *_COMPONENTS, "coding"}
    for registry in _REGISTRIES.values():
        keys |= {key for name in registry for key in fields_of(registry.get(name))}
    for option in options:
        close = difflib.get_close_matches(option, [*keys, *arguments], n=1)
        if option not in keys and close and close[0] in arguments:
            raise ConfigError(f"{where}: there is no argument '{option}'.{nearest(option, arguments)}")


def _with_environment(text: str, values: Mapping[str, Any]) -> Config:
    """Make a configuration from the text of GRACE_CONFIG and values that take precedence."""
    try:
        return _from_mapping({**_from_environment(text), **values})
    except (ConfigError, IncompatibleError) as error:
        raise type(error)(f"{error} The configuration is that of {ENVIRONMENT_VARIABLE}={text}.") from None


def _differs(text: str, made: Config) -> bool:
    """Return whether GRACE_CONFIG would give another configuration, or none.

    It may give the same: a saved optimizer names the compressor that it got from there.
    """
    try:
        return _with_environment(text, {}) != made
    except (ConfigError, IncompatibleError):
        return True


def _from_environment(text: str) -> Mapping[str, Any]:
    if not text.startswith(("{", "[")):
        return _read_toml(Path(text))
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"the configuration is not a valid JSON object: {error}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"expected a JSON object or the path of a TOML file, received {text}.")
    return values


def _replace(config: Config, options: Mapping[str, Any]) -> Config:
    changes = dict(options)
    if "outer" in changes:
        changes["outer"] = make_outer(changes["outer"])
    for key, value in options.items():
        if key == "outer":
            continue
        if key not in _TOP_LEVEL:
            raise ConfigError(
                f"option '{key}' cannot be combined with a ready Config.{nearest(key, _TOP_LEVEL)} "
                "To change it, pass a dictionary instead of the Config."
            )
        _check_option(key, value)
    return dataclasses.replace(config, **changes)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        hint = ""
        if str(path) in compressors:
            hint = f" A string is the path of a TOML file; to name the compressor, pass {{'compressor': '{path}'}}."
        raise ConfigError(f"the configuration file '{path}' cannot be read: {error.strerror}.{hint}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file '{path}' is not valid TOML: {error}.") from None


def _check_option(key: str, value: Any) -> None:
    expected = _TOP_LEVEL[key]
    if type(value) is not expected:
        raise ConfigError(f"option '{key}': expected {expected.__name__}, received {value!r}.")


def _from_mapping(config: Mapping[str, Any]) -> Config:
    values = dict(config)
    # An array is compared element by element.
    if isinstance(values.get("compressor"), str) and values["compressor"] == AUTO:
        values.update(compressor="none", auto=True)
    top = {key: values.pop(key) for key in list(values) if key in _TOP_LEVEL}
    for key, value in top.items():
        _check_option(key, value)
    outer = make_outer(values.pop("outer", None))
    rules, schedule = (_tables(key, values.pop(key, [])) for key in ("rules", "schedule"))
    warmup = values.pop("warmup_steps", 0)
    if type(warmup) is not int or warmup < 0:
        raise ConfigError(f"option 'warmup_steps': expected a number of steps, received {warmup!r}.")
    method = _make_method(values, list(TOP_LEVEL_KEYS), "the configuration")
    stages = _warm_up(method, warmup) if warmup else [Stage(0, method)]
    for i, table in enumerate(schedule):
        changes, where = dict(table), f"stage {i + 1} of the schedule"
        step = changes.pop("step", None)
        if type(step) is not int:
            raise ConfigError(f"{where}: expected the key 'step' with a whole number, received {step!r}.")
        stages.append(Stage(step, change_method(stages[-1].method, changes, where)))
    made = tuple(_make_rule(rule, i, method) for i, rule in enumerate(rules))
    return Config(stages[0].method, made, tuple(stages[1:]), outer=outer, **top)


def _tables(key: str, value: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(t, Mapping) for t in value):
        raise ConfigError(f"option '{key}': expected a list of tables, received {value!r}.")
    return value


def _warm_up(method: Method, steps: int) -> list[Stage]:
    rungs = ladder(warmed_ratio(method.compressor), steps)
    return [Stage(step, change_method(method, {"compress_ratio": ratio}, "warmup_steps")) for step, ratio in rungs]


def change_config(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return the configuration with other options or components.

    Raises ConfigError if the configuration has a schedule, which would undo the change.
    """
    if config.schedule or (config.outer is not None and config.outer.dense_every):
        raise ConfigError(
            "the configuration has a schedule, or dense_every of outer steps, and its next stage would undo the "
            "change; change the schedule instead."
        )
    return dataclasses.replace(config, method=change_method(config.method, changes))


def change_method(
    method: Method, changes: Mapping[str, Any], where: str = "the change", other_keys: Iterable[str] = ()
) -> Method:
    """Return the method with other options or components; a new compressor brings its own memory and communicator.

    `other_keys` are names that an error about a wrong key may suggest, too. Raises ConfigError for options that no
    component has, IncompatibleError for components that do not work together.
    """
    values = dict(changes)
    if "compressor" not in values:
        kept = {kind: getattr(method, kind) for kind in _COMPONENTS if kind not in values}
        dealt: set[str] = set()
        for kind, component in kept.items():
            mine = {key: changes[key] for key in fields_of(type(component)) if key in changes}
            dealt |= set(mine)
            values[kind] = {**_REGISTRIES[kind].config_of(component), **mine}
        values = {"coding": method.coding, **{key: value for key, value in values.items() if key not in dealt}}
    return _make_method(values, other_keys, where)


def _make_rule(table: Mapping[str, Any], index: int, method: Method) -> Rule:
    """Make a rule from its table. Without a compressor of its own, it changes the configuration's method."""
    values = dict(table)
    where = f"rule {index + 1}"
    conditions = {key: values.pop(key) for key in list(values) if key in _RULE_CONDITIONS}
    if isinstance(conditions.get("match"), str):
        conditions["match"] = (conditions["match"],)
    if not values:
        raise ConfigError(
            f"{where} changes nothing. Write what is different for its tensors, for instance compress_ratio = 0.05, or "
            "compressor = 'none' to leave them uncompressed."
        )
    changed = change_method(method, values, where, _RULE_CONDITIONS)
    rule = build(Rule, {**conditions, "method": changed, "reason": f"{where} of the configuration"}, where)
    return dataclasses.replace(rule, match=tuple(rule.match))


def _make_method(values: Mapping[str, Any], other_keys: Iterable[str], where: str) -> Method:
    """Choose the components and give each flat option to those that have a field of that name."""
    options = {key: value for key, value in values.items() if key not in (*_COMPONENTS, "coding")}
    if "compressor" not in values:
        similar = [key for key in options if meant(key, ["compressor"])]
        unknown = f" It has the keys {', '.join(map(repr, options))}." if options else ""
        hint = f" Did you mean 'compressor' by '{similar[0]}'?" if similar else "".join(map(_foreign, options))
        raise ConfigError(
            f"{where} names no compressor.{unknown}{hint} Write for instance compressor = 'qsgd', or set "
            f"{ENVIRONMENT_VARIABLE} to a TOML file. `grace compressors` lists all methods."
        )
    known: list[str] = []
    used: set[str] = set()
    made: dict[str, Any] = {}
    for kind in _COMPONENTS:
        registry = _REGISTRIES[kind]
        choice = values[kind] if kind in values else _default(kind, made, where)
        if isinstance(choice, str):
            choice = {"name": choice}
        if isinstance(choice, Mapping):
            fields = fields_of(registry.get(choice["name"])) if isinstance(choice.get("name"), str) else {}
            mine = {key: value for key, value in options.items() if key in fields}
            twice = sorted(set(mine) & set(choice))
            if twice:
                raise ConfigError(
                    f"{where}: '{twice[0]}' is given twice, next to '{kind}' and inside it; remove one of them."
                )
            known += fields
            used |= set(mine)
            choice = {**mine, **choice}
        elif not dataclasses.is_dataclass(choice):
            raise ConfigError(f"{where}, '{kind}': expected a name, a table or a {kind}, received {choice!r}.")
        made[kind] = registry.make(choice)
    for key in options:
        if key not in used:
            place = "belongs to the top level" if key in _TOP_LEVEL else f"is no option of {_chosen(made)}"
            keys = [*_COMPONENTS, "coding", *other_keys, *known]
            hint = "" if key in _TOP_LEVEL else _foreign(key) or nearest(key, keys)
            raise ConfigError(f"{where}: '{key}' {place}.{hint}")
    return Method(**made, coding=make_coding(values.get("coding", NONE), where))


def _foreign(key: object) -> str:
    """Return what an option of outer steps in another library is called here; a synonym of our own comes first."""
    return "" if fold(str(key)) in SYNONYMS else foreign(key, "")


def _default(kind: str, made: Mapping[str, Any], where: str) -> str:
    """Return the name of a component that the user does not name; raises ConfigError if it must be named."""
    if kind == "communicator":
        return "auto"
    compressor: Compressor = made["compressor"]
    name = compressors.name_of(compressor)
    need = compressors.about(name).needs.get("memory")
    # If error feedback is known to harm, nothing is left to ask.
    if need and not compressor.harmed_by_feedback:
        raise ConfigError(f"{where}: compressor '{name}' needs a value for memory: {need.why}")
    return compressor.default_memory


def _chosen(made: Mapping[str, Any]) -> str:
    return ", ".join(f"{kind} '{_REGISTRIES[kind].name_of(component)}'" for kind, component in made.items())
