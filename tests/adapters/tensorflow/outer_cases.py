"""Configurations of outer steps that Keras' optimizers share with a simulation."""

from __future__ import annotations

from typing import Any

from tests.support.cases import EVERYTHING

# Gathered changes are added in the order of the ranks; Horovod adds three or more as they come.
GATHERED = {"communicator": "allgather", **EVERYTHING}
NONE = {"compressor": "none", **GATHERED}
TOPK = {"compressor": "topk", "compress_ratio": 0.3, **GATHERED}
EF21 = {"name": "ef21", "momentum": 0.5}
#: The configuration and the outer steps of each case.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "participation": (TOPK, {"every": 2, "participation": 0.5, "weight": True, "warmup": 1}),
    "participation, delay": (
        {"compressor": "qsgd", **GATHERED},
        {"every": 4, "fragments": 2, "delay": 1, "participation": 0.5, "warmup": 1},
    ),
    "participation, two shots": (
        {**TOPK, "communicator": "two_shot"},
        {"every": 2, "delay": 1, "participation": 0.5},
    ),
    "variates": (TOPK, {"every": 3, "variates": True, "warmup": 1}),
    "pairs": (NONE, {"preset": "noloco", "every": 2}),
    "pairs, states": (NONE, {"preset": "noloco", "every": 1, "state": {"momentum": 2}}),
    "pairs, fragments": (NONE, {"preset": "noloco", "every": 6, "fragments": 2, "delay": 1}),
    "fragments": (TOPK, {"every": 2, "fragments": 2, "participation": 0.5, "lr": 0.5}),
    "relevance": (TOPK, {"every": 2, "relevance": 0.29, "lr": 0.5, "momentum": 0.5}),
    "relevance, states": (TOPK, {"every": 2, "relevance": 0.2, "state": "average"}),
    "FedCOMGATE": (
        {"compressor": "qsgd", "memory": "none", **GATHERED},
        {"every": 4, "fragments": 2, "variates": True},
    ),
    "Scafcom": ({**TOPK, "memory": EF21}, {"every": 4, "fragments": 2, "variates": True}),
    "Scafcom, dense": ({**TOPK, "memory": EF21}, {"every": 2, "variates": True, "dense_every": 3}),
    "SCAFFOLD, in part": (TOPK, {"every": 2, "variates": True, "participation": 0.5, "warmup": 1}),
    "Scafcom, in part": (
        {**TOPK, "memory": EF21},
        {"every": 2, "fragments": 2, "variates": True, "participation": 0.5},
    ),
    "local error": ({**TOPK, "memory": "none"}, {"every": 2, "local_error": True, "warmup": 1}),
    "CSER": ({**TOPK, "memory": "none"}, {"every": 2, "local_error": True, "dense_every": 3}),
}


def sizes_of(name: str) -> tuple[int, ...]:
    """Return the numbers of ranks of a case; two, if Horovod adds what is not compressed."""
    _, outer = CASES[name]
    added = "dense_every" in outer or ("state" in outer and outer.get("preset") != "noloco")
    return (2,) if added else (2, 4)
