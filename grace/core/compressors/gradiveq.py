"""GradiVeQ: principal components of gradient slices, learned in a few uncompressed steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grace.core.codecs.levels import rows_of
from grace.core.config.registry import About, Setting, compressors
from grace.core.errors import ConfigError, PayloadError
from grace.core.methods.capabilities import Learning
from grace.core.methods.compressor import Compressor
from grace.core.methods.site import Site
from grace.core.ops.composites import ArrayOps
from grace.core.spec import Array, Field, Payload, State, TensorSpec


@compressors.register(
    "gradiveq",
    About(
        family="low_rank",
        adam=False,
        tests=[{"slice_size": 7, "components": 2, "training_steps": 1, "compressed_steps": 2}],
        errors=(),
        # With error feedback and a short cycle, because the next full step sends all that the components miss at once.
        digits=Setting(options={"memory": "residual", "training_steps": 2, "compressed_steps": 8}),
    ),
)
@dataclass(frozen=True)
class GradiVeQ(Compressor, Learning):
    r"""GradiVeQ: principal components of gradient slices, learned in a few steps without compression.

    Formula: C(g) = U U^\top g, \quad U = \text{the leading eigenvectors of}\; \sum g g^\top

    A slice g is `slice_size` (K) consecutive elements. A cycle starts with `training_steps` steps that send the whole
    gradient. From the sum over all ranks, every rank learns the same basis U for all slices of a tensor, with K rows
    and `components` columns. Then `compressed_steps` steps send U^T g, `components` values per slice. Steps that were
    lost to NaN or infinity do not count. C is linear, so an allreduce can add the payloads. On the gradients that U was
    learned from, the squared error is the sum of the eigenvalues left out, the least for any U. The last slice is
    padded with zeros. Tensors shorter than one slice, or that would not shrink, stay dense.
    The paper subtracts the mean slice and takes U from the covariance. Here g g^T holds the mean as one more direction:
    zeros stay zeros, sums need no count of their terms, and C is an orthogonal projection (contraction with delta = 0).
    With one component more the error is at most that of the paper.

    Error: that of projecting each group of slices on the basis that was trained last, so it follows the gradients.

    Cost: two products of the gradient and K x components; in training steps one with K x K in float64; K^3 operations
    once per cycle. State: K (K + components) values per tensor.

    When: layers whose slices look alike, such as convolutions; slice_size is best a multiple or a divisor of the last
    axes. The full steps cost bytes: on average training_steps / (training_steps + compressed_steps) of the gradient.
    The paper uses no error feedback. With the memory `residual`, keep the cycle short: what U cannot represent is sent
    in one burst.

    Reference: Yu et al., "GradiVeQ: vector quantization for bandwidth-efficient gradient aggregation in distributed CNN
    training", NeurIPS 2018.
    """

    slice_size: int = 64
    components: int = 8
    training_steps: int = 10
    compressed_steps: int = 90

    summable = True
    flat = False
    multiplies = True

    def __post_init__(self) -> None:
        for name in ("slice_size", "components", "training_steps", "compressed_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"gradiveq: {name} must be at least 1, received {getattr(self, name)!r}.")
        if self.components >= self.slice_size:
            message = f"gradiveq: expected fewer components than slice_size ({self.slice_size})"
            raise ConfigError(f"{message}, received {self.components!r}.")

    def contraction(self, spec: TensorSpec) -> float | None:
        return 0.0

    def unfit(self, spec: TensorSpec) -> str | None:
        if spec.numel < self.slice_size:
            return f"the tensor has {spec.numel} elements, fewer than one slice of {self.slice_size}"
        if self._slices(spec) * self.components >= spec.numel:
            return (
                f"{self.components} components per slice take no fewer values than the {spec.numel} elements themselves"
            )
        return None

    def _slices(self, spec: TensorSpec) -> int:
        return -(-spec.numel // self.slice_size)

    def init(self, spec: TensorSpec, ops: ArrayOps, key_seed: int) -> State:
        k, d = self.slice_size, self.components
        return {
            # The number of steps of the cycle that are done; the step number would also count steps that were lost.
            "position": ops.zeros(1, "int64"),
            # In float64, because squares of large or small gradients leave the range of float32.
            "moment": ops.reshape(ops.zeros(k * k, "float64"), (k, k)),
            "basis": ops.reshape(ops.zeros(k * d, spec.work_dtype), (k, d)),
        }

    def _training(self, at: Site) -> Array:
        return at.state["position"][0] < self.training_steps

    def wire(self, spec: TensorSpec) -> tuple[Field, ...]:
        return (Field("values", spec.work_dtype, "of the phase"),)

    def compress(self, x: Array, at: Site) -> Payload:
        ops = at.ops

        def components() -> Array:
            return ops.reshape(ops.matmul(rows_of(ops, x, self.slice_size), at.state["basis"]), (-1,))

        return {"values": ops.choose(self._training(at), lambda: x, components)}

    def decompress(self, payload: Payload, at: Site) -> Array:
        ops, values, n = at.ops, payload["values"], at.spec.numel
        few, length = self._slices(at.spec) * self.components, ops.length(values)
        # Not in a graph, whose optimizer takes the length in one phase for that in the other.
        if isinstance(length, int) and length != (n if bool(self._training(at)) else few):
            raise PayloadError(
                f"gradiveq: expected {n} values in a training step and {few} in any other, received {length}; "
                "the payload is damaged."
            )

        def gradient() -> Array:
            slices = ops.matmul(ops.reshape(values, (-1, self.components)), at.state["basis"], transpose_b=True)
            return ops.reshape(slices, (-1,))[:n]

        return ops.reshape(ops.choose(self._training(at), lambda: ops.copy(values), gradient), (n,))

    def learn(self, payloads: Sequence[Payload], at: Site) -> State:
        ops, position = at.ops, at.state["position"]

        def seen() -> Array:
            total = payloads[0]["values"]
            for payload in payloads[1:]:
                total = total + payload["values"]
            slices = ops.cast(rows_of(ops, ops.reshape(total, (at.spec.numel,)), self.slice_size), "float64")
            old = ops.where(position[0] > 0, at.state["moment"], 0.0)
            new = old + ops.matmul(slices, slices, transpose_a=True)
            # A sum that overflowed teaches nothing, and has no decomposition.
            return ops.where(ops.finite(new), new, old)

        def leading() -> Array:
            return ops.cast(ops.svd(moment)[0][:, : self.components], at.spec.work_dtype)

        moment = ops.choose(self._training(at), seen, lambda: at.state["moment"])
        basis = ops.choose(position[0] == self.training_steps - 1, leading, lambda: at.state["basis"])
        position = (position + 1) % (self.training_steps + self.compressed_steps)
        return {"position": position, "moment": moment, "basis": basis}
