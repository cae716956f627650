"""Train what docs/results/study lacks of the study, and write all results into it: a file per task, a line per run.

    python benchmarks/study.py docs/results/study
    python benchmarks/study.py docs/results/study --pack

The runs are those of `grace report` that `list_parts` returns. The folder of `grace report` is made from the files, so
the study goes on where it was stopped, on another machine as well. Stop it at any time: it writes what it has. With
--pack, it trains nothing, and adds to the files what is in the folder.
"""

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import tables

import grace
from grace.bench.command import INTERRUPTED
from grace.core.config.registry import compressors
from grace.core.transport.collectives import KINDS
from grace.report.cell import Cell, read, write
from grace.report.methods import chosen, methods
from grace.report.task import MODULES, find_task

# What every task trains first: the recommended methods, and the usual one of every other kind.
MAIN = ("qsgd", "blockwise", "eden", "powersgd", "topk", "topk 10 %", "terngrad", "efsignsgd")
# What the page on communicators compares by one compression and by two, beginning with the finest; and with 8 bits for
# the mean.
TWICE = (
    "qsgd", "qsgd:quantum_num=15", "qsgd:quantum_num=7", "qsgd:quantum_num=3", "qsgd:quantum_num=1", "blockwise",
    "eden", "eden:bits=2", "eden:bits=1", "natural", "terngrad", "efsignsgd", "dgc", "topk:compress_ratio=0.5",
    "topk:compress_ratio=0.1", "topk:compress_ratio=0.02", "topk",
)  # fmt: skip
FINER = ':communicator={"name":"two_shot","second":"qsgd"}'
# Thresholds that a probe chooses, or that follow what is sent, for the elements that topk sends.
VOLUME = tuple(f"hardthreshold{more}" for more in ("", ":tune_steps=20", ":controlled=true"))
# Quantizers so coarse that feedback matters, by one compression as in its paper, and the same with feedback.
COARSE = {f"qsgd:quantum_num={n}:communicator=allgather": ":memory=residual" for n in (3, 1)}
# Gradients, updates of each step, and rare syncs, in the words of the page on outer steps.
_NESTEROV = '"lr":0.7,"momentum":0.9,"nesterov":true'
OUTER = {
    "gradients": "none", "updates": "none:outer=update",
    "gradients, `topk`": "topk", "updates, `topk`": "topk:outer=update",
    "gradients, `efsignsgd`": "efsignsgd", "updates, `efsignsgd`": "efsignsgd:outer=update",
    "mean of the weights every 10 steps": 'none:outer={"every":10}',
    "DiLoCo every 10 steps": f'none:outer={{"every":10,{_NESTEROV}}}',
    "DiLoCo every 25 steps": f'none:outer={{"every":25,{_NESTEROV}}}',
    "SparseLoCo every 25 steps": "topk:compress_ratio=0.015625:beta=0.95:communicator=allgather:reduce=senders"
    ':clip=median_norm:outer={"every":25,"optimizer":"sgd"}',
}  # fmt: skip
# What `grace report` says of the origin of a run.
ORIGIN = ("command", "version", "commit", "machine", "system", "versions")
# What results have per kind of collective; the files leave out zeros.
SPARSE = ("collectives", "sends")
# Significant digits of results: what a table shows has fewer.
DIGITS = 5


def list_parts():
    """Return the parts of the study as arguments of `grace report`, the most important one first."""
    plain = [label for label, method in methods().items() if not (method.switched or method.equal)]
    others = [name for name, _ in compressors.ready() if name not in methods()]
    twice = [f"{name}:communicator={way}" for name in TWICE for way in ("allgather", "two_shot")]
    twice += [name + FINER for name in ("topk", "efsignsgd")]
    return (
        ("--tasks", *MODULES, "--ranks", "4", "--methods", *MAIN),
        ("--tasks", "mf", "mf_adam", "--ranks", "4", "--methods", *others),
        ("--tasks", "mf", "mf_adam", "--ranks", "4", "--methods", *twice, *VOLUME, *(a + b for a, b in COARSE.items())),
        ("--tasks", "mf", "mf_adam", "ncf", "--ranks", "2", "8", "--methods", *MAIN),
        ("--tasks", "mf", "mf_adam", "ncf", "cnn", "transformer", "--ranks", "4"),
        ("--tasks", "mf", "mf_adam", "ncf", "transformer", "--ranks", "4", "--methods", *OUTER.values()),
        ("--tasks", "resnet", "lstm", "unet", "--ranks", "4", "--seeds", "0", "--methods", *plain),
    )


@cache
def method_of(label):
    """Return the method of a label, or None if grace has no such method any more."""
    if label in methods():
        return methods()[label]
    try:
        return chosen([label])[-1]
    except grace.errors.GraceError:
        return None


@cache
def setting_of(task, label, ranks):
    """Return today's settings of the cells that differ in their seeds; None if the task or the method is unknown."""
    method = method_of(label)
    if method is None or task not in MODULES:
        return None
    try:
        return Cell(task, method, ranks, 0, find_task(task).steps).setting()
    except grace.errors.GraceError:
        return None


