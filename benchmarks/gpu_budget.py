"""Write what every kernel moves on a GPU, and the least time that this takes.

    python benchmarks/gpu_budget.py docs/results/gpu_budget.json docs/results/gpu_budget_steps.json

It needs no GPU. Every method takes a step with its default options on the CPU, and the arguments and results of its
kernels are counted. Passes within a kernel (`WITHIN`) are counted from the sources in kernels/cuda. An access to a
single element moves a sector of 32 bytes. What stays in the caches (levels, scales, filters, sketches) is not counted.
"""

import sys

import numpy as np
import tables

from grace.bench.codec import LocalStep, make_unit
from grace.core.codecs.signs import binarize_means, sign_mean
from grace.core.config.registry import compressors
from grace.core.ops import get_ops, native
from grace.core.optim.moments import limited_sum, masked_sum
from grace.core.wire.lanes import pack_lanes, unpack_lanes

ELEMENTS, SHOWN, STEPS, RANKS = 1_000_000, 25_000_000, 3, 2
# Bytes per second of the memory of an H100 SXM, by its data sheet.
BANDWIDTH = 3.35e12
SECTOR = 32
# Kernels without a body for GPUs: PyTorch's own products and array operations take their place.
ELSEWHERE = {
    "thin_product", "sub_product", "power_product", "sum_power_product", "project", "bitshuffle_encode",
    "bitshuffle_decode", "decode_gaps", "encode_gaps", "gap_facts", "huffman_encode", "huffman_decode", "rans_encode",
    "rans_decode", "run_length_encode", "run_length_decode",
}  # fmt: skip
# Kernels that read or write only some elements of their first argument: the bytes that an entry moves.
SPARSE = {
    "put": SECTOR,
    "gather": SECTOR,
    "power_fade": SECTOR,
    "scatter_add": 2 * SECTOR,
    "sparse_sum": 2 * SECTOR,
    "power_sum": 2 * SECTOR,
}
# A bit per element, written and read.
MARKS = 2 / 8
# A selection of the largest reads the array again to mark its elements. Two marks are written, read for two digits,
# read and written to settle ties, and read to write the entries.
TOP = 4 + 5 * MARKS
# Bytes per element of float32 beyond arguments and results, and where they come from.
WITHIN = {
    "sum_top": (TOP, "a second pass marks elements by the first digit of the k-th magnitude; marks; tied elements"),
    "sum_select": (MARKS, "marks"),
    "sum_sample": (MARKS, "marks; the sample is written in its own order"),
    "top": (TOP, "as sum_top"),
    "top_bound": (TOP, "as sum_top"),
    "top_of_sides": (2 * (4 + TOP), "as sum_top, for each sign"),
    "select": (MARKS, "marks"),
    "draw_kept": (2 * MARKS, "marks of certain and of drawn elements"),
    "select_in_bins": (2 * MARKS, "marks, by sign"),
    "filter_positions": (MARKS, "marks"),
    "keep_odds": (3 * 4, "a pass per round; three rounds are counted"),
    "power_words": (8 + MARKS, "gradient and noise are read twice; marks"),
    "ternary_encode": (4 / 5, "bytes of five digits are written once and read three times"),
    "ternary_sum": (3 / 5, "of each payload: its digits are written twice and read once"),
    "precision_encode": (4 + 2 / 4, "elements are read twice; widths"),
    "precision_sum": (1 / 4, "of each payload: widths are read twice"),
    "leading_encode": (3 * 4, "elements are read four times: for middles, lengths, counts and bytes"),
    "leading_sum": (1 / 4, "of each payload: codes are read twice"),
    "spread_in_frame": (4 * 8, "of each coefficient: four projections read and write it again"),
    "count_sketch": (5 * 6 + 4 * 4, "each of five rows sorts blocks of 16 in four passes, and reads the elements"),
    "draw_vertices": (16, "cumulative sums of 64 bits are written and read"),
}
# Of these, each payload after the first reads and writes the sum again.
AGAIN = ("precision_sum", "leading_sum")
# Bits of the first digit of a magnitude of 31 bits.
FIRST_DIGIT = 11
# Methods that make all their passes over the gradient by kernels, and the least that a step moves: bytes per element,
# and bytes per entry of the payload of a sparsifier. What is read or written once before, and once after each number of
# the whole tensor (a scale, the k-th magnitude) is known, is counted: first what compresses, then what merges two
# payloads. A residual is added by 12 bytes. An entry has 8 bytes, and a sector at its place: to leave the residual, and
# in the sum of each payload, which is read from the second one on.
ENTRY = 8 + SECTOR + 2 * 8 + 3 * SECTOR
LIMITS = {
    "fp16": (6 + 6, 0),
    "signsgd": (4 + 1 / 8 + 2 / 8 + 4, 0),
    "efsignsgd": (12 + 1 / 8 + 8 + 2 / 8 + 4, 0),
    "onebit": (12 + 1 / 8 + 8 + 2 / 8 + 4, 0),
    "topk": (12 + 4 + 4, ENTRY),
    "threshold": (12 + 4, ENTRY),
    # The values are added on the way, and their order is not that of the elements.
    "randomk": (12 + 4, 8 + SECTOR + 8 + SECTOR),
    "qsgd": (4 + 1 + 2 + 4, 0),
    "terngrad": (4 + 4 + 2 / 8 + 4 / 8 + 4, 0),
    "natural": (4 + 9 / 8 + 18 / 8 + 4, 0),
    "eightbit": (4 + 4 + 1 + 2 + 4, 0),
    "uniform": (4 + 4 + 1 + 2 + 4, 0),
    "blockwise": (12 + 4 / 8 + 8 / 8 + 4, 0),
    "eden": (4 + 4 / 8 + 8 / 8 + 4, 0),
    "3lc": (12 + 8 + 4, 0),
}
# A copy reads and writes a float32.
COPY = 8
COLUMNS = {
    "kernel": {"title": "kernel"},
    "method": {"title": "method"},
    "outside": {"title": "arguments and results, bytes per element", "format": ".2f"},
    "within": {"title": "within, bytes per element", "format": ".2f"},
    "why": {"title": "what is within"},
    "microseconds": {"title": "least time, µs", "format": ".0f"},
}
STEPS_COLUMNS = {
    "method": {"title": "method"},
    "bytes": {"title": "bytes per element", "format": ".1f"},
    "limit": {"title": "least possible", "format": ".1f"},
    "times": {"title": "bytes / least possible", "format": ".2f"},
    "copies": {"title": "copies", "format": ".1f"},
    "microseconds": {"title": "least time, µs", "format": ".0f"},
}
CONDITIONS = (
    "default options and 2 ranks, and the least time for 25 million elements at 3.35 TB/s; computed, not measured"
)


