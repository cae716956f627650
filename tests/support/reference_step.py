"""A reference step, tensor by tensor, that uses only the methods. A step must give the same results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from grace.core.methods.capabilities import Learning, Negotiating, Stateful, Tuning
from grace.core.methods.site import Site
from grace.core.plan.plan import make_plan
from grace.core.plan.unit import Assignment
from grace.core.session.simulation import reduce
from grace.core.spec import HALF_DTYPES, Key


@dataclass
class Reference:
    """The reference for `size` ranks and finite gradients.

    `items` are the tensors with their methods. `number` counts the steps.
    """

    ops: Any
    items: list[Assignment]
    size: int
    seed: int
    number: int = 0
    states: list[dict[str, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self):
        self.states = [
            {
                item.spec.name: {
                    "memory": item.memory.init(item.spec, self.ops),
                    "compressor": item.compressor.init(item.spec, self.ops, Key.derive(self.seed, item.spec.name))
                    if isinstance(item.compressor, Stateful)
                    else {},
                }
                for item in self.items
            }
            for _ in range(self.size)
        ]

    def step(self, gradients, lr=0.1):
        """Return the merged gradient per rank and tensor, from one gradient per rank and tensor."""
        merged: list[dict[str, Any]] = [{} for _ in range(self.size)]
        tallies: dict[Any, list[Any]] = {}
        norms = [self._norm(mine) for mine in gradients]
        for item in self.items:
            sites, payloads = self._exchange(item, [mine[item.spec.name] for mine in gradients], lr, norms)
            for rank in range(self.size):
                gradient, tally = self._conclude(item, sites[rank], payloads[rank])
                merged[rank][item.spec.name] = self.ops.reshape(
                    self.ops.cast(gradient, item.spec.dtype), item.spec.shape
                )
                if tally is not None:
                    tallies.setdefault((item.compressor, rank), []).append((sites[rank], tally))
        self._retune(tallies)
        self.number += 1
        return merged

    def _norm(self, gradients):
        """Return the norm of the gradients of all tensors whose memories need it."""
        ops = self.ops
        flat = [
            ops.cast(ops.reshape(gradients[item.spec.name], (-1,)), "float64")
            for item in self.items
            if "norm" in item.memory.needs
        ]
        return ops.norm(ops.stack([ops.norm(x) for x in flat], axis=0)) if flat else None

    def _exchange(self, item, gradients, lr, norms):
        """Return for each rank the site and the received payloads: one of each rank, or their sum."""
        ops, spec, compressor = self.ops, item.spec, item.compressor
        xs, sites = [], []
        for rank, gradient in enumerate(gradients):
            states = self.states[rank][spec.name]
            site = Site(
                ops=ops,
                spec=spec,
                key=Key(Key.derive(self.seed, spec.name), self.number),
                rank=rank,
                size=self.size,
                state=states["compressor"],
                lr=ops.full(1, lr, "float64")[0],
                norm=norms[rank] if "norm" in item.memory.needs else None,
            )
            flat = ops.copy(ops.cast(ops.reshape(gradient, (-1,)), spec.work_dtype))
            x, memory_state, _ = item.memory.compensate(flat, states["memory"], site)
            states["memory"] = memory_state
            xs.append(x)
            sites.append(site._replace(memory=memory_state))
        sites = self._negotiate(compressor, xs, sites)
        payloads = [compressor.compress(x, site) for x, site in zip(xs, sites, strict=True)]
        travelling = [{f.name: payload[f.name] for f in item.fields if f.wire} for payload in payloads]
        for rank in range(self.size):
            states = self.states[rank][spec.name]
            states["memory"] = item.memory.update(xs[rank], payloads[rank], compressor, states["memory"], sites[rank])
        if item.communicator.adds:
            # Integers of a known magnitude are widened before they are added.
            wider = {f.name for f in item.fields if f.most is not None}
            travelling = [
                {name: ops.cast(v, "int64") if name in wider else v for name, v in sent.items()} for sent in travelling
            ]
            travelling = [{name: self._sum(item, [sent[name] for sent in travelling]) for name in travelling[0]}]
        home = [{f.name: payload[f.name] for f in item.fields if not f.wire} for payload in payloads]
        # Every rank gets its own copy, because the merged gradient may be a payload and is changed in place.
        return sites, [
            [{**{name: ops.copy(v) for name, v in sent.items()}, **mine} for sent in travelling] for mine in home
        ]

    def _negotiate(self, compressor, xs, sites):
        """Return the sites with what the ranks negotiated."""
        if not isinstance(compressor, Negotiating) or not compressor.proposed(sites[0].spec):
            return sites
        proposals = [compressor.propose(x, site) for x, site in zip(xs, sites, strict=True)]
        arrays, op = [proposal.array for proposal in proposals], proposals[0].op
        negotiated = arrays[self.number % self.size] if op == "leader" else reduce(self.ops, arrays, op)
        return [site._replace(negotiated=negotiated) for site in sites]

    def _sum(self, item, arrays):
        if self.ops.dtype(arrays[0]) not in HALF_DTYPES:
            return reduce(self.ops, arrays, "sum")
        # 16-bit floats are averaged by the allreduce, because their sum may overflow.
        return self.ops.half_sum(arrays, 1 / self.size if item.half_sum else 1.0)

    def _conclude(self, item, site, payloads):
        states = self.states[site.rank][item.spec.name]
        gradient = item.compressor.merge(payloads, site)
        size = self.size if item.compressor.averages and not item.half_sum else 1
        if item.memory.gain != size:
            gradient = self.ops.scale_(gradient, item.memory.gain / size)
        gradient, states["memory"] = item.memory.finish(gradient, states["memory"], site)
        if isinstance(item.compressor, Learning):
            states["compressor"] = item.compressor.learn(payloads, site)
        return gradient, item.compressor.tally(payloads, site) if isinstance(item.compressor, Tuning) else None

    def _retune(self, tallies):
        ops = self.ops
        for (compressor, rank), group in tallies.items():
            first, second = (
                ops.sum(ops.stack([ops.cast(tally[i], "float64") for _, tally in group], axis=0)) for i in (0, 1)
            )
            for site, _ in group:
                states = self.states[rank][site.spec.name]
                states["compressor"] = compressor.retune(states["compressor"], first, second, site)


def reference(specs, config, ops, size):
    """Return the reference in which every tensor is a unit, in the order of a step."""
    return Reference(ops, list(make_plan(specs, config).exchanged), size, config.seed)
