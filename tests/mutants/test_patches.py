"""Every patch applies, and the score distinguishes caught patches from survivors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.mutants import score
from tests.mutants.patches import PATCHES, Patch

TOY = "def double(x):\n    return 2 * x\n"
TOY_TESTS = "from toy import double\n\n\ndef test_one():\n    assert double(1) == 2\n"


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_every_patch_applies_once(patch):
    text = score.patched((score.ROOT / patch.file).read_text(), patch)
    if patch.file.endswith(".py"):
        compile(text, patch.file, "exec")
    for arguments in patch.tests:
        assert Path(score.ROOT / arguments.split()[0]).is_file(), arguments


def test_ids_differ():
    assert len({patch.id for patch in PATCHES}) == len(PATCHES) >= 70


def test_the_committed_score_holds_every_patch_as_caught():
    path = Path(score.__file__).with_name("score.json")
    assert [(result.id, result.caught) for result in score.read_json(path)] == [(patch.id, True) for patch in PATCHES]
    written = json.loads(path.read_text())
    assert written["caught"] == written["of"] == len(written["results"]) == len(PATCHES)
    assert written["mutant classes"]["rejected"] == written["mutant classes"]["of"] > 0


def toy(new: str, tests: str = "test_toy.py") -> Patch:
    return Patch("toy", "toy.py", "2 * x", new, "for this test", (tests,))


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "test_toy.py").write_text(TOY_TESTS)
    return tmp_path


def run(checkout, patch, limit=60.0):
    result = score.score(checkout, patch, targeted=True, more=[], limit=limit)
    assert (checkout / "toy.py").read_text() == TOY, "the patch is taken back"
    return result


def test_a_break_that_a_test_sees_is_caught(checkout):
    result = run(checkout, toy("3 * x"))
    assert result.caught
    assert result.by == "test_toy.py::test_one"
    assert not score.unsound(checkout, [result], [])


def test_a_break_that_no_test_sees_survives(checkout):
    result = run(checkout, toy("x + x"))
    assert not result.caught
    assert "survived" in result.by


def test_a_selection_that_is_empty_leaves_the_others_to_decide(checkout):
    patch = toy("3 * x")._replace(tests=("test_toy.py -k nothing", "test_toy.py"))
    assert run(checkout, patch).by == "test_toy.py::test_one"


def test_a_test_that_fails_anyway_proves_nothing(checkout):
    (checkout / "test_toy.py").write_text(TOY_TESTS.replace("== 2", "== 5"))
    assert score.unsound(checkout, [run(checkout, toy("3 * x"))], []) == ["test_toy.py::test_one"]


def test_a_hang_and_a_crash_count_as_caught(checkout):
    assert "hung" in run(checkout, toy("[1 for _ in iter(int, 1)]"), limit=3).by
    assert "crashed" in run(checkout, toy("__import__('os').abort()")).by


def test_what_says_nothing_is_an_error(checkout):
    with pytest.raises(score.ScoreError, match="found it 0 times"):
        run(checkout, toy("3 * x")._replace(old="4 * x"))
    with pytest.raises(score.ScoreError, match="names no test"):
        run(checkout, toy("3 * x", "test_toy.py -k nothing"))


def test_results_of_portions_are_put_together(tmp_path):
    first, second = (score.Result(patch.id, True, "a test", 1.0) for patch in PATCHES[:2])
    for results, mutants in (([second], (3, 4)), ([first], None)):
        score.write_json(tmp_path / "score.json", results, mutants)
    assert score.read_json(tmp_path / "score.json") == [first, second]
    assert json.loads((tmp_path / "score.json").read_text())["mutant classes"] == {"rejected": 3, "of": 4}
