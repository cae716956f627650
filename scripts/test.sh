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
step "tests" python -m pytest -q --durations=5 "$@"
printf '\ntest: all passed\n'
