#!/usr/bin/env bash
# Builds the documentation site into build/site; every warning is an error. Needs no network.
# Arguments go to Sphinx: bash scripts/docs.sh -q
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=python
if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
# All pages anew: Sphinx does not repeat the warnings of pages that it keeps.
rm -rf build/site
exec "$python" -m sphinx --builder html --fail-on-warning --keep-going --fresh-env --doctree-dir build/doctrees "$@" \
    docs build/site
