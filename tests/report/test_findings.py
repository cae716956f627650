"""The findings of the papers and the advice: they follow the numbers, and say what is missing."""

from __future__ import annotations

import pytest

from grace.report.advice import advice
from grace.report.comparison import cases, feedback_pairs
from grace.report.findings import FINDINGS, findings
from grace.report.methods import EQUAL, chosen
from tests.report.made import dense, error, run, runs

MF, NCF = dense(), dense("ncf", compute=5e-2)
# Sent bytes and times, by which a method is slower or faster than uncompressed training on every link.
SLOW, FAST = {"exchange": 1.0}, {"exchange": 0.0, "share": 0.01}
OTHERS = ("eden", "natural", "uniform", "blockwise", "powersgd")


def methods(qualities, names=OTHERS, task="mf", **more):
    return [run(name, quality, task=task, **more) for name, quality in zip(names, qualities, strict=True)]


def five(quality, task="mf", **more):
    return methods([quality] * 5, task=task, **more)


def line(says, results):
    """Return the only finding that says this."""
    (found,) = (found for found in findings(cases(results)) if says in found.says)
    return found


def twice(method, quality, **more):
    return runs(method, (quality, quality), **more)


def hard(quality, method=EQUAL, **more):
    return run(method, quality, **{"share": 0.02, **more})


# By a part of the finding: results that reproduce it, and results that do not.
BOTH = {
    "1.3 % more": ([*MF, *five(0.1)], [*dense(compute=1e-9), *five(0.1, share=1000, exchange=0)]),
    "comparable to the baseline": ([*MF, *five(0.1)], [*MF, *five(0.2)]),
    "sometimes above": tuple([*MF, *five(quality)] for quality in (0.06, 0.08)),
    # With 100 times the speed, the link takes three quarters of an uncompressed step.
    "bound by computation": ([*MF, *five(0.1)], [*MF, *five(0.1, **SLOW)]),
    "falls by up to 10 %": ([*NCF, *five(0.58, "ncf")], [*NCF, *five(0.5, "ncf")]),
    "1.5 to 4.5 times": (
        [*dense("ncf", exchange=1.0), *five(0.6, "ncf", **FAST)],
        [*NCF, *five(0.6, "ncf", **FAST)],
    ),
    "on NCF, stronger": tuple(
        [*NCF, run("topk", quality, task="ncf"), run("topk 10 %", 0.6, task="ncf")] for quality in (0.5, 0.6)
    ),
    "elsewhere, stronger": tuple([*MF, run("topk", quality), run("topk 10 %", 0.1)] for quality in (0.1, 0.3)),
    "improves sparsifiers": tuple([*MF, run("topk", q), run("topk, no feedback", 0.2)] for q in (0.1, 0.2)),
    "harms QSGD": tuple([*MF, run("qsgd", 0.1), run("qsgd, feedback", quality)] for quality in (0.2, 0.1)),
    "harms TernGrad": tuple([*MF, run("terngrad", 0.2), run("terngrad, feedback", q)] for q in (None, 0.1)),
    "worsens Top-k": tuple(
        [*NCF, run("topk", q, task="ncf"), run("topk, no feedback", 0.55, task="ncf")] for q in (0.5, 0.6)
    ),
    "performs well on all": tuple(
        [*MF, *five(0.1), *NCF, *five(quality, "ncf")] for quality in (0.5, 0.6)
    ),
    "not strongly correlated": (
        [
            *MF, *NCF, *(run(m, 0.1 + n / 100, exchange=n / 100) for n, m in enumerate(OTHERS)),
            *(run(m, 0.5 + n / 100, task="ncf", exchange=n / 100) for n, m in enumerate(OTHERS)),
        ],
        [*MF, *(run(m, 0.1 + n / 100, exchange=n / 100) for n, m in enumerate(OTHERS))],
    ),
    "more data gives a higher": tuple(
        [*MF, *(run(m, 0.2 + sign * n / 100, share=0.1 + n / 100) for n, m in enumerate(OTHERS))] for sign in (-1, 1)
    ),
    "more data gives a lower": tuple([*MF, run("topk", 0.1), run("qsgd", q, share=0.5)] for q in (0.2, 0.1)),
    "not negligible": tuple([*MF, *five(0.1, exchange=seconds)] for seconds in (1e-2, 1e-6)),
    "Random-k and 8-bit": tuple(
        [*methods([0.1] * 5, exchange=1e-3), *methods([0.1] * 2, ("randomk", "eightbit"), exchange=t)]
        for t in (1e-2, 1e-4)
    ),
    "Adaptive and DGC": tuple(
        [*methods([0.1] * 5, exchange=1e-3), *methods([0.1] * 2, ("adaptive", "dgc"), exchange=t)]
        for t in (1e-2, 1e-4)
    ),
    "SketchML": tuple(
        [*methods([0.1] * 5, exchange=1e-3), run("sketchml", 0.1, exchange=t)] for t in (1e-2, 1e-4)
    ),
    "at 1 Gbit/s": (
        # Uncompressed bytes take 12 microseconds at 1 Gbit/s and a tenth of them at 10, and their messages 150.
        [*MF, *five(0.1, share=0.0, exchange=156e-6)],
        [*MF, *five(0.1, **SLOW)],
    ),
    "best in all cases": (
        [*MF, *NCF, *methods([0.1, *[0.2] * 4]), *methods([*[0.5] * 4, 0.6], task="ncf")],
        [*MF, *NCF, *methods([0.1, *[0.2] * 4]), *methods([0.6, *[0.5] * 4], task="ncf")],
    ),
    "faster without compression": ([*MF, *five(0.1, **SLOW)], [*MF, *five(0.1, **FAST)]),
    "459 of 668": ([*MF, *five(0.1, **SLOW)], [*MF, *five(0.1, **FAST)]),
    "heavy compression": tuple([*MF, *five(q, share=0.01), run("qsgd", 0.2, share=0.5)] for q in (0.3, 0.1)),
    "ends better than top-k": tuple([*MF, run("topk", 0.2, share=0.02), hard(q)] for q in (0.1, 0.3)),
    "converges faster": tuple(
        [*MF, run("topk", 0.2, share=0.02), hard(0.2, curve=[[0, 1.0, 1.0], [50, middle, 0.2], [100, 0.2, 0.2]])]
        for middle in (0.3, 0.9)
    ),
    "total error": tuple(
        [*MF, run("topk", 0.2, share=0.02, errors=[[50, 1.0], [100, 2.0]]), hard(0.2, errors=[[50, 1.0], [100, last]])]
        for last in (1.9, 2.1)
    ),
    "cheaper to compute": tuple(
        # At ten times the bytes, top-k is slower for another reason.
        [run("topk", 0.1, share=0.02), run("topk 10 %", 0.1, share=0.2, exchange=1.0), hard(0.1, exchange=t)]
        for t in (1e-4, 1e-2)
    ),
}  # fmt: skip
NEVER = ("SignSGD and SIGNUM", "RDMA", "frameworks differ", "Accordion")


