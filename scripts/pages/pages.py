"""Write what the pages repeat from data and code: blocks between comments, and figures.

python scripts/pages                    # everything
python scripts/pages docs/choose.md     # only these pages and figures
python scripts/pages --check            # changes nothing; exit status 1 if something is out of date

A block stands between `<!-- begin KIND ARGUMENTS -->` and `<!-- end KIND ARGUMENTS -->`, each on a line of its own. The
function that is registered for the kind returns its lines. A number within a sentence stands between
`<!--=PAGE.NAME-->` and `<!--/-->` (quoted.py).
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

# What these modules register.
import break_even  # noqa: F401
import bytes_table  # noqa: F401
import contents  # noqa: F401
import error_chart  # noqa: F401
import groups  # noqa: F401
import measurements  # noqa: F401
import methods  # noqa: F401
import numpy as np
import outer_runs  # noqa: F401
import outer_tables  # noqa: F401
import quoted
import recommended  # noqa: F401
import reference  # noqa: F401
import report_tasks  # noqa: F401
import step_time  # noqa: F401
import study_findings  # noqa: F401
import study_tables  # noqa: F401
import timeline  # noqa: F401
from PIL import Image
from registry import ROOT, Block, figures, kinds

MARK = re.compile(r"<!-- (begin|end) ([\w-]+)((?: [\w./-]+)*)(?:: [^>]*)? -->")
# Two drawings of one picture may differ by a dot here and there, because processors round differently.
TOLERANCE = 0.002


def pages() -> list[Path]:
    """Return README and the pages of docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def written(page: Path, text: str) -> str:
    """Return the text of a page with all its blocks and quoted numbers written again."""
    lines = text.split("\n")
    done: list[str] = []
    position = 0
    for first, last, name in blocks(page, lines):
        word, *arguments = name.split()
        if word not in kinds:
            raise SystemExit(f"{at(page, first)}: no block is of the kind {word!r}; expected one of {sorted(kinds)}.")
        content = kinds[word](Block(arguments, page, "\n".join(lines[last + 1 :])))
        begin = f"<!-- begin {name}: written by scripts/pages -->"
        done += [*lines[position:first], begin, "", *content, "", lines[last]]
        position = last + 1
    return quoted.filled("\n".join([*done, *lines[position:]]))


def blocks(page: Path, lines: list[str]) -> Iterator[tuple[int, int, str]]:
    """Yield the index of the first and of the last line of each block, and its kind with the arguments."""
    begun: tuple[int, str] | None = None
    for index, line in enumerate(lines):
        mark = MARK.fullmatch(line)
        if not mark:
            continue
        name = mark[2] + mark[3]
        if mark[1] == "begin" and begun is None:
            begun = index, name
        elif mark[1] == "end" and begun and begun[1] == name:
            yield begun[0], index, name
            begun = None
        else:
            raise SystemExit(f"{at(page, index)}: {line} does not match the comment before it.")
    if begun:
        raise SystemExit(f"{at(page, begun[0])}: the block has no <!-- end {begun[1]} -->.")


def at(page: Path, index: int) -> str:
    return f"{page.relative_to(ROOT)}, line {index + 1}"


def same(path: Path, drawn: bytes) -> bool:
    """Return whether a file holds a figure: SVG to the byte, PNG up to a few pixels."""
    if not path.exists():
        return False
    if path.suffix == ".svg":
        return path.read_bytes() == drawn
    old, new = (np.asarray(Image.open(file).convert("L"), np.float32) for file in (path, BytesIO(drawn)))
    return old.shape == new.shape and float(np.mean(np.abs(old - new) > 64)) <= TOLERANCE


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/pages", description="Write the generated parts of the pages.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if something is out of date")
    parser.add_argument("paths", nargs="*", type=Path, help="pages and figures to write; all by default")
    arguments = parser.parse_args()
    # The figures show methods without their memories, of which grace warns.
    logging.getLogger("grace").setLevel(logging.ERROR)
    known = [*figures, *pages()]
    chosen = [path.resolve() for path in arguments.paths] or known
    if unknown := [str(path) for path in chosen if path not in known]:
        parser.error(f"{unknown[0]} is no page, and no figure that this program draws.")
    status = 0
    for path in chosen:
        if path in figures:
            content = figures[path]()
            fresh = same(path, content)
        else:
            old = path.read_bytes()
            content = written(path, old.decode()).encode()
            fresh = content == old
        if fresh:
            continue
        name = path.relative_to(ROOT)
        if arguments.check:
            print(f"{name} is out of date; run: python scripts/pages", file=sys.stderr)
            status = 1
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
            print(f"wrote {name}")
    return status
