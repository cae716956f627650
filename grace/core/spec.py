"""Value types that every layer uses: tensors, payload fields, random keys, proposals and the site of a call."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeAlias

from grace.core.errors import ConfigError

#: An array of whichever framework is in use; only array operations know more about it.
Array: TypeAlias = Any
#: The arrays of a component that live between steps, by name.
State: TypeAlias = dict[str, Array]
# The flat arrays of a payload, by the names of its fields.
Payload: TypeAlias = dict[str, Array]

# The state of components that keep nothing; states are never changed.
NO_STATE: State = {}

ITEMSIZE = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
}
# Larger magnitudes count as infinite, because sums of them overflow: over elements, ranks and steps. Squares are added
# in float64, in which those of float64 must not overflow.
MAX_MAGNITUDE = {"float16": 65504.0, "bfloat16": 2.0**104, "float32": 2.0**104, "float64": 2.0**512}

GRADIENT_DTYPES = ("float16", "bfloat16", "float32", "float64")
# Dtypes of gradients that stay dense, and that only some libraries can add; no step can. Each with its bytes.
COMPLEX_DTYPES = {"complex64": 8, "complex128": 16}
HALF_DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class TensorSpec:
    """Static facts about a gradient, known before the first step.

    `dtype` is one of float16, bfloat16, float32, float64, complex64, complex128. `sparse` means that the gradient comes
    as rows and their indices, like that of an embedding. `model_numel` is the number of elements of all tensors of the
    run (0: this tensor is alone). `rounds` is for outer steps: above 0, the tensor is no weight but accompanies the
    weights, as a state of the inner optimizer does, and the ranks take the mean of it at every `rounds`-th sync. Raises
    ConfigError for any other dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    device: str = "cpu"
    sparse: bool = False
    model_numel: int = 0
    rounds: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in GRADIENT_DTYPES and not self.complex:
            raise self.not_exchanged()

    def not_exchanged(self) -> ConfigError:
        """Return the error for a dtype whose gradients cannot be exchanged."""
        return ConfigError(
            f"tensor '{self.name}': gradients of dtype {self.dtype} cannot be exchanged here; expected one of "
            f"{', '.join(GRADIENT_DTYPES)}. Make it a tensor of such numbers, of complex ones for example with their "
            "real and imaginary parts, or leave it out of what grace exchanges."
        )

    @property
    def complex(self) -> bool:
        """True for complex numbers, which no compressor takes."""
        return self.dtype in COMPLEX_DTYPES

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the uncompressed gradient."""
        return self.numel * (COMPLEX_DTYPES[self.dtype] if self.complex else ITEMSIZE[self.dtype])

    @cached_property
    def work_dtype(self) -> str:
        """Dtype of compensation, residual and decoded sums: float32, or float64 for a float64 gradient."""
        return "float64" if self.dtype == "float64" else "float32"


def as_specs(tensors: Mapping[str, tuple[int, ...]] | Sequence[TensorSpec]) -> list[TensorSpec]:
    """Return the specs of tensors that may be given as shapes by name, and are then float32.

    Raises ConfigError for a shape with other entries than whole numbers from 0 on. Within a graph, a compressor may
    make specs whose sizes are known at run time only.
    """
    specs = [TensorSpec(n, s) for n, s in tensors.items()] if isinstance(tensors, Mapping) else tensors
    return [dataclasses.replace(spec, shape=_sizes(spec)) for spec in specs]


def _sizes(spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape of a spec in Python's integers: NumPy's overflow."""
    try:
        shape = tuple(map(operator.index, spec.shape))
    except TypeError:
        shape = (-1,)
    if min(shape, default=0) < 0:
        raise ConfigError(
            f"tensor '{spec.name}': expected a shape of whole numbers from 0 on, such as (64, 10), received "
            f"{spec.shape!r}; name the size of every dimension."
        )
    return shape


class Field(NamedTuple):
    """One flat array of a payload.

    `length` is a number of elements, or the name of a count that is known only at run time (two fields may share it).
    If payloads are summable, it must be equal on all ranks, for instance follow from the step. `wire=False` keeps the
    field on the rank: it must be equal on all ranks, for instance indices drawn from the shared key. `below` marks
    int32 indices, strictly ascending and below that number, which may travel in fewer bytes. `coding` names how the
    field travels ("none" or "int32": as it is), and `bits` is the width of the codes that are packed into its bytes.
    `most` is the largest magnitude of integers that are added exactly: a sum of them travels in as few bits as it needs
    on this number of ranks, `lanes` of them in a 32-bit word.
    """

    name: str
    dtype: str
    length: int | str
    wire: bool = True
    below: int | None = None
    coding: str = "none"
    most: int | None = None
    lanes: int = 0
    bits: int = 8


class Key(NamedTuple):
    """Name of one stream of random numbers: its purpose (`seed`), time (`step`) and owner (`rank`; 0 is shared)."""

    seed: int
    step: Any
    rank: int = 0

    @staticmethod
    @cache
    def derive(seed: int, name: str) -> int:
        """Return the 64-bit seed of tensor `name` in a run with `seed`; equal on all ranks, frameworks and machines."""
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


class Ranks(NamedTuple):
    """Number of ranks, and how many of them each node has (0: unknown).

    With a known `local_size`, ranks are numbered node by node: rank r is on node r // local_size.
    """

    size: int = 1
    local_size: int = 0


ONE_RANK = Ranks()
