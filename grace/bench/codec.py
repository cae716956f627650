"""The local work of one rank for one tensor in one training step, with the payloads of simulated other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from grace.bench.variants import Variant
from grace.core.config.config import make_config
from grace.core.errors import ConfigError
from grace.core.ops.composites import ArrayOps
from grace.core.plan.plan import make_plan
from grace.core.plan.unit import Unit
from grace.core.session.simulation import deliver, negotiate
from grace.core.spec import Array, Payload, Ranks, State, TensorSpec
from grace.core.state.states import initial
from grace.core.step.unit_step import UnitStep, retune
from grace.core.wire.layout import sent_bytes

SEED = 0
# The learning rate for memories that need one.
LR = 0.1


def near_square(numel: int) -> tuple[int, int]:
    """Return (rows, columns) with rows * columns = numel, rows <= columns and the smallest difference.

    Example: 25,000,000 elements are a matrix of 5,000 x 5,000.
    """
    rows = next(n for n in range(int(numel**0.5), 0, -1) if numel % n == 0)
    return rows, numel // rows


def make_unit(compressor: str, numel: int, device: str = "cpu", **options: Any) -> Unit:
    """Return a near-square float32 matrix with a method; what `options` do not name is as in all tables.

    If the method cannot compress the matrix, the unit's `reason` says why. Raises ConfigError for an unknown name.
    """
    spec = TensorSpec("tensor", near_square(numel), device=device)
    # The default rules do not compress small tensors, and the default granularity cuts large ones.
    chosen = Variant(compressor, options).config()
    config = make_config({**chosen, "default_rules": False, "granularity": "layer"})
    (unit,) = make_plan([spec], config).units
    return unit


def on_ranks(unit: Unit, ranks: int) -> Unit:
    """Return the unit as that many ranks exchange it.

    Raises IncompatibleError if the method does not work with so many ranks, ConfigError if they exchange shards of it:
    then a rank compresses a second time, and what it does depends on its place.
    """
    unit.compressor.check_ranks(ranks)
    found = unit.communicator.divide([unit], Ranks(ranks))
    if len(found) > 1 or found[0].onward is not None:
        raise ConfigError(
            f"communicator {unit.communicator} exchanges shards, and `grace bench codec` times a tensor as a whole; "
            "measure it with `grace bench step`, or name another communicator."
        )
    return found[0]


class Arrived(NamedTuple):
    """The data that a rank receives in one step: what was negotiated, and payloads with their flags.

    There is one payload of each rank. With allreduce there is one: their sum.
    """

    negotiated: Array | None
    payloads: list[Payload]
    flags: list[Array]


class Done(NamedTuple):
    """The results of a rank's step."""

    gradient: Array
    payload: Payload


class LocalStep:
    """Training steps of one tensor on `ranks` ranks, as a run takes them. Only the work of rank 0 is timed.

    Each step has two calls. `receive` runs the step of all ranks, to know what rank 0 receives. `run` does all work of
    rank 0: compensate, check for NaN, propose, compress, update, merge, finish, learn, and scale by the memory's gain
    and the number of ranks. States carry over from step to step, as in training.

    The wire buffer is not included: encoding, decoding, and the division of floats that travel beside 16-bit ones.
    """

    def __init__(self, unit: Unit, ops: ArrayOps, ranks: int) -> None:
        self.unit, self.ops, self.ranks = on_ranks(unit, ranks), ops, ranks
        self._states = [initial(self.unit, ops, SEED, rank) for rank in range(ranks)]

    def receive(self, gradients: Sequence[Array], step: int) -> Arrived:
        """Return the data that rank 0 receives in a step, and end the step on the other ranks.

        `gradients` holds one gradient per rank.
        """
        begun = [self._begin(gradients[rank], self.states(rank), rank, step) for rank in range(self.ranks)]
        negotiate(begun)
        (payloads, flags), *others = deliver(begun)
        for rank, (mine, delivered) in enumerate(zip(begun[1:], others, strict=True), 1):
            mine.remember()
            _, self._states[rank] = self._conclude(mine, *delivered)
        return Arrived(begun[0].site.negotiated, payloads, flags)

    def run(self, gradient: Array, step: int, arrived: Arrived) -> Done:
        """Run the step of rank 0. This part is timed."""
        done, self._states[0] = self.run_from(gradient, self._states[0], step, arrived)
        return done

    def states(self, rank: int) -> dict[str, State]:
        """Return the states of a rank between two steps."""
        return self._states[rank]

    def wire_bytes(self, done: Done) -> int:
        """Return the bytes that rank 0 sent in a step: payload and proposal."""
        return int(sent_bytes(self.ops, self.unit.fields, done.payload)) + self.unit.negotiated_bytes

    # --- one rank's step ----------------------------------------------------------------------------------------

    def run_from(
        self, gradient: Array, states: dict[str, State], step: Any, arrived: Arrived
    ) -> tuple[Done, dict[str, State]]:
        """Run the step of rank 0 from the given states. Return its results and its new states."""
        mine = self._begin(gradient, states, 0, step)
        if mine.proposal is not None:
            mine.compress(arrived.negotiated)
        mine.remember()
        merged, states = self._conclude(mine, arrived.payloads, arrived.flags)
        return Done(merged, mine.payload), states

    def _begin(self, gradient: Array, states: dict[str, State], rank: int, step: Any) -> UnitStep:
        begun = UnitStep(self.unit, states, self.ops, seed=SEED, step=step, rank=rank, size=self.ranks)
        begun.begin(gradient, LR)
        return begun

    def _conclude(
        self, step: UnitStep, payloads: Sequence[Payload], flags: Sequence[Array]
    ) -> tuple[Array, dict[str, State]]:
        """Return the merged gradient and the new states."""
        x, factor, states, tally = step.conclude(payloads, flags)
        if tally is not None:
            (states["compressor"],) = retune([step], [tally], [states["compressor"]])
        return x if factor == 1 else self.ops.scale_(x, factor), states
