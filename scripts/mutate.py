"""Break the lines of a diff, one after another, and show what no test notices.

pip install -r scripts/requirements_coverage.txt        # cosmic-ray and pytest-cov, which scripts/setup.sh leaves out
python scripts/mutate.py                              # what differs from main, by the tests that `pytest` runs
python scripts/mutate.py --base HEAD~3 tests/papers   # the last three commits and changes since, by these tests

It works on a copy of the checkout, with the changes of tracked files that are not committed. The tests run once, and
tell which of them run a changed line. Only these run again for each mutant, until one fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import coverage
from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import use_db

ROOT = Path(__file__).resolve().parents[1]
# Of the replacements of an operator, one suffices. `|` and `*` mostly stand between types and in signatures.
FEW = "Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Div|Mod_Mul|Eq_NotEq|NotEq_Eq|Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Is_IsNot"
CHOSEN = re.compile(rf"core/(?!Replace(Binary|Comparison|Unary)Operator)|core/Replace\w+Operator_({FEW}|Delete_Not)$")


def changed_lines(diff: str) -> dict[str, set[int]]:
    """Return the new lines of each module of the package, from a diff without context."""
    changed: dict[str, set[int]] = {}
    for line in diff.splitlines():
        if line.startswith("+++ "):
            lines = changed.setdefault(line.removeprefix("+++ b/"), set())
        elif found := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            lines.update(range(int(found[1]), int(found[1]) + int(found[2] or 1)))
    return {path: lines for path, lines in changed.items() if re.fullmatch(r"grace/.*\.py", path) and lines}


def tests_of(changed: dict[str, set[int]]) -> list[str]:
    """Return the tests that ran a changed line: of each test function one case first, then all others."""
    data = coverage.CoverageData()
    data.read()
    contexts = {path: data.contexts_by_lineno(os.path.abspath(path)) for path in changed}
    found = {name.partition("|")[0] for path in changed for n in changed[path] for name in contexts[path].get(n, ())}
    first = {name.partition("[")[0]: name for name in sorted(found - {""})}
    return [*first.values(), *sorted(found - {"", *first.values()})]


def run(base: str, tests: list[str], timeout: float) -> int:
    """Break the changed lines in the current folder. Return 1 if a mutant survives, else 0."""
    changed = changed_lines(subprocess.check_output(["git", "diff", "--unified=0", base, "--", "grace"], text=True))
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    subprocess.run([*pytest, "--cov=grace", "--cov-context=test", "--cov-report=", *tests], check=True)
    Path("tests.txt").write_text("\n".join(tests_of(changed)), encoding="utf-8")
    counts = {"killed": 0, "survived": 0, "incompetent": 0}
    with use_db("mutants.sqlite") as db:
        init(map(Path, changed), db, {})
        for item in db.work_items:
            (mutation,) = item.mutations
            lines = range(mutation.start_pos[0], mutation.end_pos[0] + 1)
            if CHOSEN.match(mutation.operator_name) and changed[str(mutation.module_path)].intersection(lines):
                result = mutate_and_test(item.mutations, shlex.join([*pytest, "-x", "-n0", "@tests.txt"]), timeout)
                outcome = result.test_outcome.value if result.test_outcome else "incompetent"
                counts[outcome] += 1
                print(f"{outcome}: {mutation.module_path}:{lines[0]}: {mutation.operator_name}", flush=True)
                if not result.is_killed:
                    print(result.diff, flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return int(counts["survived"] > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="main", help="the commit to compare with (default: %(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=600, help="seconds for a mutant's tests (default: %(default)s)"
    )
    parser.add_argument("tests", nargs="*", help="arguments of pytest (default: none, which runs the ordinary tests)")
    arguments = parser.parse_args()

    def git(*words: str) -> str:
        return subprocess.check_output(["git", *words], cwd=ROOT, text=True).strip()

    base = git("merge-base", arguments.base, "HEAD")
    folder = Path(tempfile.mkdtemp(prefix="grace-mutants-")) / "grace"
    git("worktree", "add", "--quiet", "--detach", str(folder), git("stash", "create") or "HEAD")
    try:
        for kernels in (ROOT / "grace").glob("*.so"):
            shutil.copy(kernels, folder / "grace")
        os.chdir(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        return run(base, arguments.tests, arguments.timeout)
    finally:
        git("worktree", "remove", "--force", str(folder))


if __name__ == "__main__":
    sys.exit(main())
