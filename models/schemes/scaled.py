"""Weights of few bits with a scale for each channel, group or block."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

from rjax.models.schemes.scheme import Leaf, WeightScheme
from rjax.pallas_kernels.quantised_gemm.interleaving import INTERLEAVED, interleave, natural

ScaledDType = Literal["fp8", "int8", "int4", "mxfp4"]
ScaleDType = Literal["float32", "bfloat16", "float16", "uint8"]

VALUE_DTYPES: Mapping[ScaledDType, np.dtype] = {
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
    "int8": np.dtype(np.int8),
    "int4": np.dtype(ml_dtypes.int4),
    "mxfp4": np.dtype(ml_dtypes.int4),
}
# Scales of random weights, for a standard deviation of 0.02 together with the random values.
_RANDOM_SCALE: Mapping[ScaledDType, float] = {
    "fp8": 1.0,
    "int8": 2.7e-4,
    "int4": 4.3e-3,
    "mxfp4": 120.0,
}
EXPONENT_BIAS = 127
"""Exponent bias of a scale of mxfp4: the number e means 2 ** (e - 127)."""
LARGEST_EXPONENT = 128
"""The largest exponent of a scale of mxfp4 that kernels take: a scale of 2."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scaled(WeightScheme):
    """weight = (value - zero point) * scale.

    Values lie with the outputs first and the inputs last ([N, K] row-major, K-major for tensor
    cores), as in most checkpoints. int4 values are stored interleaved along the last input axis
    (`interleaving`), if it is a multiple of 32.

    Attributes:
        values: "fp8" is float8_e4m3fn, "int8" and "int4" are signed. "mxfp4" is float4_e2m1fn with
            powers of two as scales; the bits of a value are stored as an int4, and the exponent of
            a scale as uint8 (float8_e8m0fnu).
        block: (outputs, inputs) that share a scale: (1, None) is a scale for each channel, (1, 128)
            for each group of 128 inputs, (128, 128) for each square. Blocks that do not divide an
            axis are stored as smaller ones that do.
        zero_points: whether there are zero points, int8, one for each scale.
        scale_dtype: dtype of the scales.
    """

    values: ScaledDType
    block: tuple[int, int | None] = (1, None)
    zero_points: bool = False
    scale_dtype: ScaleDType = "float32"

    @property
    def name(self) -> str:
        """Name for kernels: the type of the values."""
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
        return VALUE_DTYPES[self.values] == jnp.int4 and shape[-1] % INTERLEAVED == 0

    def arrange(self, leaves: Mapping[str, Array]) -> Mapping[str, Array]:
        """The leaves with interleaved int4 values."""
        weight = leaves["weight"]
        if not self.is_interleaved(weight.shape):
            return leaves
        return {**leaves, "weight": interleave(weight)}

    def dequantise(
        self, leaves: Mapping[str, Array], depth: int, dtype: DTypeLike
    ) -> Float[Array, "E X"]:
        """The weight, computed in float32 and rounded once."""
        weight = leaves["weight"]
        value = natural(weight) if self.is_interleaved(weight.shape) else weight
        return self.dequantise_plain({**leaves, "weight": value}, depth, dtype)

    def dequantise_plain(
        self, leaves: Mapping[str, Array], depth: int, dtype: DTypeLike
    ) -> Float[Array, "E X"]:
        """See the base class."""
        return self.widened(leaves).astype(dtype).reshape(-1, depth).T

    def widened(self, leaves: Mapping[str, Array]) -> Float[Array, "..."]:
        """The weight in float32, with its axes, of leaves in plain order."""
        value, scale = leaves["weight"], leaves["weight_scale"]
        shape = value.shape
        value = _e2m1(value) if self.values == "mxfp4" else value.astype(jnp.float32)
        if self.zero_points:
            value = value - _repeated(leaves["weight_zero_point"], shape)
        if self.values == "mxfp4":
            scale = jnp.ldexp(jnp.float32(1), scale.astype(jnp.int32) - EXPONENT_BIAS)
        return value * _repeated(scale, shape)


MXFP4 = Scaled("mxfp4", (1, 32), scale_dtype="uint8")
"""The microscaling format of OCP, as gpt-oss is published; kernels take it for experts."""


def _e2m1(bits: Num[Array, "..."]) -> Float[Array, "..."]:
    """float4_e2m1fn in float32, from its bits as int4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign."""
    bits = bits.astype(jnp.int8)
    size = (bits & 7).astype(jnp.float32)
    size = jnp.where(size < 4, size / 2, jnp.where(size < 6, size - 2, 2 * size - 8))
    return jnp.where(bits < 0, -size, size)


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
