"""Tests of the pages that docs/_ext/methods.py writes from the registry."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from grace import compressors
from grace.listing import FAMILIES

ROOT = Path(__file__).parents[2]
# These three round to a common format, which no paper introduced, or send the gradient as it is.
WITHOUT_REFERENCE = {"none", "fp16", "bf16"}
BUILT_IN = [name for name in compressors if compressors.get(name).__module__.startswith("grace.")]


@pytest.fixture(scope="module")
def methods():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "_ext")
        yield importlib.import_module("methods")


def test_every_built_in_method_belongs_to_one_family():
    assert sorted(name for family in FAMILIES for name in family.methods) == BUILT_IN


def test_measured_bytes_are_what_theory_says(methods):
    # adaptive: 1 % of either sign, 4 bytes each. threshold: the share above one standard deviation, 8 bytes each, and
    # more with error feedback, because the residual is sent later.
    assert methods.sent("adaptive").total == pytest.approx(0.04, rel=0.02)
    # 10 of 100 steps send everything, the others 8 of every 64 elements.
    assert methods.sent("gradiveq").total == pytest.approx(0.1 * 4 + 0.9 * 4 / 8, rel=1e-3)
    assert methods.sent("threshold").total > 8 * 0.3173


def test_computed_bytes_name_their_collective(methods):
    assert methods.sent("signsgd") == methods.Sent({"allgather": 1 / 8}, exact=True)
    # Two factors of rank 4 of a square of 1,024: one as a proposal, one as the payload.
    assert methods.sent("powersgd") == methods.Sent({"allreduce": 2 * 4 * 4 / 1024}, exact=True)
    assert methods.sent("none").received(2) == 4
    assert methods.sent("none").received(16) == 7.5
    assert methods.sent("signsgd").received(16) == 15 / 8


def test_a_docstring_is_taken_apart(methods):
    class Method:
        r"""Identity: sends x
        as it is.

        Formula: C(x) = x \, 1

        Some words.

        More words.

        Cost: one pass
        of x.

        When: seldom. Not now.

        Reference: Doe et al., "A title", ICML 2019.
        """

    text = methods.text_of(Method)
    assert text.summary == "Identity: sends x as it is."
    assert text.body == "Some words.\n\nMore words."
    assert text.labels == {
        "Formula": r"C(x) = x \, 1",
        "Cost": "one pass of x.",
        "When": "seldom. Not now.",
        "Reference": 'Doe et al., "A title", ICML 2019.',
    }


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_section_has_formula_cost_use_and_reference(methods, name):
    section = "\n".join(methods.section(name, methods.Sent({"allgather": 1.0}, exact=True)))
    expected = ["$$\n", "**Error.** ", "**Cost.** ", "**When.** "] + ["**Reference.** "] * (
        name not in WITHOUT_REFERENCE
    )
    assert [part for part in expected if part not in section] == []
    for option in methods.fields_of(compressors.get(name)):
        assert f"| `{option}` |" in section


def test_options_show_what_they_accept(methods):
    table = "\n".join(methods.options(compressors, "qsgd"))
    assert "from 1 to 32767" in table
    assert '`"l2"`, `"max"`' in table
    assert methods.options(compressors, "signsgd") == []
