"""Train the digits example with methods of your choice and with `none`: rows like those of docs/accuracy.md.

    python benchmarks/accuracy.py --compressors mine:clip=2 qsgd --import ./mine.py

Two ranks on this machine train in DistributedDataParallel, as in examples/ddp_digits.py, each weight compressed
separately (granularity "layer"). Methods of grace have the settings that they are registered with, unless options
change them. The column "setting" has what differs from learning rate 0.05, momentum 0.9 and the default options.
Bytes are what one rank sends per step for the three weights of at least 1,024 elements, on average over the run of the
first seed, and their share of the bytes of these weights. A run of a fast method takes some seconds on two cores.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import ddp_digits
import digits
import tables
import torch
import torch.distributed as dist
from digits_torch import Torchrun

import grace
from grace.bench.command import add_variants
from grace.bench.variants import Variant, import_own, parse_variants

RANKS, BATCH = 2, 32
SHARED = {"granularity": "layer", "check_replicas": 20}
USUAL = grace.compressors.about("none").digits


def runs_of(args):
    """Return the runs with the beginnings of their rows: `none`, then the given methods.

    Raises GraceError for a wrong configuration.
    """
    runs = []
    for variant in [Variant("none"), *parse_variants(args.compressors, **SHARED)]:
        setting = grace.compressors.about(variant.name).digits
        options = {**setting.options, **variant.options}
        config = grace.make_config(Variant(variant.name, options).config(**SHARED))
        lr = args.lr if runs and args.lr is not None else setting.lr
        shown = dict(options)
        if lr != USUAL.lr:
            shown["lr"] = lr
        if setting.momentum != USUAL.momentum:
            shown["momentum"] = setting.momentum
        text = ", ".join(f"{key} {value}" for key, value in shown.items())
        run = digits.Run(variant.label, config, lr, setting.momentum)
        runs.append((run, {"method": variant.name, "setting": text}))
    return runs


def trained(run, data, args, row):
    """Return the entries of a row for a run with the seed of `args`; with the bytes, if the row has none yet."""
    outcomes = Torchrun.allgather_object(ddp_digits.train(run, data, args))
    if len({outcome.fingerprint for outcome in outcomes}) > 1:
        raise grace.errors.MismatchError(f"{run.label}, seed {args.seed}: the ranks have different weights")
    found = {f"seed_{args.seed}": 100 * outcomes[0].accuracy}
    sent, dense = (
        sum(outcome.per_step[f"compressed_{what}_bytes_per_step"] for outcome in outcomes) / RANKS
        for what in ("wire", "dense")
    )
    return found if "bytes" in row or dense == 0 else {**found, "bytes": sent, "share": 100 * sent / dense}


def rank(number, args, folder):
    """Train all runs on one rank. Rank 0 writes the results to a file in the folder."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=RANKS)
    # The ranks share the cores of one machine.
    torch.set_num_threads(1)
    import_own(args.modules)
    data, rows = digits.load_data(), []
    for run, row in runs_of(args):
        for seed in args.seeds:
            row |= trained(run, data, argparse.Namespace(epochs=args.epochs, batch_size=BATCH, seed=seed), row)
        row["mean"] = sum(row[f"seed_{seed}"] for seed in args.seeds) / len(args.seeds)
        rows.append(row)
    if number == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_variants(parser, "qsgd")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], metavar="N", help="(default: 0 1)")
    parser.add_argument("--epochs", type=int, default=15, help="(default: 15)")
    parser.add_argument("--lr", type=float, help="of the methods; none has 0.05 (default: those of the methods)")
    args = parser.parse_args()
    args.compressors = args.compressors or ["qsgd"]
    if args.epochs < 1 or (args.lr is not None and args.lr <= 0):
        parser.error("expected --epochs of at least 1 and a positive --lr")
    try:
        args.modules = import_own(args.modules)
        runs_of(args)
    except grace.errors.GraceError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank, (args, folder), nprocs=RANKS)
        rows = json.loads(Path(folder, "rows.json").read_text(encoding="utf-8"))
    columns = {
        "method": {"title": "method"},
        "setting": {"title": "setting"},
        **{f"seed_{seed}": {"title": f"seed {seed}", "format": ".2f"} for seed in args.seeds},
        "mean": {"title": "mean", "format": ".2f"},
        "bytes": {"title": "bytes/step", "format": ",.0f"},
        "share": {"title": "share, %", "format": ".2f"},
    }
    print(f"\nTest accuracy in %: one image is {100 / digits.TEST_IMAGES:.2f} %\n")
    print(tables.printed(columns, rows))


if __name__ == "__main__":
    main()
