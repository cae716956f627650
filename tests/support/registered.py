"""Methods under test: every registered one with its defaults, and extra configurations that reach other code.

The lists come from the registry, so a new method is tested as soon as it is registered.
"""

from __future__ import annotations

from functools import cache

import pytest

from grace.core.config.config import Method
from grace.core.config.registry import Registry, communicators, compressors, memories
from grace.core.errors import IncompatibleError
from grace.core.methods.compressor import Compressor
from grace.core.methods.memory import Memory
from grace.core.ops import get_ops
from grace.core.ops.composites import ArrayOps
from grace.testing.harness import FRAMEWORKS

every_framework = pytest.mark.parametrize("framework", FRAMEWORKS)

# The frameworks, and those with kernels also with the reference implementation.
BACKENDS = (*FRAMEWORKS, *(f"{name}-reference" for name in ("numpy", "torch") if name in FRAMEWORKS))


def ops_of(backend: str) -> ArrayOps:
    """Return the array operations of one of BACKENDS."""
    framework, _, reference = backend.partition("-")
    return get_ops(framework, native=False if reference else None)


# Communicators whose units are shards, and the memories that only these serve; tests of their own have their promises.
OF_SHARDS = {"two_shot", "hierarchical"}
MEMORIES_OF_SHARDS = {"dore", "dore_mean"}