class Counter:
    """Count of what kernels move: a context manager in place of `native.module.run`."""

    def __init__(self):
        # By kernel: the largest call as (bytes outside, bytes within, method).
        self.largest = {}
        # By method: the bytes of all its calls.
        self.total = dict.fromkeys(LIMITS, 0.0)
        self.method = ""

    def __enter__(self):
        self._plain = native.module.run
        native.module.run = self._run
        return self

    def __exit__(self, *_):
        native.module.run = self._plain

    def _run(self, kernel, inputs, integers, numbers, consumes, *rest):
        results = self._plain(kernel, inputs, integers, numbers, consumes, *rest)
        if self.method and kernel not in ELSEWHERE:
            found = (*count_bytes(kernel, inputs, integers, numbers, results, consumes), self.method)
            self.largest[kernel] = max(self.largest.get(kernel, found), found)
            if self.method in self.total:
                self.total[self.method] += found[0] + found[1]
        return results


def count_bytes(kernel, inputs, integers, numbers, results, consumes):
    """Return the bytes of arguments and results, and those that move within the kernel."""
    sizes = [x.nbytes for x in inputs]
    # A condition comes back as a Python bool.
    results = [x for x in results if not isinstance(x, bool)]
    outside = sum(sizes) + sum(x.nbytes for x in results)
    # A list of bytes may be longer than the gradient.
    within = WITHIN.get(kernel, (0, ""))[0] * max([x.size for x in (*inputs, *results) if x.itemsize > 1], default=0)
    if kernel in SPARSE:
        indices = sum(x.size for x in inputs[consumes:] if x.dtype == np.int32)
        if kernel == "sparse_sum" and not consumes:
            # The first entries are written over zeros.
            within -= SECTOR * inputs[integers[0]].size
        # A factor other than 1 changes all elements.
        whole = 2 if kernel == "power_fade" and numbers[0] != 1 else 0
        return outside + (whole - consumes) * sizes[0], within + SPARSE[kernel] * indices
    if consumes:
        # The first argument is written as well.
        outside += sizes[0]
    if kernel in (
        "top",
        "select",
        "sum_top",
        "sum_select",
        "sum_sample",
        "select_in_bins",
        "draw_kept",
        "top_of_sides",
        "power_words",
    ):
        within += SECTOR * sum(x.size for x in results if x.dtype == np.int32)
    if kernel in ("top", "top_bound", "sum_top"):
        x = results[0] if kernel == "sum_top" else inputs[0]
        # Two digits and the settling of ties read the elements that share the first digit.
        within += 3 * SECTOR * count_ties(x, integers[0])
    if kernel in AGAIN:
        within += (integers[0] - 1) * 2 * (sizes[0] if consumes else results[0].nbytes)
    return outside, within


