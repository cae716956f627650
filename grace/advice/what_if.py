"""The command `grace what-if`: whether compression pays on a network that need not be here, and which method."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from grace.advice.accuracy import ACCURACY, WHAT_IF
from grace.advice.candidates import LOW, RISKS, Risk, risk_of
from grace.advice.model import (
    INSIDE,
    LATENCY,
    Allreduce,
    Bucket,
    Link,
    Machine,
    Prediction,
    Step,
    bandwidth_for,
    break_even,
    pays_below,
    predict,
    rate,
    remembered,
)
from grace.advice.passes import Passes, assumed, measured
from grace.bench.command import add_variants, check_writable
from grace.bench.step.network import rate_of
from grace.bench.variants import Variant, import_own, parse_variants
from grace.core.config.config import make_config
from grace.core.config.recommended import Optimizer
from grace.core.errors import ConfigError
from grace.core.observe.table import align
from grace.core.spec import ITEMSIZE, Ranks, TensorSpec

COMPRESSORS = ("qsgd", "blockwise", "eden", "powersgd", "topk", "signsgd")
# With --nodes, also these.
BY_NODES = ("qsgd:communicator=hierarchical", "topk:communicator=hierarchical")
# Always in the table: uncompressed gradients, which is what DDP sends, and 16 bits, which cost nothing to try.
ALWAYS = ("none", "fp16")
# The optimizers of --optimizer.
OPTIMIZERS = {"adam": Optimizer("Adam", 0.9, True), "sgd": Optimizer("SGD", 0.9, False)}
SHARES = (0.5, 0.75, 0.9, 0.95, 0.99)
DTYPES = ("float32", "bfloat16", "float16")
# A method may pay if it is predicted to be at least so many times as fast as no compression. It pays if the whole band
# is above 1.
PAYS = 1.05
# The knee is where less than this share of a step without compression is compute.
KNEE = 0.5
# Elements of the tensors that --params stands for.
TENSOR = 2048 * 2048
_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9}
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Model:
    """A model to train: its tensors in the order of the forward pass, and the passes of a step without exchange."""

    name: str
    specs: Sequence[TensorSpec]
    passes: Passes
    #: On what the passes were measured; empty if their time was given.
    device: str = ""

    @property
    def where(self) -> str:
        """The device as words of a sentence."""
        return f" (measured here on {self.device})" if self.device else ""

    @property
    def compute(self) -> float:
        """Seconds of a step without exchange."""
        return self.passes.compute

    @property
    def dtypes(self) -> str:
        """The types of the gradients."""
        return " and ".join(dict.fromkeys(spec.dtype for spec in self.specs))


@dataclass(frozen=True)
class Row:
    """A method in a setting: its prediction, the error of its mean, and bandwidths in bytes per second.

    `error` is |m - mean|^2 / |mean|^2 of a first step on normal gradients, and `risk` the risk to the training. From
    `break_even` on it does not pay: 0 if it never does, None if it always does. `bandwidths` are those that each of
    SHARES needs; None where none is enough.
    """

    label: str
    prediction: Prediction
    error: float
    risk: Risk
    break_even: float | None
    bandwidths: tuple[float | None, ...]


@dataclass(frozen=True)
class Answer:
    """The answer of `grace what-if`: rows and steps on the most ranks, and predictions on all of them by method."""

    model: Model
    machine: Machine
    rows: Sequence[Row]
    steps: Mapping[str, Step]
    by_ranks: Mapping[int, Mapping[str, Prediction]]
    knee: Machine | None
    optimizer: Optimizer
    #: How many times as fast codecs are taken to be as on a core of this machine.
    faster: float
    #: When the codecs were measured, in words.
    when: str

    @property
    def dense(self) -> Row:
        """The row without compression."""
        return next(row for row in self.rows if row.label == "none")

    @property
    def best(self) -> Row:
        """The fastest row of no or low risk; that without compression unless another one pays."""
        return self._fastest(row for row in self.rows if row.risk.grade <= LOW)

    @property
    def risky(self) -> Row | None:
        """The fastest row of all if that is of a higher risk."""
        fastest = self._fastest(self.rows)
        return fastest if fastest.risk.grade > LOW else None

    def _fastest(self, rows: Iterable[Row]) -> Row:
        fastest = min(rows, key=lambda row: row.prediction.seconds)
        return fastest if self.speedup(fastest) >= PAYS else self.dense

    def speedup(self, row: Row) -> float:
        """Return how many times as fast as no compression a row is."""
        return self.dense.prediction.seconds / row.prediction.seconds

    @property
    def sentence(self) -> str:
        """The answer in one sentence, and a faster method of higher risk in a second one."""
        dense, best, risky = self.dense.prediction, self.best, self.risky
        exposed = f"exposed communication is {dense.exposed / dense.seconds:.0%} of the step without it"
        head = f"On this network and {self.machine.ranks:,} ranks, compression "
        if best.label == "none" and risky:
            head += "of low risk does not pay"
        elif best.label == "none":
            head += "does not pay"
        else:
            low, high = band_of_speedup(self.speedup(best))
            pays = "pays" if low > 1 else "may pay"
            head += f"{pays} {self.speedup(best):.1f}x ({best.label}, band {low:.1f} to {high:.1f})"
        where = f"the knee is at {self.knee.ranks} ranks" if self.knee else "all these ranks are before the knee"
        sentence = f"{head}; {exposed}; {where}."
        if risky:
            risk = f"{RISKS[risky.risk.grade]} risk with {self.optimizer.name}"
            sentence += f" {risky.label} is faster ({self.speedup(risky):.1f}x), at a {risk}."
        return sentence


def band_of_speedup(speedup: float) -> tuple[float, float]:
    """Return the speed-ups between which 95 % of measured ones lay, relative to predictions after a calibration."""
    low, high = ACCURACY.speedups
    return speedup * low, speedup * high


def add_what_if(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "what-if",
        help="predict whether compression pays on a network, and which method",
        description="Predict the time of a training step with each method on a network that need not be here. The "
        "codecs are measured on this machine, the rest follows from the arguments.",
    )
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--params", metavar="N", help="parameters of the model, such as 124M; needs --compute")
    own = "your own model: build() returns it and the function of its loss; one step is measured here"
    what.add_argument("--model", metavar="FILE.py:FUNCTION", help=own)
    trace = "timeline of grace (GRACE_TIMELINE) of training with a compressor, such as fp16; needs --compute"
    what.add_argument("--trace", type=Path, metavar="FILE", help=trace)
    dtype = "type of the gradients, with --params and --trace (default: float32); --model has its own"
    add("--dtype", choices=DTYPES, help=dtype)
    add("--compute", metavar="TIME", help="time of a step without exchange on one rank, such as 250ms")
    ranks = "numbers of ranks, or a range such as 2:16384 in powers of two (default: 2:64)"
    add("--ranks", nargs="+", default=["2:64"], metavar="N", help=ranks)
    add("--nodes", metavar="NxR", help="nodes with R ranks each in place of --ranks, such as 128x8")
    add(
        "--link",
        default="10gbit",
        metavar="RATE[:LATENCY]",
        help="link of a node, such as 10gbit:50us (default: 10gbit)",
    )
    kinds = "how ranks add gradients: in a ring as Gloo, or a tree as NCCL and MPI for many ranks (default: ring)"
    add("--allreduce", choices=get_args(Allreduce), default="ring", help=kinds)
    add("--inside", default="100gbit", metavar="RATE", help="link within a node (default: 100gbit)")
    add_variants(parser, " ".join(COMPRESSORS))
    kind = "optimizer of the training, on which the risk of a method depends: adam stands for its kind (default: adam)"
    add("--optimizer", choices=tuple(OPTIMIZERS), default="adam", help=kind)
    add("--accumulate", type=int, default=1, metavar="N", help="backward passes per exchange (default: 1)")
    add("--every", type=int, default=1, metavar="N", help="optimizer steps per exchange, as in local SGD (default: 1)")
    speed = "codecs run so many times as fast as on a core of this machine, as on a GPU (default: 1)"
    add("--codec-speed", type=float, default=1.0, metavar="FACTOR", help=speed)
    add("--json", type=Path, metavar="FILE", help="write everything as JSON")
    add("--html", type=Path, metavar="FILE", help="write one page with figures")
    parser.set_defaults(run=run_what_if)


def run_what_if(args: argparse.Namespace) -> int:
    """Predict, print and write. Return the exit status. Raises ConfigError for wrong arguments."""
    for option in ("accumulate", "every", "codec_speed"):
        if not getattr(args, option) > 0:
            raise ConfigError(f"--{option.replace('_', '-')}: expected more than 0, received {getattr(args, option)}.")
    machines = _machines(args)
    for path in filter(None, (args.json, args.html)):
        check_writable(path)
    # Local imports: NumPy reads the number of threads when it is imported.
    from grace.bench.frameworks import set_threads, set_up

    # The model of a user has the threads of its training, and codecs have one.
    value = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    threads = int(value) if value.isdigit() and int(value) else len(os.sched_getaffinity(0))
    set_threads(1)
    import_own(args.modules)
    given = parse_variants(args.compressors or COMPRESSORS + BY_NODES * bool(args.nodes))
    always = [Variant(name) for name in ALWAYS]
    variants = list({variant.label: variant for variant in (*always, *given)}.values())
    model = _model(args, threads)
    from grace.advice.cost import FIGURES, SIZES, Codecs
    from grace.advice.kept import kept_here

    framework = set_up("numpy", "cpu", 1, True)
    kept = kept_here(FIGURES, framework=framework.name, native=framework.native, elements=list(SIZES))
    codecs = Codecs(framework, kept=kept)
    begin = time.perf_counter()
    optimizer = OPTIMIZERS[args.optimizer]
    answer = answer_of(model, variants, machines, codecs, optimizer, args.accumulate, args.every, args.codec_speed)
    print("\n".join(lines(answer)), flush=True)
    took = f"{len(machines) * len(variants)} steps predicted in {time.perf_counter() - begin:.1f} s"
    where = f"in {kept.path}; delete it to measure again" if not kept.fault else f"nowhere ({kept.path}: {kept.fault})"
    print(f"{took}; times of codecs are kept {where}")
    if args.json:
        args.json.write_text(json.dumps(to_dict(answer), indent=1) + "\n", encoding="utf-8")
    if args.html:
        from grace.advice.page import page

        args.html.write_text(page(answer), encoding="utf-8")
    return 0


def answer_of(
    model: Model,
    variants: Sequence[Variant],
    machines: Sequence[Machine],
    codecs: Any,
    optimizer: Optimizer,
    backwards: int = 1,
    every: int = 1,
    faster: float = 1.0,
) -> Answer:
    """Return the answer for a model, with the last machine as the one of the rows."""
    steps = {
        machine.ranks: {
            variant.label: _step(model, variant, machine, codecs, backwards, every, faster) for variant in variants
        }
        for machine in machines
    }
    predictions = {
        machine.ranks: {label: predict(step, machine) for label, step in steps[machine.ranks].items()}
        for machine in machines
    }
    last = machines[-1]
    dense = remembered(steps[last.ranks]["none"])
    rows = []
    for variant in variants:
        step, without = steps[last.ranks][variant.label], variant.label == "none"
        error = 0.0 if without else codecs.of(make_config(variant.config()), _ranks_of(last)).error
        risk = risk_of(variant.config(), error, [optimizer])
        even = None if without else break_even(step, dense, last)
        needed = tuple(bandwidth_for(step, last, share) for share in SHARES)
        rows.append(Row(variant.label, predictions[last.ranks][variant.label], error, risk, even, needed))
    knee = next((each for each in machines if predictions[each.ranks]["none"].utilisation < KNEE), None)
    return Answer(model, last, rows, steps[last.ranks], predictions, knee, optimizer, faster, codecs.when)


def _step(
    model: Model, variant: Variant, machine: Machine, codecs: Any, backwards: int, every: int, faster: float
) -> Step:
    from grace.advice.cost import buckets, ddp_buckets

    passes = model.passes
    found: Sequence[Bucket]
    if variant.label == "none":
        found = ddp_buckets(model.specs, passes.ready)
    else:
        config, ranks = make_config(variant.config()), _ranks_of(machine)
        found = buckets(model.specs, config, ranks, codecs.of(config, ranks).faster(faster), passes.ready)
    return Step(passes.forward, passes.backward, 0.0, tuple(found), backwards=backwards, every=every)


def _ranks_of(machine: Machine) -> Ranks:
    return Ranks(machine.ranks, machine.local_size)


# --- arguments --------------------------------------------------------------------------------------------------------


def _machines(args: argparse.Namespace) -> list[Machine]:
    link, inside = _link(args.link, "--link", LATENCY), _link(args.inside, "--inside", INSIDE.latency)
    if args.nodes:
        found = re.fullmatch(r"(\d+)x(\d+)", args.nodes)
        if not found or not int(found[1]) or not int(found[2]):
            raise ConfigError(f"--nodes: expected NODESxRANKS, such as 128x8, received '{args.nodes}'.")
        nodes, local = int(found[1]), int(found[2])
        if nodes * local < 2:
            raise ConfigError(
                f"--nodes: expected at least 2 ranks in all, received '{args.nodes}'; one rank exchanges nothing."
            )
        counts = [n for n in _powers(1, nodes) if n * local > 1]
        return [Machine(n * local, link, local, inside, allreduce=args.allreduce) for n in counts]
    return [Machine(n, link, 1, inside, allreduce=args.allreduce) for n in _ranks(args.ranks)]


def _ranks(given: Sequence[str]) -> list[int]:
    found: set[int] = set()
    for text in given:
        first, colon, last = text.partition(":")
        if not first.isdigit() or (colon and not last.isdigit()) or int(first) < 2:
            raise ConfigError(f"--ranks: expected numbers from 2 on, or a range such as 2:16384, received '{text}'.")
        if colon and int(last) < int(first):
            raise ConfigError(
                f"--ranks: expected a range that begins with its smaller number, received '{text}'; write "
                f"'{max(2, int(last))}:{first}'."
            )
        found.update(_powers(int(first), int(last)) if colon else [int(first)])
    return sorted(found)


def _powers(first: int, last: int) -> list[int]:
    """Return first, and its products with powers of two below last, and last."""
    found = []
    while first < last:
        found.append(first)
        first *= 2
    return [*found, last]


def _link(text: str, option: str, usual: float) -> Link:
    """Return the link of an argument; `usual` is its latency if the text names none."""
    bandwidth, _, latency = text.partition(":")
    bits = rate_of(bandwidth, option)
    if bits is None:
        raise ConfigError(f"{option}: expected a rate such as 10gbit, received '{text}'.")
    return Link(bits / 8, _seconds(latency, option) if latency else usual)


def _seconds(text: str, option: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text)
    if not found:
        raise ConfigError(f"{option}: expected a time such as 50us, 250ms or 1.5s, received '{text}'.")
    return float(found[1]) * _UNITS[found[2]]


def _model(args: argparse.Namespace, threads: int) -> Model:
    compute = _seconds(args.compute, "--compute") if args.compute else None
    if args.model:
        if args.dtype:
            raise ConfigError("--dtype is for --params and --trace, and a --model has its own; leave it out.")
        return _own(args.model, compute, threads)
    dtype = args.dtype or DTYPES[0]
    option = "--params" if args.params else "--trace"
    if compute is None:
        raise ConfigError(f"{option} needs --compute, the time of a step without exchange on one rank, such as 250ms.")
    if args.trace:
        return _traced(args.trace, compute, dtype)
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBG]?)", args.params.upper())
    numel = round(float(found[1]) * _SUFFIXES.get(found[2], 1)) if found else 0
    if numel < 1:
        raise ConfigError(f"--params: expected a number of parameters, such as 124M, received '{args.params}'.")
    specs = _tensors([TENSOR] * (numel // TENSOR) + [numel % TENSOR], dtype)
    return Model(f"{args.params} parameters", specs, assumed(specs, compute))


def _tensors(numels: Sequence[int], dtype: str) -> list[TensorSpec]:
    shapes = [(2048, n // 2048) if n % 2048 == 0 else (n, 1) for n in numels if n]
    return [TensorSpec(f"tensor {i}", shape, dtype) for i, shape in enumerate(shapes)]


def _own(text: str, compute: float | None, threads: int) -> Model:
    """Return a model of the user; if `compute` is None, its passes are measured with so many threads."""
    from grace.bench.step.own import check_model, load_builder

    if ":" not in text:
        raise ConfigError(f"--model: expected FILE.py:FUNCTION, such as train.py:build, received '{text}'.")
    check_model(text)
    model, loss = load_builder(text)()
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"--model: expected a module of PyTorch, received {type(model).__name__}.")
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    specs = [TensorSpec(name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in named]
    if not named:
        raise ConfigError("--model: expected a model with parameters to train, received one without; unfreeze some.")
    if compute is not None:
        return Model(text, specs, assumed(specs, compute))
    torch.set_num_threads(threads)
    passes, device = measured(model, loss), named[0][1].device
    torch.set_num_threads(1)
    on_cpu = f"{threads} thread{'s' if threads > 1 else ''} of this CPU"
    return Model(text, specs, passes, on_cpu if device.type == "cpu" else str(device))


def _traced(path: Path, compute: float, dtype: str) -> Model:
    """Return the model of a timeline: a tensor per bucket, as large as its gradients together."""
    try:
        events = json.loads(path.read_text(encoding="utf-8"))
        found = {e["tid"]: e["args"]["dense_bytes"] for e in events if e.get("name") == "send"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--trace: '{path}' is not a timeline of grace ({type(error).__name__}: {error}); write one with "
            "GRACE_TIMELINE=FILE."
        ) from None
    if not found:
        raise ConfigError(
            f"--trace: '{path}' shows no gradients. Without compression, DDP and Horovod exchange them, and grace does "
            "not see their sizes; record a step with a compressor, such as fp16."
        )
    itemsize = ITEMSIZE[dtype]
    specs = _tensors([max(1, nbytes // itemsize) for _, nbytes in sorted(found.items(), reverse=True)], dtype)
    return Model(path.name, specs, assumed(specs, compute))


# --- outputs ----------------------------------------------------------------------------------------------------------


def lines(answer: Answer) -> list[str]:
    """Return the sentence, what was assumed, the table, the bandwidths, and how well predictions were checked."""
    machine = answer.machine
    numel = sum(spec.numel for spec in answer.model.specs)
    nodes = f"{machine.ranks // machine.local_size} nodes of {machine.local_size}, " if machine.local_size > 1 else ""
    head = ("method", "step", "band", "x none", "MB/step", "efficiency", "error", "break-even", "risk")
    cells = [
        (
            row.label,
            _time(row.prediction.seconds),
            "{} to {}".format(*map(_time, ACCURACY.band(row.prediction.seconds))),
            f"{answer.speedup(row):.2f}",
            f"{row.prediction.sent / 1e6:.2f}",
            f"{row.prediction.utilisation:.0%}",
            f"{row.error:.2g}",
            "-" if row.label == "none" else pays_below(row.break_even),
            RISKS[row.risk.grade],
        )
        for row in answer.rows
    ]
    where = "; with GPUs, give --codec-speed" if answer.faster == 1 else f", divided by {answer.faster:g}"
    needs = [("link for", *(f"{share:.0%}" for share in SHARES))]
    needs += [(row.label, *("-" if each is None else rate(each) for each in row.bandwidths)) for row in answer.rows]
    gentle = [row.label for row in answer.rows if row.risk.grade <= LOW]
    ranks = [("ranks", "none", "fastest", "step", "x none")]
    for n, found in answer.by_ranks.items():
        label = min(gentle, key=lambda each: found[each].seconds)
        dense, other = found["none"].seconds, found[label].seconds
        ranks.append((f"{n:,}", _time(dense), label, _time(other), f"{dense / other:.2f}"))
    return [
        answer.sentence,
        *_about_rings(answer),
        "",
        f"{answer.model.name}, {numel / 1e6:.1f} M parameters in {answer.model.dtypes}, "
        f"{_time(answer.model.compute)} of compute per step{answer.model.where}, "
        f"{machine.ranks} ranks, {nodes}{rate(machine.link.bandwidth)} and {machine.link.latency * 1e6:.0f} us per "
        f"message, allreduces in a {machine.allreduce}",
        *align([head, *cells], right=range(1, len(head) - 1)),
        "",
        "The link that a share of compute in the step needs:",
        *align(needs, right=range(1, len(SHARES) + 1)),
        "",
        "By the number of ranks, with the fastest method of no or low risk:",
        *align(ranks, right=(0, 1, 3, 4)),
        "",
        f"Times of codecs: one core of this CPU, {answer.when}{where}.",
        *ACCURACY.lines,
        "Without that calibration, as here, steps took {:.1f} to {:.1f} times as long as predicted: ".format(
            *WHAT_IF.steps
        )
        + "the ranks shared their cores with the transport.",
        "Not known: whether the model learns as well (docs/choose.md, docs/adam.md), waits for the slowest rank, other "
        "traffic on the link, and what the transport takes of the processor.",
    ]


def _about_rings(answer: Answer) -> list[str]:
    """Return what to know if most of the communication is the latency of rings."""
    in_trees = predict(answer.steps["none"], dataclasses.replace(answer.machine, allreduce="tree"))
    in_rings = answer.dense.prediction
    if in_rings.exposed <= 2 * in_trees.exposed:
        return []
    return [
        f"Most of it is latency: in a ring as Gloo's, {2 * (answer.machine.size('all') - 1):,} messages follow each "
        f"other. In trees, as NCCL and MPI use, a step without compression takes {_time(in_trees.seconds)}: give "
        "--allreduce tree."
    ]


def to_dict(answer: Answer) -> dict[str, Any]:
    """Return the answer as an object for JSON; times in seconds, bandwidths in bytes per second."""
    machine = answer.machine

    def fields_of(found: Prediction) -> dict[str, float]:
        low, high = ACCURACY.band(found.seconds)
        derived = {"exposed": found.exposed, "utilisation": found.utilisation, "low": low, "high": high}
        return {**dataclasses.asdict(found), **derived}

    return {
        "sentence": answer.sentence,
        "model": answer.model.name,
        "parameters": sum(spec.numel for spec in answer.model.specs),
        "dtypes": answer.model.dtypes,
        "compute": answer.model.compute,
        "machine": dataclasses.asdict(machine),
        "optimizer": answer.optimizer.name,
        "codec_speed": answer.faster,
        "codecs": answer.when,
        "best": answer.best.label,
        "rows": [
            {
                "method": row.label,
                "speedup": answer.speedup(row),
                "speedup_band": band_of_speedup(answer.speedup(row)),
                **fields_of(row.prediction),
                "error": row.error,
                "risk": RISKS[row.risk.grade],
                "reason": row.risk.reason,
                "break_even": row.break_even,
                "bandwidths": dict(zip(map(str, SHARES), row.bandwidths, strict=True)),
            }
            for row in answer.rows
        ],
        "by_ranks": {
            str(n): {label: fields_of(found) for label, found in methods.items()}
            for n, methods in answer.by_ranks.items()
        },
        "accuracy": ACCURACY._asdict(),
        "accuracy_without_calibration": WHAT_IF._asdict(),
    }


def _time(seconds: float) -> str:
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{seconds * 1e3:.0f} ms"
        if seconds >= 0.01
        else f"{seconds * 1e3:.1f} ms"
    )
