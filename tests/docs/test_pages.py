"""The pages are plain Markdown, their links lead to tracked files, and what scripts/pages writes is up to date."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from grace.listing import FAMILIES
from tests.support.launch import ROOT

pytestmark = pytest.mark.processes

PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
FIGURES = ["docs/figures/timeline.svg", "docs/figures/errors_normal.svg", "docs/figures/errors_recorded.svg"]
FIGURES += [f"docs/figures/break_even_{ranks}.svg" for ranks in (2, 4, 8, 16)]
FIGURES += [f"docs/figures/step_time_{link}.svg" for link in ("1gbit", "10gbit")]
FIGURES += [f"docs/figures/outer_{over}.svg" for over in ("bytes", "time")]
FIGURES += [f"docs/methods/figures/{name}.png" for family in FAMILIES for name in family.methods]
# What Sphinx understands, and plain Markdown shows as it is.
SPHINX = {
    "a directive": re.compile(r"^ *(?:```+|~~~+) *\{", re.MULTILINE),
    "a colon fence": re.compile(r"^ *:::", re.MULTILINE),
    "a target": re.compile(r"^ *\([\w-]+\)=", re.MULTILINE),
    "a role": re.compile(r"(?<!`)\{[\w:+-]+\}`"),
    "a substitution": re.compile(r"\{\{"),
    "a definition list": re.compile(r"^: ", re.MULTILINE),
}
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
CODE = re.compile(r"^( *)(```+)[^`\n]*\n.*?^\1\2$|(`+)(?!`).+?(?<!`)\3(?!`)", re.MULTILINE | re.DOTALL)
FENCES = re.compile(r"^( *)(```+)(?! *\{)[^`\n]*\n.*?^\1\2$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def pages():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        patch.syspath_prepend(ROOT / "scripts" / "pages")
        yield importlib.import_module("pages")


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def step_time(pages):
    return pages.step_time


@cache
def tracked() -> set[Path]:
    """Return the files that git tracks, or will track."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.check_output(words, cwd=ROOT, text=True).split("\0")
    return {ROOT / name for name in names if name}


def only_sphinx(text: str) -> list[str]:
    """Return what of a page plain Markdown cannot show."""
    text = FENCES.sub("", COMMENT.sub("", text))
    prose = CODE.sub("code", text)
    return [
        what for what, pattern in SPHINX.items() if pattern.search(text if what in ("a directive", "a role") else prose)
    ]


