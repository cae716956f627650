"""Gradients as views into flat storage, laid out as the units are, so that nothing is concatenated."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from grace.core.plan import Plan


class GradientViews:
    """Flat storage for the gradients that the engine exchanges, in the order of its units.

    `parameters` are those of the model by name. A backward pass adds to what is there, in place of handing over a new
    tensor, so `clear` must come before it.
    """

    def __init__(self, plan: Plan, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._views: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._storage: list[torch.Tensor] = []
        alike: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
        for part in sorted(plan.exchanged, key=lambda part: _place(plan, part.spec.name)):
            p = parameters[part.spec.name]
            if p.is_contiguous():
                alike.setdefault((p.dtype, p.device), []).append(p)
        for (dtype, device), group in alike.items():
            flat = torch.zeros(sum(p.numel() for p in group), dtype=dtype, device=device)
            self._storage.append(flat)
            for p, view in zip(group, flat.split([p.numel() for p in group]), strict=True):
                self._views[p] = view.view_as(p)
        self.clear()

    def clear(self) -> None:
        """Zero all gradients, and put the views back where the user replaced them."""
        for flat in self._storage:
            flat.zero_()
        for p, view in self._views.items():
            p.grad = view

    def __contains__(self, p: torch.nn.Parameter) -> bool:
        return p in self._views


def _place(plan: Plan, name: str) -> tuple[int, int]:
    """The number of the unit that holds the tensor's first element, and where in it."""
    unit, offset, _ = plan.places[name][0]
    return plan.units.index(unit), offset


def apart(buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those that results may be written to: contiguous, and sharing no memory with another.

    Autograd may hand one buffer to several parameters, or views of it.
    """
    spans = sorted((b.data_ptr(), b.data_ptr() + b.nbytes, name) for name, b in buffers.items() if b.is_contiguous())
    crowded, end, last = set(), 0, ""
    for start, stop, name in spans:
        if start < end:
            crowded |= {name, last}
        if stop > end:
            end, last = stop, name
    whole = len(spans) == len(buffers)
    return {name: buffers[name] for _, _, name in spans if whole and name not in crowded}
