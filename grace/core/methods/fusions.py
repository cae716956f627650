"""Fusions: functions that do two steps of methods in one pass over memory, found by the exact classes of the methods.

They are to methods what `Composite.kernel` is to array operations: nobody must have one, both ways give the same bits,
and a fusion returns None for what it does not serve, so that the ordinary steps run. They stand beside the methods. A
subclass has none, because it may have replaced one of the steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from grace.core.methods.site import Proposal, Site
from grace.core.spec import Array, Payload, State

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


class Fusion(Generic[P, R]):
    """Table of the functions that fuse the same steps, by the classes of the methods."""

    def __init__(self) -> None:
        self._functions: dict[tuple[type, ...], Callable[P, R | None]] = {}

    def of(self, *methods: type | tuple[type, ...]) -> Callable[[F], F]:
        """Return a decorator that registers a function for these classes; of a tuple, for each of its classes."""

        def decorate(function: F) -> F:
            each = (one if isinstance(one, tuple) else (one,) for one in methods)
            self._functions.update(dict.fromkeys(itertools.product(*each), function))
            return function

        return decorate

    def find(self, *methods: object) -> Callable[P, R | None] | None:
        """Return the function for methods of exactly these classes; None if there is none."""
        return self._functions.get(tuple(map(type, methods)))


#: (compressor, x, at) -> the payload of x, and a 0-d bool that is True if x is finite. If not, the payload may be
#: anything.
compress_checked: Fusion[[Any, Array, Site], tuple[Payload, Array]] = Fusion()
#: (compressor, memory, gradient, state, at) -> x as `compensate` returns it, its payload, and a 0-d bool that is True
#: if x is finite. If not, the payload may be anything. Only for memories without a state in progress.
compress_sum: Fusion[[Any, Any, Array, State, Site], tuple[Array, Payload, Array]] = Fusion()
#: (compressor, memory, gradient, state, at) -> what `update` returns of x, its payload, and a 0-d bool that is True if
#: x is finite. If not, the first two may be anything. For the same memories, where nobody needs x itself.
compress_feedback: Fusion[[Any, Any, Array, State, Site], tuple[State, Payload, Array]] = Fusion()
#: (compressor, memory, gradient, state, at) -> x as `compensate` returns it, its proposal, and a 0-d bool that is True
#: if x is finite. If not, the proposal may be anything. For the same memories.
propose_sum: Fusion[[Any, Any, Array, State, Site], tuple[Array, Proposal, Array]] = Fusion()
#: (compressor, payloads, factor, at) -> the factor times what `merge` returns.
merge_scaled: Fusion[[Any, Sequence[Payload], float, Site], Array] = Fusion()
#: (compressor, memory, payloads, state_, at) -> what `finish` returns of what `merge` returns; consumes state_.
merge_finish: Fusion[[Any, Any, Sequence[Payload], State, Site], tuple[Array, State]] = Fusion()

_overwritten: dict[type, tuple[str, ...]] = {}


def overwrites(*keys: str) -> Callable[[C], C]:
    """Return a decorator for a memory whose `compensate` passes `at.out` to the operation that computes x.

    Without roll-back, `at.out` is a tuple of the arrays of these keys of the state, in the order of the results.
    Nothing may read them afterwards.
    """

    def decorate(memory: C) -> C:
        _overwritten[memory] = keys
        return memory

    return decorate


def overwritten(memory: object) -> tuple[str, ...]:
    """Return the keys of the state that a memory of exactly this class may write over in `compensate`."""
    return _overwritten.get(type(memory), ())


class Fused(NamedTuple):
    """The fusions of a compressor and a memory."""

    compress_checked: Callable[[Any, Array, Site], tuple[Payload, Array] | None] | None
    compress_sum: Callable[[Any, Any, Array, State, Site], tuple[Array, Payload, Array] | None] | None
    compress_feedback: Callable[[Any, Any, Array, State, Site], tuple[State, Payload, Array] | None] | None
    propose_sum: Callable[[Any, Any, Array, State, Site], tuple[Array, Proposal, Array] | None] | None
    merge_scaled: Callable[[Any, Sequence[Payload], float, Site], Array | None] | None
    merge_finish: Callable[[Any, Any, Sequence[Payload], State, Site], tuple[Array, State] | None] | None
    overwritten: tuple[str, ...]


def find_fusions(compressor: object, memory: object) -> Fused:
    """Return the fusions of a compressor and a memory."""
    return Fused(
        compress_checked.find(compressor),
        compress_sum.find(compressor, memory),
        compress_feedback.find(compressor, memory),
        propose_sum.find(compressor, memory),
        merge_scaled.find(compressor),
        merge_finish.find(compressor, memory),
        overwritten(memory),
    )
