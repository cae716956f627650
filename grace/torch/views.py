"""Gradients as views into flat storage in the order of the units, so that units need no concatenation."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from grace.core.plan.plan import Plan


class GradientViews:
    """Flat storage for the gradients that a run exchanges, in the order of its units.

    `parameters` maps names to the model's parameters. Backward passes add to existing gradients, so call `clear` first.
    """

    def __init__(self, plan: Plan, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._views: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._storage: list[torch.Tensor] = []
        alike: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
        for item in sorted(plan.exchanged, key=lambda item: _place(plan, item.spec.name)):
            p = parameters[item.spec.name]
            if p.is_contiguous():
                alike.setdefault((p.dtype, p.device), []).append(p)
        for (dtype, device), group in alike.items():
            flat = torch.zeros(sum(p.numel() for p in group), dtype=dtype, device=device)
            self._storage.append(flat)
            for p, view in zip(group, flat.split([p.numel() for p in group]), strict=True):
                # With a version counter of its own: it tells whether this gradient was changed.
                self._views[p] = view.view_as(p).data
        self.clear()

    def clear(self) -> None:
        """Set all gradients to zero. Restore views that the user has replaced."""
        for flat in self._storage:
            flat.zero_()
        for p, view in self._views.items():
            p.grad = view


def _place(plan: Plan, name: str) -> tuple[int, int]:
    """Return the index of the unit with the tensor's first element, and the element's offset in the unit."""
    unit, offset, _ = plan.places[name][0]
    return plan.units.index(unit), offset


def writable(buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the buffers that may be overwritten with results: contiguous, and without memory shared with others.

    Autograd may give one buffer, or views of it, to several parameters.
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