def count_ties(x, k):
    """Return how many elements of a float32 array share the first digit of the k-th largest magnitude."""
    digits = (x.view(np.int32) & 0x7FFFFFFF) >> 31 - FIRST_DIGIT
    return int((digits == np.partition(digits, -k)[-k]).sum())


def least_us(moved):
    """Return the least time for `SHOWN` elements."""
    return round(moved / ELEMENTS * SHOWN / BANDWIDTH * 1e6, 1)


def draw_gradients(rng):
    """Return heavy-tailed gradients of all ranks."""
    sizes = np.exp(rng.standard_normal(ELEMENTS)) * 1e-3
    return [(sizes * rng.standard_normal(ELEMENTS)).astype(np.float32) for _ in range(RANKS)]


def run_other_kernels(ops, counter):
    """Count kernels of other options, and those of sums that no transport makes: of 16-bit floats, and in words."""
    counter.method = "efsignsgd without memory"
    sign_mean(ops, ops.zeros(ELEMENTS, "float32"))
    counter.method = "onebit without memory"
    binarize_means(ops, ops.zeros(ELEMENTS, "float32"), 0.0, 1000)
    halves = [ops.zeros(ELEMENTS, "float16") for _ in range(RANKS)]
    counter.method = "fp16, the sum"
    ops.half_sum(halves, 1 / RANKS)
    counter.method = "uniform by allreduce"
    words = pack_lanes(ops, ops.zeros(ELEMENTS, "int8"), ELEMENTS, 3)
    unpack_lanes(ops, words, ELEMENTS, 3)
    counter.method, x = "OneBitAdam", ops.zeros(ELEMENTS, "float32")
    limited_sum(ops, x, 0.9, x, 0.1, x, 1.0)
    masked_sum(ops, x, 1.0, x, -0.001, x)
    counter.method = "eden, shared"
    local = LocalStep(make_unit("eden", ELEMENTS, shared_rotation=True), ops, RANKS)
    given = draw_gradients(np.random.default_rng(0))
    local.run(given[0], 0, local.receive(given, 0))


def main():
    ops, rng = get_ops("numpy"), np.random.default_rng(0)
    if not ops.runs_kernels:
        sys.exit("the kernels are not built: python setup.py build_ext --inplace")
    entries = {}
    with Counter() as counter:
        for name in compressors:
            local = LocalStep(make_unit(name, ELEMENTS), ops, RANKS)
            for step in range(STEPS):
                given = draw_gradients(rng)
                counter.method = ""
                arrived = local.receive(given, step)
                # The last step is counted, when memories are full.
                counter.method = name if step == STEPS - 1 else ""
                done = local.run(given[0], step, arrived)
                entries[name] = done.payload["indices"].size if "indices" in done.payload else 0
        run_other_kernels(ops, counter)
    rows = [
        {
            "kernel": kernel,
            "method": method,
            "outside": round(outside / ELEMENTS, 3),
            "within": round(within / ELEMENTS, 3),
            "why": WITHIN.get(kernel, (0, "single elements" if kernel in SPARSE else ""))[1],
            "microseconds": least_us(outside + within),
        }
        for kernel, (outside, within, method) in sorted(counter.largest.items())
    ]
    commands = [f"python benchmarks/gpu_budget.py {sys.argv[1]} {sys.argv[2]}"]
    what = f"Bytes that each kernel moves on a GPU per element of a float32 gradient, in a step with {CONDITIONS}"
    tables.write(sys.argv[1], what, COLUMNS, rows, commands=commands)
    least = {name: dense + entry * entries[name] / ELEMENTS for name, (dense, entry) in LIMITS.items()}
    steps = [
        {
            "method": name,
            "bytes": round(total / ELEMENTS, 2),
            "limit": round(least[name], 2),
            "times": round(total / ELEMENTS / least[name], 3),
            "copies": round(total / ELEMENTS / COPY, 2),
            "microseconds": least_us(total),
        }
        for name, total in counter.total.items()
    ]
    what = f"Bytes that the kernels of a step move on a GPU per element of a float32 gradient, with {CONDITIONS}"
    tables.write(sys.argv[2], what, STEPS_COLUMNS, steps, commands=commands)


if __name__ == "__main__":
    main()
