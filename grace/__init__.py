"""Gradient compression for distributed training over torch.distributed, Horovod or MPI.

`DistributedOptimizer` wraps an optimizer of PyTorch or Keras. `grace.torch.register` takes a model that PyTorch makes
parallel. Importing grace imports no framework: `grace.torch`, `grace.tensorflow`, `grace.mpi` and `grace.testing` are
imported at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from grace import errors as errors
from grace.core.config.config import Config, Method, Rule, make_config
from grace.core.config.outer import OuterSteps
from grace.core.config.registry import communicators, compressors, memories, outer_optimizers
from grace.core.methods.capabilities import Learning, Negotiating, Selecting, Stateful, Tuning
from grace.core.methods.communicator import Communicator, Route
from grace.core.methods.compressor import Compressor, Sparsifier, fixed_size
from grace.core.methods.memory import Compensated, Memory, Merging
from grace.core.methods.outer import OuterOptimizer
from grace.core.methods.site import Proposal, Site
from grace.core.ops import get_ops, register_backend
from grace.core.ops.table import composite
from grace.core.session.simulation import Simulation
from grace.core.spec import Field, Key, Payload, TensorSpec
from grace.lazy import importer

if TYPE_CHECKING:
    from grace import mpi as mpi
    from grace import tensorflow as tensorflow
    from grace import testing as testing
    from grace import torch as torch

__version__ = "0.2.0.dev0"

register_compressor = compressors.register
register_memory = memories.register
register_communicator = communicators.register
register_outer_optimizer = outer_optimizers.register
register_backend("torch", "grace.backends.torch_ops:TorchOps")
register_backend("tensorflow", "grace.backends.tensorflow_ops:TensorflowOps")

__all__ = [
    "Communicator",
    "Compensated",
    "Compressor",
    "Config",
    "DistributedOptimizer",
    "Field",
    "Key",
    "Learning",
    "Memory",
    "Merging",
    "Method",
    "Negotiating",
    "OuterOptimizer",
    "OuterSteps",
    "Payload",
    "Proposal",
    "Route",
    "Rule",
    "Selecting",
    "Simulation",
    "Site",
    "Sparsifier",
    "Stateful",
    "TensorSpec",
    "Tuning",
    "__version__",
    "communicators",
    "composite",
    "compressors",
    "fixed_size",
    "get_ops",
    "make_config",
    "memories",
    "outer_optimizers",
    "register_backend",
    "register_communicator",
    "register_compressor",
    "register_memory",
    "register_outer_optimizer",
]

__getattr__ = importer(
    __name__,
    {"torch": "torch", "tensorflow": "tensorflow and horovod", "mpi": "mpi4py", "testing": "pytest"},
)


def DistributedOptimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N802 - the field's name
    """Wrap an optimizer with the adapter of its framework.

    All further arguments go to the `DistributedOptimizer` of `grace.torch` or `grace.tensorflow`.
    Raises TypeError if the optimizer belongs to neither framework.
    """
    frameworks = {cls.__module__.partition(".")[0] for cls in type(optimizer).__mro__}
    # Keras comes first: with the backend "torch" or "tensorflow", its classes derive from that framework's classes.
    name = next((name for name in ("keras", "tensorflow", "torch") if name in frameworks), None)
    if name is None:
        raise TypeError(
            "grace.DistributedOptimizer: expected a torch.optim.Optimizer or a keras.optimizers.Optimizer, "
            f"received {type(optimizer).__qualname__} from module {type(optimizer).__module__}."
        )
    adapter = importlib.import_module("grace.torch" if name == "torch" else "grace.tensorflow")
    return adapter.DistributedOptimizer(optimizer, *args, **kwargs)
