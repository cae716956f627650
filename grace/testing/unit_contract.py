"""The part of the compressor's contract about units: tensors that a plan concatenates or slices."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from grace.core.config.registry import memories
from grace.core.memories.residual import Residual
from grace.core.methods import fusions
from grace.core.methods.capabilities import Negotiating, proposed_fields
from grace.core.methods.compressor import Compressor, sparsifies
from grace.core.methods.memory import Memory
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.ops.numpy_ops import NumpyOps
from grace.core.spec import MAX_MAGNITUDE, Array, Payload, State, TensorSpec
from grace.testing.harness import EPS, array, draw, exchange, host, learnt, payload_on_host, same, wide


class UnitContract(ABC):
    """Tests of a compressor's flags `flat`, `joins` and `linear_in`, and of its fusions."""

    few_shapes: ClassVar[tuple[tuple[int, ...], ...]]

    @abstractmethod
    def specs(self, compressor: Compressor, ops: ArrayOps | None = None) -> list[TensorSpec]:
        """Return all tensors under test that fit the compressor."""

    def test_declared_flatness_holds(self, compressor: Compressor, ops: ArrayOps) -> None:
        if not compressor.flat:
            return
        for spec in self.specs(compressor, ops):
            # Other frameworks give the same bytes as NumPy, and TensorFlow traces a graph per shape, which takes time.
            if ops.name != "numpy" and spec.ndim < 2:
                continue
            given = [draw(spec, 1), draw(spec, 2)]
            expected = self._told(compressor, ops, spec, given)
            for shape in ((spec.numel,), (1, spec.numel)) if ops.name == "numpy" else ((spec.numel,),):
                other = self._told(compressor, ops, dataclasses.replace(spec, shape=shape), given)
                assert [name for name in expected if not _alike(expected[name], other[name])] == [], (spec, shape)

    def test_joined_tensors_keep_their_error(self, compressor: Compressor) -> None:
        # A sparsifier chooses among the elements of all tensors; then the error of one alone says nothing.
        if not compressor.joins or sparsifies(compressor):
            return
        ops, few = NumpyOps(), 20
        for spec in self.specs(compressor):
            n, scales = spec.numel, (1.0, 2.0**-4, 2.0**-8)
            if n < 100:
                continue
            specs = [dataclasses.replace(spec, name=f"t{i}", model_numel=3 * n) for i in range(3)]
            unit = dataclasses.replace(spec, name="unit", shape=(3 * n,), model_numel=3 * n)
            xs = [
                draw(one, i) * np.asarray(scale, spec.work_dtype)
                for i, (one, scale) in enumerate(zip(specs, scales, strict=True))
            ]
            alone, together = np.zeros(3), np.zeros(3)
            for step in range(few):
                joined = self._errors(compressor, ops, unit, np.concatenate(xs), step)
                for i, (one, x) in enumerate(zip(specs, xs, strict=True)):
                    norm = np.sum(wide(x) ** 2)
                    alone[i] += np.sum(self._errors(compressor, ops, one, x, step) ** 2) / norm / few
                    together[i] += np.sum(joined[i * n : (i + 1) * n] ** 2) / norm / few
            assert (together <= 1.2 * alone + EPS[spec.work_dtype]).all(), (spec, together, alone)
            delta = compressor.contraction(spec)
            assert delta is None or (together <= 1.2 * (1 - delta) + EPS[spec.work_dtype]).all(), (spec, together)

    def _errors(
        self, compressor: Compressor, ops: ArrayOps, spec: TensorSpec, x: np.ndarray[Any, Any], step: int
    ) -> np.ndarray[Any, Any]:
        ex = exchange(compressor, ops, spec, [x], step=step)
        return wide(x) - wide(host(ops, compressor.decompress(ex.payloads[0], ex.sites[0])))

    def test_what_is_checked_is_compressed_as_ever(self, compressor: Compressor, ops: ArrayOps) -> None:
        check = fusions.compress_checked.find(compressor)
        if check is None:
            return
        for spec in self.specs(compressor, ops):
            for bad in (0.0, np.nan, np.inf, -np.inf):
                for place in (0, spec.numel // 2, spec.numel - 1) if spec.numel else ():
                    gradient = draw(spec, 1)
                    gradient[: spec.numel // 3] = MAX_MAGNITUDE[spec.work_dtype]
                    gradient[place] += bad
                    at = exchange(compressor, ops, spec, [draw(spec, 2)]).sites[0]
                    x = array(ops, gradient, spec.work_dtype)
                    made = check(compressor, x, at)
                    if made is None:
                        continue
                    payload, finite = made
                    assert bool(finite) == bool(np.isfinite(gradient).all()), (spec, bad, place)
                    if finite:
                        one, two = (payload_on_host(ops, p) for p in (payload, compressor.compress(x, at)))
                        assert one.keys() == two.keys()
                        assert all(same(one[name], two[name]) for name in one), (spec, bad, place)

    def test_a_sum_is_compressed_as_ever(self, compressor: Compressor, ops: ArrayOps) -> None:
        for memory in (*map(memories.make, memories), Residual(beta=0.9)):
            found = [fusion.find(compressor, memory) for fusion in (fusions.compress_sum, fusions.compress_feedback)]
            for fuse in filter(None, found):
                for grad, state, at in self._fed(compressor, memory, ops):
                    made = fuse(compressor, memory, grad, state, at)
                    if made is None:
                        continue
                    first, payload, finite = made
                    expected, in_progress, _ = memory.compensate(grad, state, at)
                    assert not in_progress
                    assert bool(finite) == bool(ops.finite(expected)), (memory, at.spec)
                    if finite:
                        sent = compressor.compress(expected, at)
                        one, two = (payload_on_host(ops, p) for p in (payload, sent))
                        assert one.keys() == two.keys()
                        assert all(same(one[name], two[name]) for name in one), (memory, at.spec)
                        # One fusion returns the sum, the other one the state that `update` makes of it.
                        one, two = {"x": first}, {"x": expected}
                        if isinstance(first, dict):
                            one, two = first, memory.update(ops.copy(expected), sent, compressor, in_progress, at)
                        assert one.keys() == two.keys()
                        assert all(same(host(ops, one[k]), host(ops, two[k])) for k in one), (memory, at.spec)

    def test_a_sum_is_proposed_as_ever(self, compressor: Compressor, ops: ArrayOps) -> None:
        for memory in map(memories.make, memories):
            fuse = fusions.propose_sum.find(compressor, memory)
            for grad, state, at in self._fed(compressor, memory, ops) if fuse else []:
                assert fuse is not None
                assert isinstance(compressor, Negotiating)
                made = fuse(compressor, memory, grad, state, at)
                if made is None:
                    continue
                x, proposal, finite = made
                expected, in_progress, _ = memory.compensate(grad, state, at)
                assert not in_progress
                assert bool(finite) == bool(ops.finite(expected)), (memory, at.spec)
                if finite:
                    wanted = compressor.propose(expected, at)
                    assert proposal.op == wanted.op
                    for one, two in ((x, expected), (proposal.array, wanted.array)):
                        assert same(host(ops, one), host(ops, two)), (memory, at.spec)

    def _fed(self, compressor: Compressor, memory: Memory, ops: ArrayOps) -> Iterator[tuple[Array, State, Site]]:
        """Make gradients of all tensors under test, some with NaN or infinity, and states of a memory."""
        for spec in self.specs(compressor, ops):
            at = exchange(compressor, ops, spec, [draw(spec, 2)]).sites[0]
            for bad in (0.0, np.nan, -np.inf):
                gradient = draw(spec, 1)
                gradient[spec.numel // 2 :] += bad
                state = {k: array(ops, draw(spec, 3), spec.work_dtype) for k in memory.init(spec, ops)}
                yield array(ops, gradient, spec.work_dtype), state, at

    def test_what_is_scaled_while_it_merges_is_the_merged_gradient(self, compressor: Compressor, ops: ArrayOps) -> None:
        scale = fusions.merge_scaled.find(compressor)
        if scale is None:
            return
        for spec in self.specs(compressor, ops):
            ex = exchange(compressor, ops, spec, [draw(spec, 1), draw(spec, 2), draw(spec, 3)])
            at = ex.sites[0]
            for payloads in (ex.payloads[:1], ex.payloads):
                merged = compressor.merge(payloads, at)
                for factor in (1.0, 0.5, 1 / 3, 10.0):
                    expected = host(ops, ops.scale_(ops.copy(merged), factor))
                    scaled = scale(compressor, payloads, factor, at)
                    assert scaled is None or same(host(ops, scaled), expected), (spec, factor)

    def test_what_is_subtracted_while_it_merges_is_the_merged_gradient(
        self, compressor: Compressor, ops: ArrayOps
    ) -> None:
        for memory in map(memories.make, memories):
            fuse = fusions.merge_finish.find(compressor, memory)
            for spec in self.specs(compressor, ops) if fuse else []:
                assert fuse is not None
                ex = exchange(compressor, ops, spec, [draw(spec, 1), draw(spec, 2), draw(spec, 3)])
                at = ex.sites[0]
                for payloads in (ex.payloads[:1], ex.payloads):
                    states = [
                        {k: array(ops, draw(spec, 4), spec.work_dtype) for k in memory.init(spec, ops)} for _ in "ab"
                    ]
                    made = fuse(compressor, memory, payloads, states[0], at)
                    if made is None:
                        continue
                    merged, rest = memory.finish(compressor.merge(payloads, at), states[1], at)
                    assert same(host(ops, made[0]), host(ops, merged)), (memory, spec)
                    assert made[1].keys() == rest.keys()
                    assert all(same(host(ops, made[1][k]), host(ops, rest[k])) for k in rest), (memory, spec)

    def _told(
        self, compressor: Compressor, ops: ArrayOps, spec: TensorSpec, given: Sequence[np.ndarray[Any, Any]]
    ) -> dict[str, Any]:
        """Return everything that a compressor reports about a tensor and computes from its gradients."""
        ex = exchange(compressor, ops, spec, given)
        at = ex.sites[0]
        return {
            "unfit": compressor.unfit(spec),
            "wire": compressor.wire(spec),
            "proposed": proposed_fields(compressor, spec),
            "contraction": compressor.contraction(spec),
            **{f"state.{k}": host(ops, v) for k, v in at.state.items()},
            **{f"payload.{k}": v for k, v in payload_on_host(ops, ex.payloads[0]).items()},
            "decoded": host(ops, compressor.decompress(ex.payloads[0], at)),
            "merged": host(ops, compressor.merge(ex.payloads, at)),
            **{f"learnt.{k}": host(ops, v) for k, v in learnt(compressor, ex.payloads, at).items()},
        }

    def test_declared_linearity_holds(self, compressor: Compressor, ops: ArrayOps) -> None:
        for spec in self.specs(compressor, ops) if compressor.linear_in else []:
            if ops.traced and spec.shape != self.few_shapes[1]:
                continue
            fields = {f.name: f for f in compressor.wire(spec)}
            assert all(fields[name].dtype == spec.work_dtype for name in compressor.linear_in), spec
            ex = exchange(compressor, ops, spec, [draw(spec, 1), draw(spec, 2)])
            at = ex.sites[0]
            halves = [_halved(compressor, ops, payload) for payload in ex.payloads]
            for whole, half in zip(ex.payloads, halves, strict=True):
                one, two = (host(ops, compressor.decompress(payload, at)) for payload in (whole, half))
                # The inputs are normal numbers. Half of the smallest number would be rounded.
                assert np.array_equal(one / 2, two), spec
            one, two = (host(ops, compressor.merge(payloads, at)) for payloads in (ex.payloads, halves))
            assert np.array_equal(one / 2, two), spec


def _halved(compressor: Compressor, ops: ArrayOps, payload: Payload) -> Payload:
    return {k: v * ops.cast(0.5, ops.dtype(v)) if k in compressor.linear_in else v for k, v in payload.items()}


def _alike(a: Any, b: Any) -> bool:
    return same(a, b) if isinstance(a, np.ndarray) else bool(a == b)
