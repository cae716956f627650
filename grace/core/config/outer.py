"""Outer steps as a user describes them: when the ranks sync, with which tensors, and what they make of it."""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grace.core.config.registry import build, fields_of, outer_optimizers
from grace.core.errors import ConfigError, fold, nearest
from grace.core.methods.outer import OuterOptimizer
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, TensorSpec

_DILOCO = {"optimizer": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True}
#: Outer steps by the name that publications and other libraries give them.
PRESETS: dict[str, Mapping[str, Any]] = {
    "update": {"every": 1, "optimizer": "average"},
    "adacomm": {"every": 16, "adapt": "loss", "optimizer": "average"},
    "local_sgd": {"every": 8, "optimizer": "average"},
    "post_local_sgd": {"every": 4, "optimizer": "average", "warmup": 100},
    "diloco": {"every": 500, **_DILOCO},
    "streaming_diloco": {"every": 100, **_DILOCO, "fragments": 4, "delay": 5, "alpha": 0.5},
    "sparseloco": {"every": 30, "optimizer": "sgd", "lr": 1.0},
    "muloco": {"every": 30, **_DILOCO, "lr": 0.8},
    "noloco": {"every": 100, "optimizer": "sgd", "lr": 0.7, "momentum": 0.3, "pairs": True},
}
# What other libraries call an option, with ours.
_FOREIGN = {
    **dict.fromkeys(
        ("syncevery", "syncsteps", "localsteps", "localsgdsteps", "h", "period", "syncinterval", "dilocosyncperiod"),
        "every",
    ),
    **dict.fromkeys(("synchronizationperiod", "numinnersteps"), "every"),
    **dict.fromkeys(
        ("numfragments", "modelfragments", "numdilocofragments", "modulefqnspermodelfragment"), "fragments"
    ),
    **dict.fromkeys(("fragmentsyncdelay", "numcommunicationoverlappingsteps", "tau"), "delay"),
    **dict.fromkeys(("fragmentupdatealpha", "communicationoverlappingalpha"), "alpha"),
    **dict.fromkeys(("outerlr", "dilocoouterlr", "slowlr"), "lr"),
    **dict.fromkeys(("outermomentum", "dilocooutermomentum", "blockmomentum", "slowmomentum"), "momentum"),
    **dict.fromkeys(("outeroptimizer", "method", "name"), "optimizer"),
    **dict.fromkeys(("movingrate", "elasticity"), "pull"),
    **dict.fromkeys(("clientfraction", "fraction", "fractionfit", "samplerate"), "participation"),
    **dict.fromkeys(("weights", "numsamples", "samples", "numexamples"), "weight"),
    **dict.fromkeys(("maxgradnorm", "l2normclip", "clippingnorm"), "clip"),
    **dict.fromkeys(("noisemultiplier",), "noise"),
    **dict.fromkeys(("warmupsteps", "startlocalsgditer"), "warmup"),
    "semisyncmethod": "preset",
    **dict.fromkeys(("optimizerstatepolicy", "averageoptstatistics", "states"), "state"),
}
_SENDERS = "'communicator': {'name': 'allgather', 'reduce': 'senders', 'clip': 'median_norm'}"
# The same, of options of the configuration.
_ELSEWHERE = {
    **dict.fromkeys(("errordecay", "efdecay"), "beta of the memory residual, next to 'compressor': {'beta': 0.95}"),
    **dict.fromkeys(("shouldquantize", "quantizationbins"), "a compressor of the configuration, such as 'eightbit'"),
    **dict.fromkeys(("bucketcapmb", "usebucketization"), "bucket_bytes of the configuration"),
    "reduce": f"an option of the communicator: {_SENDERS}",
}
#: An entry of `OuterSteps.fragments`: the patterns of one fragment.
Patterns = str | tuple[str, ...]


