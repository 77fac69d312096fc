"""Weights of few bits with a scale for each channel, group or block."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.models.schemes.scheme import Leaf, WeightScheme
from rjax.pallas_kernels.quantised_gemm.interleaving import INTERLEAVED, interleave, natural

ScaledDType = Literal["fp8", "int8", "int4"]
ScaleDType = Literal["float32", "bfloat16", "float16"]

VALUE_DTYPES: Mapping[ScaledDType, np.dtype] = {
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
    "int8": np.dtype(np.int8),
    "int4": np.dtype(ml_dtypes.int4),
}
# Scales of random weights, for a standard deviation of 0.02 together with the random values.
_RANDOM_SCALE: Mapping[ScaledDType, float] = {"fp8": 1.0, "int8": 2.7e-4, "int4": 4.3e-3}


@dataclasses.dataclass(frozen=True, slots=True)
class Scaled(WeightScheme):
    """weight = (value - zero point) * scale.

    Values lie with the outputs first and the inputs last ([N, K] row-major, K-major for tensor
    cores), as in most checkpoints. int4 values are stored interleaved along the last input axis
    (`interleaving`), if it is a multiple of 32.

    Attributes:
        values: "fp8" is float8_e4m3fn, "int8" and "int4" are signed.
        block: (outputs, inputs) that share a scale: (1, None) is a scale for each channel, (1, 128)
            for each group of 128 inputs, (128, 128) for each square. Blocks that do not divide an
            axis are stored as smaller ones that do.
        zero_points: whether there are zero points, int8, one for each scale.
        scale_dtype: of the scales.
    """

    values: ScaledDType
    block: tuple[int, int | None] = (1, None)
    zero_points: bool = False
    scale_dtype: ScaleDType = "float32"

    @property
    def name(self) -> str:
        """For kernels."""
        return self.values

    def leaves(self, inputs: str, outputs: str, sizes: Mapping[str, int]) -> Mapping[str, Leaf]:
        """``weight``, ``weight_scale`` and perhaps ``weight_zero_point``."""
        both = f"{outputs} {inputs}"
        values = Leaf(
            both,
            VALUE_DTYPES[self.values],
            "normal" if self.values == "fp8" else "integers",
        )
        rows, columns = self.block
        blocks = _shared(outputs.split()[-1:], rows, sizes)
        letters = outputs
        if columns is not None:
            letters = both
            blocks += _shared(inputs.split(), columns, sizes)
        scale = Leaf(letters, jnp.dtype(self.scale_dtype), _RANDOM_SCALE[self.values], blocks)
        leaves = {"weight": values, "weight_scale": scale}
        if self.zero_points:
            leaves["weight_zero_point"] = Leaf(letters, jnp.dtype(jnp.int8), "zeros", blocks)
        return leaves

    def is_interleaved(self, shape: tuple[int, ...]) -> bool:
        """Whether values of a shape are stored interleaved."""
        return self.values == "int4" and shape[-1] % INTERLEAVED == 0

    def arrange(self, leaves: Mapping[str, Array]) -> Mapping[str, Array]:
        """With interleaved int4 values."""
        weight = leaves["weight"]
        if not self.is_interleaved(weight.shape):
            return leaves
        return {**leaves, "weight": interleave(weight)}

    def dequantise(
        self, leaves: Mapping[str, Array], depth: int, dtype: DTypeLike
    ) -> Float[Array, "E X"]:
        """Computed in float32 and rounded once."""
        weight = leaves["weight"]
        value = natural(weight) if self.is_interleaved(weight.shape) else weight
        value = value.astype(jnp.float32)
        if self.zero_points:
            value = value - _repeated(leaves["weight_zero_point"], weight.shape)
        value = value * _repeated(leaves["weight_scale"], weight.shape)
        return value.astype(dtype).reshape(-1, depth).T


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
    """In float32, repeated along every axis to the shape; missing last axes are broadcast."""
    scale = scale.astype(jnp.float32).reshape(*scale.shape, *(1,) * (len(shape) - scale.ndim))
    for axis, size in enumerate(shape):
        if scale.shape[axis] not in (1, size):
            scale = jnp.repeat(scale, size // scale.shape[axis], axis)
    return scale
