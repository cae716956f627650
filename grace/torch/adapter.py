"""`OptimizerAdapter`: what a wrapped optimizer does in place of its own methods."""

from __future__ import annotations

import functools
import types
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch

from grace.core.errors import GraceError, GraceWarning, StepError
from grace.core.state.merge import optimizer_state
from grace.torch.exchange import Exchange
from grace.torch.library import Delegated
from grace.torch.references import References
from grace.torch.tensors import refuse_sparse, resolve_signs
from grace.torch.views import GradientViews

# More backward passes than a closure takes.
_MANY = 1 << 30
# By these marks, a learning-rate scheduler finds that it counts the steps of an optimizer.
_COUNTED = ("_wrapped_by_lr_sched", "_with_counter")


class PlainMethods(NamedTuple):
    """The methods of an optimizer before it was wrapped, some of which others may have replaced on the instance."""

    step: Callable[..., Any]
    zero_grad: Callable[..., None]
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> PlainMethods:
        """Return the methods that the optimizer has now."""
        return cls(*(getattr(optimizer, name) for name in cls._fields))


class OptimizerAdapter(ABC):
    """The methods of a wrapped optimizer that use its exchange.

    `optimizer` is the one that users call, and `plain` has the methods that it had before. `names` has the names of the
    parameters. `check_frozen` raises StepError if a parameter trains that is not exchanged, because it was frozen.
    """

    #: The methods that take the places of the optimizer's own, besides `step`.
    replaced: ClassVar[tuple[str, ...]] = ("state_dict", "load_state_dict", "add_param_group")

    def __init__(
        self,
        optimizer: Any,
        plain: PlainMethods,
        exchange: Exchange,
        names: Mapping[torch.nn.Parameter, str],
        check_frozen: Callable[[], None],
    ) -> None:
        self.optimizer, self.plain, self.exchange = optimizer, plain, exchange
        self.run, self.rollback = exchange.run, exchange.rollback
        self.names, self.check_frozen = names, check_frozen

    def attach(self) -> None:
        """Put the methods in their places. No other optimizer may have the class of this one."""
        optimizer = self.optimizer
        optimizer.grace, self.rollback.forget = self.exchange, self.forget
        for name in self.replaced:
            method = getattr(self, name)
            setattr(optimizer, name, method)
            # Lightning's wrapper has a class derived from this one. It would find other methods there, which act on the
            # wrapper instead of this optimizer, and zero_grad() would call itself forever.
            setattr(type(optimizer), name, _forward(method))

        def step(_: Any, closure: Any = None) -> Any:
            return self.step(closure)

        for mark in _COUNTED:
            if hasattr(self.plain.step, mark):
                setattr(step, mark, getattr(self.plain.step, mark))
        # A bound method, because schedulers that are made later read its __func__.
        optimizer.step = types.MethodType(step, optimizer)
        optimizer.__getstate__ = _refuse_copy

    @abstractmethod
    def step(self, closure: Any = None) -> Any:
        """Take a step of the optimizer; see `grace.torch.DistributedOptimizer`."""

    @abstractmethod
    def forget(self) -> None:
        """Forget the step under way, which was dropped."""

    def refuse_while_under_way(self, call: str) -> None:
        """Raise StepError if a step has failed, or if the call would come in the middle of one."""
        self.rollback.check()

    def load_state_dict(self, state_dict: Mapping[str, Any] | list[Mapping[str, Any]]) -> None:
        """Load a state of this optimizer, or a list with those of all ranks. Warn if it has none of grace."""
        self.refuse_while_under_way("load_state_dict()")
        given = optimizer_state(state_dict, self.exchange.rank)
        saved = given.pop("grace", None)
        self.exchange.load(saved, self.optimizer, lambda: self.plain.load_state_dict(given))
        if saved is None:
            again = self.begin()
            warnings.warn(
                f"the checkpoint contains no state of grace (key 'grace'): {again}", GraceWarning, stacklevel=2
            )

    def begin(self) -> str:
        """Begin what an exchange without states needs, and say what that is."""
        return "residuals start from zero"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, with that of grace."""
        return {**self.plain.state_dict(), "grace": self.exchange.state_dict()}

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Raise GraceError."""
        raise GraceError(
            "add_param_group() was called after the optimizer was wrapped, and the new parameters would not be "
            "exchanged; add the group before you wrap the optimizer."
        )


