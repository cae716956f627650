"""Write the rows of a table of training steps from results of `grace bench step`.

    grace bench step --link 1gbit --json slow.json       # with the options that the table names as its commands
    grace bench step --link 10gbit --json fast.json
    python benchmarks/step_table.py docs/results/step_torch.json "Intel Xeon with AVX-512" \
        1gbit=slow.json 10gbit=fast.json

Each column takes its unit from its title: ms, s, MB sent, or else the speed-up over the plain baseline.
"""

import json
import sys
import time
from pathlib import Path

import tables


def value(result, title):
    """Return what a result has for a column with this title."""
    unit = title.split(": ")[-1]
    if unit in ("ms", "s"):
        seconds = result["median_s"]
        return round(1000 * seconds) if unit == "ms" else round(seconds, 2)
    if unit.startswith("MB"):
        return round(result["wire_bytes"] / 1e6, 2)
    return round(next(x for key, x in result.items() if key.startswith("speedup_over_")), 2)


path, processor, *given = sys.argv[1:]
data = json.loads(Path(path).read_text())
rows: dict[str, dict] = {}
for column, name in (argument.split("=", 1) for argument in given):
    for result in json.loads(Path(name).read_text()):
        row = rows.setdefault(result["method"], {"method": result["method"]})
        row[column] = value(result, data["columns"][column]["title"])
data |= {"machine": f"{processor}, 2 cores, CPU only", "date": time.strftime("%Y-%m-%d"), "rows": list(rows.values())}
tables.save(path, data)
