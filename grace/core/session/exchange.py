"""`Exchange`: all that a run can ask of an exchange and change in it, the same in every adapter."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from grace.core.config.config import Config, change_config
from grace.core.config.recommended import Optimizer, warn_of_pairs
from grace.core.errors import ConfigError, GraceWarning, IncompatibleError, StateError, StepError
from grace.core.guards.agreement import Handshake, formats
from grace.core.guards.replicas import compare, digest
from grace.core.observe.announcement import announce, warn
from grace.core.observe.statistics import scalars
from grace.core.ops.composites import ArrayOps
from grace.core.plan.plan import Modules, Plan, make_plans, next_plan
from grace.core.plan.unit import Assignment, Unit
from grace.core.session.outer import OuterRun, OuterState
from grace.core.session.outer_setup import check_outer, check_references, fragments_of
from grace.core.session.start import describe
from grace.core.spec import ONE_RANK, Array, Ranks, TensorSpec
from grace.core.state.checkpoint import saved_carried_tensors
from grace.core.state.checks import check_saved
from grace.core.state.merge import sort_by_rank
from grace.core.state.run import Run
from grace.core.state.states import plan_at

if TYPE_CHECKING:
    from grace.advice.advise import Advice
    from grace.advice.watch import Watch
    from grace.bench.codec import LocalStep


class Exchange:
    """The plan, statistics and state of an exchange, and their changes during the run; the base of every adapter.

    `runs` are those of the ranks in this process: one, more in a simulation, none while the tensors are unknown. All
    of them have the plan of `config`. `ops(device)` returns the array operations, and `delegate` says what the adapter
    exchanges itself. `prefix` begins the names of collectives and buckets. `world` has rank and size among all
    processes per run, which name the files of timelines.
    """

    # The exchange as its users call it.
    called: ClassVar[str]
    # A step takes second gradients, for memories that need them.
    takes_references: bool = False
    # The adapter tells `advisor` of steps and gradients.
    watches: bool = False
    #: The configuration, with all changes so far.
    config: Config
    #: The transport of this process; a simulation has none.
    transport: Any
    #: The number of this rank; -1 outside of the ranks that take part.
    rank: int

    def __init__(
        self,
        config: Config,
        specs: Sequence[TensorSpec],
        runs: Sequence[Run],
        ops: Callable[[str], ArrayOps],
        *,
        rank: int = 0,
        ranks: Ranks = ONE_RANK,
        prefix: str = "grace",
        delegate: Callable[[Assignment], bool] = lambda item: False,
        world: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.config, self.rank, self.ranks, self.prefix = config, rank, ranks, prefix
        self._specs, self._runs, self._ops = specs, runs, ops
        self._delegate, self._world = delegate, world
        #: The outer steps of the runs, if the ranks step on their own.
        self.outers = [] if config.outer is None else [OuterRun(config.outer, run, specs, config.seed) for run in runs]
        #: The configuration before each call of `change`.
        self.history: list[Config] = []
        #: The optimizers that apply the merged gradients, as far as they are known.
        self.optimizers: list[Optimizer] = []
        # The warnings of plans that were logged.
        self.warned: set[str] = set()
        #: What watches the steps, for `advise` and for the compressor "auto".
        self.advisor: Watch | None = None
        self._start_watching()

    def _start_watching(self) -> None:
        """Watch the steps for the compressor "auto", or for the command `grace advise` if that has started the job."""
        if self.config.auto:
            # Here, because advice is about exchanges.
            from grace.advice.auto import Auto

            self.advisor = Auto(self)
        if self.watches and self.config.outer is None and self.size > 1 and "GRACE_ADVISE" in os.environ:
            from grace.advice.launched import Launched

            self.advisor = Launched(self)

    # --- what an adapter may override -------------------------------------------------------------------------------

    def local_step(self, unit: Unit, ops: ArrayOps, ranks: int) -> LocalStep:
        """Return the local step of a unit on so many ranks, to time it."""
        # Here, because the tables of methods load with it.
        from grace.bench.codec import LocalStep

        return LocalStep(unit, ops, ranks)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.ranks.size

    @property
    def runs(self) -> Sequence[Run]:
        """The runs of the ranks in this process."""
        return self._runs

    @property
    def run(self) -> Run:
        """The run of this process; in a simulation that of rank 0."""
        return self.runs[0]

    def _gather(self, mine: Sequence[Any], purpose: str, what: str) -> list[Any]:
        """Return the JSON-able values of all ranks, in rank order, from those of the ranks in this process."""
        gathered: list[Any] = self.transport.gather_objects(mine[0], f"{self.prefix}/{purpose}", what)
        return gathered

    def everyone(self, mine: Any, purpose: str, what: str) -> list[Any]:
        """Return the JSON-able values of all ranks that train the model, of which each rank here has `mine`."""
        return self._gather([mine], purpose, what)

    def gathers(self) -> Sequence[tuple[int, int]]:
        """Return the bytes of parameters that all ranks gather before they compute, and how often in a step.

        There is a pair for each module that the ranks share. Without such modules, there is none.
        """
        return ()

    def _plan_of(self, config: Config) -> Plan:
        """Return the plan that follows the current one under a changed configuration."""
        return self._plan_after(self.plan, config, len(self.history) + 1, self.ranks)

    def _plan_after(self, before: Plan, config: Config, number: int, ranks: Ranks) -> Plan:
        """Return the plan after another one with these ranks, after `number` changes."""
        return next_plan(
            self._specs,
            config,
            before,
            ranks=ranks,
            prefix=f"{self.prefix}.change{number}",
            delegate=self._delegate,
            modules=self._modules_for(ranks),
        )

    def _modules_for(self, ranks: Ranks) -> Modules | None:
        """Return the modules of the tensors with these ranks, if they are exchanged module by module."""
        return fragments_of(self.config, self._specs)

    def outer_of(self, run: Run) -> OuterRun | None:
        """Return the outer steps of a run; None if gradients are exchanged."""
        return self.outers[self.runs.index(run)] if self.outers else None

    def _check_idle(self, call: str) -> None:
        """Raise StepError if gradients are being exchanged, when the call is not possible."""
        for outer in self.outers:
            outer.drain()
        for run in self.runs:
            run.check_idle(call)

    def _weights(self) -> Mapping[str, Array]:
        """Return the weights that are equal on all ranks, as far as the exchange knows them."""
        return {}

    def _digest(self, x: Array) -> int:
        """Return the digest of the bits of a weight or state."""
        return digest(self._ops("cpu"), x)

    def _place(self, saved: Any, current: Array) -> Array:
        """Return a copy of a saved array, of the kind and in the place of the current one."""
        return self._ops("cpu").copy(saved)

    @property
    def _logs(self) -> bool:
        """True on the rank that tells the user about the exchange."""
        return self.rank == 0

    def description(self) -> dict[str, Any]:
        """Return what must be equal on all ranks."""
        return describe(self.config, self._specs, [self.plan], self._ops)

    def announce(self, stages: Sequence[tuple[int, Plan]], step: int | None = None) -> None:
        """Tell the user on rank 0 what is sent from now on; see `grace.core.observe.announcement`."""
        if self._logs:
            warn((text for _, plan in stages for text in plan.warnings), self.warned)
            announce(stages, self.size, f"{self.called}.report()", step, self.config.outer)
            for outer in self.outers:
                outer.record.logs_need = True

    # --- what users call --------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan for the next step: how each tensor is exchanged."""
        return self.run.plan

    @property
    def full_round(self) -> bool:
        """True if the next step takes the gradient of all data of a rank, and no second one at other weights.

        This is for memories that need second gradients, such as `marina`. It is equal on all ranks.
        """
        return self.run.full_round

    def report(self) -> str:
        """Return the start-up report: method, memory, collective and bytes of each tensor, and why some stay dense."""
        outer = "" if self.config.outer is None else f"outer steps: {self.config.outer}\n"
        return f"{outer}{self.plan.report()}"

    def stats(self) -> dict[str, Any]:
        """Return bytes, times, relative errors and residual norms of the last step.

        `grace.core.state.run.Run.stats` describes the keys. With outer steps, the last step is the last sync, and the
        key `outer` has what `grace.core.session.record.Record.stats` describes. With the compressor "auto", the key
        `auto` has the choice (`compressor`), `why`, `since` which step, `step_seconds` of the candidates that were
        measured, and the `link`.
        """
        return self._stats(self.run)

    def _stats(self, run: Run) -> dict[str, Any]:
        outer = self.outer_of(run)
        return self._with_auto(run.stats() if outer is None else {**run.stats(), "outer": outer.stats()})

    def _with_auto(self, stats: dict[str, Any]) -> dict[str, Any]:
        """Return statistics with those of the compressor "auto"."""
        advice = {} if self.advisor is None else self.advisor.stats()
        return {**stats, "auto": advice} if advice else stats

    def scalars(self) -> dict[str, float]:
        """Return the main numbers of `stats` by name, for TensorBoard, Weights & Biases and other loggers.

        `grace/wire_bytes` and `grace/dense_bytes` are the bytes of the last step of this rank with and without
        compression, and `grace/ratio` is their quotient. `grace/compress_seconds`, `grace/wait_seconds` and
        `grace/merge_seconds` are the sums of these phases over all buckets; they are left out if no times are known. Of
        outer steps there are `grace/loss`, `grace/utilisation`, `grace/distance` and `grace/cosine` of this rank, as
        far as they are known. With `track_norms` there are also `grace/relative_error`, the mean of |x - C(x)| / |x|
        over the compressed tensors, and `grace/residual_norm`, the norm |e| of all residuals together.
        """
        return scalars(self.stats())

    def change(self, **changes: Any) -> None:
        """Change options, for instance change(compress_ratio=0.1), or the method. Residuals are kept.

        All ranks must call it between the same two steps. Raises the errors of `make_config`, ConfigError if the
        configuration has a schedule, StepError during a step, and MismatchError on every rank if the ranks differ. It
        ends the compressor "auto".
        """
        self._change(changes, auto=False)

    def _change(self, changes: Mapping[str, Any], *, auto: bool) -> None:
        """Change the configuration; with `auto`, go on to choose the compressor by measurement."""
        plan, where = None, f"{self.called}.change"
        with Handshake(lambda mine: self._gather([mine], "change", f"{where}()"), where) as handshake:
            self._check_idle("change")
            config = dataclasses.replace(change_config(self.config, changes), auto=auto)
            check_outer(config, where, average=True, size=self.size)
            check_references(config, where, self.takes_references)
            if self._logs:
                for optimizer in self.optimizers:
                    warn_of_pairs(config, optimizer, self.config)
            handshake.local["configuration"] = config.to_dict()
            if self.runs:
                plan = self._plan_of(config)
                handshake.local.update({"step": int(self.run.step), "formats": formats([plan], self._ops)})
        if plan is not None:
            for run in self.runs:
                run.change(plan)
            self.history.append(self.config)
            self.announce([(0, plan)], int(self.run.step))
        self.config = config
        if not auto:
            self.advisor = None

    def advise(self, steps: int = 10) -> Advice | None:
        """Return whether compression pays in this job and which method, equal on all ranks, after some steps.

        Call it on all ranks after each step. The first call begins to watch, and the result is None until `steps` more
        are complete. Then the ranks measure their link and the codecs of candidates on gradients of the job, which
        takes seconds, and go on as before. Raises ConfigError for fewer than one step, and StepError during a step, on
        a single rank, with outer steps, with the compressor "auto", and if the adapter cannot watch gradients.
        """
        # Here, because advice is about exchanges.
        from grace.advice.advise import advise

        self._check_idle("advise")
        return advise(self, steps)

    def step_begins(self) -> None:
        """Tell the advisor that a step begins, before its first gradient; it may change the configuration."""
        if self.advisor is not None:
            self.advisor.decide()
            self.advisor.begin()

    def note_gradient(self, name: str, *parts: Array) -> None:
        """Tell the advisor that a gradient of this rank is there, in one or more parts."""
        if self.advisor is not None:
            self.advisor.note_gradient(name, *parts)

    def resume(self) -> None:
        """Tell the advisor that the backward pass goes on, which has waited for the exchange of what was seen last."""
        if self.advisor is not None:
            self.advisor.resume()

    def step_ends(self) -> None:
        """Tell the advisor that all gradients of a step are merged."""
        if self.advisor is not None:
            self.advisor.end()

    def common_weights(self) -> dict[str, Array]:
        """Return copies of the weights that all ranks have in common with outer steps: those of the last sync.

        With `alpha` or the outer optimizer `elastic`, each rank trains on weights of its own, and these are the model
        in the end. With `pairs`, they are those of this rank. Raises StepError without outer steps, and before they
        begin.
        """
        if not self.outers:
            raise StepError(
                "common_weights: no outer steps are taken here, so the weights are your model's; set outer."
            )
        return self.outers[0].reshape(self.outers[0].state.anchors)

    def variates(self, rank: int = 0) -> dict[str, Array]:
        """Return copies of the control variates, which an inner step subtracts from its gradients.

        An optimizer of PyTorch does so by itself. A simulation has those of each rank. Raises StepError without outer
        steps, and before they begin.
        """
        if not self.outers:
            raise StepError("variates: no outer steps are taken here; set outer = {'variates': true}.")
        return self.outers[rank].variates()

    def note_loss(self, *losses: float) -> None:
        """Note the loss of an inner step of outer steps: of this rank, in a simulation one of each rank.

        With `adapt = "loss"`, the mean of all ranks decides on the next period. Raises StepError without outer steps,
        for another number of losses, and if periods follow the loss and it is not positive.
        """
        if len(losses) != len(self.outers):
            raise StepError(
                f"note_loss: expected one loss for each of {len(self.outers)} ranks here that take outer steps, "
                f"received {len(losses)}; set outer in the configuration, and pass one loss per rank."
            )
        for outer, loss in zip(self.outers, losses, strict=True):
            outer.note_loss(float(loss))

    def check_replicas(self) -> None:
        """Compare the weights and the shared states of all ranks now; all ranks must call it between the same steps.

        The option `check_replicas` does it every so many steps. Raises MismatchError on every rank. It names the first
        tensor that differs, or says that the ranks are at different steps.
        """
        self._compare(self._weights())

    def _compare(self, weights: Mapping[str, Array]) -> None:
        compare(
            [(int(run.step), self._digests(run, weights)) for run in self.runs],
            lambda values, purpose: self._gather(values, purpose, "the comparison of replicas"),
            self.rank,
        )

    def _digests(self, run: Run, weights: Mapping[str, Array]) -> dict[str, int]:
        """Return digests of weights and of a run's shared states."""
        outer = self.outer_of(run)
        equal = {} if outer is None else outer.equal_arrays
        return {name: self._digest(x) for name, x in {**weights, **run.shared_states, **equal}.items()}

    @property
    def track_norms(self) -> bool:
        """True if each step measures errors and norms for stats(). This costs a decompression per tensor and step."""
        return self.run.track_norms

    @track_norms.setter
    def track_norms(self, value: bool) -> None:
        for run in self.runs:
            run.track_norms = value

    def start_timeline(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace of all further steps to `path`; several ranks add ".rankN" before its suffix.

        Raises ConfigError if the file cannot be written.
        """
        for run, (rank, size) in zip(self.runs, self._world, strict=True):
            run.times.start(path, rank, size)

    def stop_timeline(self) -> None:
        """Stop writing the timeline."""
        for run in self.runs:
            run.times.stop()

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the states of this rank; every rank must save its own."""
        return self._saved(self.run)

    def _saved(self, run: Run) -> dict[str, Any]:
        outer = self.outer_of(run)
        return run.state_dict() if outer is None else {**run.state_dict(), "outer": outer.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> bool:
        """Load a result of `state_dict`. Return whether the run continues exactly.

        A list with the states of all ranks, in any order, may come from another number of ranks: then they are merged,
        and what all ranks together hold back is kept. The result is False, with a warning if something else starts
        again. For one state, the result says whether the same rank of as many ranks has saved it. If not, warns and
        starts with residuals of zero; what is equal on all ranks is loaded. Raises StepError during a step, and
        StateError if a state belongs to other tensors, methods, shapes or dtypes, or is damaged, or if a rank's state
        is missing; then nothing was loaded.
        """
        self._check_idle("load_state_dict")
        exact, notice = self._load(self.run, self.rank, state)
        if notice:
            self._warn(notice)
        return exact

    def _load(self, run: Run, rank: int, state: Any) -> tuple[bool, str]:
        """Load a state, or those of all ranks; return whether the run continues exactly, and a notice for the user.

        The caller warns at the end, because a warning may be an error. Nothing may be on its way: outer steps are
        drained.
        """
        outer = self.outer_of(run)
        if not isinstance(state, list):
            check_saved(state)
            outer_state = self._outer_state(outer, [state], 0)
            exact = run.load_state_dict(state, self._place, self._plans_carrying)
            notice = "" if exact else self._notice_of_another_rank(state, rank)
        else:
            states = sort_by_rank(state)
            outer_state = self._outer_state(outer, states, max(rank, 0) if len(states) == self.size else None)
            if len(states) == self.size:
                exact, notice = run.load_state_dict(states[max(rank, 0)], self._place, self._plans_carrying), ""
            else:
                exact, notice = False, self._notice_of_other_ranks(len(states), self._merge(run, states))
        if outer is not None:
            outer.restore(outer_state)
        return exact, notice

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Return to the states of now if the body fails."""
        before, outer_states = [run.states for run in self.runs], [outer.now for outer in self.outers]
        try:
            yield
        except Exception:
            for run, states in zip(self.runs, before, strict=True):
                run.discard(states)
            for outer, state in zip(self.outers, outer_states, strict=True):
                outer.restore(state)
            raise

    def _outer_state(
        self, outer: OuterRun | None, states: Sequence[Mapping[str, Any]], number: int | None
    ) -> OuterState | None:
        """Return the state of outer steps in one of these saved states, or in all of them merged."""
        saved = [state.get("outer") for state in states]
        if outer is None:
            if any(part is not None for part in saved):
                raise StateError(
                    "checkpoint: it was saved by a run with outer steps or local_steps, whose residuals are in units "
                    "of the weights; load it with the same option outer or local_steps."
                )
            return None
        return outer.merge_states(saved, self._place) if number is None else outer.load(saved[number], self._place)

    def _merge(self, run: Run, states: Sequence[Mapping[str, Any]]) -> list[str]:
        """Load the states of all ranks of a run with another number of ranks; return what could not be continued."""
        size, step, saved = len(states), int(states[0]["step"]), states[0]["tensors"]
        carrying = saved_carried_tensors(saved)
        for ranks in self._possible_ranks(size):
            try:
                plans = self._plans_for(ranks, carrying)
            except (ConfigError, IncompatibleError):
                continue
            plan = plan_at(plans, step)
            if plan.stateful.keys() == saved.keys():
                return run.merge_state_dicts(states, plan, self._place, self._plans_carrying)
        raise self._no_plan(states)

    def _possible_ranks(self, size: int) -> list[Ranks]:
        """Return all that `size` ranks may have been: a checkpoint does not say how many of them each node had."""
        return [Ranks(size, local_size) for local_size in range(size + 1) if not local_size or not size % local_size]

    def _plans_for(self, ranks: Ranks, carrying: frozenset[str] = frozenset()) -> list[tuple[int, Plan]]:
        """Return the plans that this run would have with other ranks, each with its first step.

        The tensors in `carrying` carry a residual of an earlier method.
        """
        return make_plans(
            self._specs,
            self.config,
            ranks=ranks,
            prefix=self.prefix,
            delegate=self._delegate,
            holding=carrying,
            modules=self._modules_for(ranks),
        )

    def _plans_carrying(self, carrying: frozenset[str]) -> list[tuple[int, Plan]]:
        return self._plans_for(self.ranks, carrying)

    def _no_plan(self, states: Sequence[Mapping[str, Any]]) -> StateError:
        names = sorted(map(str, states[0]["tensors"]))
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return StateError(
            f"checkpoint of {len(states)} ranks: the units of compression differ from those that this configuration "
            f"gives for as many ranks; received {', '.join(names[:5])}{more}. Use the tensors and the configuration it "
            "was saved with, including granularity, bucket_bytes and split_bytes."
        )

    def _notice_of_another_rank(self, state: Mapping[str, Any], rank: int) -> str:
        return (
            f"rank {state['rank']} of {state['size']} saved this checkpoint, and rank {rank} of {self.size} loads it: "
            "residuals start from zero. Save one file per rank, and load your own, or a list with the states of all."
        )

    def _notice_of_other_ranks(self, size: int, lost: Sequence[str]) -> str:
        if not lost:
            return ""
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        return (
            f"{size} ranks saved this checkpoint, and {self.size} load it: what cannot be merged starts from zero: "
            f"{', '.join(lost[:5])}{more}."
        )

    def _warn(self, text: str) -> None:
        warnings.warn(text, GraceWarning, stacklevel=3)