EXTRA_COMPRESSORS = [
    {"name": "3lc", "sparsity_multiplier": 1.9},
    {"name": "acpsgd", "compress_rank": 1},
    {"name": "adacomp", "bin_size": 7},
    {"name": "adaptive", "compress_ratio": 0.3},
    {"name": "alq", "quantum_num": 4, "bucket_size": 100, "norm": "l2"},
    {"name": "alq", "quantum_num": 1},
    {"name": "alq", "spacing": "exponential", "bucket_size": 0},
    {"name": "atomo", "compress_rank": 9.5},
    {"name": "atomo", "mode": "entry"},
    {"name": "atomo", "mode": "entry", "compress_ratio": 1.0},
    {"name": "blockwise", "format": "fp4", "bucket_size": 0},
    {"name": "blockwise", "format": "fp8_e5m2", "bucket_size": 100},
    {"name": "blockwise", "format": "int4"},
    {"name": "blockwise", "format": "int8", "bucket_size": 7},
    {"name": "blockwise", "format": "mxfp4", "bucket_size": 32},
    {"name": "blockwise", "format": "mxfp8_e4m3", "bucket_size": 32},
    {"name": "chain", "sparsifier": {"name": "randomk", "compress_ratio": 0.3}, "quantizer": "terngrad"},
    {"name": "chain", "sparsifier": {"name": "topk", "compress_ratio": 0.3}, "quantizer": "efsignsgd"},
    {"name": "chain", "sparsifier": {"name": "topk", "compress_ratio": 1.0}, "quantizer": "none"},
    {"name": "chain", "sparsifier": {"name": "threshold", "threshold": 0.5}, "quantizer": "qsgd"},
    {"name": "dct", "compress_ratio": 0.1, "refresh": 2},
    {"name": "deepreduce", "policy": "p0", "compress_ratio": 0.1, "false_positives": 0.1},
    {"name": "deepreduce", "policy": "p0", "compress_ratio": 0.1, "false_positives": 0.1, "pieces": 5},
    {"name": "deepreduce", "policy": "p1", "compress_ratio": 0.3, "false_positives": 0.5, "pieces": 1},
    {"name": "deepreduce", "compress_ratio": 0.1, "false_positives": 0.25, "pieces": 8},
    {"name": "dgc", "compress_ratio": 0.1, "min_samples": 16, "sample_ratio": 0.05},
    {"name": "dgc", "compress_ratio": 1.0},
    {"name": "dme", "compress_ratio": 0.3, "probabilities": "optimal"},
    {"name": "eden", "bits": 1, "block_size": 128},
    {"name": "eightbit", "format": "1-3-4"},
    {"name": "eightbit", "format": "e5m2"},
    {"name": "fedqcs", "compress_ratio": 0.3, "bits": 1, "reduction": 2, "block_size": 128, "rounds": 3},
    {"name": "gaussiank", "compress_ratio": 0.3, "adjustments": 0},
    {"name": "gradiveq", "slice_size": 7, "components": 2, "training_steps": 1, "compressed_steps": 2},
    {"name": "gradzip", "compress_rank": 1, "regularization": 1.0},
    {"name": "gradzip", "compress_rank": 9, "regularization": 0.001},
    {"name": "hardthreshold", "threshold": 0.5},
    {"name": "hardthreshold", "compress_ratio": 0.1, "tune_steps": 0},
    {"name": "hgc", "alpha": 0.5, "quantum_num": 1},
    {"name": "homomorphic", "compress_ratio": 0.05, "buckets_per_value": 2.0},
    {"name": "inceptionn", "error_bound": 0.7},
    {"name": "inceptionn", "error_bound": 1e-6},
    {"name": "inceptionn", "error_bound": 2**-10, "relative": False},
    {"name": "kashin", "bits": 2, "block_size": 128, "redundancy": 4},
    {"name": "lpc", "width": 2},
    {"name": "lpc", "width": 12, "delta": 0.001},
    {"name": "m22", "compress_ratio": 0.3, "bits": 1, "power": 8},
    {"name": "mstopk", "compress_ratio": 0.6},
    {"name": "mstopk", "compress_ratio": 0.1, "trials": 5},
    {"name": "mucsc", "bits": 1},
    {"name": "mucsc", "bits": 3, "super_cluster": 0.7},
    {"name": "natural", "clipped": True},
    {"name": "nuqsgd", "quantum_num": 1, "bucket_size": 0},
    {"name": "nuqsgd", "quantum_num": 3, "bucket_size": 100, "norm": "l2"},
    {"name": "onebit", "threshold": 0.5},
    {"name": "onebit", "threshold": -0.5},
    {"name": "onebit", "columns": False},
    {"name": "powersgd", "compress_rank": 1},
    {"name": "powersgd", "compress_rank": 9},
    {"name": "qcs", "compress_ratio": 0.3, "bits": 2, "block_size": 128, "unbiased": True},
    {"name": "qsgd", "quantum_num": 1},
    {"name": "qsgd", "quantum_num": 7, "bucket_size": 0},
    {"name": "qsgd", "quantum_num": 15, "bucket_size": 100, "norm": "l2"},
    {"name": "qsgd", "quantum_num": 300, "norm": "l2"},
    {"name": "qsgd", "quantum_num": 32767},
    {"name": "qsparse", "compress_ratio": 0.3, "quantizer": "sign"},
    {"name": "qsparse", "compress_ratio": 0.3, "sparsifier": "randomk", "quantum_num": 2},
    {"name": "randomk", "mode": "block", "compress_ratio": 0.3},
    {"name": "randomk", "mode": "block", "compress_ratio": 0.6, "scaled": True},
    {"name": "randomk", "scaled": True},
    {"name": "randomk", "compress_ratio": 0.3},
    {"name": "randomk", "compress_ratio": 0.3, "scaled": True},
    {"name": "randomk", "compress_ratio": 1.0},
    {"name": "redsync", "compress_ratio": 0.1, "search": "trimmed"},
    {"name": "rtopk", "compress_ratio": 0.3, "spread": 2.5},
    {"name": "sbc", "compress_ratio": 0.3},
    {"name": "scalecom", "compress_ratio": 0.1},
    {"name": "sdagc", "alpha": 0.5},
    {"name": "sidco", "compress_ratio": 0.1, "distribution": "pareto"},
    {"name": "sidco", "stages": 1},
    {"name": "sketchedsgd", "compress_ratio": 0.1, "rows": 3, "columns_per_k": 0.5},
    {"name": "sketchedsgd", "rows": 1, "columns_per_k": 20.0, "candidates": 1},
    {"name": "sketchml", "compress_ratio": 1.0, "quantiles": 256, "rows": 3, "columns": 0.7},
    {"name": "sketchml", "compress_ratio": 0.2, "quantiles": 2, "groups": 2},
    {"name": "strom", "threshold": 0.5},
    {"name": "terngrad", "clip_factor": None},
    {"name": "terngrad", "clip_factor": 0.5},
    {"name": "terngrad", "shared_scale": True},
    {"name": "terngrad", "clip_factor": None, "shared_scale": True},
    {"name": "threshold", "threshold": 0.0},
    {"name": "threshold", "threshold": 0.5, "capacity": 0.1},
    {"name": "threshold", "threshold": 1e9},
    {"name": "topk", "compress_ratio": 0.1},
    {"name": "topk", "compress_ratio": 1.0},
    {"name": "truncatedsvd", "compress_rank": 1},
    {"name": "uniform", "bits": 2},
    {"name": "uniform", "bits": 12, "stochastic": True},
    {"name": "uniform", "bits": 24},
    {"name": "uniform", "stochastic": True},
    {"name": "uveqfed", "bits": 2, "bucket_size": 0},
    {"name": "uveqfed", "bits": 5, "dimension": 2, "bucket_size": 0},
    {"name": "vqsgd", "bucket_size": 8, "samples": 3, "norm": "l2"},
    {"name": "wangni", "compress_ratio": 0.3},
    {"name": "wangni", "variance_budget": 1.0},
]
EXTRA_MEMORIES = [
    {"name": "dgc", "momentum": 0.5, "gradient_clipping": 1.0},
    {"name": "dgc", "momentum": 0.5, "gradient_clipping": 1.0, "clipping_norm": "all"},
    {"name": "dgc", "momentum_masking": False},
    {"name": "diana", "alpha": 1.0},
    {"name": "dore", "alpha": 0.5},
    {"name": "dore_mean", "alpha": 0.5, "eta": 0.5},
    {"name": "efsignsgd", "lr": 0.5},
    {"name": "leftover", "then": "momentum"},
    {"name": "leftover", "then": "svrg"},
    {"name": "leftover", "then": "diana"},
    {"name": "lowpass", "beta": 0.5},
    {"name": "momentum", "momentum": 0.5},
    {"name": "residual", "beta": 0.9, "gamma": 0.5},
    {"name": "residual", "lr_correction": True, "gradient_clipping": 1.0},
    {"name": "shared_momentum", "momentum": 0.5},
    {"name": "svrg", "period": 2},
    {"name": "variance", "decay": 0.5},
]


