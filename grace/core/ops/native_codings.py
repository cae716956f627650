"""Kernels for the codings of dense quantizers that use powers of two, tables, digits or several widths."""

from __future__ import annotations

from collections.abc import Sequence

from grace.core.ops.base import packed_size
from grace.core.ops.native import FLOATS, Native
from grace.core.values.spec import Array, Key


class NativeCodings(Native):
    """All composites by kernels: those of `Native`, and the codings here."""

    # --- powers of two --------------------------------------------------------------------------------------------

    def natural_encode(self, x: Array, key: Key, clipped: bool) -> tuple[Array, Array]:
        if self._floating(x) is None:
            return super().natural_encode(x, key, clipped)
        size = packed_size(self.length(x), 8 if clipped else {"float32": 9, "float64": 12}[self.dtype(x)])
        integers, outputs = [int(clipped), *self._key(key)], ["uint8", "int32"]
        codes, base = self._run("natural_encode", [x], integers, outputs=outputs, lengths=[size, 1])
        return codes, base

    def natural_sum(
        self,
        codes: Sequence[Array],
        bases: Sequence[Array],
        n: int,
        dtype: str,
        clipped: bool,
        onto: Array | None = None,
        negate: bool = False,
    ) -> Array:
        integers = [len(codes), n, FLOATS.index(dtype), int(clipped), int(negate)]
        return self._total("natural_sum", [*codes, *bases], integers, n, dtype, onto)

    # --- tables of 128 magnitudes ---------------------------------------------------------------------------------

    def table_encode(self, x: Array, scale: Array, table: Array) -> Array:
        if self._floating(x) is None:
            return super().table_encode(x, scale, table)
        inputs = [x, scale, table]
        return self._run("table_encode", inputs, outputs=["uint8"], lengths=[self.length(x)])[0]

    def table_sum(
        self, codes: Sequence[Array], scales: Sequence[Array], table: Array, onto: Array | None = None
    ) -> Array:
        n = self.length(codes[0])
        inputs = [*codes, *scales, table]
        return self._total("table_sum", inputs, [len(codes), n], n, self.dtype(table), onto)

    # --- ternary digits -------------------------------------------------------------------------------------------

    def ternary_encode(self, x: Array, scale: Array) -> Array:
        if self._floating(x) is None:
            return super().ternary_encode(x, scale)
        return self._run("ternary_encode", [x, scale], outputs=["uint8"], lengths=[None])[0]

    def ternary_sum(self, codes: Sequence[Array], scales: Sequence[Array], n: int, onto: Array | None = None) -> Array:
        inputs = [*codes, *scales]
        return self._total("ternary_sum", inputs, [len(codes), n], n, self.dtype(scales[0]), onto)

    # --- numbers of 0, 8, 16 bits or all --------------------------------------------------------------------------

    def precision_encode(self, x: Array, bound: float, m: int, h: int) -> tuple[Array, Array, Array, Array]:
        if self._floating(x) is None:
            return super().precision_encode(x, bound, m, h)
        outputs, lengths = [self.dtype(x), "int16", "int8", "uint8"], [None, None, None, packed_size(self.length(x), 2)]
        full, words, bytes_, tags = self._run(
            "precision_encode", [x], [m, h], [float(bound)], outputs=outputs, lengths=lengths
        )
        return full, words, bytes_, tags

    def precision_sum(
        self,
        payloads: Sequence[tuple[Array, Array, Array, Array]],
        m: int,
        h: int,
        n: int,
        dtype: str,
        onto: Array | None = None,
        negate: bool = False,
    ) -> Array:
        inputs = [field for fields in zip(*payloads, strict=True) for field in fields]
        return self._total("precision_sum", inputs, [len(payloads), m, h, n, int(negate)], n, dtype, onto)
