"""The bases and decorators that the adapter takes from PyTorch, as mypy has to see them.

mypy skips PyTorch, which not every machine has, so that all it defines is `Any`. A class derived from `Any` has every
attribute, and a method decorated by it takes every argument: what is misspelt or has moved would be no error. Here mypy
finds what the adapter uses of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Generic, TypeVar

    import torch

    F = TypeVar("F", bound=Callable[..., Any])
    T = TypeVar("T")

    def no_grad() -> Callable[[F], F]:
        """Return a decorator of functions that autograd does not follow."""

    class Optimizer:
        """A `torch.optim.Optimizer`."""

        defaults: dict[str, Any]
        param_groups: list[dict[str, Any]]
        state: dict[torch.Tensor, dict[str, Any]]

        def __init__(self, params: Any, defaults: dict[str, Any]) -> None: ...
        def step(self, closure: Callable[[], Any] | None = None) -> Any: ...
        def zero_grad(self, set_to_none: bool = True) -> None: ...
        def state_dict(self) -> dict[str, Any]: ...
        def load_state_dict(self, state_dict: Any) -> None: ...
        def add_param_group(self, param_group: dict[str, Any]) -> None: ...

    class Future(Generic[T]):
        """A `torch.futures.Future`."""

        def __init__(self, *, devices: list[torch.device] | None = None) -> None: ...
        def done(self) -> bool: ...
        def wait(self) -> T: ...
        def then(self, callback: Callable[[Any], Any]) -> Future[Any]: ...
        def add_done_callback(self, callback: Callable[[Any], None]) -> None: ...
        def set_result(self, result: T) -> None: ...
        def set_exception(self, result: Exception) -> None: ...

else:
    from torch import no_grad  # noqa: F401
    from torch.futures import Future
    from torch.optim import Optimizer  # noqa: F401