def default_compressors() -> list[Compressor]:
    """Return one compressor per registered name."""
    return [compressors.make(name) for name in compressors]


def extra_compressors() -> list[Compressor]:
    """Return the extra configurations."""
    return [compressors.make(extra) for extra in EXTRA_COMPRESSORS]


def all_compressors() -> list[Compressor]:
    """Return the default of every registered name, and the extra configurations."""
    return default_compressors() + extra_compressors()


def all_memories() -> list[Memory]:
    """Return the default of every registered name, and the extra configurations."""
    return [memories.make(name) for name in memories] + [memories.make(extra) for extra in EXTRA_MEMORIES]


def default_method(compressor: Compressor) -> Method:
    """Return a compressor with its default memory and communicator."""
    return Method(
        compressor,
        memories.make(compressor.default_memory),
        communicators.make(compressor.default_communicator),
    )


def valid_methods() -> list[Method]:
    """Return every valid combination of compressor, memory and communicator, all with their defaults.

    Without the communicators of `OF_SHARDS`.
    """
    parts = []
    for compressor in default_compressors():
        for memory in memories:
            for communicator in sorted(set(communicators) - OF_SHARDS - {"auto"}):
                try:
                    method = Method(compressor, memories.make(memory), communicators.make(communicator))
                    method.check_memory()
                except IncompatibleError:
                    continue
                parts.append(method)
    return parts


def name(one: Compressor | Memory | Method) -> str:
    """Return a short name for test reports: the options that differ from the defaults."""
    if isinstance(one, Method):
        kinds = (
            (compressors, one.compressor),
            (memories, one.memory),
            (communicators, one.communicator),
        )
        return "-".join(registry.name_of(p) for registry, p in kinds)
    registry = compressors if isinstance(one, Compressor) else memories
    config = registry.config_of(one)
    default = _default(registry, config["name"])
    given = {f: getattr(one, f) for f in config if f != "name" and config[f] != default[f]}
    changed = [f"{f}={name(v) if isinstance(v, Compressor) else v}" for f, v in given.items()]
    return "-".join([config["name"], *changed])


@cache
def _default(registry: Registry, name: str) -> dict:
    return registry.config_of(registry.make(name))


def by_name(parts: list, kind: str | None = None) -> dict:
    """Return the parts by their short names, or by the name of one kind."""
    return {name(getattr(one, kind) if kind else one): one for one in parts}


def params(parts: list) -> list:
    """Return pytest parameters with short names."""
    return [pytest.param(one, id=name(one)) for one in parts]
