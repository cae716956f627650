#!/usr/bin/env bash
# Set everything up. Then train the digits examples on two workers, with and without compression: PyTorch in
# DistributedDataParallel, and PyTorch and Keras with Horovod. Print their tables. Arguments are passed to the examples:
# bash scripts/demo.sh --epochs 3
# With --ddp, only PyTorch in DistributedDataParallel: neither Horovod nor TensorFlow is needed then.
# At the end, time steps of a larger model behind links of 1 Gbit/s.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$root"
parts=()
if [ "${1:-}" = --ddp ]; then parts=(--ddp); shift; fi
if [ "${#parts[@]}" -gt 0 ]; then
    echo "demo: it takes a minute and a half on two cores, and before it the first set-up 2 to 4 minutes"
else
    echo "demo: it takes 4 minutes on two cores, and before it the first set-up 5 to 10 minutes"
    echo "demo: most of these are for Horovod; 'bash scripts/demo.sh --ddp' shows DDP alone, without Horovod"
fi
bash scripts/setup.sh "${parts[@]}"
export PATH="$root/.venv/bin:$PATH" VIRTUAL_ENV="$root/.venv"
unset PYTHONHOME PYTHONPATH
# TensorFlow logs a lot when it is imported, and horovodrun imports it as well.
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}" TF_ENABLE_ONEDNN_OPTS="${TF_ENABLE_ONEDNN_OPTS:-0}"

# horovodrun writes "[0]<stdout>:" before every line of rank 0 and has no option to turn this off. This filter removes
# the mark. It does not wait for whole lines, so that progress bars move (their lines end with a carriage return). The
# marks of other ranks stay.
without_mark='
import os, re, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, wait for horovodrun and show the rest of its output
while piece := os.read(0, 65536):
    rest = re.sub(rb"(?m)(^|\r)\[0\]<std(?:out|err)>:", rb"\1", piece)
    while rest:
        rest = rest[os.write(1, rest):]
'

# Ranks share the cores, and torchrun would say so.
printf '\ndemo: PyTorch in DistributedDataParallel on 2 workers: none qsgd\n'
OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/ddp_digits.py --compressor none qsgd "$@"

# Say what the tables cannot show, and show it.
over_a_link() {
    cat <<'END'

demo: In the tables above the ranks share one machine's memory: there is no network to save, so most methods are slower
demo: than none. This is a model of 25 million parameters on 2 ranks, each behind a link of 1 Gbit/s of its own. Root is
demo: not needed. In the column 'x DDP', above 1 is faster than plain DDP:

END
    grace bench step --link 1gbit --compressors none qsgd blockwise --rounds 2
    cat <<'END'

demo: Your own script, behind the same links:   .venv/bin/grace bench run --link 1gbit --ranks 2 -- python train.py
demo: Your own model, in a table like this one: .venv/bin/grace bench step --link 1gbit --model train.py:build
END
}

if [ "${#parts[@]}" -gt 0 ]; then
    over_a_link
    exit
fi

# train FRAMEWORK EXAMPLE "COMPRESSORS" arguments...
train() {
    local framework="$1" example="$2" compressors="$3"; shift 3
    printf '\ndemo: %s with Horovod on 2 workers: %s\n' "$framework" "$compressors"
    # shellcheck disable=SC2086  # one word per compressor
    {
        horovodrun -np 2 --gloo python "$example" --compressor $compressors "$@" 2>&1 >&3 |
            python -c "$without_mark" >&2
    } 3>&1 | python -c "$without_mark"
}

train PyTorch examples/torch_digits.py "none qsgd topk efsignsgd powersgd" "$@"
train Keras examples/keras_digits.py "none qsgd" "$@"
over_a_link
