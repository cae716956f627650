"""Train the digits example with methods of your choice and with `none`: rows like those of docs/accuracy.md.

    python benchmarks/accuracy.py --compressors mine:clip=2 qsgd --import ./mine.py

Two ranks on this machine train in DistributedDataParallel, as in examples/ddp_digits.py, each weight compressed
separately (granularity "layer"). Without further options, methods of grace have the settings of examples/digits.py.
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

RANKS = 2
SHARED = {"granularity": "layer", "check_replicas": 20}


def runs_of(args):
    """Return the runs: `none`, then the given methods. Raises GraceError for a wrong configuration."""
    runs = []
    for variant in [Variant("none"), *parse_variants(args.compressors, **SHARED)]:
        setting = digits.SETTINGS.get(variant.name, digits.Setting())
        config = grace.make_config(variant.config(**SHARED, **setting.options))
        changed = runs and args.lr is not None
        runs.append(digits.Run(variant.label, config, args.lr if changed else setting.lr, setting.momentum))
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
    for run in runs_of(args):
        row = {"method": run.label, "setting": f"lr {run.lr:g} momentum {run.momentum:g}"}
        for seed in args.seeds:
            row |= trained(run, data, argparse.Namespace(**{**vars(args), "seed": seed}), row)
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
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
    parser.add_argument("--lr", type=float, help="of the methods; none has 0.05 (default: as in digits.py)")
    args = parser.parse_args()
    args.compressors = args.compressors or ["qsgd"]
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