@dataclass(frozen=True)
class OuterSteps:
    """Steps of each rank on its own, and syncs at which the ranks exchange the changes of their weights.

    `optimizer` makes the new weights of the mean change. `every` is the number of inner steps H between two syncs of a
    tensor, or pairs (s, H): H from inner step s on. `fragments` cuts the tensors into as many parts of about equal
    size, or names the tensors or modules of each part by shell patterns; the parts take turns and sync every H /
    fragments steps. `adapt` changes H after each sync: a number a makes the period after the n-th sync that follows the
    warm-up (1 + a n) H steps long, and "loss" makes it sqrt(F / F_0) H steps, F being the mean loss of all ranks in the
    period before, and F_0 that of the first one; both round up. `delay` is the number of inner steps between sending a
    change and applying the result, which hides the exchange behind computation. `alpha` is the share of a rank's own
    weights in the weights after a sync; 0 takes the common ones. In the first `warmup` steps, all tensors sync after
    every step and take the plain mean. `state` says what becomes of the states of the inner optimizer: they stay
    "local", the ranks take their "average", or they are "reset" when their tensor syncs; pairs (key, n) average the
    states of this key at every n-th sync. `buffers`, the running statistics of a model, become the "average", stay
    "local", or are those of the "first" rank. `participation` is the share of the ranks, rounded up, that contribute to
    a sync; they are drawn each time. `weight` has a number per rank for the mean, such as that of its samples; without
    it, all are equal. With `variates`, each rank keeps a control variate per tensor, which inner steps subtract from
    gradients: how far the mean gradient of this rank was from that of all (SCAFFOLD). With `dense_every` = K, every
    K-th sync is uncompressed and brings what is held back. With `local_error`, a rank goes on with the common weights
    less what the compressor has dropped of its change, so that it is in the next one. With `relevance`, a rank
    contributes to a sync only if the signs of so many of its changes, as a share, are those of the last mean change.
    With `pairs`, each rank syncs with one other, drawn each time; each has weights after a sync and states of the outer
    optimizer of its own, and the change is from these to the mean weights of the pair. `clip` is the largest norm of a
    change that a rank sends, over all tensors that sync at once; 0 is no limit. `noise` times `clip` is the standard
    deviation of normal noise that a rank adds to each element.

    Raises ConfigError for numbers that do not divide, because rounding them would train something else.
    """

    optimizer: OuterOptimizer
    every: int | tuple[tuple[int, int], ...] = 1
    adapt: float | Literal["loss"] = 0.0
    fragments: int | tuple[Patterns, ...] = 1
    delay: int = 0
    alpha: float = 0.0
    warmup: int = 0
    state: Literal["local", "average", "reset"] | tuple[tuple[str, int], ...] = "local"
    buffers: Literal["average", "local", "first"] = "average"
    participation: float = 1.0
    weight: tuple[float, ...] = ()
    variates: bool = False
    dense_every: int = 0
    local_error: bool = False
    relevance: float = 0.0
    pairs: bool = False
    clip: float = 0.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(
                f"outer: fragments must be at least 1, or a list of patterns, received {self.fragments!r}."
            )
        if self.dense_every < 0 or self.dense_every == 1:
            raise ConfigError(
                "outer: dense_every is the number of syncs from one without compression to the next, at least 2, or "
                f"0 for none; received {self.dense_every!r}."
            )
        for name in ("delay", "warmup"):
            if getattr(self, name) < 0:
                raise ConfigError(f"outer: {name} is a number of steps, at least 0; received {getattr(self, name)!r}.")
        if not 0 <= self.alpha <= 1:
            raise ConfigError(
                f"outer: alpha is the share of a rank's own weights and must lie in [0, 1], received {self.alpha!r}."
            )
        for key, rounds in () if isinstance(self.state, str) else self.state:
            if rounds < 1:
                raise ConfigError(
                    f"outer: state['{key}'] is the number of syncs between two means of this state, at least 1; "
                    f"received {rounds!r}."
                )
        self._check_shares()
        self._check_noise()
        self._check_phases()

    def _check_shares(self) -> None:
        if not 0 < self.participation <= 1:
            raise ConfigError(
                f"outer: participation is a share of the ranks, above 0 and at most 1; received {self.participation!r}."
            )
        if any(weight <= 0 for weight in self.weight):
            raise ConfigError(f"outer: each weight must be positive, received {list(self.weight)}.")
        if not 0 <= self.relevance < 1:
            raise ConfigError(
                f"outer: relevance is a share of the elements, at least 0 and below 1; received {self.relevance!r}."
            )
        others = self.delay or self.count > 1 or self.participation < 1 or self.weight or self.variates
        if self.relevance and others:
            raise ConfigError(
                f"outer: with relevance = {self.relevance:g}, the whole model syncs at once, and who contributes "
                "follows from the changes of a rank; leave delay, fragments, participation, weight and variates out."
            )
        if self.variates and (self.delay or self.keeps_own or self.weight):
            raise ConfigError(
                "outer: variates need ranks of equal weight, which go on with equal weights at once after a sync; "
                "leave variates out, or alpha, delay, weight, local_error, pairs and optimizer = 'elastic', received "
                f"{self}."
            )
        if self.variates and self.participation < 1 and self.dense_every:
            raise ConfigError(
                "outer: where a part of the ranks contributes, control variates go with one method in all syncs, "
                f"received dense_every = {self.dense_every}; leave it out, or participation, or variates."
            )
        if self.local_error and (self.delay or self.alpha or not self.optimizer.agrees or not self.is_plain_mean):
            raise ConfigError(
                "outer: local_error needs syncs of all ranks with equal weights, after which they go on with the "
                "common weights and an error of their own at once; leave local_error out, or alpha, delay, "
                f"participation, weight, relevance and optimizer = 'elastic', received {self}."
            )
        unequal = self.alpha or self.local_error or not self.optimizer.agrees
        if self.pairs and (unequal or self.dense_every or self.warmup or not self.is_plain_mean):
            raise ConfigError(
                "outer: with pairs, there is no mean of all ranks; leave pairs out, or alpha, local_error, "
                f"dense_every, warmup, participation, weight, relevance and optimizer = 'elastic', received {self}."
            )
        if self.pairs and (self.adapt == "loss" or self.buffers == "first"):
            raise ConfigError(
                f"outer: with pairs, a rank knows the loss and the buffers of one other only, received adapt = "
                f"{self.adapt!r} and buffers = '{self.buffers}'; use a number as adapt, and buffers = 'average' or "
                "'local', or leave pairs out."
            )
        if self.buffers == "first" and not self.is_plain_mean:
            raise ConfigError(
                "outer: the first rank may be out of a sync, or have a weight of its own; set buffers = 'average' "
                "or 'local' with participation and weight."
            )

    def _check_noise(self) -> None:
        if self.clip < 0 or self.noise < 0 or (self.noise and not self.clip):
            raise ConfigError(
                "outer: clip is a norm, and noise a factor of it; both must be at least 0, and noise needs clip, "
                f"received clip = {self.clip!r} and noise = {self.noise!r}."
            )
        if self.clip and (self.pairs or self.local_error):
            raise ConfigError(
                f"outer: clip = {self.clip:g} limits changes of weights, and pairs exchange the weights, while "
                "local_error keeps in them what was not sent; leave one of them out."
            )
        if self.noise and (self.adapt == "loss" or self.state != "local" or self.buffers != "local"):
            raise ConfigError(
                "outer: with noise, what a rank sends beside would not be hidden, such as losses, states and buffers; "
                f"set buffers = 'local', state = 'local' and a number as adapt, received buffers = {self.buffers!r}, "
                f"state = {self.state!r} and adapt = {self.adapt!r}."
            )

    def _check_phases(self) -> None:
        if self.adapt:
            if isinstance(self.adapt, float | int) and self.adapt < 0:
                raise ConfigError(f"outer: adapt must be at least 0, or 'loss'; received {self.adapt!r}.")
            if not isinstance(self.every, int) or self.count > 1 or self.delay:
                raise ConfigError(
                    f"outer: adapt = {self.adapt!r} changes the periods of the model and needs a number as every, "
                    f"received every = {self.every!r}, fragments = {self.fragments!r}, delay = {self.delay}; leave "
                    "adapt, or the others, out."
                )
        phases = self.phases
        starts = [start for start, _ in phases]
        if not isinstance(self.every, int) and self.warmup:
            raise ConfigError(
                f"outer: every = {self.every!r} says itself what the first steps do; leave warmup = {self.warmup} out."
            )
        if starts != sorted(set(starts)) or not starts or starts[0] != self.warmup:
            raise ConfigError(f"outer: expected steps from 0 on, in ascending order, in every, received {starts}.")
        for _, every in phases:
            if every < 1:
                raise ConfigError(f"outer: every must be at least 1 inner step, received {every!r}.")
            if every % self.count:
                raise ConfigError(
                    f"outer: every = {every} is no multiple of {self.count} fragments, so they cannot sync equally "
                    f"often; set every = {every - every % self.count or self.count} or "
                    f"{every - every % self.count + self.count}."
                )
            if self.delay >= every // self.count:
                raise ConfigError(
                    f"outer: delay = {self.delay} must be less than every / fragments = {every // self.count}, or a "
                    "sync would begin before the last one is over."
                )
        for (start, every), (end, _) in itertools.pairwise(phases):
            if (end - start) % every:
                raise ConfigError(
                    f"outer: every changes at step {end}, in the middle of a period of {every} steps that began with "
                    f"step {start}; change it at step {end - (end - start) % every + every}."
                )

    @property
    def count(self) -> int:
        """Number of fragments."""
        return self.fragments if isinstance(self.fragments, int) else len(self.fragments)

    @property
    def phases(self) -> list[tuple[int, int]]:
        """First inner step and period of each phase after the warm-up."""
        return [(self.warmup, self.every)] if isinstance(self.every, int) else list(self.every)

    def period(self, synced_at: int, rounds: int, ratio: float = 1.0) -> int:
        """Return the number of inner steps to the next sync, if all tensors sync at once.

        `synced_at` is the inner step of the last of `rounds` syncs, and `ratio` F / F_0 of the last period.
        """
        if synced_at < self.warmup:
            return 1
        every = self.phases[-1][1]
        if self.adapt == "loss":
            return max(1, math.ceil(math.sqrt(ratio) * every))
        # Rounding errors must make no period longer.
        return math.ceil((1 + self.adapt * (rounds - self.warmup)) * every - 1e-9)

    def fragments_sent(self, step: int) -> Sequence[int]:
        """Return the fragments whose changes are sent after inner step `step`, without `adapt`; the first step is 1."""
        return [fragment for fragment in range(self.count) if self.sends(step, fragment)]

    def sends(self, step: Any, fragment: int = 0) -> Any:
        """Return whether a fragment's changes are sent after inner step `step`, without `adapt`.

        In a graph, the step is a 0-d array.
        """
        found, ends = step <= self.warmup, [start for start, _ in self.phases[1:]]
        for (start, every), end in itertools.zip_longest(self.phases, ends):
            turn = (fragment + 1) * (every // self.count) % every
            now = (step > start) & ((step - start) % every == turn)
            found = found | (now if end is None else now & (step <= end))
        return found

    def applies(self, step: Any, fragment: int = 0) -> Any:
        """Return whether a fragment's changes are applied after inner step `step`, without `adapt`; as `sends`."""
        sent = step - self.delay
        return (step <= self.warmup) | ((sent > self.warmup) & self.sends(sent, fragment))

    @property
    def keeps_own(self) -> bool:
        """True if ranks go on with weights of their own after a sync."""
        return bool(self.alpha) or self.local_error or self.pairs or not self.optimizer.agrees

    @property
    def follows_sent(self) -> bool:
        """True if a rank must know what it has sent of its change."""
        return self.variates or self.local_error

    @property
    def is_plain_mean(self) -> bool:
        """True if all ranks contribute to all syncs, with equal weights."""
        return self.participation == 1 and not self.weight and not self.relevance

    def factors(self, step: int, rounds: int, size: int, seed: int) -> list[float]:
        """Return the factor on what each rank contributes to the plain mean of a sync; 0 for those that are out.

        `step` is the inner step that it follows, and `rounds` the number of syncs before it.
        """
        if self.is_plain_mean or step <= self.warmup:
            return [1.0] * size
        order = sorted(range(size), key=lambda r: hashlib.sha256(f"{seed}/{rounds}/{r}".encode()).digest())
        inside = order[: math.ceil(self.participation * size - 1e-9)]
        weight = self.weight or (1.0,) * size
        total = math.fsum(weight[r] for r in inside)
        return [weight[r] * size / total if r in inside else 0.0 for r in range(size)]

    def number(self, step: int, rounds: int) -> int:
        """Return the number of the sync of the last fragment after inner step `step`, from 1 on.

        `rounds` is the number of syncs of any fragment before it.
        """
        if step <= self.warmup:
            return rounds + 1
        return self.warmup + (rounds - self.warmup) // self.count + 1

    def delay_after(self, step: int) -> int:
        """Return the inner steps between sending after inner step `step` and applying."""
        return 0 if step <= self.warmup else self.delay

    def is_exact(self, step: int) -> bool:
        """Return whether what syncs after inner step `step` takes the common weights at once, and nothing else."""
        return not self.local_error and (step <= self.warmup or not (self.delay or self.keeps_own))

    def mix(self, ops: ArrayOps, anchor: Array, new: Array, own: Array) -> Array:
        """Return the weights of a rank after a sync, if it keeps weights of its own."""
        if not self.optimizer.agrees:
            new = self.optimizer.own(ops, anchor, new, own)
        return ops.weighted_sum(own, self.alpha, new, 1 - self.alpha) if self.alpha else new

    def divide(self, specs: Sequence[TensorSpec]) -> list[list[str]]:
        """Return the names of the tensors of each fragment.

        Raises ConfigError if a fragment has no tensor, or a tensor no fragment.
        """
        if isinstance(self.fragments, int):
            return _split_evenly(specs, self.fragments)
        found: list[list[str]] = [[] for _ in self.fragments]
        for spec in specs:
            fits = [i for i, patterns in enumerate(self.fragments) if _names(patterns, spec.name)]
            if not fits:
                raise ConfigError(
                    f"outer: no fragment has the tensor '{spec.name}', and it would never be exchanged; add a pattern "
                    "for it, or '*' to the last fragment."
                )
            found[fits[0]].append(spec.name)
        for patterns, names in zip(self.fragments, found, strict=True):
            if not names:
                raise ConfigError(
                    f"outer: the fragment {patterns!r} has no tensor; expected names such as '{specs[0].name}'."
                )
        return found

    def to_config(self) -> dict[str, Any]:
        """Return a JSON-able description: make_outer(outer.to_config()) == outer."""
        values = {name: getattr(self, name) for name in _OPTIONS}
        if not isinstance(self.every, int):
            values["every"] = {str(step): every for step, every in self.every}
        if not isinstance(self.fragments, int):
            values["fragments"] = [p if isinstance(p, str) else list(p) for p in self.fragments]
        if not isinstance(self.state, str):
            values["state"] = dict(self.state)
        values["weight"] = list(self.weight)
        return {"optimizer": outer_optimizers.config_of(self.optimizer), **values}

    def __str__(self) -> str:
        phases = [
            (f"every {every} steps" if every > 1 else "after every step") + (f" from step {start} on" if start else "")
            for start, every in self.phases
        ]
        parts = [", ".join(phases), str(self.optimizer)]
        if self.adapt == "loss":
            parts.append("periods follow the square root of the loss")
        elif self.adapt:
            parts.append(f"periods grow by {self.adapt:g} of the first after each sync")
        if self.warmup:
            parts.append(f"mean after every step in the first {self.warmup}")
        if self.count > 1:
            parts.append(f"{self.count} fragments")
        if self.delay:
            parts.append(f"applied {self.delay} steps later")
        if self.alpha:
            parts.append(f"{self.alpha:g} of the rank's own weights kept")
        if not isinstance(self.state, str):
            parts += [f"mean of the states {key} every {n} syncs" for key, n in self.state]
        elif self.state != "local":
            parts.append(f"states: {self.state}")
        if self.variates:
            parts.append("control variates")
        if self.local_error:
            parts.append("what the compressor drops stays in the rank's own weights")
        if self.clip:
            parts.append(f"norms up to {self.clip:g}")
        if self.noise:
            parts.append(f"noise of {self.noise * self.clip:g} per element")
        if self.pairs:
            parts.append("in pairs")
        if self.relevance:
            parts.append(f"sent if {self.relevance:g} of the signs are those of the last change")
        if self.dense_every:
            parts.append(f"one of {self.dense_every} syncs uncompressed")
        if self.participation < 1:
            parts.append(f"{self.participation:g} of the ranks contribute")
        if self.weight:
            parts.append("weights of the ranks: " + ", ".join(f"{weight:g}" for weight in self.weight))
        return "; ".join(parts)


_OPTIONS = {f: t for f, t in fields_of(OuterSteps).items() if f != "optimizer"}


def make_outer(value: Any) -> OuterSteps | None:
    """Return outer steps from the name of a preset, a table, a ready value, or None for none.

    A table has the fields of `OuterSteps`, the options of the outer optimizer, and perhaps `preset`, whose options the
    others replace. `lr` and `momentum` without `optimizer` mean SGD, and nothing at all the mean. Raises ConfigError.
    """
    if value is None or isinstance(value, OuterSteps):
        return value
    if isinstance(value, str):
        return _from_table(_preset(value))
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"outer: expected the name of a preset or a table such as {{'every': 30, 'lr': 0.7}}, received {value!r}."
        )
    values = dict(value)
    preset = values.pop("preset", None)
    if preset is not None:
        if not isinstance(preset, str):
            raise ConfigError(f"outer: expected the name of a preset, received {preset!r}.")
        before = _preset(preset)
        if "optimizer" in values:
            before = {key: x for key, x in before.items() if key in _OPTIONS}
        values = {**before, **values}
    return _from_table(values)