def test_every_finding_is_tried_both_ways_or_never_tested():
    for finding in FINDINGS:
        assert sum(part in finding.says for part in (*BOTH, *NEVER)) == 1, finding.says


@pytest.mark.parametrize("says", BOTH)
def test_a_finding_turns_with_the_numbers(says):
    pytest.importorskip("torch", reason="ncf is a task of PyTorch")
    yes, no = (line(says, results) for results in BOTH[says])
    assert (yes.holds, no.holds) == (True, False), (yes.number, no.number)
    assert yes.number != no.number
    assert " ranks; " in yes.cells


@pytest.mark.parametrize("says", NEVER)
def test_what_a_simulation_cannot_tell_is_not_tested(says):
    found = line(says, [*MF, run("topk", 0.1), hard(0.1)])
    assert (found.holds, found.cells) == (None, "")
    assert found.number


@pytest.mark.parametrize("results", [[], [error()], dense()])
def test_findings_whose_cells_are_missing_say_so(results):
    found = findings(cases(results))
    assert {line.holds for line in found} == {None}
    tested = [line for line in found if not any(part in line.says for part in NEVER)]
    assert all(line.number.startswith("needs ") for line in tested)


def test_without_noise_nothing_is_said_about_differences():
    found = [run("none", 0.1), *five(0.1), run("topk", 0.1), run("topk, no feedback", 0.5)]
    for says in ("comparable to the baseline", "improves sparsifiers", "performs well on all", "sometimes above"):
        assert line(says, found).holds is None
    assert advice(cases(found))[2].startswith("The noise is unknown")


def test_the_share_of_cells_in_which_dense_is_faster_is_counted():
    results = [*MF, run("topk", 0.1, **FAST), *methods([0.1] * 4, OTHERS[:4], **SLOW), run("fp16", 0.1, **SLOW)]
    found = line("459 of 668", results)
    # The 16-bit baseline does not count. At 100 times the speed, 10 ms are still too much.
    assert "12 of 15 cells and links (80 %)" in found.number
    assert found.number.count("80 % (80 % at 100 x)") == 3


def test_a_few_methods_say_nothing_of_methods_in_general():
    results = [*MF, *methods([0.1] * 4, OTHERS[:4], **SLOW)]
    for says in ("comparable to the baseline", "459 of 668", "not negligible", "heavy compression"):
        assert line(says, results).number.startswith("needs 5 methods"), says
        assert line(says, [*results, run("powersgd", 0.1, share=0.01, **SLOW)]).holds is not None, says


