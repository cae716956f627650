"""The page of a study: well-formed, self-contained, complete, and the same for the same results."""

from __future__ import annotations

import html.parser
import itertools
import random
import re

import pytest

from grace.report import figures
from grace.report.comparison import cases
from grace.report.findings import FINDINGS
from grace.report.page import page
from tests.report.made import dense, error, run, runs

EMPTY = ("meta", "br", "input", "img", "link", "hr")
CODEC = [
    {
        "compressor": name, "options": options, "numel": numel, "framework": "numpy", "threads": 1, "repetitions": 3,
        "times": [1e-3, 2e-3, 3e-3], "copy_times": [1e-4, 1e-4, 2e-4], "command": "grace bench codec --json x",
        "machine": {"cpu": "a processor", "gpu": None},
    }
    for numel in (1000, 2000)
    for name, options in (("topk", {}), ("qsgd", {"quantum_num": 7}))
]  # fmt: skip


def results():
    """Return results with everything: methods, feedback on and off, divergence, two numbers of ranks, an error."""
    return [
        *dense(),
        *runs("fp16", (0.1, 0.1), share=0.5),
        *runs("qsgd", (0.1, 0.11), share=0.25),
        *runs("topk", (0.12, 0.11), share=0.02),
        *runs("topk, no feedback", (0.125, 0.13), share=0.02),
        *runs("terngrad", (0.4, 0.5), share=0.06),
        *runs("signsgd", (None, 0.11), share=0.03),
        *runs('<b>&"mine"', (0.105, 0.105), config={"compressor": {"name": "topk"}}),
        *dense(ranks=8),
        *runs("qsgd", (0.1, 0.1), share=0.25, ranks=8),
        error("a < b"),
    ]


@pytest.fixture(scope="module")
def text():
    return page(results())


