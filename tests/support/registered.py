"""Methods under test: every registered one with its defaults, and extra configurations that reach other code.

The lists come from the registry, so a new method is tested as soon as it is registered.
"""

from __future__ import annotations

import itertools
from functools import cache

import pytest

from grace.core.config.config import Method
from grace.core.config.registry import Registry, communicators, compressors, memories
from grace.core.errors import IncompatibleError
from grace.core.methods.compressor import Compressor, usual_communicator
from grace.core.methods.memory import Memory, Merging
from grace.core.ops import get_ops
from grace.core.ops.composites import ArrayOps
from grace.testing.harness import FRAMEWORKS

every_framework = pytest.mark.parametrize("framework", FRAMEWORKS)

# The frameworks, and those with kernels also with the reference implementation.
BACKENDS = (*FRAMEWORKS, *(f"{name}-reference" for name in ("numpy", "torch") if name in FRAMEWORKS))


def ops_of(backend: str) -> ArrayOps:
    """Return the array operations of one of BACKENDS."""
    framework, _, reference = backend.partition("-")
    return get_ops(framework, native=False if reference else None)


# Communicators whose units are shards, and the memories that only these serve; tests of their own have their promises.
OF_SHARDS = {"two_shot", "hierarchical"}
MEMORIES_OF_SHARDS = {"dore", "dore_mean"}
# Memories that need a second gradient, which most tests of steps do not pass, or merge payloads themselves, which the
# reference step does not know. tests/papers has their promises.
MEMORIES_OF_PAPERS = {
    name for name, memory in memories.ready() if "reference" in memory.needs or isinstance(memory, Merging)
}


def default_compressors() -> list[Compressor]:
    """Return one compressor per registered name."""
    return [compressors.example(name) for name in compressors]


def _extras(registry: Registry) -> list:
    """Return the configurations beside the defaults with which components are registered."""
    return [registry.make({"name": name, **extra}) for name in registry for extra in registry.about(name).tests]


def extra_compressors() -> list[Compressor]:
    """Return the extra configurations."""
    return _extras(compressors)


def all_compressors() -> list[Compressor]:
    """Return the default of every registered name, and the extra configurations."""
    return default_compressors() + extra_compressors()


def all_memories() -> list[Memory]:
    """Return the default of every registered name, and the extra configurations."""
    return [memories.make(name) for name in memories] + _extras(memories)


def default_method(compressor: Compressor) -> Method:
    """Return a compressor with its default memory and communicator."""
    return Method(
        compressor,
        memories.make(compressor.default_memory),
        communicators.make(usual_communicator(compressor)),
    )


@cache
def valid_methods() -> tuple[Method, ...]:
    """Return every valid combination of compressor, memory and communicator, all with their defaults.

    Without the communicators of `OF_SHARDS` and `MEMORIES_OF_PAPERS`.
    """
    kept = [memories.make(name) for name in memories if name not in MEMORIES_OF_PAPERS]
    travels = [communicators.make(name) for name in sorted(set(communicators) - OF_SHARDS - {"auto"})]
    parts = []
    for chosen in itertools.product(default_compressors(), kept, travels):
        try:
            method = Method(*chosen)
            method.check_memory()
        except IncompatibleError:
            continue
        parts.append(method)
    return tuple(parts)


def name(one: Compressor | Memory | Method) -> str:
    """Return a short name for test reports: the options that differ from the defaults."""
    if isinstance(one, Method):
        kinds = (
            (compressors, one.compressor),
            (memories, one.memory),
            (communicators, one.communicator),
        )
        return "-".join(registry.name_of(p) for registry, p in kinds)
    registry = compressors if isinstance(one, Compressor) else memories
    config = registry.config_of(one)
    default = _default(registry, config["name"])
    given = {f: getattr(one, f) for f in config if f != "name" and config[f] != default[f]}
    changed = [f"{f}={name(v) if isinstance(v, Compressor) else v}" for f, v in given.items()]
    return "-".join([config["name"], *changed])


@cache
def _default(registry: Registry, name: str) -> dict:
    return registry.config_of(registry.example(name))


def by_name(parts: list, kind: str | None = None) -> dict:
    """Return the parts by their short names, or by the name of one kind."""
    return {name(getattr(one, kind) if kind else one): one for one in parts}


def params(parts: list) -> list:
    """Return pytest parameters with short names."""
    return [pytest.param(one, id=name(one)) for one in parts]
