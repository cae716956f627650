"""Configurations of outer steps that Keras' optimizers share with a simulation."""

from __future__ import annotations

from typing import Any

from tests.support.cases import EVERYTHING

# Gathered changes are added in the order of the ranks; Horovod adds three or more as they come.
GATHERED = {"communicator": "allgather", **EVERYTHING}
NONE = {"compressor": "none", **GATHERED}
TOPK = {"compressor": "topk", "compress_ratio": 0.3, **GATHERED}
EF21 = {"name": "ef21", "momentum": 0.5}
#: The configuration and the outer steps of each case. Those with uncompressed meetings run on two ranks only.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "participation": (TOPK, {"every": 2, "participation": 0.5, "weight": True, "warmup": 1}),
    "variates": (TOPK, {"every": 3, "variates": True, "warmup": 1}),
    "fragments": (TOPK, {"every": 2, "fragments": 2, "participation": 0.5, "lr": 0.5}),
    "relevance": (TOPK, {"every": 2, "relevance": 0.29, "lr": 0.5, "momentum": 0.5}),
    "FedCOMGATE": (
        {"compressor": "qsgd", "memory": "none", **GATHERED},
        {"every": 4, "fragments": 2, "variates": True},
    ),
    "Scafcom": ({**TOPK, "memory": EF21}, {"every": 4, "fragments": 2, "variates": True}),
    "Scafcom, dense": ({**TOPK, "memory": EF21}, {"every": 2, "variates": True, "dense_every": 3}),
    "local error": ({**TOPK, "memory": "none"}, {"every": 2, "local_error": True, "warmup": 1}),
    "CSER": ({**TOPK, "memory": "none"}, {"every": 2, "local_error": True, "dense_every": 3}),
}
