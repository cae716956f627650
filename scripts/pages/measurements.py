"""Measurements in docs/results: what a file holds, and the table that a page shows of it.

A file says what was measured, on which machine, with which versions and by which commands. `columns` gives each key of
the rows a title and a format; a column with `speedup_of`, `share_of_dense` or `mean_of` is computed from others.
Speed-ups are over the method that `baseline` names, by default plain Horovod.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from registry import ROOT, Block, kind, wrapped
from registry import row as table_row

RESULTS = ROOT / "docs" / "results"


@cache
def load(name: str) -> dict[str, Any]:
    """Return the measurements of docs/results/<name>.json."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def rows_of(name: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a file of measurements by method."""
    return {row["method"]: row for row in load(name)["rows"]}


def value_of(data: dict[str, Any], row: dict[str, Any], key: str) -> Any:
    """Return what a row has in a column, computed where the column says so; None where it has nothing."""
    column = data["columns"][key]
    if source := column.get("speedup_of"):
        baseline = next(r for r in data["rows"] if r["method"] == data.get("baseline", "horovod"))
        return baseline[source] / row[source] if source in row else None
    if source := column.get("share_of_dense"):
        return 100 * row[source] / data["dense_bytes"] if source in row else None
    if sources := column.get("mean_of"):
        return sum(row[source] for source in sources) / len(sources)
    return row.get(key)


def number(value: float, form: str) -> str:
    """Return a number by a format; a number as format means significant digits, with two decimals at most."""
    if not form.isdigit():
        return f"{value:{form}}"
    decimals = int(form) - len(str(int(abs(value))))
    return f"{value:,.{min(2, max(0, decimals))}f}"


def cell(data: dict[str, Any], row: dict[str, Any], key: str) -> str:
    """Return a column of a row as text: ranges as "a to b", and in bold what is above its goal."""
    value, column = value_of(data, row, key), data["columns"][key]
    if value is None or value == "":
        return ""
    if key == "method":
        return f"`{value}`"
    if isinstance(value, list):
        return (" to " if column.get("range") else ", ").join(map(str, value))
    if isinstance(value, str):
        return value
    text = number(value, column.get("format", ","))
    if row.get("approximate") and key.endswith("_bytes"):
        text = f"about {text}"
    goal = column.get("goal")
    goal = row.get(goal) if isinstance(goal, str) else goal
    return f"**{text}**" if isinstance(goal, (int, float)) and value > goal else text


def table(name: str, keys: list[str]) -> list[str]:
    """Return the lines of a Markdown table of all rows, with these columns."""
    data = load(name)
    columns = {key: data["columns"][key] for key in keys or data["columns"]}
    words = {key for key in columns if isinstance(value_of(data, data["rows"][0], key), (str, list))}
    align = ["---" if key in words and not data["columns"][key].get("range") else "---:" for key in columns]
    lines = [[column["title"] for column in columns.values()], align]
    lines += [[cell(data, row, key) for key in columns] for row in data["rows"]]
    return [table_row(*line) for line in lines]


def origin(name: str, block: Block) -> list[str]:
    """Return the lines of Markdown that say where measurements come from; the commands are in the file."""
    data = load(name)
    versions = ", ".join(f"{what} {version}" for what, version in data["versions"].items())
    when = f"{data['date']}. " if "date" in data else ""
    link = f"[{name}.json]({block.link(f'docs/results/{name}.json')})"
    return wrapped(f"{data['what']}. {data['machine']}; {versions}. {when}Data and commands: {link}")


@kind("measurements")
def measured(block: Block) -> list[str]:
    """Return the table of docs/results/NAME.json, and where it comes from.

    Further arguments choose columns. Where several tables of a page show one file, the last one says its origin.
    """
    name, *keys = block.arguments
    if unknown := [key for key in keys if key not in load(name)["columns"]]:
        columns = ", ".join(load(name)["columns"])
        raise SystemExit(f"{block.page}: {name}.json has no column {unknown[0]!r}; expected some of {columns}.")
    again = re.search(rf"^<!-- begin measurements {name}\b", block.after, re.MULTILINE)
    return table(name, keys) if again else [*table(name, keys), "", *origin(name, block)]
