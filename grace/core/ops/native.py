"""Composites by kernels: the same bytes as the reference implementation, in one or two passes.

`Native` precedes a framework's operations in the method resolution order; calls that no kernel serves (another dtype,
more axes) go on to the framework. The kernels are optional: without the built module the reference implementation is
used.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from abc import abstractmethod
from collections.abc import Sequence
from functools import cache
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from typing import Any, ClassVar

import numpy as np

from grace.core.errors import ConfigError, nearest
from grace.core.observe.log import logger
from grace.core.ops.base import packed_size
from grace.core.ops.composites import ArrayOps
from grace.core.spec import HALF_DTYPES, Array, Key


@cache
def module_file() -> str | None:
    """Return the path of the module for NumPy and PyTorch; None if it was not built."""
    spec = importlib.util.find_spec("grace._native")
    return None if spec is None else spec.origin


def _load() -> Any:
    """Return the module of kernels that was built with the package, or the build at the path in GRACE_NATIVE."""
    path = os.environ.get("GRACE_NATIVE", "")
    if not path.endswith(".so"):
        try:
            return importlib.import_module("grace._native")
        except ImportError as error:
            if module_file() is not None:
                logger().warning("the kernels do not load and are not used; reinstall grace. %s", error)
            return None
    if not os.path.exists(path):
        return None
    loader = ExtensionFileLoader("grace._native", path)
    loaded = module_from_spec(ModuleSpec("grace._native", loader, origin=path))
    loader.exec_module(loaded)
    return loaded


module: Any = _load()

INSTRUCTIONS = ("baseline", "avx2", "avx512")


def check_environment() -> None:
    """Raise ConfigError if GRACE_NATIVE or GRACE_ISA has an invalid value."""
    path, isa = os.environ.get("GRACE_NATIVE", ""), os.environ.get("GRACE_ISA")
    if path not in ("", "0", "1") and not (path.endswith(".so") and os.path.exists(path)):
        raise ConfigError(f"GRACE_NATIVE: expected 0, or the path of an .so file that exists; received '{path}'.")
    if isa is not None and isa not in INSTRUCTIONS:
        raise ConfigError(f"GRACE_ISA: unknown instruction set '{isa}'.{nearest(isa, INSTRUCTIONS)}")


FLOATS = ("float32", "float64")

# A matrix with at most this many columns is thin; with more, the frameworks' own products are as fast.
MOST_THIN = 16


REBUILD = "To build the kernels, run in the source folder of grace: pip install --no-build-isolation --no-deps ."


def describe() -> str:
    """Return the text of `grace doctor` on the module for NumPy and PyTorch: which kernels are in use, or why none are.

    Raises ConfigError for an invalid environment variable.
    """
    devices = "CPU only"
    if module is not None and module.cuda:
        devices = "CPU and CUDA" if module.serves_gpu(0) else "CPU; built for CUDA too, but there is no CUDA device"
    return describe_fault(Native.fault("cpu"), devices)


def describe_fault(fault: str | None, devices: str) -> str:
    """Return the text of `grace doctor` on kernels with a fault, or on those that serve some devices.

    Raises ConfigError for an invalid environment variable.
    """
    check_environment()
    if fault is not None:
        return f"{fault}: the reference implementation is used. {REBUILD}"
    what = [devices] if module is None else [str(module.isa()), devices]
    return ", ".join(what) + ("" if is_enabled() else "; not used, because GRACE_NATIVE is 0")


def is_enabled() -> bool:
    """Return whether the environment allows the kernels: GRACE_NATIVE is not 0 (a path names another build)."""
    return os.environ.get("GRACE_NATIVE") != "0"


class Native(ArrayOps):
    """Kernels behind the composites; a framework's class defines how to run one."""

    runs_kernels: ClassVar[bool] = True
    # True if arrays on a GPU are served, where the module was built for it.
    gpu: ClassVar[bool] = False

    @classmethod
    def fault(cls, device: str) -> str | None:
        """Return why there are no kernels for arrays on a device ("cpu", "cuda" or "cuda:1"); None if there are."""
        if module is None:
            return "not built" if module_file() is None else "built for another version and cannot be loaded"
        kind, _, index = device.partition(":")
        on_gpu = kind == "cuda" and cls.gpu and module.cuda
        if kind == "cpu" or (on_gpu and module.serves_gpu(int(index or 0))):
            return None
        return f"not built for {device}"

    @property
    def products(self) -> str:
        return "kernels" if self.device.startswith("cpu") else super().products

    @abstractmethod
    def run(
        self,
        kernel: str,
        inputs: Sequence[Array],
        integers: Sequence[Any] = (),
        numbers: Sequence[Any] = (),
        *,
        outputs: Sequence[str],
        lengths: Sequence[Any] = (),
        consumes: bool = False,
        out: Array | tuple[Array, ...] | None = None,
    ) -> list[Array]:
        """Run a kernel and return its flat results; the shapes of its inputs do not matter.

        `integers` and `numbers` are Python numbers or, in a graph, 0-d tensors. `outputs` names the dtypes of the
        results and `lengths` their lengths, None where only the kernel knows them. The last one may be "bool": a
        condition, which the kernel writes as one uint8 of 0 or 1. With `consumes` the first input is changed in place
        and is the first result. The first new arrays may be written to `out`, one array or a tuple, where dtype and
        length fit.
        """

    def floating(self, x: Array) -> str | None:
        """Return the dtype of an array that kernels take (flat, and float32 or float64); None for any other."""
        dtype = self.kind(x)
        return dtype if dtype in FLOATS and len(x.shape) == 1 else None

    def kind(self, x: Array) -> str | None:
        """Return the dtype of an array; None for a number, an array of another framework or a rare dtype."""
        # Numbers are frequent, and this is faster than the exception.
        if isinstance(x, (int, float)):
            return None
        try:
            return self.dtype(x)
        except (AttributeError, KeyError, TypeError):
            return None

    def total(
        self,
        kernel: str,
        lists: Sequence[Array],
        integers: Sequence[Any],
        n: Any,
        dtype: str,
        onto: Array | None,
        numbers: Sequence[Any] = (),
        out: Array | None = None,
    ) -> Array:
        """Return the result of a kernel that adds payloads; its last integer is 1 if the sum starts from an array."""
        inputs = lists if onto is None else [onto, *lists]
        flag = int(onto is not None)
        consumes, integers = onto is not None, [*integers, flag]
        out = None if consumes else out
        return self.run(kernel, inputs, integers, numbers, outputs=[dtype], lengths=[n], consumes=consumes, out=out)[0]

    # --- arithmetic -----------------------------------------------------------------------------------------------

    def weighted_sum(self, x: Array, a: float, y: Array, b: float) -> Array:
        dtype = self.floating(x)
        if dtype is None or self.floating(y) != dtype:
            return super().weighted_sum(x, a, y, b)
        return self.run("weighted_sum", [x, y], (), [a, b], outputs=[dtype], lengths=[self.length(x)])[0]

    def finite_sum(self, x: Array, a: float, y: Array, b: float, out: Array | None = None) -> tuple[Array, Array]:
        dtype = self.floating(x)
        if dtype is None or self.floating(y) != dtype:
            return super().finite_sum(x, a, y, b, out)
        outputs, lengths = [dtype, "bool"], [self.length(x), 1]
        total, good = self.run("finite_sum", [x, y], (), [a, b], outputs=outputs, lengths=lengths, out=out)
        return total, good

    def max_abs(self, x: Array) -> Array:
        return super().max_abs(x) if self.floating(x) is None else self.reshape(self.flat_max_abs(x), ())

    def flat_max_abs(self, x: Array) -> Array:
        dtype = self.floating(x)
        if dtype is None:
            return self.reshape(super().max_abs(x), (1,))
        return self.run("max_abs", [x], outputs=[dtype], lengths=[1])[0]

    def norm_max(self, x: Array) -> tuple[Array, Array]:
        dtype = self.floating(x)
        if dtype is None:
            return super().norm_max(x)
        norm, most = self.run("norm_max", [x], outputs=[dtype, dtype], lengths=[1, 1])
        return self.reshape(norm, ()), self.reshape(most, ())

    def norm(self, x: Array, axis: int | None = None) -> Array:
        if axis is not None or self.floating(x) is None:
            return super().norm(x, axis)
        return self.norm_max(x)[0]

    def finite(self, x: Array) -> Array:
        if self.floating(x) is None:
            return super().finite(x)
        return self.run("finite", [x], outputs=["bool"], lengths=[1])[0]

    def cast(self, x: Array, dtype: str) -> Array:
        made = self.cast_half(x, dtype)
        return super().cast(x, dtype) if made is None else made

    def cast_half(self, x: Array, dtype: str, out: Array | None = None) -> Array | None:
        """Return `cast` between float32 and 16-bit floats, perhaps written to `out`; None for other dtypes."""
        source = self.kind(x)
        if source == "float32" and dtype in HALF_DTYPES and len(x.shape) == 1:
            integers, lengths = [int(dtype == "bfloat16")], [self.length(x)]
            return self.run("half", [x], integers, outputs=[dtype], lengths=lengths, out=out)[0]
        if source in HALF_DTYPES and dtype == "float32" and len(x.shape) == 1:
            return self.run("wide", [x], outputs=[dtype], lengths=[self.length(x)], out=out)[0]
        return None

    def half_sum(self, rows: Sequence[Array], factor: float = 1.0) -> Array:
        dtype = self.kind(rows[0])
        if dtype not in HALF_DTYPES or any(len(row.shape) != 1 for row in rows):
            return super().half_sum(rows, factor)
        return self.run("half_sum", rows, (), [factor], outputs=[dtype], lengths=[self.length(rows[0])])[0]

    # --- random ---------------------------------------------------------------------------------------------------

    def words(self, n: int, key: Key, stream: int = 0) -> Array:
        return self.run("words", [], [n, *self.key_integers(key, stream)], outputs=["int64"], lengths=[n])[0]

    def uniform(self, n: int, key: Key, stream: int = 0) -> Array:
        return self.run("uniform", [], [n, *self.key_integers(key, stream)], outputs=["float32"], lengths=[n])[0]

    def sample(self, n: int, k: int, key: Key, stream: int = 0) -> Array:
        return self.run("sample", [], [n, k, *self.key_integers(key, stream)], outputs=["int32"], lengths=[k])[0]

    def next_above(self, value: float, dtype: str) -> float:
        """Return the least number of a dtype above a value."""
        return float(np.nextafter(np.dtype(dtype).type(value), np.inf, dtype=dtype))

    def key_integers(self, key: Key, stream: int = 0) -> list[Any]:
        """Return the four integers of a kernel; the seed becomes the signed number of the same bits."""
        seed = key.seed
        if isinstance(seed, int) and seed >= 2**63:
            seed -= 2**64
        return [seed, key.step, stream, key.rank]

    def noise_integers(self, key: Key | None) -> list[Any]:
        """Return the integers of a kernel that rounds stochastically if there is a key."""
        return [0] * 5 if key is None else [1, *self.key_integers(key)]

    # --- selections -----------------------------------------------------------------------------------------------

    def select(self, x: Array, bound: Array, strict: bool, nonzero: bool = False) -> tuple[Array, Array]:
        dtype = self.floating(x)
        if dtype is None:
            return super().select(x, bound, strict, nonzero)
        edge = bound if self.kind(bound) == dtype else self.cast(bound, dtype)
        flags, outputs = [int(strict), int(nonzero)], [dtype, "int32"]
        values, indices = self.run("select", [x, edge], flags, outputs=outputs, lengths=[None, None])
        return values, indices

    def sparsify(self, x: Array, k: int) -> tuple[Array, Array]:
        dtype = self.floating(x)
        if dtype is None:
            return super().sparsify(x, k)
        k = self.min_size(k, self.length(x))
        values, indices = self.run("top", [x], [k], outputs=[dtype, "int32"], lengths=[k, k])
        return values, indices

    def top_bound(self, x: Array, k: int) -> Array:
        dtype = self.floating(x)
        if dtype is None:
            return super().top_bound(x, k)
        return self.run("top_bound", [x], [k], outputs=[dtype], lengths=[1])[0]

    def top_indices(self, x: Array, k: int) -> Array:
        return super().top_indices(x, k) if self.floating(x) is None else self.sparsify(x, k)[1]

    def gather(self, x: Array, indices: Array) -> Array:
        dtype = self.floating(x)
        if dtype is None or len(indices.shape) != 1 or self.kind(indices) != "int32":
            return super().gather(x, indices)
        return self.run("gather", [x, indices], outputs=[dtype], lengths=[self.length(indices)])[0]

    def put_(self, x: Array, indices: Array, value: float) -> Array:
        dtype = self.floating(x)
        if dtype is None:
            return super().put_(x, indices, value)
        lengths = [self.length(x)]
        return self.run("put", [x, indices], (), [value], outputs=[dtype], lengths=lengths, consumes=True)[0]

    def scatter_add_(self, x: Array, indices: Array, values: Array) -> Array:
        dtype = self.floating(x)
        if dtype is None:
            return super().scatter_add_(x, indices, values)
        inputs, lengths = [x, indices, values], [self.length(x)]
        return self.run("scatter_add", inputs, outputs=[dtype], lengths=lengths, consumes=True)[0]

    def sparse_sum(
        self,
        values: Sequence[Array],
        indices: Sequence[Array],
        n: int,
        onto: Array | None = None,
        out: Array | None = None,
    ) -> Array:
        dtype = self.floating(values[0])
        if dtype is None:
            return super().sparse_sum(values, indices, n, onto, out)
        return self.total("sparse_sum", [*values, *indices], [len(values), n], n, dtype, onto, out=out)

    # --- bits -----------------------------------------------------------------------------------------------------

    def pack(self, codes: Array, bits: int) -> Array:
        if len(codes.shape) != 1:
            return super().pack(codes, bits)
        if self.kind(codes) != "int64" and (self.kind(codes) != "uint8" or bits > 8):
            codes = self.cast(codes, "int64")
        size = packed_size(self.length(codes), bits)
        return self.run("pack", [codes], [bits], outputs=["uint8"], lengths=[size])[0]

    def unpack(self, data: Array, bits: int, n: int) -> Array:
        return self.run("unpack", [data], [bits, n], outputs=["int64"], lengths=[n])[0]

    # --- matrices with few columns --------------------------------------------------------------------------------

    def matmul(self, a: Array, b: Array, transpose_a: bool = False, transpose_b: bool = False) -> Array:
        shape = self._thin(a, b, transpose_a, transpose_b)
        if shape is None:
            return super().matmul(a, b, transpose_a, transpose_b)
        sides, rows, columns = shape
        integers = [*sides, int(transpose_a), int(transpose_b)]
        return self.reshape(self._thin_product(a, b, integers, rows * columns), (rows, columns))

    def flat_product(self, a: Array, b: Array, r: int, out: Array | None = None) -> Array:
        if self.thin(a, b, r) is None:
            return super().flat_product(a, b, r, out)
        n, m = self.length(a) // r, self.length(b) // r
        return self._thin_product(a, b, [n, m, r, 0, 1], n * m, out)

    def sub_product_(self, x: Array, a: Array, b: Array, r: int, out: Array | None = None) -> tuple[Array, Array]:
        dtype = self.thin(a, b, r)
        if dtype is None or dtype != self.floating(x):
            return super().sub_product_(x, a, b, r, out)
        sides = [self.length(a) // r, self.length(b) // r, r]
        lengths = [self.length(x)] * 2
        run = self.run("sub_product", [x, a, b], sides, outputs=[dtype] * 2, lengths=lengths, consumes=True, out=out)
        return run[0], run[1]

    def thin(self, x: Array, b: Array, r: int) -> str | None:
        """Return the dtype of a flat matrix x and of a matrix b of r columns, if kernels multiply them; else None."""
        dtype = self.floating(x)
        # On a GPU, the frameworks' products are fast.
        return dtype if dtype == self.kind(b) and r <= MOST_THIN and self.device.startswith("cpu") else None

    def _thin_product(self, a: Array, b: Array, integers: list[Any], size: Any, out: Array | None = None) -> Array:
        return self.run("thin_product", [a, b], integers, outputs=[self.dtype(a)], lengths=[size], out=out)[0]

    def _thin(
        self, a: Array, b: Array, transpose_a: bool, transpose_b: bool
    ) -> tuple[tuple[Any, int, int], int, int] | None:
        """Return the sides n x m of the wide matrix of a product, the few columns r, and the result's sides.

        None if the product is not thin. A transposed matrix may have any number of rows, which a graph need not know.
        """
        # The frameworks' products are slow with few columns and write to fresh memory; on a GPU they are fast.
        if not self.device.startswith("cpu"):
            return None
        dtype = self.dtype(a)
        if dtype not in FLOATS or dtype != self.dtype(b) or len(a.shape) != 2 or len(b.shape) != 2:
            return None
        (p, q), (s, t) = a.shape, b.shape
        if (transpose_a and transpose_b) or (p if transpose_a else q) != (t if transpose_b else s):
            return None
        m, r = (s, q) if transpose_b else (q, t)
        # A side that a graph does not know is None.
        if not m or not r or r > MOST_THIN or (not transpose_a and not p):
            return None
        rows, columns = (q, t) if transpose_a else (p, s if transpose_b else t)
        return (self.length(a) // q if p is None else p, m, r), rows, columns
