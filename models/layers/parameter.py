"""Parameters with named axes."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from rjax.models.config import ModelConfig
from rjax.models.schemes.scheme import Initial, Leaf


def parameter(
    letters: str, config: ModelConfig, dtype: DTypeLike, initial: Initial = "normal", a: int = 1
) -> nnx.Param:
    """An abstract parameter: shape and dtype, no memory. Loading gives it its values.

    Args:
        letters: its axes, such as "D K A H"; A is the axis along which projections are fused.
        config: gives each letter its size.
        dtype: of the values.
        initial: initial values of random weights ("normal" has standard deviation 0.02).
        a: size of axis A.
    """
    return leaf_parameter(Leaf(letters, dtype, initial), config.axis_sizes | {"A": a}, dtype)


def leaf_parameter(leaf: Leaf, sizes: Mapping[str, int], dtype: DTypeLike) -> nnx.Param:
    """The abstract parameter of one array of a `Linear`.

    Args:
        leaf: its description.
        sizes: of each letter, with A.
        dtype: where the leaf does not set its own.
    """
    shared = dict(leaf.blocks)
    shape = tuple(sizes[letter] // shared.get(letter, 1) for letter in leaf.letters.split())
    own = dtype if leaf.dtype is None else leaf.dtype
    return nnx.Param(jax.ShapeDtypeStruct(shape, own), letters=leaf.letters, initial=leaf.initial)


def array_bytes(arrays: Any) -> int:
    """Bytes of all arrays of a pytree, abstract or not; values of 4 bits are packed."""
    leaves = jax.tree.leaves(arrays)
    return sum(math.ceil(leaf.size * _bits(leaf.dtype) / 8) for leaf in leaves)


def _bits(dtype: DTypeLike) -> int:
    return (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits
