"""Write the rows of a table of codecs from results of `grace bench codec`.

    grace bench codec --numel 25M --framework torch --json torch.json     # and the other frameworks, and --numel 1000
    python benchmarks/codec_table.py docs/results/codec.json "Intel Xeon with AVX-512" torch.json numpy.json ...

The second argument is the processor, because its name does not say which instructions the kernels use. The table keeps
its columns and aims. Its date, versions and commands become those of the results.
"""

import json
import re
import sys
import time
from pathlib import Path

import tables

# From this number of elements on, a result is in copies of the gradient, and below in microseconds.
LARGE = 1_000_000
TITLES = {"python": "Python", "numpy": "NumPy", "torch": "PyTorch", "tensorflow": "TensorFlow"}


def format_number(value):
    """Return a number with three significant digits."""
    rounded = float(f"{value:.3g}")
    return int(rounded) if rounded == int(rounded) else rounded


path, processor, *names = sys.argv[1:]
path, results = Path(path), [row for name in names for row in json.loads(Path(name).read_text())]
data = json.loads(path.read_text())
old = {row["method"]: row for row in data["rows"]}
rows: dict[str, dict] = {}
for result in results:
    row = rows.setdefault(result["compressor"], {"method": result["compressor"]})
    framework = result["framework"]
    if result["numel"] < LARGE:
        row[f"small_{framework}"] = round(1e6 * result["median_s"])
        continue
    row[framework] = format_number(result["ratio_to_copy"])
    row["elements"] = result["numel"]
    if framework == "torch":
        row["gb_per_s"] = format_number(result["gb_per_s"])
        if result["break_even_gbit_per_s"]:
            row["break_even"] = format_number(result["break_even_gbit_per_s"])
copies = sorted(1000 * result["copy_s"] for result in results if result["numel"] >= LARGE)
versions = {key: value for result in results for key, value in result["machine"].items() if key in TITLES}
data |= {
    "machine": f"{processor}, 2 cores, CPU only",
    "date": time.strftime("%Y-%m-%d"),
    "versions": {title: re.match(r"[\d.]+", versions[key])[0] for key, title in TITLES.items() if key in versions},
    "copy_ms": [round(copies[len(copies) // 10]), round(copies[-1 - len(copies) // 10])],
    "commands": list(dict.fromkeys(result["command"].split(" --json")[0] for result in results)),
    "rows": [
        {key: row[key] for key in data["columns"] if row.get(key) is not None}
        for row in ({"aim": old.get(method, {}).get("aim"), **row} for method, row in rows.items())
    ],
}
tables.save(path, data)
