"""The weights of a layer, in 16 or fewer bits, as operands of its kernel."""

import dataclasses
from typing import Any, no_type_check

import jax
from jaxtyping import Array, Float

from rjax.pallas_kernels.gemm.few_bits.scaled_weight import ScaledWeight
from rjax.pallas_kernels.one_row_layer.few_bit_gemv import FewBits
from rjax.pallas_kernels.one_row_layer.sizes import LINE_BITS
from rjax.pallas_kernels.one_row_layer.smem_row import GROUP
from rjax.pallas_kernels.one_row_layer.stage_scales import StageScales

BITS = {"fp8": 8, "int8": 8, "int4": 4}
"""Bits of a weight, for each few-bit scheme that the kernel takes."""

PRODUCTS = ("qkv", "output", "gate_up", "down")


@no_type_check  # JAX also builds it with other leaves than arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """The arrays of a layer, bfloat16; those of norms may be float32.

    Attributes:
        attention_norm, mlp_norm: weights of the RMS norms before both halves.
        qkv: weights of the projection to each KV head's queries, its key, its value.
        qkv_bias: bias of ``qkv``, or None.
        q_norm, k_norm: weights of the RMS norms of queries and keys, or None.
        output, gate_up, down: weights of the other projections; gate before up, two matrices as a
            ScaledWeight.
    """

    attention_norm: Float[Array, " D"]
    mlp_norm: Float[Array, " D"]
    qkv: Float[Array, "D K A H"] | ScaledWeight
    qkv_bias: Float[Array, "K A H"] | None
    q_norm: Float[Array, " H"] | None
    k_norm: Float[Array, " H"] | None
    output: Float[Array, "E D"] | ScaledWeight
    gate_up: Float[Array, "D 2 F"] | ScaledWeight
    down: Float[Array, "F D"] | ScaledWeight

    @property
    def depths(self) -> tuple[int, int]:
        """(inputs of the output projection, F)."""
        sizes = []
        for weight in (self.output, self.down):
            few = isinstance(weight, ScaledWeight)
            sizes.append(weight.values.shape[2] if few else weight.shape[0])
        return tuple(sizes)

    @property
    def stored(self) -> dict[str, Any]:
        """How the weights are stored, as arguments of `mosaic.refusal`."""
        weight = self.qkv
        if not isinstance(weight, ScaledWeight):
            return {"values": None, "group": None, "zero_points": False}
        values = "fp8" if weight.is_fp8 else weight.values.dtype.name
        if weight.bits == 4 and not weight.interleaved:
            values = "int4 in plain order"
        return {
            "values": values,
            "group": None if weight.scale.ndim == 2 else weight.block[1],
            "zero_points": weight.zero_points is not None,
        }

    def operands(self) -> dict[str, Array]:
        """The operands of the kernel, by name."""
        found = {"attention_norm": self.attention_norm, "mlp_norm": self.mlp_norm}
        for name in PRODUCTS:
            weight = getattr(self, name)
            if not isinstance(weight, ScaledWeight):
                found[name] = weight.reshape(weight.shape[0], -1)
                continue
            for part, leaf in (("", weight.values), *_scales(weight)):
                found[name + part] = leaf.reshape(-1, *leaf.shape[2:])
        for name in ("qkv_bias", "q_norm", "k_norm"):
            array = getattr(self, name)
            if array is not None:
                found[name] = array
        return found

    def few_bits(self, refs: dict[str, Any]) -> dict[str, FewBits]:
        """How each product's few-bit weights are stored; refs: GMEM, those of ``operands``."""
        found = {}
        for name in PRODUCTS:
            weight = getattr(self, name)
            if not isinstance(weight, ScaledWeight):
                continue
            scales = tuple(refs[name + part] for part, _ in _scales(weight))
            values = weight.values.dtype.name
            if weight.scale.ndim == 2:
                found[name] = FewBits(values, scales[0], None)
                continue
            stage = StageScales(scales, weight.block, groups_of_block(weight.bits))
            found[name] = FewBits(values, None, stage)
        return found


def groups_of_block(bits: int) -> int:
    """Groups of inputs that a block of weights has, each of `GROUP`."""
    return LINE_BITS // bits // GROUP


def scale_rows(values: str | None, group: int | None, *, zero_points: bool) -> int:
    """Rows of words that the scales of a stage take; arguments as of `mosaic.refusal`."""
    if values is None or group is None:
        return 0
    return (2 if zero_points else 1) * groups_of_block(BITS[values])


def few_bit_refusal(
    depths: tuple[int, ...], values: str, group: int | None, *, zero_points: bool
) -> str | None:
    """Why the kernel cannot take weights of a few-bit scheme, or None.

    depths: inputs of the products. values: the scheme, such as "fp8". group: inputs that share a
    scale; None for scales of channels.
    """
    if values not in BITS:
        return f"weights in {values}; it takes {', '.join(BITS)}"
    if zero_points and (values != "int4" or group is None):
        return f"{values} weights with zero points; it takes those of groups of int4"
    if group is not None and group % GROUP:
        return f"scales of {group} inputs; it takes multiples of {GROUP}"
    step = LINE_BITS // BITS[values]
    if any(depth % step for depth in depths):
        return f"products of {depths} inputs in {values}; it takes multiples of {step}"
    return None


def _scales(weight: ScaledWeight) -> list[tuple[str, Array]]:
    found = [("_scale", weight.scale)]
    if weight.zero_points is not None:
        found.append(("_zero_points", weight.zero_points))
    return found
