"""Parameters with named axes."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from rjax.models.config import ModelConfig
from rjax.models.schemes.scheme import Initial, Leaf
from rjax.models.sharding import partition_spec


def parameter(
    letters: str,
    config: ModelConfig,
    dtype: DTypeLike,
    initial: Initial = "normal",
    a: int = 1,
) -> nnx.Param:
    """An abstract parameter: shape and dtype, no memory. Loading gives it its values.

    Args:
        letters: its axes, such as "D K A H"; A is the axis along which projections are fused.
        config: gives each letter its size.
        dtype: dtype of the values.
        initial: initial values of random weights ("normal" has standard deviation 0.02).
        a: size of axis A.
    """
    sizes = config.axis_sizes | {"A": a}
    return leaf_parameter(Leaf(letters, dtype, initial), sizes, dtype)


def leaf_parameter(
    leaf: Leaf, sizes: Mapping[str, int], dtype: DTypeLike, *, expert_parallel: bool = False
) -> nnx.Param:
    """The abstract parameter of one array of a `Linear`.

    Args:
        leaf: description of the array.
        sizes: size of each axis letter, with A.
        dtype: dtype of the values where the leaf does not set its own.
        expert_parallel: see `partition_spec`.
    """
    shared = dict(leaf.blocks)
    shape = tuple(sizes[letter] // shared.get(letter, 1) for letter in leaf.letters.split())
    own = dtype if leaf.dtype is None else leaf.dtype
    return nnx.Param(
        jax.ShapeDtypeStruct(shape, own),
        letters=leaf.letters,
        initial=leaf.initial,
        expert_parallel=expert_parallel,
    )


def variable_sharding(variable: nnx.Variable, mesh: Mesh) -> NamedSharding:
    """The sharding of a parameter.

    Raises ValueError if the devices cannot divide it.
    """
    return NamedSharding(mesh, variable_spec(variable, mesh))


def variable_spec(variable: nnx.Variable, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The partition spec of `variable_sharding`; the mesh may be abstract."""
    return partition_spec(
        variable.get_metadata("letters"),
        variable.get_value().shape,
        mesh,
        expert_parallel=variable.get_metadata("expert_parallel"),
    )


def array_bytes(arrays: Any) -> int:
    """Bytes of all arrays of a pytree, abstract or not; values of 4 bits are packed."""
    leaves = jax.tree.leaves(arrays)
    return sum(math.ceil(leaf.size * bits(leaf.dtype) / 8) for leaf in leaves)


def bits(dtype: DTypeLike) -> int:
    """Number of bits of a value."""
    return (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits
