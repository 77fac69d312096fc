"""MXFP4 checkpoints of experts with ``quant_method`` "mxfp4", as OpenAI publishes gpt-oss."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rjax.models.formats.registry import register_format
from rjax.models.formats.weight_format import StoredTensor, Target, WeightFormat
from rjax.models.schemes import MXFP4, UNQUANTISED, WeightScheme
from rjax.models.schemes.mxfp4 import LARGEST_EXPONENT

_BLOCK = 32  # inputs that share a scale
_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
_FIELDS = frozenset({"dequantize", "modules_to_not_convert", "quant_method"})
"""Fields of the ``quantization_config`` that are known: its tensors say everything."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mxfp4(WeightFormat):
    """float4_e2m1fn weights of experts with a power of two for each 32 inputs.

    The projections outside of experts are stored plainly.
    """

    biased_experts = True

    def scheme(self, module: str) -> WeightScheme:
        """mxfp4 for experts; other modules are not quantised."""
        return MXFP4 if module.endswith(_EXPERTS) else UNQUANTISED

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
                f"{tensor}_blocks",
                ((*groups, _BLOCK // 2),),
                ("U8",),
                (None, "outputs", "inputs", None),
            ),
            "scales": StoredTensor(
                f"{tensor}_scales",
                (groups,),
                ("U8",),
                (None, "outputs", "inputs"),
                check=_check_scales,
            ),
        }

    def decode_experts(
        self, stored: Mapping[str, jax.Array], target: Target
    ) -> dict[str, jax.Array]:
        """The bits of the values, the low half of each byte first, and the exponents."""
        blocks, scales = stored["blocks"], stored["scales"]
        halves = jnp.stack([blocks & 15, blocks >> 4], axis=-1).astype(jnp.int8)
        signed = jnp.where(halves > 7, halves - 16, halves)
        values = signed.reshape(*scales.shape[:2], -1).astype(jnp.int4)
        return {"weight": values, "weight_scale": scales}


def stored_experts(tensor: str, values: np.ndarray, exponents: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors that `Mxfp4` reads, by name.

    Args:
        tensor: the name of the unquantised weight.
        values: (experts, outputs, inputs), the bits of the values as signed integers.
        exponents: uint8 (experts, outputs, groups of inputs).
    """
    bits = values.astype(np.uint8) & 15
    return {
        f"{tensor}_blocks": (bits[..., ::2] | bits[..., 1::2] << 4).reshape(*exponents.shape, -1),
        f"{tensor}_scales": exponents,
    }


def _check_scales(exponents: np.ndarray) -> str | None:
    """A problem of scales: those of NaN, and those too large for the kernels."""
    largest = int(exponents.max(initial=0))
    if largest == 255:
        return "has scales that are not numbers"
    if largest > LARGEST_EXPONENT:
        return f"has the scale 2**{largest - 127}; the largest supported is 2"
    return None


def read_mxfp4(quantization: dict[str, Any]) -> Mxfp4:
    """The format; the modules that a checkpoint lists as not converted are never converted."""
    del quantization
    return Mxfp4()


register_format("mxfp4", read_mxfp4, lambda quantization: quantization.keys() - _FIELDS)
