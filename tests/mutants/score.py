"""Report which deliberate breaks of the code the tests catch: `python -m tests.mutants.score --help`.

Every patch of `tests.mutants.patches` is applied to a copy of the checkout, one at a time. Its own tests run first. If
they pass, both halves of the suite run, until the first failure. A patch that no test fails for has survived: it shows
a hole in the suite. A test run that ends in a crash or hangs counts as caught.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.mutants.patches import PATCHES, Patch

ROOT = Path(__file__).resolve().parents[2]
# Every test run is a fork of one process, which has imported the frameworks: that is most of the time of a few tests.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["pytest"])
FRAMEWORKS = ["numpy", "torch", "tensorflow"]
HALVES = (["-n", "auto", "-m", "not distributed"], ["-m", "distributed"])
HALF_LIMIT_S = 3600
# A covering array need not hold every case that a patch names: then its other tests decide.
NOTHING_RUN = "no test has run"
# As pytest documents its exit statuses; a negative one is a signal.
PASSED, FAILED, INTERRUPTED, NO_TESTS = 0, 1, 2, 5


class Outcome(NamedTuple):
    """The outcome of a test run: caught or not, and by which tests."""

    caught: bool
    by: str


@dataclass
class Result:
    """The result of one patch."""

    id: str
    caught: bool
    by: str
    seconds: float


class ScoreError(Exception):
    """A run that says nothing about the tests: a patch that does not apply, or targets without a test."""


def patched(text: str, patch: Patch) -> str:
    """Return the text with the patch applied. Raise ScoreError unless its old text occurs exactly once."""
    count = text.count(patch.old)
    if count != 1:
        raise ScoreError(
            f"patch {patch.id}: expected its old text once in {patch.file}, found it {count} times; "
            "the code has moved: write the patch anew."
        )
    return text.replace(patch.old, patch.new)


def copy_checkout(target: Path, built: bool) -> None:
    """Copy the files that git knows or would add, and with `built` the kernels that are built here."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    extensions = [str(path.relative_to(ROOT)) for path in (ROOT / "grace").glob("*.so")] if built else []
    for name in [*filter(None, listed.split("\0")), *extensions]:
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def build_kernels(root: Path) -> str:
    """Build what changed of the kernels; return the end of the output if that failed."""
    environment = {**os.environ, "GRACE_CUDA": "OFF", "PYTHONPATH": str(root)}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr)[-2000:] if done.returncode else ""


def run_pytest(root: Path, arguments: Sequence[str], output: str) -> None:
    """Run pytest in a checkout, in a process of its own that has no module of the project yet."""
    os.setsid()
    # A shell that starts this in the background makes its children ignore the signal that ends a hung pytest.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    descriptor = os.open(output, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root)
    # Bytecode is told from its source by time and size, which a patch need not change.
    os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "1", True
    sys.path[:] = [str(root), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("grace", "tests")]:
        del sys.modules[name]
    import pytest

    status = pytest.main(["-q", "-rfE", "-p", "no:cacheprovider", *arguments])
    sys.stdout.flush()
    os._exit(int(status))


def run(root: Path, arguments: Sequence[str], limit: float) -> tuple[int | None, str]:
    """Run pytest in a checkout; return its exit status, None if it took longer than the limit, and its output."""
    with tempfile.NamedTemporaryFile("r") as output:
        process = PROCESSES.Process(target=run_pytest, args=(root, arguments, output.name))
        process.start()
        process.join(limit)
        if process.exitcode is None:
            # pytest first ends what it has started, ranks for instance.
            assert process.pid is not None
            os.kill(process.pid, signal.SIGINT)
            process.join(30)
            if process.exitcode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.join()
            return None, output.read()
        return process.exitcode, output.read()


def failures(output: str) -> list[str]:
    """Return the tests that the short summary names."""
    return re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", output, re.MULTILINE)


