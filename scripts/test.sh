#!/usr/bin/env bash
# Set everything up, then run lint, type checks, the docs build and all tests. Stop at the first failure, with its exit
# status. Arguments are passed to pytest: bash scripts/test.sh -k topk
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$root"
bash scripts/setup.sh
export PATH="$root/.venv/bin:$PATH" VIRTUAL_ENV="$root/.venv"
unset PYTHONHOME PYTHONPATH

step() {
    printf '\ntest: %s: ' "$1"; shift
    printf '%s\n' "$*"
    "$@"
}

step "lint" ruff check .
step "format" ruff format --check .
step "types" mypy
step "docs" bash scripts/docs.sh -q

found=0
tests() {
    local status=0
    # -rs shows the reasons of skipped tests, such as a compiler without sanitizers.
    step "tests" python -m pytest -q -rs --durations=5 "${@}" || status=$?
    # 5 means that the arguments select no test of this half. This is an error only if it holds for both halves.
    if [ "$status" -eq 0 ]; then found=1; elif [ "$status" -ne 5 ]; then exit "$status"; fi
}
# Tests that start processes run one at a time. All other tests run in parallel on all cores.
tests -n auto -m "not distributed" "$@"
tests -m distributed "$@"
if [ "$found" -eq 0 ]; then
    echo "test: the arguments select no test: $*" >&2
    exit 5
fi
printf '\ntest: all passed\n'
