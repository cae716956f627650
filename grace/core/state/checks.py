"""Checks of saved states: their form, their tensors and methods, their arrays."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grace.core.config.registry import compressors, memories
from grace.core.errors import StateError
from grace.core.methods.memory import Memory
from grace.core.ops.composites import ArrayOps
from grace.core.plan.unit import Unit
from grace.core.spec import Array, State

STATE_VERSION = 3


def check_saved(state: Any) -> None:
    """Raise StateError unless this has the form of a result of `Run.state_dict` of this version."""
    missing = {"version", "step", "rank", "size", "tensors"} - set(check_mapping(state, "the state of grace"))
    if missing:
        raise StateError(
            f"checkpoint: {', '.join(sorted(missing))} missing; expected a state written by grace. Check the file."
        )
    # A process outside of a process set has the rank -1. No kernel counts further than 63 bits.
    for name, least in (("version", 0), ("step", 0), ("rank", -1), ("size", 1)):
        check_number(state[name], name, least)
    if state["version"] != STATE_VERSION:
        raise StateError(
            f"checkpoint: expected state version {STATE_VERSION}, received {state['version']!r}; "
            "load it with the version of grace that wrote it."
        )
    check_mapping(state["tensors"], "tensors")


def check_number(value: Any, name: str, least: int = 0) -> None:
    """Raise StateError unless the value of a checkpoint is a whole number of at least `least` and below 2^63."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or not least <= int(value) < 2**63:
        raise unreadable(name, f"a whole number from {least} on", show(value))


def check_mapping(value: Any, what: str) -> Mapping[Any, Any]:
    """Return the value; raise StateError unless it is a mapping."""
    if not isinstance(value, Mapping):
        raise unreadable(what, "a mapping", show(value))
    return value


def check_entry(name: str, unit: Unit, entry: Any, expected: Mapping[str, State | None]) -> None:
    """Raise StateError unless what was saved of a unit has these states, with their shapes and dtypes; None: any."""
    missing = {"components", "of", *expected} - set(check_mapping(entry, f"tensor '{name}'"))
    if missing:
        raise unreadable(f"tensor '{name}'", ", ".join(sorted(missing)), "nothing of this name")
    named = check_mapping(entry["components"], f"tensor '{name}', components")
    if {kind: str(other) for kind, other in named.items()} != names_of(unit):
        raise StateError(
            f"checkpoint, tensor '{name}': expected {names_of(unit)}, received {dict(named)}; "
            "use the configuration it was saved with."
        )
    tensors = entry["of"]
    if not isinstance(tensors, Sequence) or [*map(str, tensors)] != tensors_of(unit):
        raise unreadable(f"tensor '{name}', of", str(tensors_of(unit)), show(tensors))
    for kind, state in expected.items():
        if state is None:
            continue
        found = {key: show(value) for key, value in check_mapping(entry[kind], f"tensor '{name}'").items()}
        wanted = {key: show(value) for key, value in state.items()}
        if found != wanted:
            raise StateError(
                f"checkpoint, tensor '{name}': expected states {wanted}, received {found}; "
                "use the configuration it was saved with."
            )


def convert_state(
    name: str, saved: State, current: State, convert: Callable[[Array, Array], Array], ops: ArrayOps
) -> State:
    """Return the saved arrays of a unit in the form of the current ones.

    Raises StateError if they are no arrays, or if one has NaN or infinity: no step that has seen any is committed.
    """
    try:
        made = {key: convert(saved[key], value) for key, value in current.items()}
        for key, value in made.items():
            floats = ops.dtype(value).startswith(("float", "bfloat"))
            if floats and bool(ops.any(ops.bit_not(ops.abs(value) < math.inf))):
                raise nonfinite(f"tensor '{name}', '{key}'")
        return made
    except StateError:
        raise
    except Exception as error:
        # An array library refuses by errors of many classes: for sparse arrays, for example.
        expected = {key: show(value) for key, value in current.items()}
        raise unreadable(f"tensor '{name}'", f"arrays such as {expected}", f"another kind ({error})") from error


def nonfinite(what: str) -> StateError:
    """Return the error of a saved state with NaN or infinity, which would spoil all further steps."""
    return StateError(
        f"checkpoint, {what}: expected finite numbers, received NaN or infinity. The file is damaged; load another one."
    )


def alone(memory: Memory) -> StateError:
    """Return the error of a rank that would start from zero while others go on, with a memory that is `joint`."""
    return StateError(
        f"checkpoint: another rank saved it, and with the memory '{memories.name_of(memory)}' no rank can start from "
        "zero alone. Let every rank load its own file, or load no state of grace on any rank."
    )


def unreadable(what: str, expected: str, received: str) -> StateError:
    """Return the error of a saved value that is not what it should be."""
    return StateError(
        f"checkpoint, {what}: expected {expected}, received {received}. The file is damaged, or was not "
        "written by grace; load another one."
    )


def show(value: Any) -> str:
    """Return a short text on a value: dtype and shape of an array, else its type and its beginning."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if dtype is None or not isinstance(shape, Sequence):
        text = repr(value)
        return f"{type(value).__name__} {text if len(text) < 40 else text[:36] + ' ...'}"
    # PyTorch's names have the module's name in front.
    return f"{str(dtype).rpartition('.')[2]} {tuple(shape)}"


def tensors_of(unit: Unit) -> list[str]:
    """Return the names of the tensors that a unit has elements of, each once."""
    return list(dict.fromkeys(piece.tensor for piece in unit.pieces))


def names_of(unit: Unit) -> dict[str, str]:
    """Return the names of a unit's components."""
    return {"memory": memories.name_of(unit.memory), "compressor": compressors.name_of(unit.compressor)}
