"""Write a table of measurements to a JSON file, from which the documents take it, or print it."""

import json
import os
import platform
import sys
import time

from grace.machine import commit, processor

# The modules whose versions a table names, if its benchmark has imported them.
TITLES = {"numpy": "NumPy", "torch": "PyTorch", "sklearn": "scikit-learn"}


def write(path, what, columns, rows, **more):
    """Write rows, what they measure, and the commit, machine, date, versions and command that gave them.

    `columns` maps the keys of rows to titles and formats; `more` has further entries of the file.
    """
    versions = {title: sys.modules[name].__version__ for name, title in TITLES.items() if name in sys.modules}
    data = {
        "what": what,
        "machine": f"{processor()}, CPU only",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"Python": platform.python_version(), **versions},
        "commits": [commit()],
        "commands": [f"python benchmarks/{os.path.basename(sys.argv[0])} {path}"],
        **more,
        "columns": columns,
        "rows": rows,
    }
    save(path, data)


def renew(path, rows, order):
    """Replace the rows of some methods in a file, which keeps the rest; `order` sorts the rows.

    Its `commits` are those that any of its rows come from.
    """
    with open(path, encoding="utf-8") as file:
        data = json.load(file)
    methods = {row["method"] for row in rows}
    kept = [row for row in data["rows"] if row["method"] not in methods]
    data["rows"] = sorted(kept + rows, key=order)
    data["commits"] = list(dict.fromkeys([*data["commits"], commit()]))
    save(path, data)


def format_markdown(columns, rows):
    """Return rows as the text of a Markdown table, with aligned columns; `columns` as for `write`.

    A row without the key of a column has an empty cell there.
    """
    texts = {}
    for key, column in columns.items():
        cells = [f"{row[key]:{column.get('format', '')}}" if key in row else "" for row in rows]
        width = max(map(len, [column["title"], *cells]))
        is_text = isinstance(rows[0].get(key), str)
        line = "-" * width if is_text else "-" * (width - 1) + ":"
        texts[key] = [f"{cell:{'<' if is_text else '>'}{width}}" for cell in (column["title"], line, *cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*texts.values(), strict=True))


def save(path, data):
    """Write a table to its file, with a line for each column and row, and of any other list or table of entries."""
    lines = []
    for key, entry in data.items():
        text = json.dumps(entry, ensure_ascii=False)
        if entry and isinstance(entry, list) and isinstance(entry[0], dict):
            text = "[\n" + ",\n".join(f"    {json.dumps(row, ensure_ascii=False)}" for row in entry) + "\n  ]"
        elif entry and isinstance(entry, dict) and all(isinstance(inner, dict) for inner in entry.values()):
            inner = (
                f"    {json.dumps(name)}: {json.dumps(column, ensure_ascii=False)}" for name, column in entry.items()
            )
            text = "{\n" + ",\n".join(inner) + "\n  }"
        lines.append(f'  "{key}": {text}')
    with open(path, "w", encoding="utf-8") as file:
        file.write("{\n" + ",\n".join(lines) + "\n}\n")
