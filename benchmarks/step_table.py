"""Write the rows of a table of training steps from results of `grace bench step`.

    grace bench step --link 1gbit --json slow.json       # with the options that the table names as its commands
    grace bench step --link 10gbit --json fast.json
    python benchmarks/step_table.py docs/results/step_torch.json "Intel Xeon with AVX-512" \
        1gbit=slow.json 10gbit=fast.json

A column takes its unit from its title: ms, s, MB sent, or else the speed-up over the plain baseline. Without a column,
a file gives whole rows: of `--account` to step_account.json, and of other models to step_models.json, which keeps the
rows of models and links that are not in the files. The figures of `--memory` need no unit.

    python benchmarks/step_table.py docs/results/step_account.json "Intel Xeon with AVX-512" account.json
    python benchmarks/step_table.py docs/results/step_ddp.json "Intel Xeon with AVX-512" \
        two=two.json mb=two.json four=four.json mb4=four.json
    python benchmarks/step_table.py docs/results/memory.json "Intel Xeon with AVX-512" peak=usual.json once=without.json
"""

import json
import re
import sys
import time
from pathlib import Path

import tables

from grace.bench.variants import Variant

LINKS = {"none": "none", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}


def to_ms(seconds, digits=1):
    """Return milliseconds."""
    return round(1000 * seconds, digits)


def compute_speedup(result):
    """Return the speed-up over the baseline of the run."""
    return round(next(x for key, x in result.items() if key.startswith("speedup_over_")), 2)


def get_value(result, title):
    """Return what a result has for a column with this title."""
    unit = title.split(": ")[-1]
    if "exchange_over_gradients" in result:
        return round(result["exchange_over_gradients"], 2)
    if unit == "ms":
        return round(1000 * result["median_s"])
    if unit == "s":
        return round(result["median_s"], 2)
    if unit.startswith("MB"):
        return round(result["wire_bytes"] / 1e6, 2)
    return compute_speedup(result)


def of_account(result):
    """Return the row of a method whose time was split."""
    parts = {name.lower(): to_ms(seconds) for name, seconds in result["parts_s"].items() if name != "faults"}
    of_step = {"step": to_ms(result["step_s"]), "overhead": to_ms(result["overhead_s"])}
    limits = {"limit": to_ms(result["limit_s"]), "wire": to_ms(result["wire_s"])}
    return {**of_step, "copies": round(result["overhead_copies"], 2), **parts, **limits}


def of_model(results):
    """Return the row of a model behind a link."""
    by_name = {result["method"]: result for result in results}
    times = {name: round(1000 * by_name[name]["median_s"]) for name in ("compute", "horovod")}
    return times | {name: compute_speedup(result) for name, result in by_name.items() if name not in times}


path, processor, *given = sys.argv[1:]
data = json.loads(Path(path).read_text())
rows: dict[tuple, dict] = {}
if "model" in data["columns"]:
    rows = {(row["model"], row["link"]): row for row in data["rows"]}
for argument in given:
    column, _, name = argument.rpartition("=")
    results = json.loads(Path(name).read_text())
    if "model" in data["columns"]:
        key = results[0]["model"], LINKS[results[0]["link"]]
        rows[key] |= of_model(results)
        continue
    for result in results:
        # A baseline has the name of its launcher, and the table has one row for all launchers.
        method = Variant(result["method"].removesuffix("-zero2"), result["options"]).label
        row = rows.setdefault((method,), {"method": method})
        if "exchange_over_gradients" in result and (
            method == "compute" or (result["launcher"] is None and len(row) > 1)
        ):
            # It has no exchange, or another run had the same baseline.
            continue
        if column:
            row[column] = get_value(result, data["columns"][column]["title"])
        elif "parts_s" in result:
            row |= of_account(result)
            compute, copy = result["step_s"] - result["overhead_s"], result["overhead_s"] / result["overhead_copies"]
            what = re.sub(r"exchange \([\d.]+ ms\)", f"exchange ({to_ms(compute)} ms)", data["what"])
            data["what"] = re.sub(r"takes [\d.]+ ms", f"takes {to_ms(copy)} ms", what)
found = [row for row in rows.values() if len(row) > 1]
data |= {"machine": f"{processor}, 2 cores, CPU only", "date": time.strftime("%Y-%m-%d"), "rows": found}
tables.save(path, data)
