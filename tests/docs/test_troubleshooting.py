"""Every text that docs/troubleshooting.md quotes is a text that grace can print."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
# Stands in a template for a value that is known only when the text is printed.
VALUE = "\0"


def templates(source: str) -> list[str]:
    """Return the texts of a module, with VALUE in the place of formatted values."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(v.value) if isinstance(v, ast.Constant) else VALUE for v in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(re.sub(r"%[.\d]*[sdfr]", VALUE, node.value))
    return found


def occurs(text: str, template: str) -> bool:
    """Return whether the template can print the text, with words for its values and at least half of it literal."""
    if VALUE not in template:
        return text in template
    # By place in the template, the most characters so far that were literal.
    places = dict.fromkeys(range(len(template)), 0)
    for character in text:
        following: dict[int, int] = {}
        for place, literal in sorted(places.items()):
            while place < len(template) and template[place] == VALUE:
                if re.match(r"[\w.-]", character):
                    following[place] = max(following.get(place, 0), literal)
                place += 1
            if place < len(template) and template[place] == character:
                following[place + 1] = max(following.get(place + 1, 0), literal + 1)
        places = following
    return any(2 * literal >= len(text) for literal in places.values())


def printed(quote: str, texts: Iterable[str]) -> bool:
    """Return whether one of the texts contains the quote, in which `...` stands for anything."""
    parts = [part for part in quote.split("...") if part.strip()]
    return any(all(occurs(part, text) for part in parts) for text in texts)


def quotes(page: str) -> list[str]:
    """Return the quoted texts in the first column of the page's tables, below its first section heading."""
    rows = re.findall(r"^\| ([^|]*`[^|]*) \|", page.partition("\n## ")[2], re.MULTILINE)
    return [quote for row in rows for quote in re.findall(r"`([^`]+)`", row)]


PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
TEXTS = [text for path in sorted((ROOT / "grace").rglob("*.py")) for text in templates(path.read_text("utf-8"))]


@pytest.mark.parametrize("quote", quotes(PAGE))
def test_quoted_texts_are_printed(quote):
    assert printed(quote, TEXTS), "no text of grace contains it"


def test_a_text_that_grace_does_not_print_is_noticed():
    texts = templates('raise ValueError(f"unknown {kind} \'{name}\'. " "Valid names: none.")\nwarn("waited %.0f s", 3)')
    assert all(printed(quote, texts) for quote in ("unknown compressor '...'", "Valid names", "waited ... s"))
    assert not any(printed(quote, texts) for quote in ("unknown part of '...'", "compressor", "waited ... minutes"))
    assert quotes("| `No` | a |\n\n## Part\n\n| text | use |\n| --- | --- |\n| `a b`, `c` | `d` |\n") == ["a b", "c"]
