"""A figure of each method: the elements of a gradient before and after it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from registry import figure, png

from grace.core.config.registry import compressors, fields_of
from grace.core.session.simulation import Simulation
from grace.listing import FAMILIES

COLOR = "#0a7d91"
SHAPE, RANK, DEVIATION = (64, 64), 2, 0.01
# What a figure shows with other options than the defaults, and in a later step than the first.
OPTIONS: dict[str, dict[str, Any]] = {
    "gradiveq": {"training_steps": 1},
    "variance": {"memory": "variance"},
    "chain": {"sparsifier": {"name": "topk", "compress_ratio": 0.1}},
}
LATER = {"gradiveq": 2, "variance": 4}


def sample() -> np.ndarray:
    """Return the gradient of the figures: a matrix of low rank with noise, as gradients of matrices are."""
    generator = np.random.default_rng(0)
    gradient = generator.standard_normal((SHAPE[0], RANK)) @ generator.standard_normal((RANK, SHAPE[1]))
    gradient += 0.5 * generator.standard_normal(SHAPE)
    return (gradient * (DEVIATION / gradient.std())).astype(np.float32)


def _options(name: str) -> dict[str, Any]:
    ratio = {"compress_ratio": 0.1} if "compress_ratio" in fields_of(compressors.get(name)) else {}
    if name in OPTIONS:
        return OPTIONS[name]
    return ratio


def caption(name: str) -> str:
    """Return the caption of the figure of a method."""
    shown = ", ".join(f"{key} = {value}" for key, value in _options(name).items() if not isinstance(value, (dict, str)))
    if name == "chain":
        shown = "compress_ratio = 0.1"
    return f"{SHAPE[0] * SHAPE[1]:,} elements before and after{f', with {shown}' if shown else ''}."


def draw(name: str) -> bytes:
    """Draw every element of a gradient against its decoded value."""
    needed = compressors.required(name)
    config = {"compressor": name, **needed, "memory": "none", "default_rules": False, **_options(name)}
    simulation = Simulation(1, {"x": SHAPE}, config)
    steps = LATER.get(name, 1)
    gradient = sample()
    for _ in range(steps):
        decoded = simulation.step([{"x": gradient.copy()}])[0]["x"]
    drawn = Figure(figsize=(3.4, 2.6), layout="constrained")
    axes = drawn.add_subplot()
    axes.axline((0, 0), slope=1, color="0.8", linewidth=1, zorder=0)
    axes.plot(gradient.ravel(), np.asarray(decoded).ravel(), ".", markersize=2.5, color=COLOR)
    axes.set_xlabel("x")
    axes.set_ylabel("C(x)")
    return png(drawn)


for _family in FAMILIES:
    for _name in _family.methods:
        figure(f"docs/methods/figures/{_name}.png")(partial(draw, _name))