def judge(root: Path, arguments: Sequence[str], limit: float) -> Outcome:
    """Run tests against a patched checkout. Raise ScoreError if pytest refuses the arguments."""
    status, output = run(root, ["-x", *arguments], limit)
    if status is None:
        return Outcome(True, f"hung for {limit:.0f} s")
    if status in (PASSED, NO_TESTS):
        return Outcome(False, "" if status == PASSED else NOTHING_RUN)
    if status in (FAILED, INTERRUPTED):
        return Outcome(True, next(iter(failures(output)), f"pytest exited with {status}"))
    if status < 0 or status > 128:
        return Outcome(True, f"crashed: pytest ended with {status}")
    raise ScoreError(f"pytest {shlex.join(arguments)} exited with {status}:\n{output[-2000:]}")


def score(root: Path, patch: Patch, *, targeted: bool, more: Sequence[str], limit: float) -> Result:
    """Apply a patch, run the tests, and take it back."""
    began = time.monotonic()
    path = root / patch.file
    original = path.read_bytes()
    of_kernels = patch.file.startswith("kernels/")
    try:
        path.write_text(patched(original.decode(), patch))
        fault = build_kernels(root) if of_kernels else ""
        if fault:
            raise ScoreError(f"patch {patch.id} does not compile:\n{fault}")
        outcomes = []
        for arguments in map(shlex.split, patch.tests):
            outcomes.append(judge(root, [*arguments, *more], limit))
            if outcomes[-1].caught:
                break
        if all(outcome.by == NOTHING_RUN for outcome in outcomes):
            raise ScoreError(f"patch {patch.id} names no test of this suite: {'; '.join(patch.tests)}")
        for half in [] if targeted or outcomes[-1].caught else HALVES:
            outcomes.append(judge(root, [*half, *more], HALF_LIMIT_S))
            if outcomes[-1].caught:
                break
        caught, by = outcomes[-1]
    finally:
        # With a new time of change, so that kernels are built again.
        path.write_bytes(original)
    survived = "survived its tests" if targeted else "survived every test"
    return Result(patch.id, caught, by if caught else survived, round(time.monotonic() - began, 1))


def unsound(root: Path, results: Iterable[Result], more: Sequence[str]) -> list[str]:
    """Return the tests that caught a patch and fail without any patch too: they prove nothing."""
    tests = sorted({result.by for result in results if "::" in result.by})
    if not tests:
        return []
    status, output = run(root, [*more, *tests], HALF_LIMIT_S)
    if status == PASSED:
        return []
    return failures(output) or [f"pytest ended with {status}:\n{output[-2000:]}"]


def classes(root: Path) -> tuple[int, int]:
    """Return how many tests reject the mutant classes of this package as they should, and how many there are."""
    status, output = run(root, ["tests/core/test_contract_mutants.py", "-k", "rejects"], HALF_LIMIT_S)
    if status not in (PASSED, FAILED):
        raise ScoreError(f"tests/core/test_contract_mutants.py ended with {status}:\n{output[-2000:]}")
    passed, failed = (sum(map(int, re.findall(rf"(\d+) {word}", output))) for word in ("passed", "failed"))
    return passed, passed + failed


def table(results: Sequence[Result]) -> str:
    """Return one line per patch: its id, the seconds, and what caught it."""
    width = max(len(result.id) for result in results)
    return "\n".join(f"{r.id:{width}}  {r.seconds:6.1f} s  {r.by if r.caught else r.by.upper()}" for r in results)


def read_json(path: Path | None) -> list[Result]:
    """Return the results that a file holds; none if it does not exist."""
    if path is None or not path.exists():
        return []
    held = json.loads(path.read_text())["results"]
    return [Result(name, **held[name]) for name in (patch.id for patch in PATCHES) if name in held]


