"""The original GRACE (package `grace_dl`, 2021) as a baseline of `grace bench step`, where it is installed.

GRACE: Xu et al., "GRACE: a compressed communication framework for distributed machine learning", ICDCS 2021.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

# Parameters of the original for each baseline; the ratio is grace's default. The original's quantizers send a scalar of
# no dimension, which Horovod 0.28.1 refuses to gather.
PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "grace2021-topk": {"compressor": "topk", "compress_ratio": 0.01, "memory": "residual"},
    "grace2021-signsgd": {"compressor": "signsgd", "memory": "none"},
}


def is_missing() -> bool:
    """Return whether the original is not installed."""
    return importlib.util.find_spec("grace_dl") is None


def compress(optimizer: Any, method: str, ranks: int) -> None:
    """Let the original compress the gradients of an optimizer that Horovod has wrapped.

    The original replaced files of an old Horovod. Today's Horovod accepts a function in place of a handle, which needs
    no change of Horovod.
    """
    from grace_dl.torch.helper import grace_from_params

    original = grace_from_params({**PARAMETERS[method], "communicator": "allgather", "world_size": ranks})
    names = optimizer._parameter_names

    def exchange(parameter: Any) -> tuple[Any, None]:
        handles, context = original.send_step(parameter.grad, names[parameter])
        return lambda: original.receive_step(handles, context), None

    optimizer._allreduce_grad_async = exchange
