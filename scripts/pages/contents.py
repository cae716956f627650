"""The list of the pages that a page leads to."""

from __future__ import annotations

import re

from registry import ROOT, Block, kind

TOCTREE = re.compile(r"<!-- \{toctree\}\n((?::.*\n)*)\n(.*?)\n-->", re.DOTALL)


@kind("contents")
def contents(block: Block) -> list[str]:
    """Return a list of the pages of the toctree that follows, which the site shows in its sidebar."""
    tree = TOCTREE.search(block.after)
    if not tree:
        raise SystemExit(f"{block.page.relative_to(ROOT)}: no <!-- {{toctree}} follows the block of contents.")
    pages = [(block.page.parent / f"{name}.md").resolve() for name in tree[2].split("\n")]
    return [f"- [{title(page.read_text(encoding='utf-8'))}]({block.link(str(page))})" for page in pages]


def title(text: str) -> str:
    """Return the heading of a page."""
    return text.partition("# ")[2].partition("\n")[0]
