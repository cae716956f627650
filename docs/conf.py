"""Configuration of the documentation site; `bash scripts/docs.sh` builds it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "_ext"), str(DOCS.parent)]

# TensorFlow reports the processor's instructions when it is imported; -q shall show warnings of the site alone.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import grace  # noqa: E402 - found by the path above

project = "grace"
author = "The grace authors"
copyright = author
version = release = grace.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "comments",
    "docstrings",
    "mathml",
]
exclude_patterns = ["_*"]

myst_heading_anchors = 4
autodoc_member_order = "bysource"
# The environment that builds the site has none of the trainers.
autodoc_mock_imports = ["accelerate", "composer", "lightning", "transformers"]
# A default that is an object would hide the names of types in a signature.
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
# Full names would be wider than the list of a page's contents.
toc_object_entries_show_parents = "hide"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "pydata_sphinx_theme"
html_title = f"grace {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "grace"},
    "header_links_before_dropdown": 8,
    # An icon, so that the header keeps to one row.
    "navbar_persistent": ["search-button"],
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "show_prev_next": True,
    "article_footer_items": [],
    "footer_start": ["copyright"],
    "footer_end": [],
}
