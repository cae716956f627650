"""Registries of all kinds of components by name, complete so that errors can list all names."""

from __future__ import annotations

import dataclasses
import importlib
import math
import numbers
import pkgutil
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Generic, NamedTuple, TypeVar

from grace.core.config import plugins
from grace.core.errors import ConfigError, GraceWarning, fold, nearest
from grace.core.methods.communicator import Communicator
from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import Memory
from grace.core.methods.outer import OuterOptimizer

T = TypeVar("T")
C = TypeVar("C", bound=type)


@dataclasses.dataclass(frozen=True)
class Setting:
    """The optimizer's arguments and grace's options with which a method trains the digits example well.

    On another network, first tune the learning rate of sign and ternary methods.
    """

    lr: float = 0.05
    momentum: float = 0.9
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Need(NamedTuple):
    """An option that a configuration must name: the value in tables and tests, and the end of the error without it."""

    example: Any
    why: str


@dataclasses.dataclass(frozen=True)
class About:
    """Facts about a class that a component is registered with, most of them for tables, examples and tests.

    Configurations are options that differ from the defaults.
    """

    #: The family of a built-in compressor, by the name of its page.
    family: str = ""
    #: Whether it trains well under Adam; None if that was not measured.
    adam: bool | None = None
    #: Configurations that the contracts and the golden bytes cover, beside the defaults.
    tests: Sequence[Mapping[str, Any]] = ()
    #: Configurations in the table of errors.
    errors: Sequence[Mapping[str, Any]] = ({},)
    #: Configurations of a compressor that advice compares, from the gentlest to the strongest.
    advised: Sequence[Mapping[str, Any]] = ()
    digits: Setting = dataclasses.field(default_factory=Setting)
    #: Options for which no single default is good: fields without one, or `memory`.
    needs: Mapping[str, Need] = dataclasses.field(default_factory=dict)
    #: Version of a compressor's payloads: raise it when their bytes change, so that ranks of both versions do not mix.
    payload_format: int = 1


class Registry(Generic[T]):
    """Registry of one kind of component: name -> class. Built-in ones are the modules of `package`.

    Other distributions announce one in the entry-point group `grace.<plural>`, or register it at import. `listed` is a
    sentence that says where all names are listed.
    """

    def __init__(self, kind: str, plural: str, package: str, listed: str = "") -> None:
        self.kind, self._listed = kind, listed
        self._group = f"grace.{plural}"
        self._package = package
        self._classes: dict[str, type[T]] = {}
        self._about: dict[str, About] = {}
        # The errors of entry points that cannot be loaded, by name.
        self._broken: dict[str, str] = {}
        self._loaded = False

    def register(self, name: str, about: About | None = None) -> Callable[[C], C]:
        """Return a class decorator that registers a class by this name; raises ConfigError if the name is taken."""

        def decorate(cls: C) -> C:
            taken = self._classes.get(name)
            if taken is not None:
                raise ConfigError(
                    f"{self.kind} name '{name}' is taken by {taken.__module__}.{taken.__qualname__}; "
                    f"choose another name for {cls.__module__}.{cls.__qualname__}."
                )
            self._classes[name] = cls
            if about is not None:
                self._about[name] = about
            return cls

        return decorate

    def _load(self) -> None:
        if self._loaded:
            return
        # Set first, because an outside module may ask for a component during its import.
        self._loaded = True
        try:
            package = importlib.import_module(self._package)
            for module in pkgutil.walk_packages(getattr(package, "__path__", []), f"{self._package}."):
                importlib.import_module(module.name)
            for entry in entry_points(group=self._group):
                try:
                    cls = plugins.load(entry)
                except ConfigError as error:
                    # A run that does not use it is not stopped by it.
                    self._broken[entry.name] = str(error)
                    warnings.warn(str(error), GraceWarning, stacklevel=2)
                    continue
                if self._classes.get(entry.name) is not cls:
                    self.register(entry.name)(cls)
        except BaseException:
            self._loaded = False
            raise

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(sorted(self._classes))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self._like(name, self._classes))

    def _like(self, name: str, among: Iterable[str]) -> list[str]:
        """Return the names that are spelled like this one, or differ in case, hyphens and underscores only."""
        self._load()
        return [name] if name in among else sorted(known for known in among if fold(known) == fold(name))

    def get(self, name: str) -> type[T]:
        """Return the class of that name. Raises ConfigError if there is none, or if there are two."""
        return self._classes[self.registered_name(name)]

    def registered_name(self, name: str) -> str:
        """Return the name as it is registered; it may differ in case, hyphens and underscores.

        Raises ConfigError with the nearest valid names if there is none, or if there are two.
        """
        found = self._like(name, self._classes)
        if not found and (broken := self._like(name, self._broken)):
            raise ConfigError(self._broken[broken[0]])
        if not found:
            raise ConfigError(f"unknown {self.kind} '{name}'.{nearest(name, self._classes)}{self._listed}")
        if len(found) > 1:
            names = " or ".join(map(repr, found))
            raise ConfigError(f"{self.kind} '{name}' may be {names}; write one of them exactly.")
        return found[0]

    def about(self, name: str) -> About:
        """Return what tables, examples and tests show of a component. Raises ConfigError if there is none."""
        return self._about.get(self.registered_name(name), About())

    def name_of(self, component: T) -> str:
        """Return the name that the component's class is registered by; raises ConfigError if it is not registered."""
        self._load()
        for name, cls in self._classes.items():
            if type(component) is cls:
                return name
        raise ConfigError(
            f"{type(component).__qualname__} is not registered as a {self.kind}; "
            f"decorate it with @grace.register_{self.kind.replace(' ', '_')}('name')."
        )

    def make(self, config: str | Mapping[str, Any] | T) -> T:
        """Build a component from its name or from {"name": ..., **fields}, or return a ready component.

        Raises ConfigError for unknown names, unknown fields, and values of the wrong type.
        """
        if isinstance(config, str):
            config = {"name": config}
        if isinstance(config, Mapping):
            fields = dict(config)
            name = fields.pop("name", None)
            if not isinstance(name, str):
                raise ConfigError(f"{self.kind}: expected a table with the key 'name', received {dict(config)!r}.")
            return build(self.get(name), fields, f"{self.kind} '{name}'", self.about(name).needs)
        if isinstance(config, type):
            raise ConfigError(f"{self.kind}: expected an instance, received the class {config.__name__}; call it.")
        self.name_of(config)
        return config

    def required(self, name: str) -> dict[str, Any]:
        """Return the options that a configuration must name, with the values of tables, benchmarks and tests."""
        return {key: need.example for key, need in self.about(name).needs.items()}

    def example(self, name: str, **options: Any) -> T:
        """Build the component of tables and tests: these options, those that it needs, and otherwise the defaults.

        Raises ConfigError as `make` does, also if a component from outside grace needs options.
        """
        fields = fields_of(self.get(name))
        needed = {key: value for key, value in self.required(name).items() if key in fields}
        return self.make({**needed, **options, "name": name})

    def ready(self) -> Iterator[tuple[str, T]]:
        """Yield the name and the example of every component that can be built without options."""
        for name in self:
            needed = self.required(name)
            fields = dataclasses.fields(self.get(name))  # type: ignore[arg-type]
            if not any(_is_required(f) and f.name not in needed for f in fields if f.init):
                yield name, self.example(name)

    def config_of(self, component: T) -> dict[str, Any]:
        """Return a JSON-able description, nested components included; make(config_of(component)) == component."""
        values = {f.name: getattr(component, f.name) for f in dataclasses.fields(component)}  # type: ignore[arg-type]
        inner = {
            name: registry.config_of(v)
            for kind, registry in _INNER.items()
            for name, v in values.items()
            if isinstance(v, kind)
        }
        return {"name": self.name_of(component), **values, **inner}


