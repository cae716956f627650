#!/usr/bin/env bash
# Set everything up, then run lint, type checks, the docs build and all tests. Stop at the first failure, with its exit
# status. At the end, print how long each group took. Arguments are passed to pytest: bash scripts/test.sh -k topk
# With --all, slow tests run, too, and every pair of methods, launchers and so on in place of few cases.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$root"
times="$(mktemp)" output="$(mktemp)" beside=""
trap 'rm -f "$times" "$output"; if [ -n "$beside" ]; then kill -- "-$beside" 2>/dev/null || true; fi' EXIT

# Run a command as one group of the table of times, which has a line per group: seconds, a tab and the name.
timed() {
    local name="$1" from="$SECONDS" status=0; shift
    "$@" || status=$?
    printf '%d\t%s\n' "$((SECONDS - from))" "$name" >>"$times"
    return "$status"
}

timed "set-up" bash scripts/setup.sh
export PATH="$root/.venv/bin:$PATH" VIRTUAL_ENV="$root/.venv"
# Hundreds of processes import the same modules: they must find them compiled.
unset PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE
. scripts/compiler_cache.sh

step() {
    local name="$1"; shift
    printf '\ntest: %s: %s\n' "$name" "$*"
    timed "$name" "$@"
}

step "lint" ruff check .
step "format" ruff format --check .
step "types" mypy
found=0
tests() {
    local name="$1" status=0; shift
    # -rs shows the reasons of skipped tests, such as a compiler without sanitizers.
    GRACE_TEST_TIMES="$times" step "$name" python -m pytest -q -rs --durations=5 "${@}" || status=$?
    # 5 means that the arguments select no test of this group. This is an error only if it holds for all of them.
    if [ "$status" -eq 0 ]; then found=1; elif [ "$status" -ne 5 ]; then exit "$status"; fi
}
# Tests of ranks run one at a time. All other tests run in parallel on all cores.
tests "tests, one process" -n auto -m "not distributed and not processes and not kernels" "$@"
# Ranks leave a tenth of the processor unused. The docs and the tests of kernels and of other processes take it, at the
# lowest priority. Linux shares the processor among sessions first, so they run in a session of their own. Their output
# is printed afterwards. They go on when the ranks have ended, and then use all cores.
beside_ranks="not distributed and (processes or kernels)"
printf '\ntest: beside the next step: bash scripts/docs.sh -q; python -m pytest -q -rs --durations=5 -n auto -m "%s"%s\n' \
    "$beside_ranks" "${*:+ $*}"
setsid bash -ec '
    { echo 19 >/proc/self/autogroup; } 2>/dev/null || true
    renice -n 19 $$ >/dev/null
    bash scripts/docs.sh -q
    exec python -m pytest -q -rs --durations=5 -n auto -m "$@"
' beside "$beside_ranks" "$@" >"$output" 2>&1 &
beside=$!
tests "tests, several processes" -m distributed "$@"
status=0
timed "what ran beside it, the rest" wait "$beside" || status=$?
beside=""
cat "$output"
if [ "$status" -eq 0 ]; then
    found=1
elif [ "$status" -ne 5 ]; then
    echo "test: docs, and tests of kernels and of other processes: failed with exit status $status" >&2
    exit "$status"
fi
if [ "$found" -eq 0 ]; then
    echo "test: the arguments select no test: $*" >&2
    exit 5
fi
# The lines of folders, which begin with a space, are parts of the group after them.
awk -F '\t' '{ seconds[NR] = $1; name[NR] = $2; if ($2 !~ /^ /) total += $1 }
    END {
        printf "\n"
        for (i = 1; i <= NR; i++) printf "%6d s  %3d %%  %s\n", seconds[i], 100 * seconds[i] / (total ? total : 1), name[i]
        printf "%6d s         all\n", total
    }' "$times"
printf '\ntest: all passed\n'
