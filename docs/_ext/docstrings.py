"""Docstrings for Sphinx: they are plain text with code in backticks, and Sphinx reads reStructuredText."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

CODE = re.compile(r"(``[^`]+``|`[^`]+`)")
NAME = re.compile(r"[A-Za-z_][\w.]*(\(\))?")


def inline(text: str) -> str:
    """Return text with escaped signs; names in backticks become references, other code becomes literals."""
    parts = []
    for part in CODE.split(text):
        code = " ".join(part.strip("`").split())
        if not part.startswith("`"):
            parts.append(re.sub(r"([\\*|_<])", r"\\\1", part))
        elif NAME.fullmatch(code):
            parts.append(f":py:obj:`{code}`")
        else:
            parts.append(f"``{code}``")
    return "".join(parts)


def restructured(text: str) -> str:
    """Return a docstring as reStructuredText: formulas as math, indented paragraphs and sessions as code."""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        lines = paragraph.splitlines()
        if paragraph.startswith("Formula: "):
            formula = " ".join(paragraph.removeprefix("Formula: ").split())
            paragraphs.append(f".. math:: {formula}")
        elif paragraph.startswith(">>> "):
            paragraphs.append(paragraph)
        elif any(line.startswith(" ") for line in lines) and not paragraph.lstrip().startswith("- "):
            paragraphs.append("::\n\n" + "\n".join(f"    {line}" for line in lines))
        else:
            paragraphs.append(inline(paragraph))
    return "\n\n".join(paragraphs)


def process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = restructured("\n".join(lines).strip()).splitlines() + [""]


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
