"""Directives of Sphinx in the comments of a page: plain Markdown does not show them, and the site does.

Formulas are blocks marked `math`, as web pages of repositories show them.

<!-- {toctree}
:hidden:

one_page
-->
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

# For readers of plain Markdown, a page that includes another file has a link to it.
INCLUDE = re.compile(r"^<!-- (\{include\}.*?)\n?-->$.*", re.MULTILINE | re.DOTALL)
# The site shows whole docstrings, of which these blocks are a short form.
NAMES = re.compile(r"^<!-- begin names\b.*?<!-- end names -->\n", re.MULTILINE | re.DOTALL)
MATH = re.compile(r"^```math$", re.MULTILINE)
DIRECTIVE = re.compile(r"^<!-- (\{[a-z-]+\}.*?)\n?-->$", re.MULTILINE | re.DOTALL)


def expanded(text: str) -> str:
    """Return the text of a page with a directive for each comment that holds one."""
    text = NAMES.sub("", INCLUDE.sub(r"```\1\n```\n", text))
    return MATH.sub("```{math}", DIRECTIVE.sub(r"```\1\n```", text))


def read(app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = expanded(source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
