"""Tests of docs/_ext/mathml.py, which renders formulas."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from xml.etree import ElementTree

import pytest

from grace import compressors

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def mathml():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "_ext")
        yield importlib.import_module("mathml").mathml


def formulas() -> list[str]:
    paragraphs = [
        paragraph
        for name in compressors
        for paragraph in inspect.cleandoc(compressors.get(name).__doc__ or "").split("\n\n")
    ]
    return [" ".join(p.removeprefix("Formula: ").split()) for p in paragraphs if p.startswith("Formula: ")]


@pytest.mark.parametrize("formula", formulas())
def test_a_formula_becomes_mathml_without_leftovers(mathml, formula):
    root = ElementTree.fromstring(mathml(formula, "block"))
    leftovers = [e.text for e in root.iter() if e.text and any(sign in e.text for sign in "\\$&~")]
    assert leftovers == []


def test_formulas_within_text_are_formulas(mathml):
    assert "<mi>k</mi>" in mathml(r"\text{the $k$ largest}", "inline")


def test_bars_take_no_space_of_operators(mathml):
    assert mathml(r"|x|", "inline").count('lspace="0" rspace="0"') == 2
