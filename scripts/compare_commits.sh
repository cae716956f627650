#!/usr/bin/env bash
# Compare what simulated training gives in the working tree and in another commit, bit for bit, for every method:
#     bash scripts/compare_commits.sh HEAD~1 [FRAMEWORK...]
# The kernels of the working tree serve both. Exit status 1 and the lines that differ if anything does.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
commit="$1"; shift
folder="$(mktemp -d)"
trap 'git -C "$root" worktree remove --force "$folder/tree"; rm -rf "$folder"' EXIT
git -C "$root" worktree add --quiet --detach "$folder/tree" "$commit"
cp "$root"/grace/_*.so "$folder/tree/grace/"
for tree in "$folder/tree" "$root"; do
    (cd "$folder" && PYTHONPATH="$tree" python -P "$root/scripts/results.py" "$@") >"$folder/$(basename "$tree").txt"
done
diff "$folder/tree.txt" "$folder/$(basename "$root").txt"
echo "$(wc -l <"$folder/tree.txt") lines are equal"
