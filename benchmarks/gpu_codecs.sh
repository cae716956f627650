#!/usr/bin/env bash
# Test the kernels on a GPU and time the methods: bash benchmarks/gpu_codecs.sh FOLDER [compressor...]
# Without names, it times all methods. GRACE_SANITIZER=0 skips compute-sanitizer.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
folder="${1:?usage: bash benchmarks/gpu_codecs.sh FOLDER [compressor...]}"
shift
mkdir -p "$folder"
folder="$(cd "$folder" && pwd -P)"
cd "$root"

python - <<'END' | tee "$folder/machine.txt"
import sys

import torch

from grace.core.ops import serves

if not serves("torch", "cuda"):
    sys.exit("the kernels cannot use a CUDA device here; `grace doctor` shows the reason")
print(torch.cuda.get_device_name(), "capability", torch.cuda.get_device_capability())
print("PyTorch", torch.__version__, "CUDA", torch.version.cuda)
END
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv | tee -a "$folder/machine.txt"

python -m pytest -q -m gpu -p no:xdist tests/kernels/gpu 2>&1 | tee "$folder/tests.txt"

if [ "${GRACE_SANITIZER:-1}" != 0 ] && command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck synccheck initcheck; do
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 1 \
            python -m pytest -q -m gpu -p no:xdist tests/kernels/gpu -k small 2>&1 |
            tee "$folder/$tool.txt"
    done
fi

names=()
if [ "$#" -gt 0 ]; then names=(--compressors "$@"); fi
grace bench codec --framework torch --device cuda --numel 25M 250M "${names[@]}" --json "$folder/codec.json" |
    tee "$folder/codec.txt"
