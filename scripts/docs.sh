#!/usr/bin/env bash
# Build the documentation site in build/site. Every warning is an error. It needs no network.
# Arguments are passed to Sphinx: bash scripts/docs.sh -q
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=python
if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
# Build all pages again, because Sphinx does not repeat the warnings of pages that it keeps.
rm -rf build/site
exec "$python" -m sphinx --builder html --fail-on-warning --keep-going --fresh-env --doctree-dir build/doctrees "$@" \
    docs build/site
