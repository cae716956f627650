"""A marker for all tests of the kernels, which scripts/test.sh runs beside those that start processes."""

from __future__ import annotations

from pathlib import Path

import pytest


# Before pytest deselects tests by their markers.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.kernels)
