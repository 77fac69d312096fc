"""How the weights of a layer's experts are stored: the leaves of a scheme with an axis J.

The kernels of experts widen values of few bits to 16 bits before they multiply, so fp8 is
interleaved too, as int4 is. Scales of blocks have the inputs first: then those of a tile of outputs
are neighbours.
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.models.schemes.scaled import Scaled
from rjax.models.schemes.scheme import Leaf, WeightScheme
from rjax.pallas_kernels.gemm.few_bits.interleaving import interleave, natural

_OF_BLOCKS = ("weight_scale", "weight_zero_point")


def plain_leaves(
    scheme: WeightScheme, inputs: str, outputs: str, sizes: Mapping[str, int]
) -> Mapping[str, Leaf]:
    """The arrays as a checkpoint means them: those of `WeightScheme.leaves` after an axis J."""
    leaves = scheme.leaves(inputs, outputs, sizes)
    return {
        name: dataclasses.replace(leaf, letters=f"J {leaf.letters}")
        for name, leaf in leaves.items()
    }


def grouped_leaves(
    scheme: WeightScheme, inputs: str, outputs: str, sizes: Mapping[str, int]
) -> Mapping[str, Leaf]:
    """The arrays of a `GroupedLinear`."""
    leaves = dict(plain_leaves(scheme, inputs, outputs, sizes))
    for name in _block_leaves(scheme):
        if name in leaves:
            leaves[name] = dataclasses.replace(leaves[name], letters=f"J {inputs} {outputs}")
    return leaves


def arrange_grouped(scheme: WeightScheme, leaves: Mapping[str, Array]) -> dict[str, Array]:
    """Convert leaves from the axes and order of `plain_leaves` to those of `grouped_leaves`."""
    stored = dict(leaves)
    if is_interleaved(scheme, leaves["weight"].shape):
        stored["weight"] = interleave(leaves["weight"])
    for name in _block_leaves(scheme):
        if name in stored:
            stored[name] = jnp.moveaxis(stored[name], -1, 1)
    return stored


def dequantise_expert(
    scheme: WeightScheme, leaves: Mapping[str, Array], dtype: DTypeLike
) -> Float[Array, "E ..."]:
    """The reference: the weight of one expert, inputs first.

    Args:
        scheme: weight scheme of the experts.
        leaves: leaves of the expert, without axis J; perhaps those of one device of a mesh.
        dtype: dtype of the result, which is computed in float32 and rounded once.
    """
    weight = leaves["weight"]
    if not isinstance(scheme, Scaled):
        return weight.astype(dtype)
    value = natural(weight) if is_interleaved(scheme, weight.shape) else weight
    plain = {**leaves, "weight": value}
    for name in _block_leaves(scheme):
        if name in plain:
            plain[name] = jnp.moveaxis(plain[name], 0, -1)
    return jnp.moveaxis(scheme.widened(plain).astype(dtype), -1, 0)


def is_interleaved(scheme: WeightScheme, shape: tuple[int, ...]) -> bool:
    """Whether values of a shape, inputs last, are stored interleaved."""
    if not isinstance(scheme, Scaled):
        return False
    block = scheme.type.interleaved_experts
    return block is not None and shape[-1] % block == 0


def _block_leaves(scheme: WeightScheme) -> tuple[str, ...]:
    """The leaves that have axes of blocks of inputs."""
    return _OF_BLOCKS if isinstance(scheme, Scaled) and scheme.block[1] is not None else ()