_fields: dict[type, Mapping[str, Any]] = {}


def fields_of(cls: type) -> Mapping[str, Any]:
    """Return the names and types of a dataclass's fields."""
    if cls not in _fields:
        # This compiles the text of every annotation.
        hints = typing.get_type_hints(cls)
        _fields[cls] = types.MappingProxyType({f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init})
    return _fields[cls]


def build(cls: type[T], values: Mapping[str, Any], where: str, needs: Mapping[str, Need] | None = None) -> T:
    """Return cls(**values) after checking names and types; integers pass as floats. Raises ConfigError.

    `needs` says why fields have no default. A field whose type is a component accepts what its registry's `make`
    accepts: a name, a table, or a ready component.
    """
    fields = fields_of(cls)
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(f"{where} has no option '{key}'.{nearest(key, fields) if fields else ' It has none.'}")
        if not _fits(value, fields[key]):
            hint = fields[key]
            expected = hint.__name__ if typing.get_origin(hint) is None else str(hint).replace("typing.", "")
            raise ConfigError(
                f"{where}, option '{key}': expected {expected}, received {value!r} of type {type(value).__name__}."
            )
    missing = [f.name for f in dataclasses.fields(cls) if f.init and _is_required(f) and f.name not in values]  # type: ignore[arg-type]
    if missing:
        why = " ".join(needs[name].why for name in missing if name in needs) if needs else ""
        raise ConfigError(f"{where} needs a value for {', '.join(missing)}{f': {why}' if why else '.'}")
    # JSON and TOML have no tuples; a frozen component with a list could not be hashed and would not equal the original.
    return cls(**{k: _make_value(v, fields[k]) for k, v in values.items()})


def _make_value(value: Any, hint: Any) -> Any:
    for kind, registry in _INNER.items():
        if value is not None and kind in (hint, *typing.get_args(hint)):
            return registry.make(value)
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    # NumPy numbers cannot be written to JSON.
    return value.item() if hasattr(value, "item") else value


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, h) for h in typing.get_args(hint))
    if origin is typing.Literal:
        # Arrays compare element by element.
        return any(isinstance(value, type(choice)) and value == choice for choice in typing.get_args(hint))
    if origin is tuple:
        if not isinstance(value, (tuple, list)):
            return False
        hints = typing.get_args(hint)
        if hints[-1] is Ellipsis:
            return all(_fits(v, hints[0]) for v in value)
        return len(value) == len(hints) and all(map(_fits, value, hints))
    if hint in _INNER:
        return isinstance(value, (str, Mapping, hint))
    if hint is float:
        # NaN and infinity would pass or fail every comparison of a range check.
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            return False
        try:
            return math.isfinite(value)
        except OverflowError:
            # A whole number beyond all floats.
            return False
    if hint is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return isinstance(value, hint)


_LISTED = " `grace compressors` lists all."
compressors: Registry[Compressor] = Registry("compressor", "compressors", "grace.core.compressors", _LISTED)
memories: Registry[Memory] = Registry("memory", "memories", "grace.core.memories", _LISTED)
communicators: Registry[Communicator] = Registry("communicator", "communicators", "grace.core.communicators", _LISTED)
outer_optimizers: Registry[OuterOptimizer] = Registry("outer optimizer", "outer_optimizers", "grace.core.outer")
# The kinds of components that others may consist of.
_INNER: dict[type, Registry[Any]] = {
    Compressor: compressors,
    Memory: memories,
    Communicator: communicators,
    OuterOptimizer: outer_optimizers,
}
