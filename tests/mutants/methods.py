"""Deliberately wrong compressors and memories. Each breaks one property of a contract, and the contract must reject it.

They show that every check can fail. Every mutant is as close to a correct implementation as possible.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from grace.core.codecs.lowrank import merge_product
from grace.core.codecs.signs import sign_mean
from grace.core.compressors.blockwise import Blockwise
from grace.core.compressors.efsignsgd import EFSignSGD
from grace.core.compressors.none import NoCompression
from grace.core.compressors.powersgd import PowerSGD
from grace.core.compressors.qsgd import QSGD
from grace.core.compressors.randomk import RandomK
from grace.core.compressors.signsgd import SignSGD
from grace.core.compressors.terngrad import TernGrad
from grace.core.compressors.topk import TopK
from grace.core.compressors.uniform import Uniform
from grace.core.errors import IncompatibleError
from grace.core.memories.dgc import DGCMemory
from grace.core.memories.none import NoMemory
from grace.core.memories.powersgd import PowerSGDMemory
from grace.core.memories.residual import Residual
from grace.core.memories.shared_momentum import SharedMomentum
from grace.core.methods.capabilities import selects
from grace.core.methods.compressor import Compressor, Sparsifier, keep_count
from grace.core.methods.fusions import (
    compress_checked,
    compress_feedback,
    compress_sum,
    merge_finish,
    merge_scaled,
    overwrites,
    propose_sum,
)
from grace.core.methods.memory import Compensated, Memory
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Field

COMPRESSORS: list[tuple[str, Compressor]] = []
MEMORIES: list[tuple[str, Memory]] = []
OPS: list[tuple[str, ArrayOps]] = []


def breaks(contract_test: str, **fields):
    """Mark a class: an instance of it must fail this test of its contract."""

    def decorate(cls):
        kind = COMPRESSORS if issubclass(cls, Compressor) else MEMORIES if issubclass(cls, Memory) else OPS
        kind.append((contract_test, cls(**fields)))
        return cls

    return decorate


# --- compressors ------------------------------------------------------------------------------------------------


@breaks("test_configuration_survives_json", compress_ratio=0.5)
@dataclass(frozen=True)
class ChangesItsConfiguration(TopK):
    def __post_init__(self):
        object.__setattr__(self, "compress_ratio", self.compress_ratio / 2)


@breaks("test_indices_that_may_travel_shorter_ascend", compress_ratio=0.1)
@dataclass(frozen=True)
class LargestFirst(TopK):
    """Sorts the indices by magnitude instead of ascending."""

    def compress(self, x, at):
        payload = super().compress(x, at)
        return {name: value[::-1].copy() for name, value in payload.items()}


@breaks("test_unfit_gives_a_reason_or_none")
@dataclass(frozen=True)
class RefusesWithoutReason(TopK):
    def unfit(self, spec):
        return "" if spec.ndim == 0 else None


@breaks("test_payload_is_what_wire_announces")
@dataclass(frozen=True)
class AnnouncesTooFewBits(SignSGD):
    """Forgets the last byte if the length is not a multiple of 8."""

    def wire(self, spec):
        return (Field("signs", "uint8", spec.numel // 8),)


@breaks("test_payload_is_what_wire_announces")
@dataclass(frozen=True)
class SendsWiderIndices(TopK):
    def compress(self, x, at):
        payload = super().compress(x, at)
        return {**payload, "indices": at.ops.cast(payload["indices"], "int64")}


@breaks("test_buffer_has_the_predicted_bytes")
@dataclass(frozen=True)
class WireDependsOnTheCall(TopK):
    """Announces another size at the second call of `wire`."""

    def wire(self, spec):
        asked = getattr(self, "asked", 0)
        object.__setattr__(self, "asked", asked + 1)
        k = keep_count(self.compress_ratio, spec.numel) + 64 * (asked % 2)
        return Field("values", spec.work_dtype, k), Field("indices", "int32", k)

    def compress(self, x, at):
        k = keep_count(self.compress_ratio, at.spec.numel)
        return {"values": at.ops.gather(x, at.ops.top_indices(x, k)), "indices": at.ops.top_indices(x, k)}


@breaks("test_payloads_survive_the_buffer")
@dataclass(frozen=True)
class RemembersThePayload(TopK):
    """Decodes from remembered data of its own payload. A received payload decodes to nothing."""

    def compress(self, x, at):
        payload = super().compress(x, at)
        object.__setattr__(self, "kept", payload)
        return payload

    def decompress(self, payload, at):
        own = payload["values"] is self.kept["values"]
        return super().decompress(payload, at) * (1.0 if own else 0.0)


@breaks("test_proposals_are_what_proposed_announces")
@dataclass(frozen=True)
class AnnouncesAShorterProposal(PowerSGD):
    def proposed(self, spec):
        return tuple(f._replace(length=f.length - 1) for f in super().proposed(spec))


@breaks("test_fields_that_stay_home_are_equal_on_all_ranks", compress_ratio=0.1)
@dataclass(frozen=True)
class DrawsPrivateIndices(RandomK):
    def compress(self, x, at):
        indices = at.ops.sample(at.spec.numel, keep_count(self.compress_ratio, at.spec.numel), at.private_key)
        return {"values": at.ops.gather(x, indices), "indices": indices}


@breaks("test_compress_leaves_the_gradient_unchanged")
@dataclass(frozen=True)
class ScalesInPlace(TopK):
    def compress(self, x, at):
        return super().compress(at.ops.scale_(x, 2.0), at)


@breaks("test_compress_is_deterministic")
@dataclass(frozen=True)
class Unseeded(TopK):
    def compress(self, x, at):
        payload = super().compress(x, at)
        return {**payload, "values": payload["values"] * float(np.random.default_rng().uniform(0.5, 1.5))}


@breaks("test_decompress_and_merge_leave_the_payload_unchanged")
@dataclass(frozen=True)
class DecodesInPlace(NoCompression):
    def decompress(self, payload, at):
        return at.ops.scale_(payload["values"], 1.5)


@breaks("test_decompress_and_merge_leave_the_payload_unchanged")
@dataclass(frozen=True)
class MergesInPlace(NoCompression):
    def merge(self, payloads, at):
        total = payloads[0]["values"]
        for payload in payloads[1:]:
            total = at.ops.add_(total, payload["values"])
        return at.ops.cast(total, at.spec.work_dtype)


@breaks("test_no_global_random_state_is_touched", compress_ratio=0.1)
@dataclass(frozen=True)
class SeedsTheGlobalGenerator(RandomK):
    def compress(self, x, at):
        np.random.seed(at.key.step)
        return super().compress(x, at)


@breaks("test_nothing_is_used_after_it_was_consumed")
@dataclass(frozen=True)
class UsesTheResidualTwice(EFSignSGD):
    """Is correct only if the operation reuses the consumed array for the result."""

    def residual_(self, x, payload, at):
        super().residual_(x, payload, at)
        return x


@breaks("test_bytes_are_equal_in_every_framework")
@dataclass(frozen=True)
class BreaksTiesByFramework(TopK):
    def compress(self, x, at):
        ops, n, k = at.ops, at.spec.numel, keep_count(self.compress_ratio, at.spec.numel)
        backwards = n - 1 - ops.arange(n, "int32")
        higher = n - 1 - ops.top_indices(ops.gather(x, backwards), k)
        indices = higher if ops.name == "torch" else ops.top_indices(x, k)
        return {"values": ops.gather(x, indices), "indices": indices}


@breaks("test_decoded_gradients_are_finite_and_of_the_working_dtype")
@dataclass(frozen=True)
class DividesByZero(QSGD):
    """Does not check for the zero scale of an all-zero bucket."""

    def decompress(self, payload, at):
        with np.errstate(all="ignore"):
            return super().decompress(payload, at) / at.ops.max(payload["norms"]) * at.ops.max(payload["norms"])


@breaks("test_decoded_gradients_are_finite_and_of_the_working_dtype")
@dataclass(frozen=True)
class DecodesToFloat32(EFSignSGD):
    def decompress(self, payload, at):
        return at.ops.cast(super().decompress(payload, at), "float32")


@breaks("test_kept_plus_residual_is_the_gradient", compress_ratio=0.1)
@dataclass(frozen=True)
class RoundsWhatItKeeps(TopK):
    """Sends values in half precision, but the residual ignores the rounding error: a sparsifier that is not exact."""

    def compress(self, x, at):
        payload = super().compress(x, at)
        values = at.ops.cast(at.ops.cast(payload["values"], "bfloat16"), at.spec.work_dtype)
        return {**payload, "values": values}


@breaks("test_erase_zeroes_exactly_what_was_carried", compress_ratio=0.1)
@dataclass(frozen=True)
class ErasesOneTooFew(TopK):
    def erase_(self, x, payload, at):
        return at.ops.put_(x, payload["indices"][1:], 0.0)


@breaks("test_erase_zeroes_exactly_what_was_carried", compress_ratio=0.1)
@dataclass(frozen=True)
class ErasesEverything(TopK):
    def erase_(self, x, payload, at):
        return at.ops.scale_(x, 0.0)


@breaks("test_declared_unbiasedness_holds", quantum_num=7)
@dataclass(frozen=True)
class RoundsDown(QSGD):
    """Rounds deterministically: the levels are correct, the mean is not."""

    def compress(self, x, at):
        norm = at.ops.max(at.ops.abs(x))
        down = at.ops.floor(at.ops.abs(x) / norm * 100) / 100 * norm
        return super().compress(at.ops.where(x < 0, -down, down), at)


@breaks("test_declared_unbiasedness_holds")
@dataclass(frozen=True)
class ClippedButDeclaredUnbiased(TernGrad):
    unbiased = True


@breaks("test_declared_unbiasedness_holds", compress_ratio=0.3)
@dataclass(frozen=True)
class UnscaledButDeclaredUnbiased(RandomK):
    unbiased = True


@breaks("test_declared_contraction_holds")
@dataclass(frozen=True)
class SignsWithoutScale(EFSignSGD):
    """Sends signs of size max|x| instead of mean|x|, which overshoots."""

    def compress(self, x, at):
        payload = super().compress(x, at)
        scale = at.ops.cast(at.ops.max(at.ops.abs(x)), "float32")
        return {**payload, "scale": at.ops.reshape(scale, (1,))}


@breaks("test_declared_contraction_holds", compress_ratio=0.1)
@dataclass(frozen=True)
class KeepsTheFirst(Sparsifier):
    """Keeps the first k elements, which is not a contraction with k/d."""

    compress_ratio: float = 0.1

    contraction = TopK.contraction
    wire = TopK.wire

    def compress(self, x, at):
        indices = at.ops.arange(keep_count(self.compress_ratio, at.spec.numel), "int32")
        return {"values": at.ops.gather(x, indices), "indices": indices}


@breaks("test_declared_contraction_holds", compress_ratio=0.2)
@dataclass(frozen=True)
class PromisesTooMuch(RandomK):
    """Random-k that declares the contraction of 3 k elements."""

    def contraction(self, spec):
        return 3 * keep_count(self.compress_ratio, spec.numel) / spec.numel


@breaks("test_declared_summability_holds")
@dataclass(frozen=True)
class SummableScales(EFSignSGD):
    """Declares packed bits summable."""

    summable = True


@breaks("test_merge_is_the_sum", compress_ratio=0.1)
@dataclass(frozen=True)
class MergesWithoutAdding(TopK):
    """Keeps only the last value if two ranks sent the same coordinate."""

    def merge(self, payloads, at):
        total = at.ops.zeros(at.spec.numel, at.spec.work_dtype)
        for payload in payloads:
            total = at.ops.where(self.decompress(payload, at) != 0, self.decompress(payload, at), total)
        return total


@breaks("test_merge_is_the_sum")
@dataclass(frozen=True)
class VoteThatGrows(SignSGD):
    """Declares a scale-free vote, but only adds the votes."""

    def merge(self, payloads, at):
        return Compressor.merge(self, payloads, at)


@breaks("test_joined_tensors_keep_their_error")
@dataclass(frozen=True)
class OneScaleForAll(EFSignSGD):
    """Lets tensors of unlike scale be joined."""

    joins = True


@breaks("test_what_is_checked_is_compressed_as_ever")
@dataclass(frozen=True)
class TakesLargeForInfinite(SignSGD):
    pass


@compress_checked.of(TakesLargeForInfinite)
def _(compressor, x, at):
    signs, mean = sign_mean(at.ops, x)
    return {"signs": signs}, at.ops.finite(mean * 64.0)


@breaks("test_what_is_checked_is_compressed_as_ever")
@dataclass(frozen=True)
class SaysNothingOfNaN(SignSGD):
    pass


@compress_checked.of(SaysNothingOfNaN)
def _(compressor, x, at):
    return compressor.compress(x, at), at.ops.finite(at.ops.zeros(1, "float32"))


@breaks("test_a_sum_is_compressed_as_ever", compress_ratio=0.1)
@dataclass(frozen=True)
class AddsTheWholeResidual(TopK):
    """Adds the residual without its factor."""


@compress_sum.of(AddsTheWholeResidual, Residual)
def _(compressor, memory, grad, state, at):
    whole = compress_sum.find(TopK(), Residual())
    return whole(compressor, dataclasses.replace(memory, beta=1.0), grad, state, at)


@breaks("test_a_sum_is_compressed_as_ever", compress_ratio=0.1)
@dataclass(frozen=True)
class TakesEverySumForFinite(TopK):
    pass


@compress_sum.of(TakesEverySumForFinite, Residual)
def _(compressor, memory, grad, state, at):
    x, payload, finite = compress_sum.find(TopK(), Residual())(compressor, memory, grad, state, at)
    return x, payload, finite == finite


@breaks("test_a_sum_is_compressed_as_ever")
@dataclass(frozen=True)
class KeepsTheWholeSum(Blockwise):
    """Returns the sum in place of what it has not sent of it."""


@compress_feedback.of(KeepsTheWholeSum, Residual)
def _(compressor, memory, grad, state, at):
    x, _, finite = memory.compensate(grad, state, at)
    return {"residual": x}, compressor.compress(x, at), finite


@breaks("test_a_sum_is_proposed_as_ever", compress_rank=1)
@dataclass(frozen=True)
class ProposesTheGradient(PowerSGD):
    """Proposes of the gradient without the residual."""


@propose_sum.of(ProposesTheGradient, PowerSGDMemory)
def _(compressor, memory, grad, state, at):
    x, _, finite = memory.compensate(grad, state, at)
    return x, compressor.propose(grad, at), at.ops.finite(x) if finite is None else finite


@breaks("test_what_is_subtracted_while_it_merges_is_the_merged_gradient", compress_rank=1)
@dataclass(frozen=True)
class SubtractsOnePayload(PowerSGD):
    """Subtracts what the first payload decodes to in place of what all of them do."""


@merge_finish.of(SubtractsOnePayload, PowerSGDMemory)
def _(compressor, memory, payloads, state_, at):
    merged = compressor.merge(payloads, at)
    _, rest = memory.finish(compressor.merge(payloads[:1], at), state_, at)
    return merged, rest


@breaks("test_what_is_scaled_while_it_merges_is_the_merged_gradient")
@dataclass(frozen=True)
class ScalesThePayloads(EFSignSGD):
    """Multiplies the scales of the payloads, which rounds otherwise."""


@merge_scaled.of(ScalesThePayloads)
def _(compressor, payloads, factor, at):
    return compressor.merge([{**each, "scale": each["scale"] * factor} for each in payloads], at)


@breaks("test_declared_nonfinite_values_are_carried")
@dataclass(frozen=True)
class LosesNaN(NoCompression):
    def compress(self, x, at):
        return {"values": at.ops.where(x == x, x, 0.0)}


@breaks("test_declared_nonfinite_values_are_shown")
@dataclass(frozen=True)
class HidesNaN(QSGD):
    def compress(self, x, at):
        return super().compress(at.ops.where(x == x, x, 0.0), at)


@breaks("test_declared_nonfinite_values_show_in_proposals")
@dataclass(frozen=True)
class ProposesNoNaN(Uniform):
    def propose(self, x, at):
        return super().propose(at.ops.where(x == x, x, 0.0), at)


@breaks("test_declared_flatness_holds", compress_ratio=0.1)
@dataclass(frozen=True)
class LooksAtTheShape(TopK):
    """Depends on the shape without declaring it."""

    def compress(self, x, at):
        return super().compress(-x if at.spec.ndim > 1 else x, at)


@breaks("test_declared_flatness_holds")
@dataclass(frozen=True)
class TakesOnlyMatrices(SignSGD):
    def unfit(self, spec):
        return None if spec.ndim > 1 else "it has no columns"


@breaks("test_declared_linearity_holds")
@dataclass(frozen=True)
class AddsAConstant(EFSignSGD):
    def decompress(self, payload, at):
        return super().decompress(payload, at) + 1


@breaks("test_declared_linearity_holds", quantum_num=7)
@dataclass(frozen=True)
class NamesAFieldOfCodes(QSGD):
    linear_in = ("codes",)


# --- memories ---------------------------------------------------------------------------------------------------


@breaks("test_configuration_survives_json", beta=0.5)
@dataclass(frozen=True)
class MemoryChangesItsConfiguration(Residual):
    def __post_init__(self):
        object.__setattr__(self, "beta", self.beta / 2)


@breaks("test_state_starts_at_zero")
@dataclass(frozen=True)
class StartsAtOne(Residual):
    def init(self, spec, ops):
        return {"residual": ops.full(spec.numel, 1.0, spec.work_dtype)}


@breaks("test_state_keeps_its_form")
@dataclass(frozen=True)
class GrowsAField(Residual):
    """Adds a field that `init` did not announce, so a checkpoint of a new run lacks it."""

    def update(self, x_, payload, compressor, state, at):
        return {**super().update(x_, payload, compressor, state, at), "seen": at.ops.zeros(1, "float32")}


@breaks("test_state_of_the_last_step_is_never_changed")
@dataclass(frozen=True)
class AddsIntoTheState(Residual):
    def compensate(self, grad, state, at):
        return Compensated(at.ops.add_(state["residual"], grad), {})


@breaks("test_the_state_shares_nothing_with_what_the_optimizer_gets")
@dataclass(frozen=True)
class KeepsTheGradientItself(SharedMomentum):
    def finish(self, merged, state, at):
        return merged, {**state, "momentum": merged}


@breaks("test_what_is_told_of_finite_gradients_is_right")
@dataclass(frozen=True)
class TakesAllForFinite(Residual):
    def compensate(self, grad, state, at):
        return super().compensate(grad, state, at)._replace(finite=at.ops.finite(at.ops.zeros(1, "float32")))


@breaks("test_fusions_give_what_the_steps_give")
@dataclass(frozen=True)
class AddsTheGradientTwice(Residual):
    pass


@compress_sum.of(TopK, AddsTheGradientTwice)
def _(compressor, memory, grad, state, at):
    return compress_sum.find(TopK(), Residual())(compressor, memory, grad + grad, state, at)


@breaks("test_a_state_that_is_written_over_gives_the_same_result")
@overwrites("residual")
@dataclass(frozen=True)
class ReadsWhatWasWrittenOver(Residual):
    """Needs the old residual after the sum that may take its place."""

    def compensate(self, grad, state, at):
        x, rest, finite = super().compensate(grad, state, at)
        return Compensated(x + state["residual"], rest, finite)


@breaks("test_fusions_give_what_the_steps_give")
@dataclass(frozen=True)
class FadesAfterTheSubtraction(PowerSGDMemory):
    """Does more than the fusion, which leaves it out."""

    def finish(self, merged, state, at):
        gradient, state = super().finish(merged, state, at)
        return gradient, {"residual": at.ops.scale_(state["residual"], 0.5)}


merge_finish.of(PowerSGD, FadesAfterTheSubtraction)(merge_product)


@breaks("test_finish_is_declared")
@dataclass(frozen=True)
class FinishesInSecret(Residual):
    def finish(self, merged, state, at):
        return merged * 2, state


@breaks("test_zero_gradients_leave_nothing_behind")
@dataclass(frozen=True)
class InventsGradients(Residual):
    def compensate(self, grad, state, at):
        return Compensated(grad + state["residual"] + 1e-20, {})


@breaks("test_nothing_is_used_after_it_was_consumed")
@dataclass(frozen=True)
class KeepsWhatItConsumed(DGCMemory):
    """Uses the consumed array as the sum, which is correct only in some frameworks."""

    def compensate(self, grad, state, at):
        momentum = state["momentum"] * self.momentum
        at.ops.add_(momentum, grad)
        return Compensated(state["residual"] + momentum, {"momentum": momentum})


@breaks("test_the_gradient_is_only_read")
@dataclass(frozen=True)
class AddsIntoTheGradient(Residual):
    def compensate(self, grad, state, at):
        return Compensated(at.ops.add_(grad, state["residual"]), {})


@breaks("test_incompatible_compressors_are_told_what_serves_them")
@dataclass(frozen=True)
class RefusesSilently(DGCMemory):
    def check(self, compressor):
        if not selects(compressor):
            raise IncompatibleError("these do not go together")


@breaks("test_state_starts_at_zero")
@dataclass(frozen=True)
class FeedsBackWhatItDoesNotKeep(NoMemory):
    feeds_back = True
