#!/usr/bin/env bash
# Sets everything up, then trains the digits examples of PyTorch and Keras on two workers, without and with compression,
# and prints their tables. Arguments go to both: bash scripts/demo.sh --epochs 3
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$root"
bash scripts/setup.sh
export PATH="$root/.venv/bin:$PATH" VIRTUAL_ENV="$root/.venv"
unset PYTHONHOME PYTHONPATH
# TensorFlow has much to say when it is imported, and horovodrun does that too, only to see whether it is there.
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}" TF_ENABLE_ONEDNN_OPTS="${TF_ENABLE_ONEDNN_OPTS:-0}"

# horovodrun writes "[0]<stdout>:" before every line of rank 0 and has no option for leaving it out. This takes it off
# again, as soon as text arrives, so that a progress bar (which ends its lines with a carriage return) moves. The other
# ranks' lines keep their mark.
without_mark='
import os, re, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, outlive horovodrun and show its last words
while piece := os.read(0, 65536):
    rest = re.sub(rb"(?m)(^|\r)\[0\]<std(?:out|err)>:", rb"\1", piece)
    while rest:
        rest = rest[os.write(1, rest):]
'

# train FRAMEWORK EXAMPLE "COMPRESSORS" arguments...
train() {
    local framework="$1" example="$2" compressors="$3"; shift 3
    printf '\ndemo: %s on 2 workers: %s\n' "$framework" "$compressors"
    # shellcheck disable=SC2086  # one word per compressor
    {
        horovodrun -np 2 --gloo python "$example" --compressor $compressors "$@" 2>&1 >&3 |
            python -c "$without_mark" >&2
    } 3>&1 | python -c "$without_mark"
}

train PyTorch examples/torch_digits.py "none topk qsgd efsignsgd powersgd" "$@"
train Keras examples/keras_digits.py "none topk" "$@"
