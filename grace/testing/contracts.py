"""The contract of every compressor."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from grace.core.config.registry import compressors
from grace.core.methods.capabilities import Negotiating, Selecting, proposed_fields
from grace.core.methods.compressor import Compressor, fixed_size, sparsifies
from grace.core.ops import get_ops
from grace.core.ops.composites import ArrayOps
from grace.core.ops.numpy_ops import NumpyOps
from grace.core.spec import MAX_MAGNITUDE, TensorSpec
from grace.core.wire.layout import GatherLayout, payload_bytes
from grace.testing.harness import (
    EPS,
    FRAMEWORKS,
    SMALLEST,
    Exchange,
    array,
    draw,
    exchange,
    flushed_below,
    host,
    inputs,
    learnt,
    overflowed,
    payload_on_host,
    same,
    wide,
    wire_bytes,
)
from grace.testing.poison import PoisonOps
from grace.testing.unit_contract import UnitContract

# The largest probability that a statistical check fails on correct code, if the seeds were not fixed.
FALSE_ALARM = 1e-6


class CompressorContract(UnitContract):
    """Tests that every compressor must pass. Derive a test class and override the fixture `compressor`.

    The test methods take their fixtures as plain arguments. So they can also be called directly, on a broken
    compressor.
    """

    #: The shape of the tensor of tests that need only one.
    shape: ClassVar[tuple[int, ...]] = (24, 40)
    #: The shapes of all other tests, as far as they fit the compressor.
    shapes: ClassVar[tuple[tuple[int, ...], ...]] = ((), (0,), (1,), (7,), (24, 40), (130,), (0, 3), (13, 11))
    #: The shapes for other frameworks than NumPy. Their bytes are compared with NumPy's.
    few_shapes: ClassVar[tuple[tuple[int, ...], ...]] = ((), (24, 40), (0,), (7,))
    #: The dtypes of all other tests, as far as they fit the compressor.
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float64", "float16", "bfloat16")
    #: The frameworks that must give the same bytes. NumPy is the reference.
    frameworks: ClassVar[tuple[str, ...]] = FRAMEWORKS
    #: The number of random keys in a statistical check.
    trials: ClassVar[int] = 200

    @pytest.fixture
    def compressor(self) -> Compressor:
        """Return the compressor under test."""
        raise pytest.UsageError("override the fixture 'compressor' of CompressorContract")

    @pytest.fixture(params=FRAMEWORKS)
    def ops(self, request: pytest.FixtureRequest) -> ArrayOps:
        """Return the array operations under test, for every installed framework."""
        return get_ops(request.param)

    def reordered(self, compressor: Compressor, dtype: str) -> str | None:
        """Return why payloads may differ by rounding between frameworks, or None if their bytes are equal."""
        return None

    def rounding(self, compressor: Compressor) -> int:
        """Return the allowed difference of decoded payloads, as a multiple of eps times the norm."""
        return 64

    def tied(self, compressor: Compressor, case: str) -> bool:
        """Return whether frameworks may break a tie in this gradient differently. Then the results are not compared."""
        return False

    def specs(self, compressor: Compressor, ops: ArrayOps | None = None) -> list[TensorSpec]:
        """Return all tensors under test that fit the compressor."""
        shapes = self.shapes if ops is None or ops.name == "numpy" else self.few_shapes
        # The dtype affects the arithmetic and the shape affects the layout. So not every pair is tested, to save time.
        of_dtype = {dtype: shapes if dtype == "float32" else shapes[1::3] for dtype in self.dtypes}
        specs = [TensorSpec(f"t{s}{d}", s, d) for d in self.dtypes for s in of_dtype[d]]
        fit = [spec for spec in specs if compressor.unfit(spec) is None]
        assert fit, f"no shape of {shapes} fits {compressor}; override `shapes`, `few_shapes` and `shape`"
        return fit

    def spec(self, compressor: Compressor, dtype: str = "float32") -> TensorSpec:
        """Return the tensor of tests that need only one."""
        spec = TensorSpec("t", self.shape, dtype)
        assert compressor.unfit(spec) is None, f"the shape {self.shape} does not fit {compressor}; override `shape`"
        return spec

    def cases(
        self, compressor: Compressor, ops: ArrayOps | None = None
    ) -> Iterator[tuple[TensorSpec, str, np.ndarray[Any, Any]]]:
        """Yield every tensor with every gradient: spec, name of the case, gradient."""
        for spec in self.specs(compressor, ops):
            for name, x in inputs(spec).items():
                yield spec, name, x

    # --- configuration and wire ---------------------------------------------------------------------------------

    def test_configuration_survives_json(self, compressor: Compressor) -> None:
        text = json.dumps(compressors.config_of(compressor))
        assert compressors.make(json.loads(text)) == compressor

    def test_unfit_gives_a_reason_or_none(self, compressor: Compressor) -> None:
        for dtype in self.dtypes:
            for shape in self.shapes:
                reason = compressor.unfit(TensorSpec("t", shape, dtype))
                assert reason is None or (isinstance(reason, str) and reason.strip()), (shape, dtype, reason)

    def test_payload_is_what_wire_announces(self, compressor: Compressor, ops: ArrayOps) -> None:
        for spec in self.specs(compressor, ops):
            fields = compressor.wire(spec)
            payload = exchange(compressor, ops, spec, [draw(spec, 1)]).payloads[0]
            assert set(payload) == {f.name for f in fields}, spec
            lengths: dict[str, int] = {}
            for f in fields:
                value = payload[f.name]
                length = lengths.setdefault(f.length, ops.length(value)) if isinstance(f.length, str) else f.length
                assert (ops.dtype(value), tuple(value.shape)) == (f.dtype, (length,)), (spec, f)
            assert fixed_size(compressor) == (payload_bytes(fields) is not None), "lengths vary for some shapes"
            real = sum(host(ops, payload[f.name]).nbytes for f in fields if f.wire)
            assert payload_bytes(fields) in (None, real), spec

    def test_indices_that_may_travel_shorter_ascend(self, compressor: Compressor, ops: ArrayOps) -> None:
        for spec in self.specs(compressor, ops):
            payload = exchange(compressor, ops, spec, [draw(spec, 1)]).payloads[0]
            for f in compressor.wire(spec):
                if f.below is not None:
                    indices = host(ops, payload[f.name]).astype(np.int64)
                    assert f.dtype == "int32", (spec, f)
                    assert (np.diff(indices, prepend=-1, append=f.below) > 0).all(), (spec, f)

    def test_buffer_has_the_predicted_bytes(self, compressor: Compressor, ops: ArrayOps) -> None:
        specs = self.specs(compressor, ops)
        fields = [compressor.wire(spec) for spec in specs]
        layout = GatherLayout(specs, fields, [True] * len(specs))
        payloads = [exchange(compressor, ops, spec, [draw(spec, 1)]).payloads[0] for spec in specs]
        buffer = layout.encode(ops, payloads, [False] * len(specs), 0)
        open_ended = sum(
            host(ops, payload[f.name]).nbytes
            for payload, mine in zip(payloads, fields, strict=True)
            for f in mine
            if f.wire and isinstance(f.length, str)
        )
        # Only the padding before and after the fields of run-time length depends on the data.
        assert abs(ops.length(buffer) - layout.nbytes - open_ended) < (16 if open_ended else 1)

    def test_payloads_survive_the_buffer(self, compressor: Compressor, ops: ArrayOps) -> None:
        specs = self.specs(compressor, ops)
        fields = [compressor.wire(spec) for spec in specs]
        layout = GatherLayout(specs, fields, [True] * len(specs))
        sent = [exchange(compressor, ops, spec, [draw(spec, 1), draw(spec, 2)]) for spec in specs]
        buffers = [layout.encode(ops, [ex.payloads[r] for ex in sent], [r == 1] * len(specs), 7) for r in range(2)]
        received = layout.decode(ops, ops.concat(buffers), 2, 7)
        for spec, ex, payloads, bad in zip(specs, sent, received.payloads, received.flags, strict=True):
            assert [bool(f) for f in bad] == [False, True]
            for mine, theirs, at in zip(ex.payloads, payloads, ex.sites, strict=True):
                theirs = {**mine, **theirs}
                expected, got = payload_on_host(ops, mine), payload_on_host(ops, theirs)
                assert all(same(expected[name], got[name]) for name in expected), spec
                assert same(host(ops, compressor.decompress(mine, at)), host(ops, compressor.decompress(theirs, at)))

    def test_proposals_are_what_proposed_announces(self, compressor: Compressor, ops: ArrayOps) -> None:
        for spec in self.specs(compressor, ops):
            announced = [(f.dtype, f.length) for f in proposed_fields(compressor, spec)]
            if isinstance(compressor, Negotiating) and announced:
                ex = exchange(compressor, ops, spec, [draw(spec, 1)])
                proposal = compressor.propose(ex.xs[0], ex.sites[0])
                assert announced == [(ops.dtype(proposal.array), ops.length(proposal.array))], spec

    def test_fields_that_stay_home_are_equal_on_all_ranks(self, compressor: Compressor, ops: ArrayOps) -> None:
        for spec in self.specs(compressor, ops):
            home = [f.name for f in compressor.wire(spec) if not f.wire]
            if home:
                first, *others = self._several(compressor, ops, spec).payloads
                for name in home:
                    assert all(same(host(ops, first[name]), host(ops, p[name])) for p in others), (spec, name)

    # --- a pure map ---------------------------------------------------------------------------------------------

    def test_compress_leaves_the_gradient_unchanged(self, compressor: Compressor, ops: ArrayOps) -> None:
        for spec in self.specs(compressor, ops):
            ex = exchange(compressor, ops, spec, [draw(spec, 1)])
            assert same(host(ops, ex.xs[0]), draw(spec, 1)), spec

    def test_compress_is_deterministic(self, compressor: Compressor, ops: ArrayOps) -> None:
        for spec in self.specs(compressor, ops):
            one, two = (
                payload_on_host(ops, exchange(compressor, ops, spec, [draw(spec, 1)]).payloads[0]) for _ in "ab"
            )
            assert all(same(one[name], two[name]) for name in one), spec

    def test_decompress_and_merge_leave_the_payload_unchanged(self, compressor: Compressor, ops: ArrayOps) -> None:
        for spec in self.specs(compressor, ops):
            ex = exchange(compressor, ops, spec, [draw(spec, 1), draw(spec, 2)])
            at = ex.sites[0]
            once = host(ops, compressor.decompress(ex.payloads[0], at))
            before = [payload_on_host(ops, p) for p in ex.payloads]
            compressor.merge(ex.payloads, at)
            assert same(host(ops, compressor.decompress(ex.payloads[0], at)), once), spec
            for payload, copy in zip(ex.payloads, before, strict=True):
                assert all(same(host(ops, payload[name]), copy[name]) for name in copy), spec

    def test_no_global_random_state_is_touched(self, compressor: Compressor, ops: ArrayOps) -> None:
        spec = self.spec(compressor)
        before = np.random.get_state()
        exchange(compressor, ops, spec, [draw(spec, 1)])
        after = np.random.get_state()
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))

    def test_nothing_is_used_after_it_was_consumed(self, compressor: Compressor) -> None:
        for spec in self.specs(compressor):
            results = []
            for ops in (NumpyOps(), PoisonOps()):
                ex = exchange(compressor, ops, spec, [draw(spec, 1), draw(spec, 2)])
                at = ex.sites[0]
                result = {f"payload.{k}": v for k, v in payload_on_host(ops, ex.payloads[0]).items()}
                result["merged"] = host(ops, compressor.merge(ex.payloads, at)).copy()
                result["decoded"] = host(ops, compressor.decompress(ex.payloads[0], at))
                result |= {f"learnt.{k}": host(ops, v) for k, v in learnt(compressor, ex.payloads, at).items()}
                result["residual"] = host(ops, compressor.residual_(ex.xs[0], ex.payloads[0], at))
                if isinstance(compressor, Selecting) and compressor.selects:
                    result["erased"] = host(ops, compressor.erase_(ex.xs[1], ex.payloads[1], ex.sites[1]))
                results.append(result)
            assert [n for n in results[0] if not same(results[0][n], results[1][n])] == [], spec

    def test_bytes_are_equal_in_every_framework(self, compressor: Compressor) -> None:
        if len(self.frameworks) < 2:
            pytest.skip("only one framework is installed; the test compares frameworks")
        reference, *others = (get_ops(framework) for framework in self.frameworks)
        for spec, case, x in self.cases(compressor):
            exact = self.reordered(compressor, spec.dtype) is None
            if self.tied(compressor, case):
                continue
            for ops in others:
                # TensorFlow traces a graph per shape, which takes longer than everything else.
                if ops.traced and spec.shape not in self.few_shapes:
                    continue
                below = flushed_below(ops, spec.work_dtype)
                seen = np.where(np.abs(x) < below, np.zeros_like(x), x)
                if exact:
                    mine, theirs = (wire_bytes(compressor, o, spec, x) for o in (ops, reference))
                    assert mine == theirs or not same(seen, x), (spec, case, ops.name)
                    if mine == theirs:
                        continue
                # A framework that flushes denormals to 0 in arithmetic may still copy them into the payload.
                decoded = [self._decoded(compressor, o, spec, given) for o, given in ((ops, x), (reference, seen))]
                # Singular vectors of close singular values lose more digits than sums do.
                rounding = 0.0 if exact else self.rounding(compressor) * EPS[spec.work_dtype] * np.linalg.norm(wide(x))
                bound = rounding + spec.numel * (SMALLEST[spec.work_dtype] + below)
                assert np.abs(decoded[0] - decoded[1]).max(initial=0.0) <= bound, (spec, case, ops.name)

    def _decoded(
        self, compressor: Compressor, ops: ArrayOps, spec: TensorSpec, x: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        ex = exchange(compressor, ops, spec, [x])
        return wide(host(ops, compressor.decompress(ex.payloads[0], ex.sites[0])))

    # --- decoded gradient and residual --------------------------------------------------------------------------

    def test_decoded_gradients_are_finite_and_of_the_working_dtype(self, compressor: Compressor, ops: ArrayOps) -> None:
        for spec, case, x in self.cases(compressor, ops):
            ex = exchange(compressor, ops, spec, [x])
            decoded = compressor.decompress(ex.payloads[0], ex.sites[0])
            assert (ops.dtype(decoded), tuple(decoded.shape)) == (spec.work_dtype, (spec.numel,)), (spec, case)
            overflow = overflowed(ops, ex.payloads[0], compressor.wire(spec))
            assert not overflow or case.startswith(("huge", "heavy")), f"{spec}: overflow on '{case}'"
            assert overflow or np.isfinite(wide(host(ops, decoded))).all(), (spec, case)

    def test_kept_plus_residual_is_the_gradient(self, compressor: Compressor, ops: ArrayOps) -> None:
        for spec, case, x in self.cases(compressor, ops):
            ex = exchange(compressor, ops, spec, [x])
            if overflowed(ops, ex.payloads[0], compressor.wire(spec)):
                continue
            carried = host(ops, compressor.decompress(ex.payloads[0], ex.sites[0]))
            left = host(ops, compressor.residual_(ex.xs[0], ex.payloads[0], ex.sites[0]))
            # The difference of two floats is rounded once, and so is the sum here. A sparsifier only copies values.
            rounding = 0.0 if sparsifies(compressor) else EPS[spec.work_dtype]
            allowed = rounding * (np.abs(wide(x)) + np.abs(wide(carried))) + 2 * flushed_below(ops, spec.work_dtype)
            error = np.abs(wide(left) + wide(carried) - wide(x))
            assert (error <= allowed).all(), (spec, case, error.max())

    def test_erase_zeroes_exactly_what_was_carried(self, compressor: Compressor, ops: ArrayOps) -> None:
        if not isinstance(compressor, Selecting) or not compressor.selects:
            return
        for spec in self.specs(compressor, ops):
            x = np.where(draw(spec, 1) == 0, 1, draw(spec, 1)).astype(spec.work_dtype)
            ex = exchange(compressor, ops, spec, [x])
            payload, at = ex.payloads[0], ex.sites[0]
            ones = ops.full(spec.numel, 1.0, spec.work_dtype)
            decoded = host(ops, compressor.decompress(payload, at))
            kept = host(ops, compressor.erase_(ones, payload, at))
            # A value that was sent inexactly may decode to zero.
            assert set(np.unique(kept)) <= {0, 1}, spec
            assert not decoded[kept == 1].any(), spec
            if sparsifies(compressor):
                assert np.array_equal(decoded, np.where(kept == 0, x, 0)), spec

    # --- declared properties ------------------------------------------------------------------------------------

    def test_declared_unbiasedness_holds(self, compressor: Compressor, ops: ArrayOps) -> None:
        if not compressor.unbiased:
            return
        spec = self.spec(compressor)
        for case in self._random_cases(ops):
            x = inputs(spec)[case]
            total, norm = wide(x), np.linalg.norm(wide(x))
            signs = np.random.default_rng(3).choice([-1.0, 1.0], (4, spec.numel))
            # The errors are projected onto some directions, one of them the gradient itself. Each projection is a sum
            # of many small independent errors.
            directions = np.vstack([np.ones(spec.numel), np.sign(total), total / norm * math.sqrt(spec.numel), signs])
            errors = np.array(
                [
                    directions @ (wide(host(ops, compressor.decompress(ex.payloads[0], ex.sites[0]))) - total)
                    for ex in (exchange(compressor, ops, spec, [x], step=step) for step in range(self.trials))
                ]
            )
            # For normal errors, 6.5 standard deviations have a probability below 1e-10, for each of 7 directions and 3
            # gradients. The margin to FALSE_ALARM allows for heavier tails. The second term is the rounding of the
            # values.
            allowed = 6.5 * errors.std(axis=0, ddof=1) / math.sqrt(self.trials) + 1e-6 * norm * math.sqrt(spec.numel)
            assert (np.abs(errors.mean(axis=0)) <= allowed).all(), (case, errors.mean(axis=0) / allowed)

    def test_declared_contraction_holds(self, compressor: Compressor, ops: ArrayOps) -> None:
        spec = self.spec(compressor)
        delta = compressor.contraction(spec)
        if delta is None:
            return
        assert 0 <= delta <= 1
        probe = {tuple(v.tobytes() for v in self._payload(compressor, ops, spec, step).values()) for step in range(4)}
        trials = 1 if len(probe) == 1 else self.trials
        cases = inputs(spec)
        for case in cases if trials == 1 else self._random_cases(ops):
            x = cases[case]
            norm = np.linalg.norm(wide(x))
            errors = []
            for step in range(trials):
                ex = exchange(compressor, ops, spec, [x], step=step)
                if overflowed(ops, ex.payloads[0], compressor.wire(spec)):
                    continue
                decoded = wide(host(ops, compressor.decompress(ex.payloads[0], ex.sites[0])))
                errors.append(float(np.linalg.norm(wide(x) - decoded)))
            if norm == 0 or not errors:
                assert not any(errors), case
                continue
            shares = (np.array(errors) / norm) ** 2
            # Hoeffding's bound for the mean of shares between 0 and max(1, ...), for a compressor that draws at random.
            spread = max(1.0, shares.max()) * math.sqrt(math.log(1 / FALSE_ALARM) / (2 * trials))
            # Decoded values are rounded to the working dtype: with a relative error, and near zero with an absolute
            # one.
            smallest = SMALLEST[spec.work_dtype] + flushed_below(ops, spec.work_dtype)
            rounding = 1e-6 + math.sqrt(spec.numel) * smallest / norm
            bound = 1 - delta + (spread if trials > 1 else 0.0)
            assert math.sqrt(shares.mean()) <= math.sqrt(bound) + rounding, (case, shares.mean(), bound)

    def _several(self, compressor: Compressor, ops: ArrayOps, spec: TensorSpec) -> Exchange:
        # Three ranks, but two for TensorFlow, which traces a graph per rank.
        ranks = 2 if ops.traced else 3
        return exchange(compressor, ops, spec, [draw(spec, seed) for seed in range(ranks)])

    def _random_cases(self, ops: ArrayOps) -> tuple[str, ...]:
        # Other frameworks give the same bytes as NumPy, which another test checks. So one gradient is enough.
        return ("normal", "heavy tail", "one element") if ops.name == "numpy" else ("normal",)

    def _payload(
        self, compressor: Compressor, ops: ArrayOps, spec: TensorSpec, step: int
    ) -> dict[str, np.ndarray[Any, Any]]:
        return payload_on_host(ops, exchange(compressor, ops, spec, [draw(spec, 1)], step=step).payloads[0])

    def test_declared_summability_holds(self, compressor: Compressor, ops: ArrayOps) -> None:
        if not compressor.summable:
            return
        for spec in self.specs(compressor, ops):
            ex = exchange(compressor, ops, spec, [draw(spec, 1), draw(spec, 2)])
            (a, b), at = ex.payloads, ex.sites[0]
            fields = compressor.wire(spec)
            # Integers of a known magnitude are widened before they are added.
            wider = {f.name for f in fields if f.most is not None}
            a, b = ({name: ops.cast(v, "int64") if name in wider else v for name, v in p.items()} for p in (a, b))
            added = {f.name: a[f.name] + b[f.name] if f.wire else a[f.name] for f in fields}
            alike = all(ops.length(a[f.name]) == ops.length(b[f.name]) for f in fields)
            assert alike, "payloads of different lengths cannot be added"
            decoded = [wide(host(ops, compressor.decompress(p, at))) for p in (added, a, b)]
            # One rounding of the sum in the dtype of the payload, and the roundings of the decoding.
            eps = max((EPS.get(f.dtype, 0.0) for f in fields if f.wire), default=0.0) + 32 * EPS[spec.work_dtype]
            scale = np.abs(decoded[1]).max(initial=0.0) + np.abs(decoded[2]).max(initial=0.0)
            assert np.abs(decoded[0] - decoded[1] - decoded[2]).max(initial=0.0) <= eps * scale, spec

    def test_merge_is_the_sum(self, compressor: Compressor, ops: ArrayOps) -> None:
        for spec in self.specs(compressor, ops):
            ex = self._several(compressor, ops, spec)
            at = ex.sites[0]
            merged = compressor.merge(ex.payloads, at)
            assert (ops.dtype(merged), tuple(merged.shape)) == (spec.work_dtype, (spec.numel,)), spec
            merged = wide(host(ops, merged))
            decoded = [wide(host(ops, compressor.decompress(p, at))) for p in ex.payloads]
            if not compressor.averages:
                # A vote: if all ranks agree, the result does not grow with their number.
                alike = host(ops, compressor.merge([ex.payloads[0]] * len(ex.payloads), at))
                assert np.array_equal(wide(alike), decoded[0]), spec
                continue
            fields = compressor.wire(spec)
            eps = 4 * max((EPS.get(f.dtype, 0.0) for f in fields if f.wire), default=0.0)
            eps = max(eps, 32 * EPS[spec.work_dtype])
            scale = sum(np.abs(d).max(initial=0.0) for d in decoded)
            assert np.abs(merged - sum(decoded)).max(initial=0.0) <= eps * scale, spec

    def test_declared_nonfinite_values_are_shown(self, compressor: Compressor, ops: ArrayOps) -> None:
        if not (compressor.nonfinite == "shown" and ops.runs_kernels):
            return
        for spec in (self.spec(compressor), TensorSpec("w", (5000,))):
            limit = MAX_MAGNITUDE[spec.work_dtype]
            floats = [f.name for f in compressor.wire(spec) if f.dtype.startswith(("float", "bfloat"))]
            for place, value in itertools.product((0, 17, spec.numel - 1), (np.nan, np.inf, -np.inf, -1.01 * limit)):
                x = draw(spec, 1)
                x[place] = value
                ex = exchange(compressor, ops, spec, [x])
                finite = [bool(ops.finite(ex.payloads[0][name])) for name in floats]
                assert not all(finite), (spec, place, value)

    def test_declared_nonfinite_values_show_in_proposals(self, compressor: Compressor, ops: ArrayOps) -> None:
        if not (isinstance(compressor, Negotiating) and compressor.proposal_shows and ops.runs_kernels):
            return
        for spec in (self.spec(compressor), TensorSpec("w", (5000,))):
            at = exchange(compressor, ops, spec, [draw(spec, 2)]).sites[0]
            limit = MAX_MAGNITUDE[spec.work_dtype]
            for place, value in itertools.product(
                (0, 17, spec.numel - 1), (np.nan, np.inf, -np.inf, -1.01 * limit, 1.0)
            ):
                x = draw(spec, 1)
                x[place] = value
                proposal = compressor.propose(array(ops, x, spec.work_dtype), at)
                assert bool(ops.finite(proposal.array)) == (value == 1.0), (spec, place, value)

    def test_declared_nonfinite_values_are_carried(self, compressor: Compressor, ops: ArrayOps) -> None:
        if compressor.nonfinite != "carried":
            return
        spec = self.spec(compressor)
        x = draw(spec, 1)
        x[3], x[-1], x[17] = np.nan, np.inf, -np.inf
        ex = exchange(compressor, ops, spec, [x])
        decoded = host(ops, compressor.decompress(ex.payloads[0], ex.sites[0]))
        assert np.isnan(decoded[3])
        assert (decoded[-1], decoded[17]) == (np.inf, -np.inf)
        assert np.array_equal(np.isfinite(decoded), np.isfinite(x))