def _preset(name: str) -> Mapping[str, Any]:
    found = next((preset for preset in PRESETS if fold(preset) == fold(name)), None)
    if found is None:
        raise ConfigError(f"outer: unknown preset '{name}'.{nearest(name, PRESETS)}")
    return PRESETS[found]


def _from_table(values: Mapping[str, Any]) -> OuterSteps:
    own = {key: x for key, x in values.items() if key in _OPTIONS}
    flat = {key: x for key, x in values.items() if key not in (*own, "optimizer")}
    chosen = values.get("optimizer", "sgd" if {*flat} & {*fields_of(outer_optimizers.get("sgd"))} else "average")
    if isinstance(chosen, str):
        chosen = {"name": chosen}
    if not isinstance(chosen, Mapping | OuterOptimizer):
        raise ConfigError(
            f"outer, option 'optimizer': expected one of {', '.join(outer_optimizers)}, received {chosen!r}; name it, "
            "with its options beside it, such as {'every': 30, 'lr': 0.7, 'momentum': 0.9, 'nesterov': True}."
        )
    valid: list[str] = []
    if isinstance(chosen, Mapping) and isinstance(chosen.get("name"), str):
        valid = list(fields_of(outer_optimizers.get(chosen["name"])))
        chosen = {**{key: flat.pop(key) for key in list(flat) if key in valid and key not in chosen}, **chosen}
    for key in flat:
        raise ConfigError(
            f"outer: there is no option '{key}'."
            f"{foreign(key) or nearest(key, [*_OPTIONS, 'optimizer', 'preset', *valid])}"
        )
    if isinstance(own.get("clip"), str):
        raise ConfigError(
            f"outer: clip is the largest norm of the change that a rank sends, a number; received {own['clip']!r}. "
            f"To clip each rank to the median norm, give the communicator: {_SENDERS}."
        )
    if "every" in own:
        own["every"] = _phases(own["every"])
    if isinstance(own.get("state"), Mapping):
        own["state"] = tuple(own["state"].items())
    if "fragments" in own and not isinstance(own["fragments"], int | str):
        own["fragments"] = tuple(tuple(p) if isinstance(p, list) else p for p in own["fragments"])
    return build(OuterSteps, {"optimizer": chosen, **own}, "outer")