class Checker(html.parser.HTMLParser):
    """Keeps the open elements, ids, references, and elements by name with what they hold."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.found, self.targets = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        of = dict(attributes)
        self.found.append((tag, of, tuple(self.open)))
        self.ids += [of["id"]] if "id" in of else []
        self.targets += [value[1:] for name, value in of.items() if name in ("href", "xlink:href")]
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in EMPTY:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open, tag
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_its_references_lead_somewhere(text):
    found = Checker(text)
    assert len(found.ids) == len(set(found.ids))
    assert set(found.targets) <= set(found.ids)
    assert {"mf", "feedback", "codecs", "findings", "law"} <= set(found.targets)
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(found.ids)


def test_the_page_needs_nothing_from_elsewhere(text):
    assert "http" not in text
    assert "@import" not in text
    found = Checker(text).found
    assert not {tag for tag, _, _ in found} & {"script", "link", "img", "iframe", "object"}
    assert not [attributes for _, attributes, _ in found if "src" in attributes]


def test_every_figure_has_a_caption_with_its_origin(text):
    whole = re.findall(r"<figure>.*?</figure>", text, re.DOTALL)
    assert len(whole) == text.count("<figure>") == 7
    for figure in whole:
        (caption,) = re.findall(r"<figcaption>(.*?)</figcaption>", figure, re.DOTALL)
        for part in ("Machine: a machine", "Date: 2026-01-01", "Command: grace report", "Seeds: 0, 1"):
            assert part in caption
        assert "<svg" in figure
    assert all("aria-label" in attributes for tag, attributes, _ in Checker(text).found if tag == "svg")


def test_narrow_and_dark_screens_have_rules(text):
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    narrow = text.split("@media (max-width", 1)[1].split("</style>")[0]
    assert re.search(r"\.panels \{ grid-template-columns: minmax\(0, 1fr\);", narrow)
    assert "prefers-color-scheme: dark" in text
    # Drawings have the colour of the text.
    assert figures.INK not in text
    assert "currentColor" in text
    # Wide tables scroll by themselves.
    tables = [path for tag, _, path in Checker(text).found if tag == "table"]
    assert tables
    assert all("div" in path for path in tables)


def test_what_results_say_is_text_and_no_markup(text):
    assert "<b>" not in text
    assert "&lt;b&gt;&amp;&quot;mine&quot;" in text
    assert "a &lt; b" in text


def test_a_label_is_no_formula():
    label = r"mine:path=$\gone$"
    assert f">{label}</text>" in page([*dense(), run(label, 0.1, config={"compressor": {"name": "topk"}})])


def test_the_page_says_that_times_are_of_several_machines(text):
    assert "several machines" not in text
    other = [{**found, "machine": "another"} for found in runs("topk", (0.1, 0.1))]
    assert "may differ by them: a machine, another." in page([*dense(), *other]).split('id="law"')[1]


def test_points_have_names_and_what_is_left_out_is_named(text):
    assert "<title>qsgd: 0.105 at 50</title>" in text
    assert re.search(r"<text[^>]*>none</text>", text)
    assert "below 75 % of uncompressed: <code>terngrad</code>, <code>signsgd</code>.</p>" in text
    # With error feedback switched, a method is in the figure of feedback only.
    before, after = text.split('id="feedback"')
    assert "<title>topk, no feedback" not in before
    assert "<title>topk, no feedback: " in after


def test_other_numbers_of_ranks_are_folded(text):
    assert "<summary>mf on 8 ranks</summary>" in text
    assert "<summary>mf on 4 ranks</summary>" not in text


def test_the_top_says_what_to_take_and_changes_with_the_results(text):
    def top(page):
        return re.search(r'<ul class="advice">(.*?)</ul>', page)[1]

    assert "<code>topk</code> (within the noise of uncompressed training or better on 1 of 1 task" in top(text)
    assert top(text).count("<li>") == 3
    worse = [found for found in results() if found["cell"]["method"] != "topk"]
    assert "with SGD <code>&lt;b&gt;&amp;&quot;mine&quot;</code> (within" in top(page(worse))


def test_the_same_results_give_the_same_page(text):
    # The order of runs is that in which workers end. The tables sort, and equal methods keep their order.
    shuffled = sorted(results(), key=lambda found: random.Random(found["cell"]["seed"]).random())
    assert shuffled != results()
    assert page(shuffled) == text


def test_without_measurements_of_codecs_the_page_says_how_to_get_them(text):
    assert "grace bench codec" in text.split('id="codecs"')[1].split("<h2")[0]


def test_codecs_are_drawn_by_size():
    part = page(dense(), CODEC).split('<h2 id="codecs"')[1].split("<h2")[0]
    assert part.count("<svg") == 2
    assert "2,000 elements" in part
    assert "qsgd:quantum_num=7" in part
    assert "3 repetitions" in part
    assert "Machine: a processor, 1 thread, numpy." in part


def test_a_page_without_uncompressed_runs_has_tables_and_no_speeds():
    text = page(runs("topk", (0.1, 0.2)))
    Checker(text)
    assert "Speeds need uncompressed training" in text
    assert "<figure>" not in text
    assert "nothing can be said" in text
    assert text.count("○ not tested") == len(FINDINGS)


@pytest.mark.parametrize("found", [[], [error()]])
def test_a_page_without_results_says_so(found):
    text = page(found)
    Checker(text)
    assert "There are no results." in text


def test_runs_that_end_with_one_error_share_a_row():
    found = [error("it failed"), error("it failed"), {**error("too late"), "cell": {**error()["cell"], "task": "ncf"}}]
    part = page(found).split("<h2>Errors</h2>")[1]
    assert part.count("<tr>") == 3
    assert "<td>mf, 4 ranks, 2 runs</td><td>it failed</td>" in part
    assert "<td>ncf, 4 ranks, topk, seed 9</td><td>too late</td>" in part


def test_one_rank_alone_has_tables_and_no_figures():
    text = page([*dense(ranks=1), run("topk", 0.1, ranks=1)])
    Checker(text)
    assert "<figure>" not in text
    assert "<td>topk</td>" in text


def test_if_all_diverge_nothing_is_drawn():
    text = page([run("none", None), run("topk", None)])
    Checker(text)
    assert "<svg" not in text
    assert "Avoid with SGD <code>topk</code>" in text


def test_labels_stand_apart():
    """As many methods as a study has, with almost equal quality: labels that have no place are left out."""
    config = {"compressor": {"name": "topk"}}
    many = [run(f"method {n}", 0.1 + n / 1e4, share=0.1 + n / 1000, config=config) for n in range(40)]
    drawn = figures.scatter(cases([*dense(), *many]), lambda case: case.sent, "bytes", 0, fewer=True)
    places = [(found, *where(found)) for found in LABEL.finditer(drawn) if found[2].startswith(("method", "none"))]
    assert "none" in [found[2] for found, *_ in places]
    assert 3 <= len(places) < 41
    assert drawn.count("<title>method") == 40
    for (_, left, low), (_, other, lower) in itertools.combinations(places, 2):
        assert abs(left - other) > 20 or abs(low - lower) > 7


LABEL = re.compile(r"<text ([^>]*)>([^<]*)</text>")


def where(found):
    """Return the middle of a label, whose anchor is its beginning, its middle or its end."""
    x, y = (float(value) for value in re.search(r'x="([-\d.]+)" y="([-\d.]+)"', found[1]).groups())
    anchor = re.search(r"text-anchor: (\w+)", found[1])
    shift = {"start": 0.5, "middle": 0.0, "end": -0.5}[anchor[1] if anchor else "start"]
    return x + shift * 0.5 * figures.FONT * len(found[2]), y
