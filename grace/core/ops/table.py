"""The open table of composites: operations made of others, each defined beside the method that needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from grace.core.errors import ConfigError

if TYPE_CHECKING:
    from grace.core.ops.composites import ArrayOps
    from grace.core.ops.native import Native

P = ParamSpec("P")
R = TypeVar("R")


class Composite(Generic[P, R]):
    """An operation with a reference body over other operations, and perhaps a faster body by kernels.

    Call it with the array operations first: `encode(ops, x, scale)`. Both bodies give the same bytes.
    """

    def __init__(self, body: Callable[Concatenate[ArrayOps, P], R], one_graph: bool) -> None:
        self.name = body.__name__
        self.module = body.__module__
        self.__doc__ = body.__doc__
        self.body = body
        self.one_graph = one_graph
        # Takes a `Native`, which only an object with `runs_kernels` is.
        self.by_kernels: Callable[Concatenate[Any, P], R | None] | None = None

    def __call__(self, ops: ArrayOps, *args: P.args, **options: P.kwargs) -> R:
        # Calls of small tensors are frequent, so this is one function and not a method per class of operations.
        if ops.runs_kernels and self.by_kernels is not None:
            result = self.by_kernels(ops, *args, **options)
            if result is not None:
                return result
        return ops.compute(self, args, options)

    def kernel(
        self,
    ) -> Callable[[Callable[Concatenate[Native, P], R | None]], Callable[Concatenate[Native, P], R | None]]:
        """Return a decorator for the body by kernels, which returns None for arguments that it does not serve."""

        def decorate(
            body: Callable[Concatenate[Native, P], R | None],
        ) -> Callable[Concatenate[Native, P], R | None]:
            self.by_kernels = body
            return body

        return decorate


#: All composites by name, those of other packages included.
composites: dict[str, Composite[Any, Any]] = {}


def composite(*, one_graph: bool = False) -> Callable[[Callable[Concatenate[ArrayOps, P], R]], Composite[P, R]]:
    """Return a decorator that makes a function of array operations a composite, named like it.

    With `one_graph`, a framework that traces graphs makes one graph of the body per signature: faster if it has many
    small operations. It must not raise then, and the lengths of the arrays that it takes must not depend on data: each
    length would make a graph. Raises ConfigError if the name is taken.
    """

    def decorate(body: Callable[Concatenate[ArrayOps, P], R]) -> Composite[P, R]:
        made = Composite(body, one_graph)
        taken = composites.setdefault(made.name, made)
        if taken is not made:
            raise ConfigError(
                f"composite name '{made.name}' is taken by {taken.module}; choose another name for the function in "
                f"{made.module}."
            )
        return made

    return decorate
