"""Every docstring states the error of its method on normally distributed values."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from grace.core.config.registry import compressors
from grace.testing.harness import draw
from tests.papers.common import make, send, spec

SHAPE = (256, 1024)
# Its error depends on what it was trained on.
WITHOUT_FIGURE = {"gradiveq"}


def stated(name):
    """Return the stated errors, each with the options that it belongs to."""
    text = " ".join(compressors.get(name).__doc__.split())
    (section,) = re.findall(r"Error: (.*?)\.? Cost:", text)
    found = []
    for part in section.split("; "):
        (number,) = re.findall(r"^(\S+) \|x\|\^2 (?:for normal x$|for normal x with |with )", part)
        options = re.findall(r"`(\w+)=(.+?)`", part)
        found.append(({key: json.loads(value) for key, value in options}, float(number)))
    return found


@pytest.mark.parametrize("name", [name for name in compressors if name not in WITHOUT_FIGURE])
def test_the_stated_error_is_that_of_normal_values(name):
    x = draw(spec(*SHAPE), 1)
    (defaults, _), *_ = figures = stated(name)
    # Without options, except those that have no default.
    assert defaults.keys() == compressors.required(name).keys() - {"memory"}
    for options, figure in figures:
        error = np.sum((x - send(make(name, **options), x, shape=SHAPE)) ** 2.0) / np.sum(x**2.0)
        assert error == pytest.approx(figure, rel=0.1), options
