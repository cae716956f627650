"""Methods with options of their own, as a command line names them: `qsgd:quantum_num=7:norm=l2`."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grace.core.config.config import make_config
from grace.core.config.registry import compressors, fields_of
from grace.core.errors import ConfigError

FORM = "NAME or NAME:OPTION=VALUE:OPTION=VALUE, such as qsgd:quantum_num=7:norm=l2"
_NAME = re.compile(r"[^:,=]+")
_OPTION = re.compile(r":([^:,=]+)=")
_PLAIN = re.compile(r"[^:,]+")


@dataclass(frozen=True)
class Variant:
    """A compressor and keys of a configuration that belong to it: its options, but also `memory` and so on."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The text that `parse_variants` reads."""
        return ":".join([self.name, *(f"{key}={_format_value(value)}" for key, value in self.options.items())])

    def config(self, **shared: Any) -> dict[str, Any]:
        """Return the configuration. The variant's own options take precedence over those that several share.

        What a configuration must name, but this one does not, is as in all tables.
        """
        return {**compressors.required(self.name), **shared, **self.options, "compressor": self.name}


def parse_variants(given: Sequence[str], **shared: Any) -> list[Variant]:
    """Return the variants that the arguments of `--compressors` name, each once.

    An argument holds one variant, or several separated by commas. A value is JSON, or else a string. `shared` are other
    keys of their configurations. Raises ConfigError for another form, IncompatibleError for keys that do not fit.
    """
    variants: dict[str, Variant] = {}
    for text in given:
        for name, options in _parts(text):
            made = make_config(Variant(name, options).config(**shared))
            # In the spelling of the registry.
            variant = Variant(compressors.name_of(made.method.compressor), options)
            variants[variant.label] = variant
    if not variants:
        raise ConfigError(f"--compressors: expected {FORM}; received {' '.join(given)!r}.")
    return list(variants.values())


def candidates(word: str) -> list[str]:
    """Return what may follow the beginning of a word: the names of methods, or after a colon the keys of options."""
    start, colon, _ = word.rpartition(":")
    if not colon:
        return list(compressors)
    name = start.partition(":")[0]
    keys = [*fields_of(compressors.get(name)), "memory", "communicator"] if name in compressors else []
    return [f"{start}:{key}=" for key in keys]


def _parts(text: str) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    at = 0
    while at < len(text):
        if text[at] == ",":
            at += 1
            continue
        name = _NAME.match(text, at)
        if name is None:
            raise _format_error(text)
        at, options = name.end(), {}
        while option := _OPTION.match(text, at):
            key = option[1]
            if key == "compressor" or key in options:
                why = "is given twice" if key in options else "is the name itself"
                raise ConfigError(f"--compressors: '{key}' {why} in '{text}'; remove it.")
            options[key], at = _value(text, option.end())
        if at < len(text) and text[at] != ",":
            raise _format_error(text)
        found.append((name[0], options))
    return found


def _value(text: str, start: int) -> tuple[Any, int]:
    """Return the value that begins at a position, and the position of its end."""
    if text[start : start + 1] in ("[", "{", '"'):
        try:
            return json.JSONDecoder().raw_decode(text, start)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--compressors: '{text[start:]}' is not valid JSON: {error}.") from None
    plain = _PLAIN.match(text, start)
    if plain is None:
        raise _format_error(text)
    return read_value(plain[0]), plain.end()


def read_value(text: str) -> Any:
    """Return the value of an option that a command line gives: JSON, or else the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _format_value(value: Any) -> str:
    """Return the shortest text that is read as the value."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value[0] not in '[{"' and read_value(value) == value:
        return value
    return json.dumps(value, separators=(",", ":"))


def _format_error(text: str) -> ConfigError:
    return ConfigError(f"--compressors: expected {FORM}; received '{text}'.")


def import_own(given: Sequence[str], option: str = "--import") -> list[str]:
    """Import the modules of an option, such as those that register components; return how other processes find them.

    A module is given by its name, or by the path of its file; the path may be relative, the returned one is not. Other
    modules beside such a file can be imported, but do not take precedence over installed ones.
    Raises ConfigError, whatever the import raises.
    """
    return [_import_module(text, option) for text in given]


def _import_module(text: str, option: str) -> str:
    path = Path(text).resolve() if text.endswith(".py") else None
    try:
        if path is None:
            importlib.import_module(text)
            return text
        if not path.is_file():
            raise ConfigError(f"{option}: there is no file '{text}'.")
        _run_file(path, option)
        return str(path)
    except ConfigError:
        raise
    except Exception as error:
        hint = ""
        if path is None and isinstance(error, ModuleNotFoundError):
            hint = " Give the path of its file, such as ./mine.py, or put its folder on PYTHONPATH."
        raise ConfigError(f"{option}: '{text}' cannot be imported: {type(error).__name__}: {error}.{hint}") from error


def _run_file(path: Path, option: str) -> None:
    name = path.stem
    if name in sys.modules:
        if getattr(sys.modules[name], "__file__", None) == str(path):
            return
        raise ConfigError(f"{option}: another module is named '{name}'; rename the file '{path}'.")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # Dataclasses look up their module there.
    sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules[name])
    except BaseException:
        del sys.modules[name]
        raise