def is_current(found):
    """Return whether a result has today's settings. Defaults may have changed since, or the length of a run."""
    cell, setting = found["cell"], setting_of(*(found["cell"][key] for key in ("task", "method", "ranks")))
    return setting is not None and found["setting"] == {
        **setting, "config": {**setting["config"], "seed": cell["seed"]}
    }  # fmt: skip


def load(path):
    """Return the results of all files in a folder."""
    return [
        found for file in sorted(path.glob("*.json")) for found in load_results(json.loads(file.read_text("utf-8")))
    ]


def load_results(data):
    """Return the results of a file as `grace report` keeps them: what a configuration lacks has its default."""
    found = []
    for line in data["cells"]:
        line = dict(line)
        cell = {key: line.pop(key) for key in ("task", "method", "ranks", "seed")}
        try:
            config = grace.make_config({**data["configs"][cell["method"]], "seed": cell["seed"]}).to_dict()
        except grace.errors.GraceError:
            # grace no longer has an option.
            config = data["configs"][cell["method"]]
        setting = {"config": json.loads(json.dumps(config)), **data["settings"][line.pop("setting")]}
        line |= {key: {**dict.fromkeys(KINDS, 0.0), **line[key]} for key in SPARSE}
        found.append({"cell": cell, "setting": setting, **line, **data["origins"][line["origin"]]})
        del found[-1]["origin"]
    return found


def pack_task(found):
    """Return what a file holds of the results of a task. What many of them share stands in it once."""
    origins, configs, settings, cells = {}, {}, {}, []
    for result in sorted(found, key=_sort_key):
        origin = {key: result[key] for key in ORIGIN}
        origin["command"] = _without_folder(origin["command"])
        name = _put_named(origin, origins)
        config = {key: value for key, value in result["setting"]["config"].items() if key != "seed"}
        configs[result["cell"]["method"]] = config
        setting = {key: value for key, value in result["setting"].items() if key != "config"}
        rest = {key: _round(value) for key, value in result.items() if key not in ("cell", "setting", *ORIGIN)}
        rest |= {key: {kind: value for kind, value in rest[key].items() if value} for key in SPARSE}
        cells.append({**result["cell"], "origin": name, "setting": _put_named(setting, settings), **rest})
    return {
        "what": "Runs of grace report, by task, method, number of ranks and seed",
        "commands": ["python benchmarks/study.py docs/results/study"],
        "origins": origins,
        "configs": configs,
        "settings": settings,
        "cells": cells,
    }


def _put_named(value, table):
    """Put a value into a table, by a name that depends on it, and return the name."""
    name = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:6]
    table[name] = value
    return name


def _sort_key(result):
    cell, labels = result["cell"], list(methods())
    place = labels.index(cell["method"]) if cell["method"] in labels else len(labels)
    return place, cell["method"], cell["ranks"], cell["seed"]


def _without_folder(command):
    """Return a command without its --output, which names a folder of one machine."""
    words = shlex.split(command)
    if "--output" in words:
        at = words.index("--output")
        del words[at : at + 2]
    return shlex.join(words)


def _round(value):
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _round(inner) for key, inner in value.items()}
    return [_round(inner) for inner in value] if isinstance(value, list) else value


def unpack(path, folder):
    """Write the results of the files of a folder into that of `grace report`, except for those that it has."""
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    for found in load(path):
        method = method_of(found["cell"]["method"])
        if method and is_current(found):
            cell = _cell(found["cell"], method)
            kept = read(cell, folder / "cells")
            if kept is None or "error" in kept:
                write(found, folder / "cells" / cell.file)


def pack(folder, path):
    """Write the results in the folder of `grace report` into files: those without error, and of today's settings."""
    found = defaultdict(list)
    for file in (folder / "cells").glob("*.json"):
        try:
            key = json.loads(file.read_text(encoding="utf-8"))["cell"]
            place = key["task"], key["method"], key["ranks"]
        except (ValueError, TypeError, LookupError):
            print(f"{file} is damaged; grace report trains its cell again", file=sys.stderr)
            continue
        if setting_of(*place):
            result = read(_cell(key, method_of(key["method"])), folder / "cells")
            if result and "error" not in result:
                found[key["task"]].append(result)
    path.mkdir(parents=True, exist_ok=True)
    for task, of_task in found.items():
        tables.save(path / f"{task}.json", pack_task(of_task))
        print(f"{path / task}.json: {len(of_task)} runs")


def _cell(key, method):
    return Cell(key["task"], method, key["ranks"], key["seed"], find_task(key["task"]).steps)


def main(path, folder, chosen_parts, jobs=None):
    """Train what the files lack of some parts of the study, and write all into them. Return the exit status."""
    unpack(path, folder)
    words = ["--output", str(folder), *(["--jobs", str(jobs)] if jobs else [])]
    status = 0
    try:
        for part in chosen_parts:
            status = max(status, subprocess.run([sys.executable, "-m", "grace", "report", *part, *words]).returncode)
    except KeyboardInterrupt:
        status = INTERRUPTED
    pack(folder, path)
    return status


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, metavar="RESULTS")
    parser.add_argument("--folder", type=Path, default=Path("grace-report"), help="(default: grace-report)")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes that train (default: one per core)")
    parser.add_argument("--pack", action="store_true", help="train nothing")
    args = parser.parse_args()
    sys.exit(main(args.path, args.folder, () if args.pack else list_parts(), args.jobs))
