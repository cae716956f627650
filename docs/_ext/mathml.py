"""Formulas as MathML, which browsers render themselves: no script, no fonts, no network."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx

TEXT = re.compile(r"\\text\{([^{}]*)\}")
BAR = re.compile(r"<mo[^>]*>(&#x0007C;|&#x02016;)</mo>")


def mathml(formula: str, display: str) -> str:
    r"""Return a formula of LaTeX as MathML.

    The converter leaves formulas within `\text` as they are, sets bars as operators between two operands,
    and `\sim` as a name.
    """

    def split(match: re.Match[str]) -> str:
        parts = match[1].split("$")
        return "".join(part if index % 2 else f"\\text{{{part}}}" for index, part in enumerate(parts) if part)

    converted = convert(TEXT.sub(split, formula), display=display).replace("<mi>&#x0007E;</mi>", "<mo>&#x0223C;</mo>")
    return BAR.sub(r'<mo stretchy="false" lspace="0" rspace="0">\1</mo>', converted)


def visit_inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def visit_display(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{mathml(node.astext(), "block")}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