def test_a_method_counts_once_and_not_with_its_feedback_switched():
    results = [*MF, *five(0.1), run("eden, feedback", 0.5), run("topk EF21", 0.1), hard(0.1)]
    assert "6 of 6 cells" in line("comparable to the baseline", results).number
    assert "of 18 cells and links" in line("459 of 668", results).number


def test_the_best_method_is_not_the_one_that_noise_prefers():
    pytest.importorskip("torch", reason="ncf is a task of PyTorch")
    results = [*MF, *NCF, *methods([0.1, 0.11, 0.2, 0.2, 0.2]), *methods([0.59, 0.6, 0.5, 0.5, 0.5], task="ncf")]
    found = line("best in all cases", results)
    assert (found.holds, found.number.endswith("wherever it trained: `eden`, `natural`")) == (False, True)


def test_a_diverged_run_has_the_lowest_quality():
    few = [run("randomk", None, share=0.01), run("terngrad", None, share=0.02)]
    results = [*MF, *few, *methods([0.11, 0.12, 0.13], OTHERS[:3], share=0.2)]
    assert line("more data gives a higher", results).number.startswith("rank correlation of bytes and quality +0.86")
    found = line("heavy compression", results)
    assert "lower in 1 of 1 places: 0.0 % instead of " in found.number


def test_a_hard_threshold_that_differs_by_noise_is_no_better():
    results = [*MF, run("topk", 0.2, share=0.02), hard(0.19)]
    found = line("ends better than top-k", results)
    assert (found.holds, found.number) == (
        False,
        "pairs whose bytes differ by less than 25 % in which it ends better: 0; worse: 0; within the noise: 1 (mf)",
    )


def test_a_number_names_its_cells():
    results = [*MF, *five(0.1), *dense(ranks=8), run("topk", 0.1, ranks=8)]
    assert line("comparable to the baseline", results).cells == "mf; 4, 8 ranks; 6 methods"
    results = [*NCF, run("topk", 0.6, task="ncf"), run("topk 10 %", 0.6, task="ncf")]
    assert line("on NCF, stronger", results).cells == "ncf; 4 ranks; `topk`, `topk 10 %`"


def test_feedback_is_compared_over_the_seeds_that_both_have():
    pytest.importorskip("torch", reason="cnn is a task of PyTorch")
    results = [*MF, *runs("qsgd", (0.1, 0.5)), run("qsgd, feedback", 0.1), *runs("topk", (0.1, 0.1))]
    results += runs("topk, no feedback", (0.2, 0.2))
    pairs = feedback_pairs(cases(results))
    assert [(off.method, on.method) for off, on in pairs] == [("qsgd", "qsgd, feedback"), ("topk, no feedback", "topk")]
    number = line("harms QSGD", results).number
    assert number == "pairs in which feedback gains: 0; harms: 0; within the noise: 1 (mf)"
    results += [*dense("cnn"), *runs("qsgd", (0.5, 0.5), task="cnn"), *runs("qsgd, feedback", (0.6, 0.6), task="cnn")]
    number = line("harms QSGD", results).number
    assert number == "pairs in which feedback gains: 1 (cnn); harms: 0; within the noise: 1 (mf)"


def test_a_hard_threshold_is_compared_at_equal_volume_only():
    found = line("ends better than top-k", [*MF, run("topk", 0.2, share=0.02), hard(0.1, share=0.03)])
    assert found.holds is None
    assert f"`{EQUAL}` 3.00 %, `topk` 2.00 %" in found.number
    assert "threshold=VALUE" in found.number


def test_a_hard_threshold_of_a_probe_is_not_the_fixed_one_of_the_paper():
    found = line("ends better than top-k", [*MF, run("topk", 0.2, share=0.02), hard(0.1, "hardthreshold")])
    assert found.number == f"needs runs of `{EQUAL}` and `topk` with equal seeds"
    (*_, own) = chosen([label := "hardthreshold:threshold=0.5"])
    own = run(label, 0.1, share=0.02, config=own.made.to_dict())
    assert line("ends better than top-k", [*MF, run("topk", 0.2, share=0.02), own]).holds


def test_the_advice_does_not_take_what_sends_the_bytes_of_another():
    take, _, _ = advice(cases([*MF, *twice("topk", 0.1, share=0.02), *twice(EQUAL, 0.1, share=0.01)]))
    assert "with SGD `topk`" in take


def test_the_advice_counts_tasks_that_have_methods():
    pytest.importorskip("torch", reason="cnn is a task of PyTorch")
    take, _, _ = advice(cases([*MF, *dense("cnn"), *twice("topk", 0.1)]))
    assert "on 1 of 1 task; " in take