def write_json(path: Path, results: Iterable[Result], mutants: tuple[int, int] | None = None) -> None:
    """Add results to those of other patches that a file holds, so that a run can be made in portions."""
    place = {patch.id: number for number, patch in enumerate(PATCHES)}
    every = {result.id: result for result in [*read_json(path), *results]}
    ordered = sorted(every.values(), key=lambda result: place[result.id])
    held: dict[str, object] = {"caught": sum(result.caught for result in ordered), "of": len(ordered)}
    if mutants is not None:
        held["mutant classes"] = {"rejected": mutants[0], "of": mutants[1]}
    elif path.exists():
        held |= {key: value for key, value in json.loads(path.read_text()).items() if key == "mutant classes"}
    held["results"] = {r.id: {"caught": r.caught, "by": r.by, "seconds": r.seconds} for r in ordered}
    path.write_text(json.dumps(held, indent=1) + "\n")


def chosen(ids: Sequence[str]) -> list[Patch]:
    """Return the patches with these ids, which may end in `*`; all of them for no id."""
    found = [p for p in PATCHES if not ids or any(re.fullmatch(i.replace("*", ".*"), p.id) for i in ids)]
    if not found:
        raise ScoreError(f"no patch is called {', '.join(ids)}; the ids are {', '.join(p.id for p in PATCHES)}.")
    return found


def main() -> int:
    """Run the command; return 1 if a patch survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="ID", help="these patches; * stands for any letters")
    parser.add_argument("--targeted", action="store_true", help="run only the tests named by each patch")
    parser.add_argument("--all", action="store_true", help="run full products of test cases, not covering arrays")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="patches at a time, each in its own copy")
    parser.add_argument("--limit", type=float, default=600, metavar="S", help="seconds for the tests of a patch")
    parser.add_argument("--classes", action="store_true", help="count the mutant classes that the contracts reject too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add every result to those that the file holds")
    parser.add_argument("--resume", action="store_true", help="leave out the patches that the file of --json holds")
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    PROCESSES.set_forkserver_preload(["pytest", *FRAMEWORKS])
    patches, more = chosen(options.only), ["--all"] if options.all else []
    known = {result.id: result for result in read_json(options.json)} if options.resume else {}
    results = [known[patch.id] for patch in patches if patch.id in known]
    patches = [patch for patch in patches if patch.id not in known]
    compiled = any(patch.file.startswith("kernels/") for patch in patches)
    with tempfile.TemporaryDirectory() as temporary:
        free: queue.Queue[Path] = queue.Queue()
        for number in range(options.jobs):
            root = Path(temporary) / str(number)
            copy_checkout(root, built=not compiled)
            if compiled and (fault := build_kernels(root)):
                raise ScoreError(f"the kernels do not build:\n{fault}")
            free.put(root)

        writing = threading.Lock()

        def work(patch: Patch) -> Result:
            root = free.get()
            try:
                result = score(root, patch, targeted=options.targeted, more=more, limit=options.limit)
            finally:
                free.put(root)
            print(table([result]), flush=True)
            if options.json:
                with writing:
                    write_json(options.json, [result])
            return result

        with ThreadPoolExecutor(options.jobs) as pool:
            results += pool.map(work, patches)
        root = free.get()
        if compiled and (fault := build_kernels(root)):
            raise ScoreError(f"the kernels do not build:\n{fault}")
        broken = unsound(root, results, more)
        mutants = classes(root) if options.classes else None
    if options.json:
        write_json(options.json, results, mutants)
    survived = [result for result in results if not result.caught]
    print(f"\n{len(results) - len(survived)} of {len(results)} caught")
    if survived:
        print(f"survived:\n{table(survived)}")
    if broken:
        print("these tests fail without a patch too, and prove nothing:\n" + "\n".join(broken))
    if mutants is not None:
        print(f"mutant classes: {mutants[0]} of {mutants[1]} rejected by the contracts")
    return int(bool(survived or broken))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ScoreError as error:
        sys.exit(f"score: {error}")