class GradientAdapter(OptimizerAdapter):
    """The methods of an optimizer whose gradients are exchanged.

    Hooks of the backward pass call its `_allreduce_grad_async`; see `Library.wrap`. `delegated` exchanges what stays
    dense.
    """

    replaced = (*OptimizerAdapter.replaced, "zero_grad", "synchronize", "skip_synchronize")

    def __init__(self, *given: Any, delegated: Delegated, sparse_as_dense: bool, views: GradientViews | None) -> None:
        super().__init__(*given)
        self.delegated, self.sparse_as_dense, self.views = delegated, sparse_as_dense, views
        self.loss_scale = self.exchange.loss_scale
        self.references = References(self.exchange, self.names, self._alone)
        self.library_synchronize = self.optimizer.synchronize
        # Keep the index of the group, because loading a checkpoint replaces the group objects.
        self.group_of = {p: i for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        # The gradients that the exchange has taken in this step, each with its version.
        self.taken: dict[torch.nn.Parameter, tuple[torch.Tensor, int]] = {}
        # The gradients that frozen parameters had before zeros took their place, mostly None.
        self.gradients_of_frozen: dict[torch.nn.Parameter, torch.Tensor | None] = {}
        # Of the first few of them, views of some elements, with the values that they had. GradScaler and `.data` change
        # gradients without counting a version.
        self.samples: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attach(self) -> None:
        """Put the methods in their places, also those of the GradScaler."""
        super().attach()
        self.optimizer._allreduce_grad_async = self.start
        self.loss_scale.attach(
            # A wrapper such as Lightning's forwards the attribute.
            lambda which: getattr(which, "grace", None) is self.exchange,
            synchronize=self.synchronize,
            exchanged=self.skip_synchronize,
            done=self.rollback.release,
        )

    # --- during the backward pass -----------------------------------------------------------------------------------

    def start(self, p: torch.nn.Parameter) -> Any:
        """Start the exchange of a gradient; return what `_allreduce_grad_async` may return."""
        with self.rollback.attempt():
            if not self.taken:
                self.exchange.begin_step()
            handle = self._hand_over(p)
            assert p.grad is not None
            self.taken[p] = p.grad, p.grad._version
            return handle

    def _hand_over(self, p: torch.nn.Parameter) -> Any:
        name = self.names[p]
        if not p.requires_grad:
            # Frozen during the run. It takes part with zeros, but neither its residual nor its weight may move.
            self.gradients_of_frozen[p] = p.grad
            p.grad = torch.zeros_like(p)
        resolve_signs(p)
        if p.grad is not None and not p.grad.is_sparse:
            self.exchange.note_gradient(name, p.grad)
        if not self.run.exchanges(name):
            return self.delegated.start(p)
        lr = self.optimizer.param_groups[self.group_of[p]]["lr"]
        if not p.requires_grad:
            self.run.current.rest(name, lr)
            return functools.partial(self.exchange.result, name), None
        if p.grad is None:
            # Another rank may have used the parameter and wait for this rank's gradient.
            p.grad = torch.zeros_like(p)
        gradient = p.grad
        if not self.sparse_as_dense:
            refuse_sparse(name, gradient, "Pass sparse_as_dense=True, or exclude")
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        else:
            self.exchange.set_output(name, gradient)
            if len(self.samples) < 4 and gradient.is_contiguous():
                some = gradient.detach().flatten()[:: max(1, gradient.numel() // 16)]
                self.samples.append((some, some.clone()))
        # Detached, because hooks may run with gradients enabled.
        gradient = self.loss_scale.unscale(gradient.detach())
        self.run.current.ready(name, gradient, lr, self.references.of(p))
        return functools.partial(self.exchange.result, name), None

    # --- what users call --------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Complete the exchange: all gradients are then those of all ranks."""
        # A second synchronize() would exchange the merged gradients again, and momentum and residuals would count
        # another step.
        with self.rollback.attempt():
            if self.optimizer._handles or not self.optimizer._synchronized:
                self._complete()

    def _complete(self) -> None:
        self.check_frozen()
        self._refuse_changed_gradients()
        alone = not self.run.plan.buckets
        if not self.taken:
            # This rank has no gradient. The others compare the ranks nevertheless.
            self.exchange.start_comparing()
        self.exchange.comparisons.finish()
        if not self.run.completed:
            # Before the library starts what this rank has no gradient for.
            self.delegated.agree_on_sparse()
        self.library_synchronize()
        self._clear()
        self.exchange.step_ends()
        if alone:
            # The library reduced all tensors and asked the run for nothing. The schedule counts the step anyway.
            self.run.finish()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let step() apply the gradients that an earlier `synchronize()` has exchanged."""
        self.optimizer._should_synchronize = False
        try:
            yield
        finally:
            self.optimizer._should_synchronize = True

    def step(self, closure: Any = None) -> Any:
        """Exchange the gradients, unless an earlier `synchronize()` has done so, and apply them."""
        optimizer, exchange = self.optimizer, self.exchange
        self.rollback.check()
        loss = None
        if self.references.needed and optimizer._should_synchronize:
            loss = self._evaluate(closure)
            for p in optimizer._handles:
                optimizer._handles[p] = self.start(p)
        elif closure is not None:
            # Before the exchange of the gradients that it computes.
            with torch.enable_grad():
                loss = closure()
        if optimizer._should_synchronize:
            if optimizer._synchronized:
                warnings.warn(
                    "step() was called after synchronize(): call it inside 'with optimizer.skip_synchronize():', or "
                    "leave synchronize() out.",
                    stacklevel=3,
                )
            self.synchronize()
        optimizer._synchronized = False
        result = self.plain.step()
        self.references.note_applied()
        self.rollback.release()
        # A scaler looks at gradients before step() exchanges them, or after synchronize(). The samples have shown the
        # former if any is compressed, and the latter does no harm if none is.
        if not exchange.scaler_sought and optimizer._should_synchronize == exchange.all_dense:
            exchange.warn_of_scaler()
        return result if closure is None else loss

    def _evaluate(self, closure: Callable[[], Any] | None) -> Any:
        """Evaluate a closure at earlier weights, and at those of now; return what the latter returns.

        Its gradients are exchanged afterwards, however many backward passes it takes.
        """
        if closure is None:
            raise StepError(
                "a memory needs second gradients, and step() was called without a closure; pass one that computes the "
                "gradients: of all data if grace.full_round of the optimizer is true, else of a batch, which stays the "
                "same when it is called twice."
            )
        optimizer = self.optimizer
        passes = optimizer.backward_passes_per_step
        optimizer.set_backward_passes_per_step(_MANY)
        try:
            self.references.evaluate(closure)
            with torch.enable_grad():
                return closure()
        finally:
            optimizer.set_backward_passes_per_step(passes)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Forget the backward passes of the body: their gradients stay on this rank."""
        try:
            yield
        finally:
            self.optimizer._handles.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients. Raises StepError while they are being exchanged."""
        self.refuse_while_under_way("zero_grad()")
        if self.rollback.before is not None and self.exchange.config.rollback:
            # The gradients were exchanged by synchronize(), and no step() has applied them.
            self.run.put_back(self.rollback.before)
        self.rollback.release()
        self.plain.zero_grad(set_to_none=set_to_none)
        if self.views is not None:
            self.views.clear()

    # --- refusals, and the end of a step ----------------------------------------------------------------------------

    def _refuse_changed_gradients(self) -> None:
        for p, (gradient, version) in self.taken.items():
            if p.grad is not gradient or gradient._version != version:
                raise _changed_error(f"the gradient of tensor '{self.names[p]}' was")
        # Compare bytes: NaN is not equal to itself.
        if not all(torch.equal(now.clone().view(torch.uint8), then.view(torch.uint8)) for now, then in self.samples):
            raise _changed_error("gradients were")

    def refuse_while_under_way(self, call: str) -> None:
        """Raise StepError if a step has failed, or if gradients are being exchanged."""
        super().refuse_while_under_way(call)
        if self.optimizer._handles:
            raise StepError(
                f"{call} was called after backward() but before step() or synchronize(), while gradients are being "
                "exchanged; call it after step(). To drop this step, call optimizer.grace.discard() on all ranks first."
            )

    def forget(self) -> None:
        """Forget the step under way, which was dropped."""
        self._clear()
        self.optimizer._handles.clear()
        self.delegated.forget()
        self.optimizer.set_backward_passes_per_step(self.optimizer.backward_passes_per_step)
        self.optimizer._synchronized = False
        self.zero_grad()

    def _clear(self) -> None:
        """Give frozen parameters their gradients back, and forget those of this step."""
        for p, gradient in self.gradients_of_frozen.items():
            p.grad = gradient
        for collection in (self.gradients_of_frozen, self.taken, self.samples):
            collection.clear()


def give_own_class(optimizer: Any, *mixins: type) -> None:
    """Change the class of an optimizer to one that no other optimizer has, derived from the mixins and its own."""
    plain = type(optimizer)
    optimizer.__class__ = type(plain.__name__, (*mixins, plain), {"__module__": plain.__module__})


def _changed_error(what: str) -> StepError:
    return StepError(
        f"{what} changed between backward() and step(), when the exchange had begun: the ranks would train apart. "
        "To clip gradients, call optimizer.synchronize() first, and then optimizer.step() inside "
        "'with optimizer.skip_synchronize():'. A GradScaler belongs into "
        "grace.DistributedOptimizer(..., grad_scaler=scaler)."
    )


def _refuse_copy() -> None:
    """Raise GraceError: the copy would not exchange its gradients."""
    raise GraceError(
        "a wrapped optimizer cannot be copied or pickled, because hooks and collectives belong to the one that was "
        "wrapped. Save optimizer.state_dict(), or wrap another plain optimizer."
    )


def _forward(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the bound method as one that can be set on a class."""
    return lambda self, *arguments, **options: method(*arguments, **options)