def test_the_advice_follows_the_numbers():
    pytest.importorskip("torch", reason="ncf is a task of PyTorch")
    good = [*twice("eden", 0.105, share=0.05), *twice("qsgd", 0.2, share=0.1), *twice("topk", 0.2, share=0.01)]
    good += [*twice("eden", 0.3, task="ncf", share=0.05), *twice("qsgd", 0.6, task="ncf", share=0.1)]
    take, avoid, noise = advice(cases([*MF, *NCF, *good]))
    # In microseconds: 3 and 6 messages of 25, a hundredth of 6 and of 5 ms, and 8 ns for a byte.
    assert "with SGD `eden` (within the noise of uncompressed training or better on 1 of 1 task; at 1 Gbit/s, " in take
    assert f"its steps take {100 * (3 * 25 + 60 + 1.2) / (6 * 25 + 50 + 12):.0f} % of" in take
    assert "with Adam `qsgd`" in take
    assert "on 4 ranks" in take
    assert avoid.startswith("Avoid with SGD `qsgd`, `topk`; with Adam `eden`: ")
    assert "0.02 on mf (loss), 0.02 on ncf (hit rate at 10)" in noise
    take, avoid, _ = advice(cases([*MF, *twice("eden", 0.2), *twice("qsgd", None), *twice("topk", 0.1)]))
    assert "`topk`" in take
    assert avoid.startswith("Avoid with SGD `eden`, `qsgd`: ")


def test_the_advice_is_one_method_if_it_is_good_with_every_optimizer():
    pytest.importorskip("torch", reason="ncf is a task of PyTorch")
    good = [*twice("eden", 0.1, share=0.05), *twice("qsgd", 0.1), *twice("qsgd", 0.6, task="ncf")]
    take, _, _ = advice(cases([*MF, *NCF, *good]))
    assert take.startswith("Take, at equal steps on 4 ranks, with any optimizer `qsgd` (")
    assert "on 2 of 2 tasks" in take


def test_of_equally_good_methods_the_advice_takes_the_fastest():
    fast, small = twice("qsgd", 0.1, share=0.4), twice("eden", 0.1, share=0.1, exchange=5e-3)
    assert "with SGD `qsgd`" in advice(cases([*MF, *fast, *small]))[0]
    assert "with SGD `eden`" in advice(cases([*MF, *twice("eden", 0.1, share=0.1), *fast]))[0]


def test_the_advice_does_not_take_what_is_behind_on_other_numbers_of_ranks():
    good = [*twice("eden", 0.1, share=0.01), *twice("qsgd", 0.1, share=0.5)]
    results = [*MF, *dense(ranks=2), *good, run("eden", 0.2, ranks=2), run("qsgd", 0.1, ranks=2)]
    assert "`qsgd`" in advice(cases(results))[0]
    assert "`eden`" in advice(cases([*MF, *good]))[0]


def test_the_advice_does_not_take_what_makes_steps_longer():
    take, _, _ = advice(cases([*MF, *twice("qsgd", 0.1, exchange=9.0)]))
    assert "with SGD nothing: at 1 Gbit/s, the steps of `qsgd`, the best, take longer" in take


def test_the_advice_does_not_take_what_one_run_says():
    """Other seeds of the method may be worse. To avoid it, one run is enough."""
    take, avoid, _ = advice(cases([*MF, *twice("qsgd", 0.1, share=0.25), run("eden", 0.1), run("topk", 0.5)]))
    assert "with SGD `qsgd`" in take
    assert "`topk`" in avoid
    take, _, _ = advice(cases([*MF, run("eden", 0.1)]))
    assert "with SGD nothing can be said, because that needs two seeds of a method" in take


def test_of_methods_to_avoid_those_of_which_most_tasks_say_so_come_first():
    pytest.importorskip("torch", reason="cnn is a task of PyTorch")
    results = [*MF, *dense("cnn"), *methods([None] * 2, ("dgc", "topk")), run("topk", None, task="cnn")]
    assert advice(cases(results))[1].startswith("Avoid with SGD `topk`, `dgc`: ")


def test_if_nothing_is_good_the_advice_is_nothing():
    take, avoid, _ = advice(cases([*MF, *twice("topk", 0.5)]))
    assert "nothing: no method is within the noise" in take
    assert "`topk`" in avoid
    assert advice(cases([*MF, *twice("topk", 0.1)]))[1].startswith("No method diverges")


def test_of_many_bad_methods_the_advice_names_some():
    names = (*OTHERS, "qsgd", "topk", "dgc", "onebit", "adaptive")
    _, avoid, _ = advice(cases([*MF, *methods([None] * 10, names)]))
    assert " and 2 more: " in avoid
