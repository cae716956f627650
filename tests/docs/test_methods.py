"""Tests of the pages that scripts/pages/methods.py writes from the registry."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import pytest

from grace import compressors
from grace.core.config.recommended import ADAM, ANY, SGD, STARTS
from grace.core.spec import TensorSpec
from grace.listing import FAMILIES

ROOT = Path(__file__).parents[2]
# These three round to a common format, which no paper introduced, or send the gradient as it is.
WITHOUT_REFERENCE = {"none", "fp16", "bf16"}
MOVED, SHAPE = json.loads((ROOT / "docs/results/moved_bytes.json").read_text(encoding="utf-8")), (256, 256)
# Their bytes depend on the data: moved_bytes.json has the first step only, of larger gradients.
BY_DATA = [
    row["method"] for row in json.loads((ROOT / "docs/results/bytes_by_data.json").read_text(encoding="utf-8"))["rows"]
]
BUILT_IN = [name for name in compressors if compressors.get(name).__module__.startswith("grace.")]


@pytest.fixture(scope="module")
def methods():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts" / "pages")
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


def test_received_bytes_follow_what_auto_takes(methods):
    assert methods.received("none", 2) == 4
    assert methods.received("none", 16) == 7.5
    assert methods.received("signsgd", 16) == 15 / 8
    assert methods.received("qsgd", 2) == 1 + 4 / 512
    assert methods.received("qsgd", 16) == 2 * 15 / 16 * (1 + 4 / 512)
    # 2 ranks gather 8-bit integers, and more add them: three share a word on 4 ranks, and two on 16.
    assert methods.received("uniform", 2) == pytest.approx(1, rel=1e-4)
    assert methods.received("uniform", 4) == pytest.approx(2 * 3 / 4 * 4 / 3, rel=1e-4)
    assert methods.received("uniform", 16) == pytest.approx(2 * 15 / 16 * 2, rel=1e-4)


def block_of(methods, *arguments):
    return methods.Block([*arguments], ROOT / "docs" / "methods" / "index.md", "")


@pytest.fixture(scope="module")
def index(methods):
    """The cells of the table of all methods, by method, for the tensor of docs/results/moved_bytes.json."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "EXAMPLE", TensorSpec("example", SHAPE))
        lines = [line for family in FAMILIES for line in methods.family_table(block_of(methods, family.page))]
    return {line.split("]")[0][3:]: line.strip("| ").split(" | ") for line in lines if line.startswith("| [")}


def by_auto(name):
    """Return the row of docs/results/moved_bytes.json that `auto` takes, by the number of ranks."""
    return {size: row for row in MOVED if row["method"] == name for size in row["auto"]}


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_index_names_what_auto_takes(index, name):
    # On 64 ranks, auto takes a union for sparsifiers.
    two, *more = (row["communicator"] for size, row in sorted(by_auto(name).items()) if size <= 16)
    (others,) = set(more)
    assert index[name][2] == (two if two == others else f"{two}, {others} from 3 ranks")


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in BY_DATA])
def test_the_index_agrees_with_the_bytes_over_the_number_of_ranks(methods, index, name):
    for n, cell in zip(methods.RANKS, index[name][4:8], strict=True):
        (moved,) = by_auto(name)[n]["bytes"][str(n)]
        # Buffers have headers as well: up to 32 bytes, and up to two buffers for every other rank.
        headers = 2 * (n - 1) * 32 / math.prod(SHAPE)
        assert 0.99 * (moved - headers) <= float(cell) <= 1.01 * moved, n


def test_a_section_says_what_auto_takes(methods):
    def row(name):
        lines = methods.section(name, block_of(methods))
        return next(line for line in lines if line.startswith("| communicator"))

    assert "| `auto`: `allgather` on 2 ranks, `two_shot` from 3; `allreduce` is not possible |" in row("qsgd")
    assert "| `auto`: `allgather`; `allreduce` is not possible |" in row("topk")
    assert "| `auto`: `allreduce` |" in row("fp16")


def test_a_section_says_for_which_optimizers_a_method_is(methods):
    assert methods.optimizers("natural") == {"optimizer": ANY}
    assert methods.optimizers("signsgd") == {"optimizer": f"{SGD}; trains badly with {ADAM}"}
    for start in STARTS:
        assert start.network in methods.optimizers(start.config["compressor"])["start with it"]


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
        """  # noqa: D205

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
    section = "\n".join(methods.section(name, block_of(methods)))
    expected = ["```math\n", "**Error.** ", "**Cost.** ", "**When.** "] + ["**Reference.** "] * (
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