def foreign(key: object, table: str = "outer") -> str:
    """Return what an option of another library is called here, as the end of an error, or nothing if none has it.

    `table` is the table in which the user wrote it.
    """
    word = fold(str(key))
    if word in _ELSEWHERE:
        return f" What other libraries call '{key}' is {_ELSEWHERE[word]}."
    if word in _FOREIGN:
        place = "" if table == "outer" else " in the table 'outer'"
        return f" What other libraries call '{key}' is '{_FOREIGN[word]}'{place} here."
    return ""


def _phases(every: Any) -> Any:
    """Return `every` as pairs of numbers if it is a table of steps, of which JSON and TOML make texts."""
    if not isinstance(every, Mapping):
        return every
    if not every or not all(str(step).isdecimal() for step in every):
        raise ConfigError(
            "outer: expected a number for every, or a table of periods by step such as {1000: 30}, received "
            f"{every!r}."
        )
    made = sorted((int(step), period) for step, period in every.items())
    # Before the first step that it names, the ranks sync after every step.
    return tuple(made) if made[0][0] == 0 else ((0, 1), *made)


def _names(patterns: Patterns, name: str) -> bool:
    """Return whether one of the patterns fits a tensor, or a module that it belongs to."""
    modules = [*itertools.accumulate(name.split("."), lambda a, b: f"{a}.{b}")]
    each = [patterns] if isinstance(patterns, str) else patterns
    return any(fnmatch.fnmatchcase(module, pattern) for module in modules for pattern in each)


def _split_evenly(specs: Sequence[TensorSpec], count: int) -> list[list[str]]:
    """Return the names of tensors in `count` runs of about equal numbers of elements, none of them empty."""
    if count > len(specs):
        raise ConfigError(f"outer: {count} fragments need as many tensors, and there are {len(specs)}; use fewer.")
    parts: list[list[str]] = [[]]
    total, before = sum(spec.numel for spec in specs), 0
    for i, spec in enumerate(specs):
        left = len(specs) - i
        # The middle of the tensor lies beyond the part.
        full = count * (2 * before + spec.numel) >= 2 * len(parts) * total
        if parts[-1] and len(parts) < count and (full or left == count - len(parts)):
            parts.append([])
        parts[-1].append(spec.name)
        before += spec.numel
    return parts
