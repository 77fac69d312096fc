"""The weights of a layer, in 16 or fewer bits, as operands of its kernel."""

import dataclasses
from typing import Any, no_type_check

import jax
from jaxtyping import Array, Float

from rjax.pallas_kernels.gemm.few_bits.scaled_weight import ScaledWeight
from rjax.pallas_kernels.layer.base import LayerProblem
from rjax.pallas_kernels.layer.one_row.few_bit_gemv import FewBits
from rjax.pallas_kernels.layer.one_row.sizes import LINE_BITS
from rjax.pallas_kernels.layer.one_row.smem_row import GROUP
from rjax.pallas_kernels.layer.one_row.stage_scales import StageScales

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

    def operands(self) -> dict[str, Array]:
        """The operands of the kernel, by name."""
        found = {"attention_norm": self.attention_norm, "mlp_norm": self.mlp_norm}
        for name in PRODUCTS:
            weight = getattr(self, name)
            if not isinstance(weight, ScaledWeight):
                found[name] = weight.reshape(weight.shape[0], -1)
                continue
            assert weight.bits > 4 or weight.interleaved
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


def scale_rows(problem: LayerProblem) -> int:
    """Rows of words that the scales of a stage take."""
    if problem.values is None or problem.group is None:
        return 0
    return (2 if problem.zero_points else 1) * groups_of_block(BITS[problem.values])


def few_bit_refusal(problem: LayerProblem) -> str | None:
    """Why the kernel cannot take weights of few bits as a layer stores them, or None."""
    values, group = problem.values, problem.group
    if values is None:
        return None
    if values not in BITS:
        return f"weights in {values}; it takes {', '.join(BITS)}"
    if problem.zero_points and (values != "int4" or group is None):
        return f"{values} weights with zero points; it takes those of groups of int4"
    if group is not None and group % GROUP:
        return f"scales of {group} inputs; it takes multiples of {GROUP}"
    step = LINE_BITS // BITS[values]
    depths = problem.depth, problem.num_heads * problem.head_dim, problem.width
    if any(depth % step for depth in depths):
        return f"products of {depths} inputs in {values}; it takes multiples of {step}"
    return None


def _scales(weight: ScaledWeight) -> list[tuple[str, Array]]:
    found = [("_scale", weight.scale)]
    if weight.zero_points is not None:
        found.append(("_zero_points", weight.zero_points))
    return found
