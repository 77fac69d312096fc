"""MXFP4 checkpoints of experts with ``quant_method`` "mxfp4", as OpenAI publishes gpt-oss."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.models.formats.weight_format import StoredTensor, Target, WeightFormat
from rjax.models.schemes import UNQUANTISED, WeightScheme

_BLOCK = 32  # inputs that share a scale
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of float4_e2m1fn without its sign


@dataclasses.dataclass(frozen=True, slots=True)
class Mxfp4(WeightFormat):
    """float4_e2m1fn weights of experts with a power of two for each 32 inputs; widened at load.

    The projections outside of experts are stored plainly.
    """

    def scheme(self, module: str) -> WeightScheme:
        """Plain."""
        del module
        return UNQUANTISED

    def tensors(self, module: str, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
        """No projection is stored so."""
        raise AssertionError(module)

    def decode(self, stored: Mapping[str, jax.Array], target: Target) -> dict[str, jax.Array]:
        """No projection is stored so."""
        raise AssertionError(target)

    def expert_tensors(
        self, tensor: str, shape: tuple[int, int, int]
    ) -> Mapping[str, StoredTensor]:
        """``NAME_blocks`` with two values a byte, and ``NAME_scales``."""
        J, outputs, inputs = shape
        groups = (J, outputs, inputs // _BLOCK)
        return {
            "blocks": StoredTensor(
                f"{tensor}_blocks", ((*groups, _BLOCK // 2),), ("U8",), (None,) * 4
            ),
            "scales": StoredTensor(f"{tensor}_scales", (groups,), ("U8",), (None,) * 3),
        }

    def decode_experts(
        self, stored: Mapping[str, jax.Array], dtype: DTypeLike
    ) -> Float[Array, "J X E"]:
        """The values times 2 ** (scale - 127); the low half of a byte comes first."""
        blocks, scales = stored["blocks"], stored["scales"]
        halves = jnp.stack([blocks & 15, blocks >> 4], axis=-1).astype(jnp.int32)
        table = jnp.asarray([*_VALUES, *(-value for value in _VALUES)], jnp.float32)
        values = table[halves].reshape(*scales.shape, _BLOCK)
        values = jnp.ldexp(values, scales.astype(jnp.int32)[..., None] - 127)
        return values.reshape(*scales.shape[:2], -1).astype(dtype)


def read_mxfp4(quantization: dict[str, Any]) -> Mxfp4:
    """The format; the modules that a checkpoint lists as not converted are never converted."""
    del quantization
    return Mxfp4()
