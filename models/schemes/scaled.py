"""Weights of few bits with a scale for each channel, group or block."""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.models.schemes.scheme import Leaf, WeightScheme
from rjax.models.schemes.values import ScaleDType, Values
from rjax.pallas_kernels.gemm.few_bits.interleaving import interleave, natural
from rjax.pallas_kernels.weight import ScaledLayout

_VALUES: dict[str, Values] = {}
ON_LOAD: dict[str, "Scaled"] = {}
"""The schemes that unquantised weights can be rounded to, by the name that a user gives."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scaled(WeightScheme):
    """weight = (value - zero point) * scale.

    Values lie with the outputs first and the inputs last ([N, K] row-major, K-major for tensor
    cores), as in most checkpoints. Values of 4 bits are stored interleaved along the last input
    axis (`interleaving`), if it is a multiple of 32.

    Attributes:
        values: name of the type of the values, see `register_values`.
        block: (outputs, inputs) that share a scale: (1, None) is a scale for each channel, (1, 128)
            for each group of 128 inputs, (128, 128) for each square. Blocks that do not divide an
            axis are stored as smaller ones that do.
        zero_points: whether there are zero points, int8, one for each scale.
        scale_dtype: dtype of the scales.
        of_expert: the weight is that of an expert, whose kernels widen values to 16 bits before
            they multiply: fp8 is interleaved too. Scales of blocks have the inputs first, so that
            those of a tile of outputs are neighbours.
    """

    values: str
    block: tuple[int, int | None] = (1, None)
    zero_points: bool = False
    scale_dtype: ScaleDType = "float32"
    of_expert: bool = False

    @property
    def name(self) -> str:
        """Name for kernels: the type of the values."""
        return self.values

    @property
    def type(self) -> Values:
        """The type of the values."""
        return _VALUES[self.values]

    @property
    def for_experts(self) -> "Scaled":
        """See the base class."""
        return dataclasses.replace(self, of_expert=True)

    def leaves(self, inputs: str, outputs: str, sizes: Mapping[str, int]) -> Mapping[str, Leaf]:
        """``weight``, ``weight_scale`` and perhaps ``weight_zero_point``."""
        both = f"{outputs} {inputs}"
        values = Leaf(both, self.type.dtype, self.type.random)
        rows, columns = self.block
        blocks = _shared(outputs.split()[-1:], rows, sizes)
        letters = outputs
        if columns is not None:
            letters = f"{inputs} {outputs}" if self.of_expert else both
            blocks += _shared(inputs.split(), columns, sizes)
        scale = Leaf(letters, jnp.dtype(self.scale_dtype), self.type.random_scale, blocks)
        leaves = {"weight": values, "weight_scale": scale}
        if self.zero_points:
            leaves["weight_zero_point"] = Leaf(letters, jnp.dtype(jnp.int8), "zeros", blocks)
        return leaves

    def layout(self, block: tuple[int, int]) -> ScaledLayout:
        """What kernels are told of a weight of which ``block`` (outputs, inputs) share a scale."""
        return ScaledLayout(
            values=self.values,
            dtype=self.type.dtype,
            block=block,
            channels=self.block[1] is None,
            zero_points=self.zero_points,
            interleaving=self._interleaving,
        )

    @property
    def _interleaving(self) -> int | None:
        """Inputs that are reordered among themselves, if a multiple of them is stored."""
        return self.type.interleaved_experts if self.of_expert else self.type.interleaved

    def is_interleaved(self, shape: tuple[int, ...]) -> bool:
        """See the base class."""
        block = self._interleaving
        return block is not None and shape[-1] % block == 0

    def arrange(self, leaves: Mapping[str, Array]) -> Mapping[str, Array]:
        """The leaves with interleaved values, and the scales of an expert's blocks inputs first."""
        stored = self._with_blocks_moved(leaves, -1, 0)
        if self.is_interleaved(leaves["weight"].shape):
            stored["weight"] = interleave(leaves["weight"])
        return stored

    def dequantise(
        self, leaves: Mapping[str, Array], depth: int, dtype: DTypeLike
    ) -> Float[Array, "E X"]:
        """The weight, computed in float32 and rounded once."""
        plain = self._with_blocks_moved(leaves, 0, -1)
        if self.is_interleaved(leaves["weight"].shape):
            plain["weight"] = natural(leaves["weight"])
        return self.dequantise_plain(plain, depth, dtype)

    def _with_blocks_moved(
        self, leaves: Mapping[str, Array], source: int, destination: int
    ) -> dict[str, Array]:
        """The leaves, those of an expert's blocks with an axis moved."""
        if not self.of_expert or self.block[1] is None:
            return dict(leaves)
        return {
            name: leaf if name == "weight" else jnp.moveaxis(leaf, source, destination)
            for name, leaf in leaves.items()
        }

    def dequantise_plain(
        self, leaves: Mapping[str, Array], depth: int, dtype: DTypeLike
    ) -> Float[Array, "E X"]:
        """See the base class."""
        weight = self.widened(leaves).astype(dtype)
        if self.of_expert:
            # In this order, float32 products have the bits of those of an unquantised weight.
            return jnp.moveaxis(weight, -1, 0).reshape(depth, -1)
        return weight.reshape(-1, depth).T

    def widened(self, leaves: Mapping[str, Array]) -> Float[Array, "..."]:
        """The weight in float32, with its axes, of leaves in plain order."""
        shape = leaves["weight"].shape
        value = self.type.widened(leaves["weight"])
        if self.zero_points:
            value = value - _repeated(leaves["weight_zero_point"], shape)
        return value * _repeated(self.type.widened_scale(leaves["weight_scale"]), shape)

    def quantise(self, weight: Float[Array, "X E"], block: tuple[int, int]) -> dict[str, jax.Array]:
        """The arrays of a scheme without zero points, outputs first, rounded to nearest.

        Args:
            weight: (outputs, inputs), float32.
            block: (outputs, inputs) that share a scale; not looked at for channels.
        """
        assert not self.zero_points
        channels = self.block[1] is None
        block = (1, weight.shape[1]) if channels else block
        values, scale = self.type.quantise(weight, block, self.scale_dtype)
        return {"weight": values, "weight_scale": scale[:, 0] if channels else scale}


def register_values(values: Values, on_load: Scaled) -> None:
    """Register a type of values, once, when its module is imported.

    Args:
        values: the type.
        on_load: the scheme for the option ``quantization`` with its name.

    Raises:
        ValueError: another type has the name.
    """
    if _VALUES.setdefault(values.name, values) is not values:
        raise ValueError(f"the value type {values.name!r} is registered already")
    ON_LOAD[values.name] = on_load


def _shared(
    letters: list[str], block: int, sizes: Mapping[str, int]
) -> tuple[tuple[str, int], ...]:
    """How many entries of each axis share a scale, if ``block`` of the merged axes do."""
    shared = []
    for letter in reversed(letters):
        size = sizes[letter]
        own = math.gcd(block, size)
        shared.append((letter, own))
        block = block // size if own == size else 1
    return tuple((letter, own) for letter, own in reversed(shared) if own > 1)


def _repeated(scale: Array, shape: tuple[int, ...]) -> Array:
    """Repeat values along every axis to the shape, in float32; missing last axes are broadcast."""
    scale = scale.astype(jnp.float32).reshape(*scale.shape, *(1,) * (len(shape) - scale.ndim))
    for axis, size in enumerate(shape):
        if scale.shape[axis] not in (1, size):
            scale = jnp.repeat(scale, size // scale.shape[axis], axis)
    return scale