def slugs(text: str) -> set[str]:
    """Return the anchors that a repository's web page gives to the headings of a page."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", FENCES.sub("", text), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = first = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        count = 0
        while slug in found:
            count += 1
            slug = f"{first}-{count}"
        found.add(slug)
    return found


def broken_links(name: str, text: str) -> list[str]:
    """Return the links of a page that lead to no tracked file or folder, or to no heading."""
    broken = []
    for target in LINK.findall(CODE.sub("", COMMENT.sub("", text))):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = ((ROOT / name).parent / file).resolve() if file else ROOT / name
        if path not in tracked() or (anchor and anchor not in slugs(text if not file else path.read_text("utf-8"))):
            broken.append(target)
    return broken


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_plain_markdown(name):
    assert only_sphinx(read(name)) == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("```{toctree}\npage\n```", ["a directive"]),
        ("- item\n\n  ~~~{note}\n  ~~~", ["a directive"]),
        ("::: {grid}\n:::", ["a colon fence"]),
        ("(method-topk)=\n## topk", ["a target"]),
        ("See {doc}`page`.", ["a role"]),
        ("{{ version }}", ["a substitution"]),
        ("term\n: meaning", ["a definition list"]),
        ("<!-- {toctree}\npage\n-->\n\n```python\n{{}}\n```\n\nA `{{x}}` and `(a)=`.", []),
    ],
)
def test_what_only_sphinx_understands_is_noticed(text, what):
    assert only_sphinx(text) == what


def torn_rows(text: str) -> list[str]:
    """Return the rows of tables with more or fewer cells than their heads: a | within a cell needs a backslash."""
    torn: list[str] = []
    cells = 0
    for line in FENCES.sub("", text).splitlines():
        count = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        if cells and count and count != cells:
            torn.append(line)
        cells = count and (cells or count)
    return torn


@pytest.mark.parametrize("name", PAGES)
def test_the_rows_of_a_table_have_as_many_cells_as_its_head(name):
    assert torn_rows(read(name)) == []


def test_a_torn_row_is_noticed():
    table = "| a | b |\n|---|---|\n| 1 | {} |\n"
    assert torn_rows(table.format("the norm \\|x\\|")) == []
    assert torn_rows(table.format("the norm |x|")) == ["| 1 | the norm |x| |"]


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_tracked_files_and_to_headings(name):
    assert broken_links(name, read(name)) == []


def test_broken_links_are_noticed():
    ignored = "build/site/index.html"
    text = (
        f"# One: `two` & three\n\n[a]({ignored}) ![b](docs/none.svg) [c](#one-two--three) [d](#four) [e](https://x.org)"
    )
    assert broken_links("README.md", text) == [ignored, "docs/none.svg", "#four"]
    assert broken_links("README.md", "[a](docs/methods/low_rank.md#powersgd)[b](docs/methods/low_rank.md#topk)") == [
        "docs/methods/low_rank.md#topk"
    ]
    assert slugs("# A\n## A\n```\n# B\n```\n### [A](b.md), `c_d`") == {"a", "a-1", "a-c_d"}


@pytest.mark.parametrize("name", [name for name in PAGES if name == "README.md" or name.startswith("docs/")])
def test_the_blocks_of_a_page_are_up_to_date(pages, name):
    assert pages.written(ROOT / name, read(name)) == read(name), "run: python scripts/pages"


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_up_to_date(pages, name):
    assert pages.same(ROOT / name, pages.figures[ROOT / name]()), "run: python scripts/pages"


def test_every_figure_is_drawn_tracked_and_shown(pages):
    assert {str(path.relative_to(ROOT)) for path in pages.figures} == {*FIGURES}
    assert {path for path in tracked() if path.parent == ROOT / "docs/methods/figures"} <= set(pages.figures)
    shown = {(ROOT / name).parent / target for name in PAGES for target in LINK.findall(read(name))}
    assert set(pages.figures) <= {path.resolve() for path in shown}


def test_another_picture_is_noticed(pages):
    """Pixels may differ a little, because processors round differently, but not by a level or a dot of another size."""
    import method_figures

    path = ROOT / "docs/methods/figures/qsgd.png"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(method_figures.OPTIONS, "qsgd", {"quantum_num": 7})
        assert not pages.same(path, method_figures.draw("qsgd"))
        patch.setitem(method_figures.OPTIONS, "qsgd", {"quantum_num": 127})
        patch.setattr(method_figures, "DEVIATION", 0.011)
        assert not pages.same(path, method_figures.draw("qsgd"))
    sample = method_figures.sample()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(method_figures, "sample", lambda: np.nextafter(sample, np.float32(1)))
        assert pages.same(path, method_figures.draw("qsgd"))


def test_blocks_are_written_where_they_stand(pages):
    page = ROOT / "docs" / "guide.md"
    text = "# A\n\n<!-- begin family-table other -->\nold\n<!-- end family-table other -->\n\nend\n"
    new = pages.written(page, text)
    assert new.startswith("# A\n\n<!-- begin family-table other: written by scripts/pages -->\n\nUse these methods if")
    assert new.endswith("|\n\n<!-- end family-table other -->\n\nend\n")
    assert pages.written(page, new) == new
    for wrong, said in (
        ("<!-- begin family-table other -->\n", "no <!-- end family-table other -->"),
        ("<!-- end family-table other -->\n", "line 1: <!-- end family-table other --> does not match"),
        (
            "<!-- begin family-table other -->\n<!-- end family other -->\n",
            "line 2: <!-- end family other --> does not match",
        ),
        ("<!-- begin nothing -->\n<!-- end nothing -->\n", "line 1: no block is of the kind 'nothing'"),
    ):
        with pytest.raises(SystemExit, match=re.escape(said)):
            pages.written(page, wrong)


def test_numbers_are_written_into_sentences(pages):
    page = ROOT / "docs" / "guide.md"
    text = "After <!--=waiting.warn-->1\nor 2<!--/--> seconds, <!--=waiting.limit--><!--/-->.\n"
    assert (
        pages.written(page, text) == "After <!--=waiting.warn-->25<!--/--> seconds, <!--=waiting.limit-->300<!--/-->.\n"
    )
    for wrong, message in (
        ("A <!--=waiting.none-->1<!--/-->", "no number is named waiting.none; expected one of ['limit', 'warn']"),
        ("A <!--=none.warn-->1<!--/-->", "has no numbers of the page 'none'"),
        ("A\n<!--=waiting.warn-->1<!--/-->", "a quoted number must not begin a line: <!--=waiting.warn-->"),
    ):
        with pytest.raises(SystemExit, match=re.escape(message)):
            pages.written(page, wrong)


def test_a_table_of_measurements_has_the_chosen_columns(pages):
    first, last = "measurements digits_launchers method ddp", "measurements digits_launchers method fsdp"
    text = "".join(f"<!-- begin {name} -->\n<!-- end {name} -->\n" for name in (first, last))
    new = pages.written(ROOT / "docs" / "guide.md", text)
    assert "| method | DDP |" in new
    assert "| method | FSDP2 |" in new
    assert new.count("[digits_launchers.json](results/digits_launchers.json)") == 1
    assert new.index("FSDP2 |") < new.index("digits_launchers.json]")
    with pytest.raises(SystemExit, match=r"digits_launchers.json has no column 'lost'; expected some of method, "):
        pages.written(ROOT / "docs" / "guide.md", text.replace("method ddp", "method lost"))


def test_the_command_checks_and_writes(tmp_path):
    """On a copy of what it needs."""
    for name in ("scripts/pages", "docs/results", "docs/figures", "docs/methods"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("grace", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    page = tmp_path / "docs" / "accuracy.md"
    page.write_text("# A\n\n<!-- begin measurements layers -->\n<!-- end measurements layers -->\n", encoding="utf-8")
    (tmp_path / "docs/figures/timeline.svg").write_text("old", encoding="utf-8")

    def call(*words):
        command = [sys.executable, "scripts/pages", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    chosen = ("docs/accuracy.md", "docs/figures/timeline.svg")
    checked = call("--check", *chosen)
    assert checked.returncode == 1
    assert "docs/accuracy.md is out of date; run: python scripts/pages" in checked.stderr
    assert "docs/figures/timeline.svg is out of date" in checked.stderr
    assert call(*chosen).stdout.split() == ["wrote", chosen[0], "wrote", chosen[1]]
    assert "| `qsgd` |" in page.read_text(encoding="utf-8")
    assert call("--check", *chosen).returncode == 0
    assert "is no page" in call("docs/none.md").stderr


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_what_everybody_reads_first_is_short(name):
    assert len(read(name).splitlines()) <= 130


def test_other_data_make_another_figure(step_time):
    data = step_time.load("step_original")
    rows = [{**row, "1gbit": row["1gbit"] + 1} if row["method"] == "topk" else row for row in data["rows"]]
    assert step_time.picture({**data, "rows": rows}, "1gbit") != step_time.picture(data, "1gbit")


def test_the_figure_is_valid_and_shows_each_measured_bar_in_proportion(step_time):
    data = step_time.load("step_original")
    rows = [row for row in data["rows"] if row["method"] != "powersgd"]
    drawn = ElementTree.fromstring(step_time.picture({**data, "rows": rows}, "1gbit"))
    text = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "original GRACE, topk" in text
    assert "grace, topk" in text
    assert "grace, powersgd" not in text
    bars = [e for e in drawn.iter("{http://www.w3.org/2000/svg}rect") if e.get("class") in ("own", "other")]
    times = {row["method"]: row["1gbit"] for row in rows if row["method"] in step_time.BARS}
    unit = float(bars[0].get("width")) / times["horovod"]
    for bar, method in zip(bars, (m for m in step_time.BARS if m in times), strict=True):
        assert float(bar.get("width")) == pytest.approx(unit * times[method], abs=0.1)


def test_every_name_of_the_reference_has_a_sentence(pages):
    for name in PAGES:
        for cells in re.findall(r"^\| (`[\w.]+`) \|(.*)\|$", read(name), re.MULTILINE) if "/reference/" in name else ():
            assert cells[1].strip(), f"{name}: {cells[0]} has no docstring"


def test_a_name_of_the_reference_is_found_where_it_is_defined(pages):
    documented = pages.reference.documented
    # A class that a package exports, its attribute with a comment in a base class, a method of its own, and a constant.
    assert documented("grace.torch.Exchange").startswith("The plan, the statistics and the state")
    assert documented("grace.torch.Exchange.config").strip() == "The configuration, with all changes so far."
    assert documented("grace.Simulation.size") == documented("grace.core.session.exchange.Exchange.size") != ""
    assert documented("grace.Simulation.step") != documented("grace.core.state.run.Run.step")
    assert "32 bits" in documented("grace.core.wire.lanes.MOST")
    with pytest.raises(SystemExit, match=r"nothing in grace defines grace\.torch\.Exchange\.none"):
        documented("grace.torch.Exchange.none")
    assert pages.reference.sentence("One thing,\nsee 1.5. Another.\n\nMore.") == "One thing, see 1.5."


def test_the_site_expands_comments_and_formulas():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "_ext")
        expanded = importlib.import_module("comments").expanded
    names = "<!-- begin names: written by scripts/pages -->\n\n| name |\n\n<!-- end names -->\n"
    text = f"# A\n\n{names}\n<!-- {{toctree}}\n:hidden:\n\nb\n-->\n\n```math\nx\n```\n\n<!-- a remark -->\n"
    assert expanded(text) == "# A\n\n\n```{toctree}\n:hidden:\n\nb\n```\n\n```{math}\nx\n```\n\n<!-- a remark -->\n"
    assert expanded("<!-- {include} ../A.md\n-->\n\nSee [A.md](../A.md).\n") == "```{include} ../A.md\n```\n"
