#!/usr/bin/env bash
# Sets everything up, then runs lint, types and every test; stops at the first failure, with its exit status.
# Arguments go to pytest: bash scripts/test.sh -k topk
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
    # With the reasons of what was left out, such as a compiler without sanitizers.
    step "tests" python -m pytest -q -rs --durations=5 "${@}" || status=$?
    # 5 means that the arguments name no test of this kind, which is all right for one of the two.
    if [ "$status" -eq 0 ]; then found=1; elif [ "$status" -ne 5 ]; then exit "$status"; fi
}
# What starts processes of its own has the cores to itself; the rest is dealt out to them.
tests -n auto -m "not distributed" "$@"
tests -m distributed "$@"
if [ "$found" -eq 0 ]; then
    echo "test: no test fits the arguments: $*" >&2
    exit 5
fi
printf '\ntest: all passed\n'
